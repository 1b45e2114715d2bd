"""Random histories of a whole group: slow and lost answers of the lease table, second copies of puts, members that join,
leave and are killed. Nothing may be committed that was returned to nobody, and in the end everything was returned."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import pytest

from services.core.broker.errors import BrokerError, NotOwner, Unavailable
from services.core.broker.kinesis.aws import Timing
from services.core.broker.kinesis.incarnation import Stream
from services.core.broker.kinesis.leases import HeldLease, Lease
from services.core.broker.kinesis.membership import KinesisMembership
from services.core.broker.kinesis.pace import ReadPace
from services.core.broker.kinesis.record_format import make_entries, parse_entry
from services.core.broker.kinesis.shard_reader import ReaderContext, read_shard
from services.core.broker.kinesis.shard_source import ShardSource
from services.core.broker.lease_member import end_tasks
from services.core.broker.record import Record, TopicPartition
from tests.support.virtual_loop import run_virtually
from tests.unit.kinesis.fake_shard import FakeShard
from tests.unit.kinesis.group_world import TOPIC, MemberBackend, MemoryTable, World

STEPS = 120
MOST_MEMBERS = 3
SETTLE_SECONDS = 200


class _SlowTable(MemoryTable):
    """Some answers are late, by up to 0.6 of a lease; some are lost, after the write or without it.

    on_write: gets the row before and after each write, at its moment.
    """

    def __init__(self, chance: random.Random, on_write: Callable[[Lease, Lease], None]) -> None:
        super().__init__()
        self._chance, self._on_write = chance, on_write

    async def rows(self) -> dict[str, Lease]:
        await self._wait()
        return await super().rows()

    async def get(self, key: str) -> Lease | None:
        await self._wait()
        return await super().get(key)

    async def replace(self, old: Lease, new: Lease) -> bool:
        if self._chance.random() < 0.03:
            raise Unavailable("the request was lost")
        await self._wait()
        is_written = await super().replace(old, new)
        if is_written:
            self._on_write(old, new)
        if self._chance.random() < 0.3:
            await self._wait()
        if self._chance.random() < 0.03:
            raise Unavailable("the answer was lost")
        return is_written

    async def _wait(self) -> None:
        is_slow = self._chance.random() < 0.15
        await asyncio.sleep(self._chance.uniform(0.1, 6) if is_slow else self._chance.choice((0.005, 0.01, 0.02)))


class _Unsteady(ReadPace):
    """Reads come fast and slowly."""

    async def acquire(self) -> None:
        await asyncio.sleep(random.choice((0.05, 0.2, 1.0)))


class _Shard(FakeShard):
    def source(self) -> ShardSource:
        return ShardSource(self, TOPIC, 0, _Unsteady(TOPIC, 0), Timing(), self.closed)


class _Backend(MemberBackend):
    """Reads the shards with the real reader."""

    def __init__(self, world: World, shards: Sequence[FakeShard]) -> None:
        super().__init__(world)
        self._shards = shards

    def clock(self) -> float:
        return time.monotonic()

    def now_ms(self) -> int:
        return self._shards[0].now_ms

    async def read(self, held: HeldLease, stream: Stream) -> None:
        async def is_listed(_source: TopicPartition) -> bool:
            return True

        context = ReaderContext(self.now_ms, lambda _error: None, lambda: None, is_listed)
        await read_shard(context, held, self._shards[held.source.partition].source())


class _Member:
    """Polls, drops what was read ahead, and commits what was returned, all at random. on_return: gets each record's number.

    processed: the last returned offset of each shard, until it is committed (or once more after that).
    """

    def __init__(self, backend: _Backend, chance: random.Random, on_return: Callable[[int], None]) -> None:
        self._chance, self._on_return = chance, on_return
        self._membership = KinesisMembership(backend, "g", [TOPIC], "earliest", self._on_revoke)
        self._membership.member = f"{chance.getrandbits(128):032x}"  # the same in each run of the seed
        self._processed: dict[TopicPartition, int] = {}
        self._committing = asyncio.Lock()
        self._working = asyncio.create_task(self._work())

    @property
    def is_over(self) -> bool:
        """Whether it could not join."""
        return self._working.done()

    async def leave(self) -> None:
        await self._stop()
        with suppress(BrokerError):
            await self._membership.leave()

    async def die(self) -> None:
        """Kill -9: nothing of it runs on."""
        await self._stop()
        await end_tasks(self._membership._heartbeats, self._membership._drain)
        for held in self._membership.held.values():
            await held.stop_reading()

    async def _stop(self) -> None:
        """Raises what is a bug: any error but those of the broker, which may pass."""
        await end_tasks(self._working)
        with suppress(BrokerError, asyncio.CancelledError):
            self._working.result()
        self._membership._background.raise_fatal()

    async def _work(self) -> None:
        await self._membership.join()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._poll_often())
            tasks.create_task(self._commit_often())

    async def _poll_often(self) -> None:
        chance = self._chance
        while True:
            await asyncio.sleep(chance.choice((0.05, 0.3, 1.0)))
            for source, held in self._membership.held.items():
                if chance.random() < 0.04:
                    held.backlog.give_up()
                if held.is_readable and chance.random() < 0.5:
                    for batch in held.backlog.poll(chance.choice((1, 2, 50))):
                        self._processed[source] = batch.offsets[-1]
                        for record in batch.records:
                            self._on_return(record.timestamp)

    async def _commit_often(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            await self._commit()

    async def _commit(self) -> None:
        try:
            async with asyncio.timeout(5), self._committing:
                marks = dict(self._processed)
                if marks:
                    await self._membership.commit(marks)
        except NotOwner as error:
            for refused in error.partitions:
                source = TopicPartition(*refused)
                if source not in self._membership.held:
                    self._processed.pop(source, None)
        except (BrokerError, TimeoutError):
            pass
        else:
            for source, offset in marks.items():
                if self._processed.get(source) == offset and self._chance.random() < 0.7:
                    del self._processed[source]

    async def _on_revoke(self, sources: frozenset[TopicPartition]) -> None:
        await asyncio.sleep(self._chance.choice((0.0, 0.2, 2.0)))
        await self._commit()
        for source in sources:
            self._processed.pop(source, None)


class _History:
    """Three shards, appends to them, and a group of one to three members.

    returned: the numbers that came to somebody; appended: so many were stored. lost: numbers that were committed before
    they were returned. copies: so many second copies were stored.
    """

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._world = World(table=_SlowTable(chance, self._check_commit))
        self._shards = [_Shard() for _ in range(3)]
        for _ in self._shards:
            self._world.add_shard()
        self._members: list[_Member] = []
        self.returned: set[int] = set()
        self.lost: list[int] = []
        self.appended = self.copies = 0

    async def run(self) -> None:
        chance = self._chance
        for _ in range(STEPS):
            await self._replace_failed()
            seconds = chance.uniform(0.1, 2)
            await asyncio.sleep(seconds)
            for shard in self._shards:
                shard.now_ms += int(1000 * seconds)
            for _ in range(chance.randrange(4)):
                self._write()
            await self._change_members()
        for _ in range(SETTLE_SECONDS):
            if len(self.returned) == self.appended:
                break
            await self._replace_failed()
            await asyncio.sleep(1)
        for member in self._members:
            await member.die()

    async def _replace_failed(self) -> None:
        for member in [member for member in self._members if member.is_over]:
            self._members.remove(member)
            await member.die()
        if not self._members:
            self._start_member()

    def _start_member(self) -> None:
        backend = _Backend(self._world, self._shards)
        self._members.append(_Member(backend, self._chance, self.returned.add))

    async def _change_members(self) -> None:
        what = self._chance.random()
        if what < 0.06 and len(self._members) < MOST_MEMBERS:
            self._start_member()
        elif what > 0.96 and len(self._members) > 1:
            member = self._members.pop(self._chance.randrange(len(self._members)))
            await (member.leave() if self._chance.random() < 0.6 else member.die())

    def _write(self) -> None:
        """An append; sometimes a copy of it, at once or behind another append."""
        shard = self._chance.choice(self._shards)
        data = self._append(shard, self._chance.choice((1, 1, 3)))
        if self._chance.random() < 0.33:
            if self._chance.random() < 0.6:
                self._append(shard, 1)
            shard.put([0], data)
            self.copies += 1

    def _append(self, shard: FakeShard, count: int) -> bytes:
        numbers = range(self.appended, self.appended + count)
        self.appended += count
        records = [Record(b"k", b"%d" % number, number) for number in numbers]
        ((entry,), _) = make_entries(records, "0", 0, lambda _bodies: b"%032d" % self.appended)
        shard.put(numbers, entry.data)
        return entry.data

    def _check_commit(self, old: Lease, new: Lease) -> None:
        """Every record at or before the commit was returned to somebody."""
        if new.committed is None or new.committed == old.committed:
            return
        before = -1 if old.committed is None else old.committed
        for row in self._shards[new.shard].entries:
            if before >> 20 <= int(row["SequenceNumber"]) <= new.committed >> 20:
                entry = parse_entry(row)
                for offset, record in zip(entry.offsets, entry.records, strict=True):
                    if before < offset <= new.committed and record.timestamp not in self.returned:
                        self.lost.append(record.timestamp)


@pytest.mark.parametrize("block", range(4))
def test_a_group_commits_only_what_it_returned_and_returns_everything(block: int) -> None:
    """If it fails, acknowledged events are lost to the group: a commit passed over them; or a shard is read no more."""
    copies = 0
    for seed in range(15 * block, 15 * block + 15):
        history = _History(random.Random(seed))
        try:
            run_virtually(history.run(), seed=seed)
            assert not history.lost, "committed and never returned"
            assert history.returned == set(range(history.appended)), "never returned"
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        copies += history.copies
    assert copies > 500
