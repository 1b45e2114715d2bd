"""Reading one shard: where it begins, what it notices is missing, and how it goes on after errors."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from services.core.broker.errors import BrokerError, OffsetOutOfRange
from services.core.broker.kinesis import shard_reader
from services.core.broker.kinesis.leases import HeldLease, Lease, StartPosition
from services.core.broker.kinesis.prefetch import Backlog, ReadBudget
from services.core.broker.kinesis.record_format import FRAME_MAGIC, offset_of
from services.core.broker.kinesis.shard_reader import ReaderContext, read_shard
from services.core.broker.record import Batch, TopicPartition
from tests.unit.kinesis.fake_shard import FakeShard
from tests.unit.kinesis.group_world import MemoryTable

RETENTION = 86_400_000
ROW = Lease("1:t:1", 0, owner="me", settled=1_000_000_000)


class _Reader:
    def __init__(self, shard: FakeShard, row: Lease, retention: int, budget: ReadBudget | None) -> None:
        self.shard, self.noted = shard, list[BrokerError]()
        self.table = MemoryTable()
        self.table.stored[row.key] = row
        self.held = HeldLease(
            Backlog(TopicPartition("t", 0), budget), "me", row, 1e9, self.table, lambda: 0.0, 10.0, retention
        )
        self.news = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(600):
            while not condition():
                await asyncio.sleep(0)

    async def read(self, count: int) -> list[int]:
        """The numbers of the next records, `count` at least."""
        batches: list[Batch] = []

        def enough() -> bool:
            batches.extend(self.held.backlog.poll(1000))
            return sum(len(batch.records) for batch in batches) >= count

        await self.until(enough)
        return [record.timestamp for batch in batches for record in batch.records]


@asynccontextmanager
async def _reading(
    shard: FakeShard, row: Lease = ROW, retention: int = RETENTION, budget: ReadBudget | None = None
) -> AsyncIterator[_Reader]:
    reader = _Reader(shard, row, retention, budget)

    async def is_listed(_source: TopicPartition) -> bool:
        return not shard.is_gone or shard.is_listed

    reading = ReaderContext(lambda: shard.now_ms, reader.noted.append, reader.news.set, is_listed)
    task = asyncio.create_task(read_shard(reading, reader.held, shard.source()))
    try:
        yield reader
    finally:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.result()


async def test_a_commit_within_an_entry_goes_on_behind_it() -> None:
    """If it fails, the rest of an aggregated entry is lost, or all of it comes again."""
    shard = FakeShard()
    first = shard.put(range(5))
    shard.put(range(5, 7))
    async with _reading(shard, ROW._replace(committed=offset_of(first, 2))) as reader:
        assert await reader.read(4) == [3, 4, 5, 6]
    async with _reading(shard, ROW._replace(committed=offset_of(first, 4))) as reader:
        assert await reader.read(2) == [5, 6]


@pytest.mark.parametrize("code", ["ExpiredIteratorException", "ProvisionedThroughputExceededException"])
async def test_errors_of_a_read_lose_and_repeat_nothing(code: str) -> None:
    """If it fails, an iterator that expired (a long pause) or a throttle makes the reader skip or repeat records."""
    shard = FakeShard()
    shard.per_read = 1
    for number in range(6):
        shard.put([2 * number, 2 * number + 1])
    async with _reading(shard) as reader:
        seen: list[int] = []
        while len(seen) < 12:
            shard.fail = [code]
            seen += await reader.read(1)
        assert seen == list(range(12))
    assert ("AT_SEQUENCE_NUMBER" in shard.iterators) == (code == "ExpiredIteratorException")


async def test_iterators_that_expire_while_nothing_comes_repeat_nothing() -> None:
    """If it fails, an idle shard's last entry is delivered again at every second expiry: with fan-out every ten minutes."""
    shard = FakeShard()
    shard.put([1, 2])
    async with _reading(shard) as reader:
        seen = await reader.read(2)
        for _ in range(4):
            shard.fail, reads = ["ExpiredIteratorException"], shard.reads
            await reader.until(lambda reads=reads: shard.reads > reads + 2)  # type: ignore[misc]  # mypy infers no default
        shard.put([3])
        assert seen + await reader.read(1) == [1, 2, 3]


async def test_a_quiet_shard_is_read_less_often_until_somebody_wants_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a fleet that has nothing to do reads each shard five times a second; or a busy shard waits; or the lag of a group
    waits for the next read of each quiet shard."""
    monkeypatch.setattr(shard_reader, "_REST_OF_QUIET", 1e9)
    monkeypatch.setattr(shard_reader, "_MOST_REST_S", 3600.0)
    shard = FakeShard()
    shard.per_read = 1
    for number in range(3):
        shard.put([number])
    async with _reading(shard) as reader:
        assert await reader.read(3) == [0, 1, 2]
        reads = -1
        while reads != shard.reads:  # the loop's clock counts milliseconds: the first rests may be none
            reads = shard.reads
            await asyncio.sleep(0.01)
        shard.put([3])
        await asyncio.sleep(0.01)
        assert shard.reads == reads
        reader.held.backlog.want_read()
        assert await reader.read(1) == [3]


async def test_a_fault_is_noted_and_tried_again() -> None:
    """If it fails, an outage of Kinesis ends reading for good, or nobody hears of it."""
    shard = FakeShard()
    shard.put([1])
    shard.fail = ["InternalFailure"]
    async with _reading(shard) as reader:
        assert await reader.read(1) == [1]
        assert len(reader.noted) == 1


async def test_the_end_of_a_shard_is_noticed() -> None:
    """If it fails, the children of a shard that was split are never read."""
    shard = FakeShard()
    shard.put([1])
    shard.closed = True
    async with _reading(shard) as reader:
        assert await reader.read(1) == [1]
        await reader.until(lambda: reader.held.backlog.ended)
        assert not reader.held.backlog.is_finished, "read is not processed"
        reader.held.backlog.processed(offset_of(1))
        assert reader.held.backlog.is_finished


async def test_what_expired_unprocessed_is_loud() -> None:
    """If it fails, retention that passed a slow group skips events without a word."""
    shard = FakeShard()
    first = shard.put([1])
    shard.put([2])
    third = shard.put([3])
    shard.trim(third)
    day = 90_000_000
    row = ROW._replace(committed=offset_of(first), arrived=shard.now_ms, settled=shard.now_ms)
    for later in (0, day):  # too young to be gone for its age; and nobody looked since
        shard.now_ms += later
        async with _reading(shard, row) as reader:
            await reader.until(lambda: reader.held.backlog.error is not None)
            error = reader.held.backlog.error
            assert isinstance(error, OffsetOutOfRange)
            assert (error.wanted, error.start, error.end) == (
                offset_of(first, 1),
                offset_of(third),
                offset_of(third, 1),
            )


async def test_an_idle_stream_whose_records_expired_is_no_gap() -> None:
    """If it fails, every quiet stream stops with an alarm when its last processed record gets old."""
    shard = FakeShard()
    first = shard.put([1])
    row = ROW._replace(committed=offset_of(first), arrived=shard.now_ms)
    shard.now_ms += RETENTION + 1000
    new = shard.put([2])
    shard.trim(new)
    async with _reading(shard, row._replace(settled=shard.now_ms - 60_000)) as reader:
        assert await reader.read(1) == [2]


async def test_a_position_that_was_set_at_the_end_of_an_idle_stream_is_no_gap() -> None:
    """A migration, or an operator. If it fails, each quiet partition stops with an alarm at the first restart after its last
    record has expired."""
    shard = FakeShard()
    row = ROW._replace(committed=offset_of(shard.put([1])), settled=shard.now_ms)
    async with _reading(shard, row) as reader:
        await reader.until(lambda: reader.held.is_placed)
        assert await reader.held.renew()
        row = reader.table.stored[row.key]
    shard.now_ms += RETENTION + 1000
    new = shard.put([2])
    shard.trim(new)
    async with _reading(shard, row._replace(settled=shard.now_ms - 60_000)) as reader:
        backlog = reader.held.backlog
        await reader.until(lambda: backlog.has_records() or backlog.error is not None)
        assert backlog.error is None
        assert await reader.read(1) == [2]


async def test_nothing_processed_within_the_retention_is_loud() -> None:
    """If it fails, a group that never committed loses what expired meanwhile without a word."""
    shard = FakeShard()
    shard.now_ms += RETENTION + 1
    shard.put([2])
    async with _reading(shard) as reader:
        await reader.until(lambda: reader.held.backlog.error is not None)


async def test_a_longer_retention_brings_nothing_back() -> None:
    """If it fails, an operator who raises the retention of a stream that is behind hides what had expired by then."""
    shard = FakeShard()
    first = shard.put([1])
    row = ROW._replace(committed=offset_of(first), arrived=shard.now_ms, settled=shard.now_ms, retention=RETENTION)
    shard.now_ms += RETENTION + 1000
    shard.trim(shard.put([2]))
    for begun in (row, row._replace(committed=None)):
        async with _reading(shard, begun, 7 * RETENTION) as reader:
            await reader.until(lambda: reader.held.backlog.error is not None)
    shard.is_gone = True
    async with _reading(shard, row, 7 * RETENTION) as reader:
        await reader.until(lambda: reader.held.backlog.error is not None)


async def test_a_retention_that_is_made_shorter_counts_at_once() -> None:
    """If it fails, a reader that goes on for days takes what a shorter retention took for what was never there."""
    shard = FakeShard()
    shard.put([1])
    async with _reading(shard, ROW, 7 * RETENTION) as reader:
        assert await reader.read(1) == [1]
        shard.now_ms += 5 * RETENTION
        reads = shard.reads
        await reader.until(lambda: shard.reads > reads + 1)
        shard.fail = ["ExpiredIteratorException"]
        reader.held.retention = RETENTION
        shard.now_ms += 2 * RETENTION + 1
        shard.trim(shard.put([2]))
        await reader.until(lambda: reader.held.backlog.error is not None or reader.held.backlog.has_records())
        assert reader.held.backlog.error is not None, "what came two days ago was gone a day ago"


async def test_a_shard_that_aged_out_is_at_its_end() -> None:
    """If it fails, a row that a late member added back, or of a shard read to its end, keeps the children from ever beginning."""
    shard = FakeShard()
    shard.is_gone = True
    shard.now_ms += RETENTION
    async with _reading(shard) as reader:
        await reader.until(lambda: reader.held.backlog.ended)
        assert reader.held.backlog.is_finished
        assert reader.held.backlog.error is None


async def test_a_shard_that_aged_out_unprocessed_is_loud() -> None:
    """If it fails, all that a group had not processed of a shard is skipped without a word, or the group waits in silence."""
    shard = FakeShard()
    shard.is_gone = True
    shard.now_ms += RETENTION + 1
    async with _reading(shard, ROW._replace(committed=offset_of(7))) as reader:
        await reader.until(lambda: reader.held.backlog.error is not None)
        error = reader.held.backlog.error
        assert isinstance(error, OffsetOutOfRange)
        assert error.wanted == offset_of(7, 1)
        assert not reader.held.backlog.ended


async def test_a_shard_that_is_still_listed_is_asked_for_again() -> None:
    """If it fails, a stream that is only unknown for a moment ends its shards for the group."""
    shard = FakeShard()
    shard.put([1])
    shard.is_gone = shard.is_listed = True
    async with _reading(shard) as reader:
        await reader.until(lambda: bool(reader.noted))
        assert not reader.held.backlog.ended
        shard.is_gone = False
        assert await reader.read(1) == [1]


async def test_a_position_that_never_was_is_loud() -> None:
    """If it fails, a wrong offset set by an operator is read from somewhere else."""
    shard = FakeShard()
    first = shard.put([1, 2])
    for wrong in (offset_of(first, 9), offset_of(first + 5)):
        async with _reading(shard, ROW._replace(committed=wrong)) as reader:
            await reader.until(lambda: reader.held.backlog.error is not None)


async def test_a_start_at_a_date_is_found_and_remembered() -> None:
    """If it fails, time travel lands elsewhere, or elsewhere again after a restart."""
    shard = FakeShard()
    first = shard.put([10, 50, 20])
    shard.put([60, 5])
    async with _reading(shard, ROW._replace(start=StartPosition("date", 40))) as reader:
        assert await reader.read(4) == [50, 20, 60, 5]
        assert reader.held.row.start == StartPosition("offset", offset_of(first, 1))
        row = reader.table.stored[ROW.key]
    async with _reading(shard, row) as reader:
        assert await reader.read(4) == [50, 20, 60, 5]


async def test_a_date_after_everything_is_the_end() -> None:
    """If it fails, a start in the future waits for ever, or skips what comes after the group has joined."""
    shard = FakeShard()
    shard.put([10])
    shard.now_ms += 1
    async with _reading(shard, ROW._replace(start=StartPosition("date", 40))) as reader:
        await reader.until(lambda: reader.held.is_placed)
        shard.put([11])
        assert await reader.read(1) == [11]
        row = reader.table.stored[ROW.key]
    async with _reading(shard, row) as reader:
        assert await reader.read(1) == [11]


async def test_a_damaged_entry_is_a_batch_of_its_own() -> None:
    """If it fails, one entry that cannot be read stops a shard, or disappears without a trace."""
    shard = FakeShard()
    shard.put([1, 2])
    bad = shard.put([], data=FRAME_MAGIC + b"\xc1")
    shard.put([3])
    async with _reading(shard) as reader:
        batches: list[Batch] = []

        def three() -> bool:
            batches.extend(reader.held.backlog.poll(10))
            return len(batches) == 3

        await reader.until(three)
    assert [batch.damage is not None for batch in batches] == [False, True, False]
    assert batches[1].offsets[-1] == offset_of(bad)
    assert batches[1].records[0].value == FRAME_MAGIC + b"\xc1"
    async with _reading(shard, ROW._replace(committed=offset_of(bad))) as reader:
        assert await reader.read(1) == [3]


async def test_catching_up_takes_few_reads() -> None:
    """If it fails, five reads a second are used up by small answers, and a group with a backlog never comes to its end."""
    shard = FakeShard()
    shard.per_read = 10_000
    for number in range(2_000):
        shard.put([number])
    async with _reading(shard) as reader:
        await reader.read(2_000)
        assert shard.reads <= 7


async def test_reading_waits_for_room() -> None:
    """If it fails, a paused or slow consumer fills the memory with what it has not asked for."""
    shard = FakeShard()
    for number in range(12):
        shard.put([number], data=b"x" * 1_000_000)
    async with _reading(shard) as reader:
        await reader.until(lambda: reader.held.backlog.is_full)
        assert reader.held.backlog.size <= 4_010_000, "the first read knows nothing of their size"
        assert len(await reader.read(12)) == 12
