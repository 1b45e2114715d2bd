"""How long a migration of a live stream takes, beside its floor: the same records, read and appended without anything else.

python -m bench.migrate [--events N] [--rate N] [--to kafka]: from the log to another log or to Kafka, while events arrive. Both
figures are of one run.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from bench.setup import tell
from services.core import event
from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.broker.several.broker import SeveralBrokers
from services.core.event import Origin
from services.core.fleet_broker import open_with_homes
from services.core.homes import Homes
from services.core.jvm.kafka import KafkaCluster
from services.core.pipes import PipeFile
from services.core.provision import ensure_topics
from services.fleet.migrate.steps import Migration

PARTITIONS, BATCH = 4, 1000
_TEXT = b"x" * 180


def _records(run: str, first: int, count: int) -> list[Record]:
    return [
        Record(
            b"%d" % (number % 997),
            b'{"n":%d,"text":"%s"}' % (number, _TEXT),
            number,
            ((event.ID, b"%s-%d" % (run.encode(), number)), (event.ORIGIN, Origin(run, 0, number).pack())),
        )
        for number in range(first, first + count)
    ]


class Load:
    """Sends events at a rate, and knows the longest wait for an answer."""

    def __init__(self, producer: Producer, rate: int) -> None:
        self._producer, self._rate = producer, rate
        self.sent, self.longest, self.is_over = 0, 0.0, False

    async def run(self) -> None:
        count = self._rate // 10
        while not self.is_over:
            began = time.monotonic()
            sent = await self._producer.send("s", _records("live", self.sent, count))
            sent.raise_first()
            self.sent += count
            waited = time.monotonic() - began
            self.longest = max(self.longest, waited)
            await asyncio.sleep(max(0.0, 0.1 - waited))


@asynccontextmanager
async def _process(folder: str, pipes: PipeFile) -> AsyncIterator[SeveralBrokers]:
    async with open_with_homes(f"log://{folder}/own", pipes) as broker:
        assert isinstance(broker, SeveralBrokers)
        yield broker


async def _floor(url: str, source: Broker) -> float:
    """Seconds to read all partitions and to append them elsewhere, in pages of the same size."""
    async with open_broker(url) as target, Producer(target.appender) as producer:
        await target.admin.create_topic(TopicSpec("s", PARTITIONS))
        began = time.monotonic()
        await asyncio.gather(*(_pump(source, producer, partition) for partition in range(PARTITIONS)))
        return time.monotonic() - began


async def _pump(source: Broker, producer: Producer, partition: int) -> None:
    offset = 0
    read = partial(source.reader.read, "s", partition, max_records=BATCH)
    while (batch := await read(offset)) is not None:
        (await producer.send_to("s", {partition: batch.records})).raise_first()
        offset = batch.offsets[-1] + 1


async def measure(events: int, rate: int, bootstrap: str | None) -> None:
    """Fill a stream, copy it plainly, then migrate it under load. bootstrap: of a Kafka that it moves to."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:

        def url(name: str) -> str:
            return f"log://{folder}/{name}" if bootstrap is None else f"kafka://{bootstrap}?prefix={name}."

        pipes = PipeFile.model_validate({"brokers": {"b": url("b")}, "streams": {"s": {"partitions": PARTITIONS}}})
        async with _process(folder, pipes) as fleet, Producer(fleet.appender) as producer:
            await ensure_topics(fleet.admin, pipes)
            for first in range(0, events, PARTITIONS * BATCH):
                parts = {one: _records(f"run{one}", first // PARTITIONS, BATCH) for one in range(PARTITIONS)}
                (await producer.send_to("s", parts)).raise_first()
            floor = await _floor(url("floor"), fleet)
            load = Load(producer, rate)
            async with asyncio.TaskGroup() as group:
                group.create_task(load.run())
                async with _process(folder, pipes) as other:
                    homes = other.brokers.places
                    assert isinstance(homes, Homes)
                    began = time.monotonic()
                    result = await Migration(other, homes, lambda _to: pipes, "s", "bench").run("b")
                    seconds = time.monotonic() - began
                await asyncio.sleep(1)
                load.is_over = True
            stored = sum(held.end for held in (await fleet.reader.describe("s")).values())
        tell(f"plain copy: {events / floor:,.0f} events/s")
        tell(f"migration: {result.events:,} events in {seconds:.1f} s, {result.events / seconds:,.0f} events/s")
        tell(
            f"{result.missing} of {result.origins:,} origins missing; stored {stored:,} of {events + load.sent:,} sent"
        )
        tell(f"writers held for {result.held_s:.2f} s; the longest wait for an answer {load.longest:.2f} s")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rate", type=int, default=1000, help="events per second that arrive meanwhile")
    parser.add_argument("--to", choices=["log", "kafka"], default="log")
    args = parser.parse_args()
    if args.to == "log":
        asyncio.run(measure(args.events, args.rate, None))
        return
    with tempfile.TemporaryDirectory(prefix="penstock-bench-kafka-") as folder, KafkaCluster(Path(folder)) as cluster:
        asyncio.run(measure(args.events, args.rate, cluster.bootstrap))


if __name__ == "__main__":
    main()
