"""Second copies of a repeated put: the names of appends, what a reader drops, and what it never drops."""

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from hashlib import md5
from types import SimpleNamespace
from typing import Any

import pytest

from services.core.broker.kinesis.appender import AppendNames, KinesisAppender
from services.core.broker.kinesis.aws import Timing
from services.core.broker.kinesis.blocking import BlockingKinesis
from services.core.broker.kinesis.leases import HeldLease, Lease, StartPosition
from services.core.broker.kinesis.prefetch import Backlog, KnownEntries, ReadBudget
from services.core.broker.kinesis.record_format import (
    Packer,
    StoredEntry,
    make_entries,
    parse_entry,
    read_entry,
    unpack,
)
from services.core.broker.kinesis.shard_reader import ReaderContext, read_shard
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from tests.support.virtual_loop import run_virtually
from tests.unit.kinesis.fake_shard import FakeShard
from tests.unit.kinesis.group_world import MemoryTable
from tests.unit.kinesis.test_appender import FakeService

ROW = Lease("1:t:1", 0, owner="me", settled=1_000_000_000)
SOURCE = TopicPartition("t", 0)


def _named(name: bytes, *numbers: int) -> bytes:
    ((entry,), _) = make_entries([Record(b"k", b"%d" % n, n) for n in numbers], "0", 0, lambda _bodies: name)
    return entry.data


def test_old_readers_get_the_records_of_a_named_entry() -> None:
    """If it fails, processes of the last version, and the KCL, cannot read what new ones write: tags are all they know."""
    data = _named(b"a" * 32, 1, 2, 3)
    parts = unpack(data)
    assert parts is not None
    assert [part.name for part in parts] == [b"a" * 32, b"", b""]
    assert [record.timestamp for record in read_entry(data, "0", 0)] == [1, 2, 3]


def test_an_entry_without_a_name_is_as_it_was() -> None:
    """If it fails, what older processes have stored cannot be read, or counts as a copy."""
    data = _named(b"", 1, 2)
    assert data == Packer("0", 0, b"\xc1PS\x01").pack([part.data[4:] for part in unpack(data) or ()])
    assert not parse_entry(_row(1, data)).identity


@pytest.mark.parametrize("tag", [b"", b"\xff", b"\x0a\x03abc", b"\x0a\x08penstock", b"\x08\x01", b"\x0a\x50short"])
def test_tags_of_others_are_passed_over(tag: bytes) -> None:
    """If it fails, entries of another producer of the KPL's kind are damaged, or are taken for copies."""
    inner = b"\x08\x00\x22" + bytes([len(tag)]) + tag + b"\x1a\x01x"
    message = b"\x0a\x010" + b"\x1a" + bytes([len(inner)]) + inner
    entry = parse_entry(_row(1, b"\xf3\x89\x9a\xc2" + message + md5(message).digest()))
    assert [record.value for record in entry.records] == [b"x"]
    assert not entry.identity
    assert entry.damage is None


def test_a_repeat_has_its_name_and_nothing_else_has() -> None:
    """If it fails, readers cannot know copies; or they take another append for one, and lose it."""
    names = AppendNames()
    records = [Record(b"k", b"%d" % n, n) for n in range(4)]

    def put(some: Sequence[Record], partition: int = 0) -> bytes:
        ((entry,), _) = make_entries(some, "0", 0, names.of("t", partition))
        return entry.name

    first = put(records)
    assert put(records) != first, "the first was confirmed: these are other records with the same content"
    names.keep("t", 0, records, first)
    assert put(records, partition=1) != first
    assert put(records) == first
    assert put(records) != first
    names.keep("t", 0, records, first)
    assert put(records[:3]) != first, "fewer records are another entry"
    assert put(records) != first, "something else was sent in between"


async def test_a_put_whose_answer_was_lost_is_repeated_as_the_same_bytes() -> None:
    """If it fails, every link that is cut stores events twice, and all of them are delivered twice."""
    service = FakeService(1)
    service.raising = [TimeoutError("the answer was lost"), TimeoutError("and once more")]
    appender = KinesisAppender(service.put, service, Timing())
    async with Producer(appender) as producer:
        for number in range(3):
            (await producer.send_to("t", {0: [Record(b"k", b"x", number)]})).raise_first()
    await appender.close()
    sent = [put.data for (put,) in service.requests]
    assert sent[0] == sent[1] == sent[2]
    assert len(set(sent)) == 3


class _Connection:
    """In place of `BlockingKinesis`: a process of its own, with a loop of its own, on a service that all share."""

    put, _put_parts = BlockingKinesis.put, BlockingKinesis._put_parts

    def __init__(self, service: FakeService, runner: asyncio.Runner) -> None:
        appender = KinesisAppender(service.put, service, Timing())
        self.broker, self._producer, self._runner = SimpleNamespace(appender=appender), appender, runner

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)


def test_a_repeat_from_another_process_has_the_same_bytes() -> None:
    """If it fails, members of groups deliver a batch again that Spark repeats; or take others for a repeat, and lose them."""
    service = FakeService(2)
    records = [Record(b"key-%d" % (n % 9), b"x" * 3000, n) for n in range(300)]

    def sent(name: str, records: Sequence[Record]) -> list[bytes]:
        service.requests.clear()
        with asyncio.Runner() as runner:
            _Connection(service, runner).put("t", records, 0, name)  # type: ignore[misc]  # not that class
        return [put.data for puts in service.requests for put in puts]

    first = sent("w:1:0:0", records)
    assert sorted(sent("w:1:0:0", records)) == sorted(first)
    assert len(first) == len(set(first)) > 2, "several pieces and partitions"
    assert not set(first) & set(sent("w:1:0:1", records)), "the same records on purpose, twice in a batch"
    others = [Record(record.key, b"y" * 3000, record.timestamp) for record in records]
    assert not set(first) & set(sent("w:1:0:0", others))
    service.raising = [TimeoutError("the answer was lost")]
    repeated = sent("w:2:0:0", records[:1])
    assert len(repeated) == 2
    assert len(set(repeated)) == 1
    identities = [parse_entry(_row(1, data)).identity for data in first]
    assert all(identities)
    assert len(set(identities)) == len(first)


def _row(sequence: int, data: bytes) -> dict[str, Any]:
    shard = FakeShard()
    shard.put([0], data)
    return shard.entries[0] | {"SequenceNumber": str(sequence)}


def test_known_entries_are_bounded_and_the_first_copy_stays() -> None:
    """If it fails, memory grows with the stream; or a reader that goes back drops both copies."""
    known = KnownEntries()

    def entry(sequence: int, identity: bytes) -> StoredEntry:
        return StoredEntry(str(sequence), [sequence], [Record(None, b"", 0)], 0, 1, 1, identity=identity)

    assert not known.is_copy(entry(5, b"a"))
    assert known.is_copy(entry(7, b"a"))
    assert not known.is_copy(entry(5, b"a"))
    assert not known.is_copy(entry(3, b"a"))
    assert known.is_copy(entry(5, b"a"))
    for number in range(10, 3000):
        assert not known.is_copy(entry(number, b"%d" % number))
    assert len(known._first) <= 1000
    assert not known.is_copy(entry(9000, b"a")), "forgotten: it is passed on once more"


@asynccontextmanager
async def _owning(shard: FakeShard, table: MemoryTable, budget: ReadBudget) -> AsyncIterator[HeldLease]:
    """An owner that goes on where the last one committed, as after a takeover."""
    held = HeldLease(Backlog(SOURCE, budget), "me", table.stored[ROW.key], 1e9, table, lambda: 0.0, 10.0, 86_400_000)

    async def is_listed(_source: TopicPartition) -> bool:
        return True

    context = ReaderContext(lambda: shard.now_ms, lambda _error: None, lambda: None, is_listed)
    task = asyncio.create_task(read_shard(context, held, shard.source()))
    try:
        yield held
    finally:
        held.close()
        task.cancel()
        await asyncio.wait((task,))


class _History:
    """Appends of one partition, repeated at random, and owners that come and go. `appended`: the numbers of each append."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.shard, self.table = chance, FakeShard(), MemoryTable()
        self.appended: list[tuple[int, ...]] = []
        self.repeated = 0
        self.returned: list[list[int]] = []
        """By owner, in order."""
        self._number = self._checked = 0

    def write(self) -> None:
        """An append; sometimes its copies at once, or behind other entries; sometimes the same records under another name."""
        chance = self.chance
        numbers = tuple(range(self._number, self._number + chance.choice((1, 1, 3, 7))))
        self._number = numbers[-1] + 1
        name = b"" if chance.random() < 0.1 else b"%032d" % self._number
        data = _named(name, *numbers)
        self.appended.append(numbers)
        self.shard.put(numbers, data)
        for _ in range(chance.choice((0, 0, 0, 1, 2))):
            if chance.random() < 0.3:
                self.write()
            self.shard.put(numbers, data)
            self.repeated += bool(name)
        if chance.random() < 0.05:
            self.shard.put(numbers, _named(b"other" + name[5:], *numbers))

    async def run(self) -> None:
        chance = self.chance
        self.table.stored[ROW.key] = ROW
        while len(self.appended) < 40:
            budget = ReadBudget()
            async with _owning(self.shard, self.table, budget) as held:
                self.returned.append([])
                for _ in range(chance.randrange(40)):
                    await self._step(held)
        async with _owning(self.shard, self.table, ReadBudget()) as held:
            self.returned.append([])
            for _ in range(400):
                await self._step(held, writes=False)
            while held.backlog.has_records() or held.backlog.millis_behind or held.backlog.must_rewind():
                self._poll(held)
                await asyncio.sleep(0)
            if held.backlog._returned:
                assert await held.commit(held.backlog._returned[-1].offsets[-1])
            await held.renew()
        self.committed = self.table.stored[ROW.key].committed

    async def _step(self, held: HeldLease, *, writes: bool = True) -> None:
        chance = self.chance
        what = chance.randrange(8)
        self.shard.per_read = chance.choice((1, 2, 100))
        if what == 0 and writes:
            self.write()
        elif what == 1:
            held.backlog.give_up()
        elif what == 2:
            await self._commit(held)
        elif what == 3:
            await held.renew()
        else:
            self._poll(held)
        for _ in range(chance.randrange(6)):
            await asyncio.sleep(0)
        self._check_commit()

    def _poll(self, held: HeldLease) -> None:
        for batch in held.backlog.poll(self.chance.choice((1, 2, 100))):
            self.returned[-1] += [record.timestamp for record in batch.records]

    def _check_commit(self) -> None:
        """Every record at or before the commit was returned to somebody."""
        committed = self.table.stored[ROW.key].committed or 0
        if committed == self._checked:
            return
        came = {number for owner in self.returned for number in owner}
        first, self._checked = self._checked >> 20, committed
        for row in self.shard.entries:
            if first <= int(row["SequenceNumber"]) <= committed >> 20:
                entry = parse_entry(row)
                for offset, record in zip(entry.offsets, entry.records, strict=True):
                    assert offset > committed or record.timestamp in came, "committed and never returned"

    async def _commit(self, held: HeldLease) -> None:
        if held.backlog._returned:
            some = self.chance.choice(held.backlog._returned)
            assert await held.commit(self.chance.choice(some.offsets))


@pytest.mark.parametrize("block", range(3))
def test_a_reader_drops_copies_and_nothing_else(block: int) -> None:
    """If it fails, an acknowledged event is lost to a reader that took it for a copy; or copies are delivered."""
    repeated = again = 0
    for seed in range(50 * block, 50 * block + 50):
        history = _History(random.Random(seed))
        try:
            run_virtually(history.run(), seed=seed)
            every = {number for numbers in history.appended for number in numbers}
            assert {number for owner in history.returned for number in owner} == every, "lost"
            firsts = list(dict.fromkeys(number for owner in history.returned for number in owner))
            assert firsts == sorted(firsts), "the first of the copies is the one that is returned"
            assert history.committed == parse_entry(history.shard.entries[-1]).next - 1, (
                "everything counts as processed"
            )
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        repeated += history.repeated
        again += sum(map(len, history.returned)) - len(every)
    assert repeated > 500
    assert again > 0


async def test_one_owner_returns_each_named_append_once() -> None:
    """If it fails, copies are delivered although nothing came between."""
    shard, table = FakeShard(), MemoryTable()
    table.stored[ROW.key] = ROW
    for number in range(50):
        data = _named(b"%032d" % number, 2 * number, 2 * number + 1)
        for _ in range(1 + number % 3):
            shard.put([0], data)
    returned: list[int] = []
    async with _owning(shard, table, ReadBudget()) as held:
        async with asyncio.timeout(600):
            while len(returned) < 100 or held.backlog.millis_behind:
                returned += [record.timestamp for batch in held.backlog.poll(7) for record in batch.records]
                await asyncio.sleep(0)
        assert returned == list(range(100))
        assert held.backlog._returned
        await held.commit(held.backlog._returned[-1].offsets[-1])
        await held.renew()
    end = parse_entry(shard.entries[-1]).next - 1
    assert table.stored[ROW.key].committed == end, "the copy at the end counts as processed: nobody waits for it"


async def test_an_entry_before_the_start_of_a_group_makes_no_copy() -> None:
    """If it fails, a group that began between two copies of an append gets neither of them."""
    shard, table = FakeShard(), MemoryTable()
    data = _named(b"n" * 32, 1, 2)
    shard.put([0], data)
    shard.now_ms += 60_000
    begun = shard.now_ms
    shard.now_ms += 1
    shard.put([0], data)
    table.stored[ROW.key] = ROW._replace(start=StartPosition("arrival", begun))
    returned: list[int] = []
    async with _owning(shard, table, ReadBudget()) as held, asyncio.timeout(600):
        while len(returned) < 2:
            returned += [record.timestamp for batch in held.backlog.poll(7) for record in batch.records]
            await asyncio.sleep(0)
    assert returned == [1, 2]


async def test_the_committed_entry_is_known_to_the_next_owner() -> None:
    """If it fails, each restart delivers the copy at the end of a quiet stream again."""
    shard, table = FakeShard(), MemoryTable()
    data = _named(b"n" * 32, 1, 2)
    first = shard.put([0], data)
    table.stored[ROW.key] = ROW._replace(committed=(first << 20) + 1, arrived=shard.now_ms)
    shard.put([0], data)
    shard.put([3])
    returned: list[int] = []
    async with _owning(shard, table, ReadBudget()) as held, asyncio.timeout(600):
        while not returned:
            returned += [record.timestamp for batch in held.backlog.poll(7) for record in batch.records]
            await asyncio.sleep(0)
    assert returned == [3]


async def test_a_renewal_behind_the_release_commits_no_copy() -> None:
    """If it fails, a heartbeat that waits while its lease is released commits records that nobody was given."""
    shard, table = FakeShard(), MemoryTable()
    table.stored[ROW.key] = ROW
    repeated = _named(b"n" * 32, 1)
    for data in (repeated, _named(b"x" * 32, 2), repeated):
        shard.put([0], data)
    async with _owning(shard, table, ReadBudget()) as held:
        async with asyncio.timeout(600):
            while not (held.backlog._copies and held.backlog._entries):
                await asyncio.sleep(0)
        (batch,) = held.backlog.poll(1)
        assert await held.commit(batch.offsets[-1])
        held.close()
        await held.renew()
    assert table.stored[ROW.key].committed == batch.offsets[-1]


async def test_a_released_lease_is_not_written() -> None:
    """If it fails, a late heartbeat writes the row of the next owner."""
    table = MemoryTable()
    table.stored[ROW.key] = ROW
    async with _owning(FakeShard(), table, ReadBudget()) as held:
        assert await held.write(lambda row: row._replace(owner="another"))
        assert not await held.renew()
    assert table.stored[ROW.key].counter == ROW.counter + 1
