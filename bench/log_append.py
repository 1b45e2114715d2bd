"""What an append to the embedded log costs: 100-event batches of 300 B events through `driver.append`, 64 at once.

Prints events/s, CPU-seconds of this process per million events, and how long an append waits (P50, P99, ms).
Run: python -m bench.log_append [--folder DIR] [--events N] [--concurrent N] [--topics N] [--batch N]
"""

import argparse
import asyncio
import resource
import shutil
import tempfile
import time

import uvloop

from services.core.broker.contract import TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.record import Record

PARTITIONS = 4


def batch_of(size: int) -> list[Record]:
    """Events as ingest makes them: 300 bytes of JSON, an id, the arrival time and the origin as headers."""
    headers = (
        ("ce_id", b"01890f3e-0000-7000-8000-000000000000"),
        ("pen_arrival", b"1700000000000"),
        ("pen_origin", b"a/1/2"),
    )
    return [
        Record(b"key-%d" % n, (b'{"n":%d,' % n).ljust(300, b"x"), 1_700_000_000_000 + n, headers) for n in range(size)
    ]


async def measure(folder: str, events: int, concurrent: int, topics: int, batch: int) -> None:
    """Append until `events` are durable; print the figures."""
    async with LogBroker.open(folder) as broker:
        for number in range(topics):
            await broker.admin.create_topic(TopicSpec(f"bench-{number}", partitions=PARTITIONS))
        records = batch_of(batch)
        left = events // batch
        waits: list[float] = []

        async def append(number: int) -> None:
            nonlocal left
            while left > 0:
                left -= 1
                began = time.perf_counter()
                await broker.driver.append(
                    f"bench-{number % topics}", number // topics % PARTITIONS, records, timeout=30
                )
                waits.append(time.perf_counter() - began)

        for number in range(topics):
            await broker.probe(f"bench-{number}", timeout=5)
        began, cpu = time.perf_counter(), cpu_seconds()
        async with asyncio.TaskGroup() as tasks:
            for number in range(concurrent):
                tasks.create_task(append(number))
        wall, cpu = time.perf_counter() - began, cpu_seconds() - cpu
    waits.sort()
    done = len(waits) * batch
    print(
        f"{done / wall:,.0f} events/s, {cpu / done * 1e6:.2f} CPU-s per million, "
        f"append P50 {waits[len(waits) // 2] * 1e3:.1f} ms, P99 {waits[int(len(waits) * 0.99)] * 1e3:.1f} ms"
    )


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Parse the command line, measure in a fresh folder, remove it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", default=None, help="where to make the data folder (a disk, not tmpfs)")
    for name, default in (("events", 1_000_000), ("concurrent", 64), ("topics", 1), ("batch", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(dir=arguments.folder)
    try:
        uvloop.run(measure(folder, arguments.events, arguments.concurrent, arguments.topics, arguments.batch))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
