"""The observer's ledger over days of retries that wait: memory, snapshots, restart. No broker and no other service takes part.

Synthetic reports go straight into the table, in simulated time: events arrive at a steady rate, a share of them fails once and
waits for a retry. Run it alone: `python -m bench.observer --minutes 400`, or `--minutes 10080` for a week.
"""

import argparse
import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from pyroaring import BitMap

from services.core.broker.contract import TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.ledger.report import (
    SNAPSHOTS,
    OriginSet,
    Outcome,
    Report,
    Span,
    due_span,
    pack_numbers,
    released_span,
)
from services.observer.ledger.flow import Flow, PipeFlow
from services.observer.ledger.table import Table
from services.observer.planned import PlannedWindows
from services.observer.snapshot import FollowerState, make_parts
from services.observer.snapshot_log import SnapshotLog

MINUTE_MS = 60_000
START_MS = 30_000_000 * MINUTE_MS
FLOW = Flow({"shop": PipeFlow(("orders",), True, {"crm": None}, frozenset({"crm"}))})


class Load:
    def __init__(self, rate: int, partitions: int, share: float, wait_s: int) -> None:
        self._rate, self._partitions, self._share, self._wait_s = rate, partitions, share, wait_s
        self._next = 0

    def _retrying(self, number: int, partition: int) -> BitMap:
        """The numbers of this minute whose first attempt fails."""
        count = self._rate * 60 // self._partitions
        picked = np.random.default_rng((number, partition)).random(count) < self._share
        return BitMap(array("I", np.flatnonzero(picked).astype(np.uint32) + number * count))

    def minute(self, number: int) -> Iterator[Report]:
        """The reports of one minute."""
        now, count = START_MS + number * MINUTE_MS, self._rate * 60 // self._partitions
        accepted = BitMap(range(number * count, (number + 1) * count))
        due, second = due_span(now + self._wait_s * 1000, self._wait_s * 1000), released_span(now)
        ingest, passed, expel, released = [], [], [], []
        for partition in range(self._partitions):
            failed = self._retrying(number, partition)
            ingest.append(_set("accepted", partition, accepted, now // MINUTE_MS))
            passed.append(_set("passed", partition, accepted))
            expel.append(_set("delivered", partition, accepted - failed))
            expel.append(_set("retrying", partition, failed, due=due))
            if (former := number - self._wait_s // 60) >= 0:
                back = self._retrying(former, partition)
                released.append(_set("released", partition, back, due=second))
                expel.append(_set("delivered", partition, back))
        at = now + MINUTE_MS
        yield Report(node="ingest", instance="i", pipe="orders", at_ms=at, sets=tuple(ingest), behind_ms=0)
        yield Report(node="transform", instance="t", pipe="shop", at_ms=at, sets=tuple(passed), behind_ms=0)
        yield Report(node="retrier", instance="r", pipe="shop", destination="crm", at_ms=at, sets=tuple(released))
        yield Report(node="retrier", instance="r", pipe="", at_ms=at, behind_ms=0)
        yield Report(
            node="expel", instance="e", pipe="shop", destination="crm", at_ms=at, behind_ms=0, returned_ms=0, held_ms=0,
            sets=tuple(expel),
        )  # fmt: skip


def _set(
    outcome: Outcome, partition: int, numbers: BitMap, minute: int | None = None, due: Span | None = None
) -> OriginSet:
    return OriginSet(outcome, "0123456789abcdef", partition, minute, pack_numbers(numbers), due)


async def run(wanted: argparse.Namespace, folder: str) -> None:
    async with LogBroker.open(folder) as broker, Producer(broker.appender) as producer:
        await broker.admin.create_topic(TopicSpec(SNAPSHOTS, 1))
        load, now = Load(wanted.rate, wanted.partitions, wanted.share, wanted.wait_s), START_MS
        table, snapshots = Table(FLOW), SnapshotLog(broker.reader, producer, lambda: now)
        began, tick_s, store_s, written = rss_mb(), 0.0, 0.0, 0
        print(f"{began:.0f} MB before the first event")
        for number in range(wanted.minutes):
            for report in load.minute(number):
                table.apply(report, report.at_ms)
            now = START_MS + (number + 1) * MINUTE_MS
            table.liveness.listened(now - MINUTE_MS, now)
            began_at = time.perf_counter()
            table.tick(now)
            tick_s = max(tick_s, time.perf_counter() - began_at)
            if number % 5 == 4:
                began_at = time.perf_counter()
                size = await snapshots.store(lambda: make_parts(table, FollowerState(PlannedWindows(), 0)))
                store_s, written = max(store_s, time.perf_counter() - began_at), max(written, size)
            if number % wanted.every == wanted.every - 1:
                figures = f"written {written / 1e6:.2f} MB at most, in {store_s:.2f} s at most"
                figures += f"; RSS {rss_mb():.0f} MB, peak {peak_mb():.0f} MB"
                print(f"minute {number + 1}: {figures}; tick {tick_s * 1000:.0f} ms at most", flush=True)
                tick_s, store_s, written = 0.0, 0.0, 0
        rows = [table.row("shop", minute, now) for minute in table.minutes("shop")]
        print(f"{sum(row.waiting for row in rows)} wait, {sum(row.missing for row in rows)} missing")


async def restart(folder: str) -> None:
    """In a process of its own."""
    async with LogBroker.open(folder) as broker, Producer(broker.appender) as producer:
        began, began_at = rss_mb(), time.perf_counter()
        found = await SnapshotLog(broker.reader, producer, lambda: START_MS).load(lambda: Table(FLOW))
        took = time.perf_counter() - began_at
        assert found is not None
        print(f"restored in {took:.2f} s; RSS {rss_mb():.0f} MB (was {began:.0f}), at most {peak_mb():.0f} MB")


def rss_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=int, default=400)
    parser.add_argument("--rate", type=int, default=1000, help="events per second")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.3, help="of the events that wait for a retry")
    parser.add_argument("--wait-s", type=int, default=3 * 86_400)
    parser.add_argument("--every", type=int, default=100, help="minutes between two lines")
    parser.add_argument("--restart", metavar="FOLDER", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.restart:
        asyncio.run(restart(wanted.restart))
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(wanted, folder))
        subprocess.run([sys.executable, "-m", "bench.observer", "--restart", folder], check=True)


if __name__ == "__main__":
    main()
