"""A stream, a lease table and members in simulated time: nothing waits, a test says what happens next."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from services.core.broker.contract import Start
from services.core.broker.errors import NotOwner, Unavailable
from services.core.broker.kinesis.aws import Timing
from services.core.broker.kinesis.incarnation import Stream
from services.core.broker.kinesis.leases import HeldLease, Lease
from services.core.broker.kinesis.membership import KinesisMembership
from services.core.broker.kinesis.prefetch import ReadBudget
from services.core.broker.kinesis.record_format import StoredEntry
from services.core.broker.kinesis.streams import Shard
from services.core.broker.record import Record, TopicPartition

TOPIC = "t"
TIMING = Timing(lease=10, heartbeat=1, sync=0, drain=5)


class MemoryTable:
    """The lease table. `unsure` writes the next so many changes and then says that it does not know."""

    def __init__(self) -> None:
        self.stored: dict[str, Lease] = {}
        self.unsure = 0

    async def rows(self) -> dict[str, Lease]:
        return dict(self.stored)

    async def get(self, key: str) -> Lease | None:
        return self.stored.get(key)

    async def add(self, lease: Lease) -> None:
        self.stored.setdefault(lease.key, lease)

    async def remove(self, old: Lease) -> None:
        if old.key in self.stored and self.stored[old.key].counter == old.counter:
            del self.stored[old.key]

    async def replace(self, old: Lease, new: Lease) -> bool:
        now = self.stored.get(old.key)
        if now is None or now.counter != old.counter:
            return False
        self.stored[old.key] = new._replace(counter=old.counter + 1)
        if self.unsure:
            self.unsure -= 1
            raise Unavailable("the answer was lost")
        return True


@dataclass
class World:
    """Shards by number, each with its records' offsets; which aged out; the clock; the group's one table.

    life: of the stream, another one when it was made anew, at `made_ms`.
    """

    shards: dict[int, Shard] = field(default_factory=dict)
    stored: dict[int, list[int]] = field(default_factory=dict)
    aged: set[int] = field(default_factory=set)
    table: MemoryTable = field(default_factory=MemoryTable)
    now: float = 1000.0
    next_offset: int = 0
    life: int = 1
    made_ms: int = 0
    retention_ms: int = 86_400_000

    def make_anew(self, shards: int) -> None:
        """Delete the stream and make it again, empty."""
        self.life, self.made_ms = self.life + 1, int(self.now * 1000)
        self.shards.clear()
        self.stored.clear()
        self.aged.clear()
        for _ in range(shards):
            self.add_shard()

    def add_shard(self, *parents: int) -> int:
        number = len(self.shards)
        self.shards[number] = Shard(number, parents, 0, 0, is_open=True)
        self.stored[number] = []
        return number

    def close(self, *numbers: int) -> None:
        for number in numbers:
            self.shards[number] = self.shards[number]._replace(is_open=False)

    def append(self, number: int) -> None:
        self.stored[number].append(self.next_offset)
        self.next_offset += 1

    def open_numbers(self) -> list[int]:
        return [number for number, shard in self.shards.items() if shard.is_open]


class MemberBackend:
    """One process's view of the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.table = world.table
        self.timing = TIMING
        self.budget = ReadBudget()

    def clock(self) -> float:
        return self._world.now

    def now_ms(self) -> int:
        return int(self._world.now * 1000)

    async def next_second(self, topic: str) -> int:
        return self.now_ms() - 7

    async def describe(self, topic: str) -> Stream:
        shards = tuple(shard for number, shard in self._world.shards.items() if number not in self._world.aged)
        return Stream(f"1:{topic}:{self._world.life}", shards, self._world.retention_ms, self._world.made_ms)

    async def read(self, held: HeldLease, stream: Stream) -> None:
        await asyncio.Event().wait()

    def wake(self) -> None:
        pass


class Actor:
    """A member and what it has in flight. `done`: (shard, offset) it committed, in order."""

    def __init__(
        self, world: World, start: Start = "earliest", on_take: Callable[[int, int], None] = lambda shard, offset: None
    ) -> None:
        self.world = world
        self.on_take = on_take
        self.backend = MemberBackend(world)
        self.membership = KinesisMembership(self.backend, "g", [TOPIC], start, self._on_revoke)
        self.in_flight: dict[TopicPartition, int] = {}
        self.done: list[tuple[int, int]] = []
        self.revoked: list[frozenset[TopicPartition]] = []
        self.frozen = False

    async def _on_revoke(self, sources: frozenset[TopicPartition]) -> None:
        self.revoked.append(sources)
        await self.commit(sources)
        for source in sources:
            self.in_flight.pop(source, None)

    async def heartbeat(self) -> None:
        """One beat, and what it set off, whether or not the beat got to its end."""
        with suppress(Unavailable):
            await self.membership.heartbeat()
        drain = self.membership._drain
        if drain is not None:
            await drain

    def feed(self) -> None:
        """Read to the end of each held shard, as a reader would."""
        for source, held in self.membership.held.items():
            stored = self.world.stored[source.partition]
            last = held.row.committed if held.row.committed is not None else -1
            new = [offset for offset in stored if offset > max(last, getattr(held, "fed", -1))]
            runs = [
                StoredEntry(str(offset), [offset], [Record(None, b"", offset)], self.backend.now_ms(), 1, 1)
                for offset in new
            ]
            held.backlog.add(runs, 0, self.backend.now_ms())
            if new:
                held.fed = new[-1]  # type: ignore[attr-defined]
            held.backlog.ended = not self.world.shards[source.partition].is_open

    def take(self, count: int) -> None:
        """What poll would return."""
        self.feed()
        for source, held in self.membership.held.items():
            if held.is_readable:
                for batch in held.backlog.poll(count):
                    for offset in batch.offsets:
                        self.on_take(source.partition, offset)
                    self.in_flight[source] = batch.offsets[-1]

    async def commit(self, sources: frozenset[TopicPartition] | None = None) -> set[TopicPartition]:
        """Commit what is in flight; gives what was refused."""
        marks = {s: offset for s, offset in self.in_flight.items() if sources is None or s in sources}
        try:
            await self.membership.commit(marks)
        except NotOwner as error:
            refused = {TopicPartition(*source) for source in error.partitions}
        except Unavailable:
            return set()
        else:
            refused = set()
        for source, offset in marks.items():
            del self.in_flight[source]
            if source not in refused:
                self.done.append((source.partition, offset))
        return refused

    def readable(self) -> set[int]:
        return {source.partition for source, held in self.membership.held.items() if held.is_readable}

    async def die(self) -> None:
        """Kill -9: nothing of it runs on."""
        for held in self.membership.held.values():
            await held.stop_reading()
