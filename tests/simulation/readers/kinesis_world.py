"""Kinesis as readers meet it: shards that split and merge, second copies of puts, iterators that expire, a lossy lease table.

The faults, by name. split, merge: shards. copies: puts are stored twice, at once or behind others. expire_iterators: all that
were given. reads, table, calls: requests to shards, to the lease table and about streams are refused, slow, or not answered,
carried out or not. remake: a stream is deleted and made anew. hurry: others read the shards, too, and leave little of their
limit. untag: a stream loses the tag with its number of partitions, for some seconds or for good. Whoever writes asks for this
number; one that knew it must not come to another, because keys would move.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.core.broker.kinesis.aws import Clients, PutRecords, Timing
from services.core.broker.kinesis.broker import KinesisBroker
from services.core.broker.record import Record
from tests.simulation.machine import WORLD, Process, current_process
from tests.simulation.readers.kinesis_service import DynamoClient, KinesisClient, Service
from tests.simulation.readers.world import World

_TIMING = Timing(lease=4.0, heartbeat=0.5, sync=2.0, drain=8.0, request=3.0)


class KinesisWorld(World):
    """One account."""

    faults = ("split", "merge", "copies", "expire_iterators", "reads", "table", "calls", "remake", "hurry", "untag")
    away = ("split", "merge", "remake")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.service = Service(self.machine, self.rng)
        self.topics: tuple[str, ...] = ()
        self._is_copying = False

    def attach(self, process: Process) -> None:
        """As there."""
        process.found["kinesis"] = self

    def open_broker(self) -> AbstractAsyncContextManager[Broker]:
        """As there."""
        return _open()

    async def has_begun(self, broker: Broker, group: str, topic: str, _count: int) -> bool:
        """As there: the rows of a stream are written for one start."""
        return await broker.admin.has_begun(group, topic)

    def make_topics(self, topics: Mapping[str, int]) -> None:
        """As there."""
        self.topics = tuple(topics)
        for name, count in topics.items():
            self.service.create(name, count)

    def write(self, topic: str) -> None:
        """As there."""
        stream, rng = self.service.streams[topic], self.rng
        partition = rng.randrange(stream.partitions)
        count, now = rng.choice((1, 1, 3)), int(stream.made * 1000)
        events = [self.oracle.issue(topic, stream.made, partition, 0) for _ in range(count)]
        records = [Record(b"k", b"%d" % event.number, now) for event in events]
        entry = self.service.put(topic, partition, records)
        for index, event in enumerate(events):
            event.state, event.offset = "stored", (int(entry["SequenceNumber"]) << 20) + index
        self.trace(f"put e{events[0].number}.. to {topic}, partition {partition}, at {entry['SequenceNumber']}")
        if self._is_copying and rng.random() < 0.5:
            after = rng.choice((0.0, rng.uniform(0.0, 3.0)))
            self.machine.call_later(after, self._copy, topic, stream.made, partition, entry, context=WORLD)

    def _copy(self, topic: str, life: int, partition: int, entry: dict[str, Any]) -> None:
        if topic in self.service.streams and self.service.streams[topic].made == life:
            copy = self.service.put(topic, partition, [], copy_of=entry)
            self.trace(f"{topic}: a copy of {entry['SequenceNumber']} at {copy['SequenceNumber']}")

    def strike(self, fault: str) -> None:
        """As there."""
        rng, service = self.rng, self.service
        seconds = rng.choice((rng.uniform(0.1, 2.0), rng.uniform(2.0, 8.0)))
        topic = rng.choice(sorted(service.streams))
        self.trace(f"kinesis: {fault} {topic} for {seconds:.1f} s")
        match fault:
            case "split":
                service.split(topic)
            case "merge":
                service.merge(topic)
            case "copies":
                self._is_copying = True
                self.machine.call_later(seconds, setattr, self, "_is_copying", False, context=WORLD)
            case "expire_iterators":
                service.valid_since = self.machine.time()
            case "remake":
                self._remake(topic)
            case "hurry":
                self._hurry(topic, self.machine.time() + seconds)
            case "untag":
                service.untagged.add(topic)
                if rng.random() < 0.5:
                    self.machine.call_later(seconds, service.untagged.discard, topic, context=WORLD)
            case _:
                service.faults[fault] = rng.choice((0.1, 0.4, 0.9))
                self.machine.call_later(seconds, service.faults.__setitem__, fault, 0.0, context=WORLD)

    def _remake(self, topic: str) -> None:
        stream = self.service.streams[topic]
        self.oracle.lose(self.oracle.of(topic, stream.made))
        self.service.create(topic, stream.partitions)
        # Until a member asks for the incarnation again, it reads shards of the new stream under leases of the old one.
        made = self.service.streams[topic].made
        self.oracle.unordered |= {(topic, made, line) for line in range(stream.partitions)}
        for _ in range(self.rng.randrange(4)):
            self.write(topic)

    def _hurry(self, topic: str, until: float) -> None:
        """Somebody else's reads of all shards."""
        now, stream = self.machine.time(), self.service.streams[topic]
        for shard in stream.shards:
            stream.reads[shard.number] += [now] * self.rng.randrange(5)
        if now < until and not self.is_calm:
            self.machine.call_later(0.5, self._hurry, topic, until, context=WORLD)

    def calm(self) -> None:
        """As there."""
        self.is_calm = True
        self._is_copying = False
        for fault in self.service.faults:
            self.service.faults[fault] = 0.0

    def close(self) -> None:
        """As there."""

    async def ask_for_partitions(self, broker: Broker, name: str) -> None:
        """What whoever writes does: ask, again and again. name: of the process."""
        known: dict[tuple[str, int], int] = {}
        while True:
            await asyncio.sleep(1.0)
            for topic in self.topics:
                life = self.service.streams[topic].made
                try:
                    count = await broker.appender.partition_count(topic)
                except BrokerError:
                    continue
                stream = self.service.streams[topic]
                if stream.made != life:
                    continue
                if count == stream.partitions:
                    known[topic, life] = count
                elif (topic, life) in known:
                    self.oracle.complaints.append(
                        f"{name} knew that {topic} has {stream.partitions} partitions, and writes to {count}: keys move"
                    )
                    del known[topic, life]


@asynccontextmanager
async def _open() -> AsyncIterator[Broker]:
    """As `KinesisBroker.open`."""
    process = current_process()
    assert process is not None
    world: KinesisWorld = process.found["kinesis"]
    service = world.service
    clients = Clients(KinesisClient(service), DynamoClient(service), cast("PutRecords", None), None)
    broker = KinesisBroker(clients, _TIMING)
    asking = asyncio.create_task(world.ask_for_partitions(broker, process.name))
    try:
        yield broker
    finally:
        asking.cancel()
        await broker.appender.close()
        await broker._streams.close()
