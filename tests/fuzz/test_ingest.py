"""Mutated bodies and mutated heads against a real ingest process on the embedded log, with an oracle.

`PENSTOCK_FUZZ_SECONDS` says how long. Every run makes the same cases, another `PENSTOCK_FUZZ_SEED` makes others.
"""

import asyncio
import os
import time
from pathlib import Path

import psutil

from tests.fuzz.clients import Run
from tests.fuzz.corpus import MAX_BODY, MAX_EVENT, SEEDS
from tests.fuzz.ledger import Ledger
from tests.integration.ingest_process import create_topics, log_lines, running

SECONDS = float(os.environ.get("PENSTOCK_FUZZ_SECONDS", "20"))
SEED = int(os.environ.get("PENSTOCK_FUZZ_SEED", "216998795"))
WARM_UP = 0.25
"""Part of the run after which memory may not grow any more."""
GROWTH_BYTES = 30_000_000
FLAGS = ("--max-body", f"{MAX_BODY}B", "--max-event", f"{MAX_EVENT}B", "--head-timeout", "1s", "--body-timeout", "2s")


async def watch_memory(pid: int, run: Run) -> tuple[int, int]:
    """(bytes after the warm-up, bytes at the end) that the process holds."""
    process = psutil.Process(pid)
    await asyncio.sleep(SECONDS * WARM_UP)
    warm = process.memory_info().rss
    while not run.is_over:
        await asyncio.sleep(0.1)
    return warm, process.memory_info().rss


async def test_ingest_answers_whatever_it_is_sent(tmp_path: Path) -> None:
    """If it fails: some input ends or blocks ingest, is answered with its fault (500), costs memory for good, or makes it
    acknowledge what it does not store, store what it refused, or store something else than was sent."""
    print(f"PENSTOCK_FUZZ_SEED={SEED}")
    await create_topics(tmp_path)
    ledger = Ledger(SEED)
    async with running(tmp_path, *FLAGS) as ingest:
        await ingest.until_ready()
        run = Run(ingest.port, time.monotonic() + SECONDS, ledger)
        async with asyncio.TaskGroup() as group:
            memory = group.create_task(watch_memory(ingest.process.pid, run))
            run.start(group)
        warm, last = memory.result()
        print(dict(sorted(ledger.statuses.items())), f"RSS {warm >> 20} MiB, then {last >> 20} MiB")
        print(f"{len(ledger.unknown_heads)} reset, {len(ledger.unknown_bodies)} unknown")
        assert (await ingest.get("/healthz"))[0] == 200
        assert last < warm + GROWTH_BYTES
        assert await ingest.end() == 0
    await ledger.check_bodies(tmp_path)
    await ledger.check_heads(tmp_path)
    assert all(ledger.statuses["body", status] for status in (200, 207, 400, 413, 415, 422)), "too little is reached"
    assert all(ledger.statuses["head", status] for status in (200, 400, 404, 405, 431)), "too little is reached"
    assert len(ledger.stored) > len(SEEDS)
    assert len(ledger.unknown_heads) < len(ledger.taken) / 100, "connections are cut before their answers are read"
    assert not any(line.get("level") == "error" for line in log_lines(tmp_path))
