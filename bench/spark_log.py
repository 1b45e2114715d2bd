"""The transform on the embedded log, or in real-time mode on Kafka: how late an event is behind it, and what it costs.

python -m bench.spark_log [--real-time] [--rate 2000] [--seconds 30] [--backlog 100000] [--ledger off]

Prints the time until the service is ready, and what the first event then takes; then, after warming up, the time from the
append of an event to its arrival at a consumer behind the transform (from_json, a filter, JSON again) at a steady rate;
CPU of the service with all its processes; and the rate at which a backlog is worked off. Floors (PEERS.md): a bare query
log -> Spark -> log, P50 0.38 s, P95 0.56 s at 2,000 events/s; Kafka -> Spark -> Kafka in real-time mode, P50 8 ms, P95
21 ms at 1,000 events/s.
"""

import argparse
import asyncio
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import Unavailable
from services.core.broker.kafka import KafkaBroker
from services.core.broker.log import LogBroker
from services.core.broker.partitioner import split_by_key
from services.core.broker.record import Record, TopicPartition
from services.core.jvm.kafka_server import KafkaCluster
from services.core.ledger.report import TELEMETRY

WARM_UP_S = 15.0
TICK_S = 0.02
PIPES = """
version: 1
streams:
  flights: {columns: "carrier STRING, flight INT, origin STRING, dep_delay DOUBLE"}
pipes:
  late:
    sources: [flights]
    transform: {sql: "SELECT event, carrier, flight, dep_delay FROM flights WHERE dep_delay > 5", mode: MODE}
    destinations: [{name: d, webhook: {url: "https://example.com/"}}]
"""
_PADDING = "x" * 200


def make_events(first: int, count: int) -> list[Record]:
    """About 300 bytes each, half of which pass the filter."""
    now = time.time_ns() // 1_000_000
    return [
        Record(
            b"%d" % (number % 500),
            b'{"carrier":"UA","flight":%d,"origin":"JFK","dep_delay":%d.5,"padding":"%s"}'
            % (number % 9000, number % 2 * 10, _PADDING.encode()),
            now,
            (("ce_id", b"%d" % number), ("penstock_arrival", b"%d" % now), ("penstock_origin", b"bench:0:%d" % number)),
        )
        for number in range(first, first + count)
    ]


async def append(broker: Broker, records: list[Record]) -> None:
    """Store them."""
    for partition, part in split_by_key(records, 4).items():
        for start in range(0, len(part), 2000):
            await broker.driver.append("flights", partition, part[start : start + 2000], timeout=10.0)


async def append_first(broker: Broker) -> None:
    """Ten events; a fresh Kafka first finds out who gives producer ids."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await append(broker, make_events(0, 10))
            except Unavailable:
                await asyncio.sleep(0.1)


class Watch:
    """Counts what comes out, and how late."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    async def run(self, broker: Broker) -> None:
        """Until cancelled."""

        async def let_go(_: frozenset[TopicPartition]) -> None:
            return

        async with broker.consumer("bench", ["late.out"], start="earliest", on_revoke=let_go) as consumer:
            while True:
                for batch in await consumer.poll(max_records=5000, max_wait=0.5):
                    now = time.time()
                    self.seen += [(now, round(now * 1000) - record.timestamp) for record in batch.records]

    async def wait_for(self, count: int, limit: float) -> None:
        """Until so many came out. Raises TimeoutError."""
        end = time.monotonic() + limit
        while len(self.seen) < count:
            if time.monotonic() > end:
                raise TimeoutError(f"{len(self.seen):,} of {count:,} events came out in {limit:.0f} s")
            await asyncio.sleep(TICK_S)


def free_port() -> int:
    """One that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(process: psutil.Process) -> float:
    """Of the process and everything it started that still runs or was waited for."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        times = each.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


@asynccontextmanager
async def open_broker(folder: Path, real_time: bool) -> AsyncIterator[tuple[str, Broker]]:
    """Its URL, and a broker to send and watch with: the log, or one Kafka node of its own."""
    if not real_time:
        async with LogBroker.open(str(folder / "log")) as broker:
            yield f"log://{folder / 'log'}", broker
        return
    cluster = KafkaCluster(folder / "kafka", brokers=1)
    await asyncio.to_thread(cluster.start)
    try:
        async with KafkaBroker.open(cluster.bootstrap) as broker:
            yield f"kafka://{cluster.bootstrap}", broker
    finally:
        await asyncio.to_thread(cluster.stop)


async def wait_until_ready(address: str, limit: float) -> None:
    """Until the service says so. Raises TimeoutError."""

    def status() -> int:
        try:
            with urllib.request.urlopen(f"http://{address}/readyz", timeout=2) as answer:
                return int(answer.status)
        except OSError:
            return 0

    async with asyncio.timeout(limit):
        while await asyncio.to_thread(status) != 200:
            await asyncio.sleep(TICK_S)


async def measure(folder: Path, rate: int, seconds: float, backlog: int, *, real_time: bool, ledger: str) -> None:
    """Run the service and print the figures."""
    pipes = folder / "pipes.yaml"
    pipes.write_text(PIPES.replace("MODE", "real-time" if real_time else "micro-batch"))
    async with AsyncExitStack() as stack:
        url, broker = await stack.enter_async_context(open_broker(folder, real_time))
        for topic in ("flights", "late.out", "late.dead"):
            await broker.admin.create_topic(TopicSpec(topic, 4))
        await broker.admin.create_topic(TopicSpec(TELEMETRY, 1))
        management = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "spark", "--broker", url, "--data", str(folder), "--pipes", str(pipes)]
        command += ["--management", management, "--master", "local[5]" if real_time else "local[2]"]
        begun = time.monotonic()
        child = await asyncio.to_thread(subprocess.Popen, [*command, "--log-level", "warning", "--ledger", ledger])
        stack.callback(child.wait)
        stack.callback(child.terminate)
        process, watch = psutil.Process(child.pid), Watch()
        watching = asyncio.create_task(watch.run(broker))
        stack.callback(watching.cancel)
        await wait_until_ready(management, 120)
        print(f"ready                     {time.monotonic() - begun:8.1f} s after the start")
        await append_first(broker)
        await watch.wait_for(5, 120)
        print(f"first event               {watch.seen[0][1]:8,} ms after it was sent")
        sent = await steady(broker, 10, rate, WARM_UP_S)
        cpu, out = cpu_seconds(process), len(watch.seen)
        measured_from = time.time()
        sent = await steady(broker, sent, rate, seconds)
        await watch.wait_for(sent // 2, 60)
        used = cpu_seconds(process) - cpu
        late = sorted(lag for at, lag in watch.seen if at > measured_from)
        shares = [f"P{share} {late[len(late) * share // 100]:,} ms" for share in (50, 95, 99)]
        print(f"lag at {rate:,} events/s     {', '.join(shares)}")
        print(
            f"CPU at {rate:,} events/s     {used / (2 * (len(watch.seen) - out)) * 1e6:8.1f} s per million events read"
        )
        cpu = cpu_seconds(process)
        await append(broker, make_events(sent, backlog))
        started = time.monotonic()
        await watch.wait_for((sent + backlog) // 2, 300)
        took = time.monotonic() - started
        print(f"backlog of {backlog:,}        {backlog / took:,.0f} events/s, ", end="")
        print(f"{(cpu_seconds(process) - cpu) / backlog * 1e6:.1f} CPU-s per million")


async def steady(broker: Broker, first: int, rate: int, seconds: float) -> int:
    """Send at this rate for so long; the number after the last event."""
    begun = time.monotonic()
    number = first
    while (passed := time.monotonic() - begun) < seconds:
        count = int(passed * rate) - (number - first)
        if count > 0:
            await append(broker, make_events(number, count))
            number += count
        await asyncio.sleep(TICK_S)
    return number


def main() -> None:
    """Exit status 0 whatever the figures are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--backlog", type=int, default=100_000)
    parser.add_argument("--ledger", choices=["on", "off"], default="on", help="to see what the ledger costs")
    parser.add_argument("--real-time", action="store_true", help="on a Kafka of its own")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        asyncio.run(
            measure(Path(name), args.rate, args.seconds, args.backlog, real_time=args.real_time, ledger=args.ledger)
        )


if __name__ == "__main__":
    main()
