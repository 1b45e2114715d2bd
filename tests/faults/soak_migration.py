"""Histories of a stream that moves while everything is killed: make soak ARGS="--migrations 20 --broker kafka"."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from services.core.aws_emulator import CREDENTIALS, AwsEmulator
from services.core.jvm.kafka import KafkaCluster
from tests.faults.moves import last_words, run_history
from tests.support.fault_table import HEAD, Row
from tests.support.kafka import unique_name

_KILLS = 4
"""In each of the three moves of a history."""
_WAYS = {
    "log": (("log", "log"),),
    "kafka": (("log", "kafka"), ("kafka", "log"), ("kafka", "kafka")),
    "kinesis": (("log", "kinesis"), ("kafka", "kinesis")),
}
"""The fleet's own broker and the other one, by `--broker`. Each history goes in both directions."""


def run(broker: str, histories: int, rate: float, seed: int) -> int:
    """The exit status; with one that is not 0, what the services said is kept."""
    killed: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    rows: list[Row] = []
    failed: list[str] = []
    with ExitStack() as stack:
        urls = _open_brokers({kind for way in _WAYS[broker] for kind in way}, stack)
        for number in range(histories):
            own, second = _WAYS[broker][number % len(_WAYS[broker])]
            folder = Path(tempfile.mkdtemp(prefix="penstock-move-"))
            name = f"{seed + number}: {own} to {second}"
            try:
                history = asyncio.run(
                    run_history(
                        name,
                        _url(own, folder / "own", urls),
                        {"second": _url(second, folder / "second", urls)},
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


def _open_brokers(kinds: set[str], stack: ExitStack) -> dict[str, str]:
    """The URLs of a Kafka and of a Kinesis, as far as they are needed, up to the prefix. The stack ends them."""
    urls = {}
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-moves-")))
    if "kafka" in kinds:
        cluster = KafkaCluster(folder / "kafka")
        stack.callback(cluster.stop, grace_s=0)
        cluster.start()
        urls["kafka"] = f"kafka://{cluster.bootstrap}?"
    if "kinesis" in kinds:
        os.environ.update(CREDENTIALS)
        urls["kinesis"] = f"{stack.enter_context(AwsEmulator(folder / 'aws')).url}&"
    return urls


def _url(kind: str, folder: Path, urls: Mapping[str, str]) -> str:
    return f"log://{folder}" if kind == "log" else f"{urls[kind]}prefix={unique_name('fleet')}."
