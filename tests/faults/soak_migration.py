"""Histories of a stream that moves while everything is killed: make soak ARGS="--migrations 20 --broker kafka"."""

import asyncio
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from services.core.jvm.kafka import KafkaCluster
from tests.faults.moves import last_words, run_history
from tests.support.fault_table import HEAD, Row
from tests.support.kafka import unique_name

_KILLS = 4
"""In each of the three moves of a history."""
_WAYS = {"log": (("log", "log"),), "kafka": (("log", "kafka"), ("kafka", "log"), ("kafka", "kafka"))}


def run(broker: str, histories: int, rate: float, seed: int) -> int:
    """The exit status; with one that is not 0, what the services said is kept."""
    killed: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    rows: list[Row] = []
    failed: list[str] = []
    with ExitStack() as stack:
        bootstrap = ""
        if broker == "kafka":
            cluster = KafkaCluster(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-moves-"))))
            stack.callback(cluster.stop, grace_s=0)
            cluster.start()
            bootstrap = cluster.bootstrap
        for number in range(histories):
            own, second = _WAYS[broker][number % len(_WAYS[broker])]
            folder = Path(tempfile.mkdtemp(prefix="penstock-move-"))
            name = f"{seed + number}: {own} to {second}"
            try:
                history = asyncio.run(
                    run_history(
                        name,
                        _url(own, folder / "own", bootstrap),
                        {"second": _url(second, folder / "second", bootstrap)},
                        folder,
                        kills=_KILLS,
                        rate=rate,
                        seed=seed + number,
                    )
                )
            except (AssertionError, TimeoutError, subprocess.TimeoutExpired) as error:
                failed.append(f"{name}: {error!r}; what the services said is in {folder}")
                print("FAILED:", failed[-1], file=sys.stderr)
                continue
            shutil.rmtree(folder, ignore_errors=True)
            rows.append(history.row)
            killed += history.killed
            refused.update(map(last_words, history.refused))
    print(f"{killed.total()} kills: {dict(killed.most_common())}\nrefused: {dict(refused)}\n{HEAD}")
    for row in rows:
        print(row.text())
    for text in failed:
        print("FAILED:", text)
    return 1 if failed or len(rows) < histories else 0


def _url(kind: str, folder: Path, bootstrap: str) -> str:
    return f"log://{folder}" if kind == "log" else f"kafka://{bootstrap}?prefix={unique_name('fleet')}."
