"""What a query over Kinesis reads next, without Spark and without the service."""

import asyncio
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.core.broker.errors import OffsetOutOfRange, Unavailable
from services.core.broker.kinesis.blocking import BlockingKinesis
from services.core.broker.kinesis.incarnation import Stream
from services.core.broker.kinesis.pace import ReadPace
from services.core.broker.kinesis.shard_lookup import KnownEnds, read_at
from services.core.broker.kinesis.streams import Shard
from services.core.broker.record import Batch, Record, estimate_size
from spark.sources import shards as planning
from spark.sources.kinesis import KinesisStreamReader, ShardTask, read_task
from spark.sources.shards import (
    SETTLED_EVERY_MS,
    ShardPosition,
    ShardRead,
    ShardRecords,
    ShardStart,
    has_more,
    list_shards,
    pack_shards,
    read_shards,
    readable,
    shards_of,
)
from tests.unit.kinesis.fake_shard import FakeShard

DAY_MS = 86_400_000
NOW = int(time.time() * 1000)
BIG = 1 << 200


class Shelf:
    """Records by shard: offsets BIG, BIG + 10, …; `gone` of them are not kept any more."""

    def __init__(self, counts: Sequence[int], gone: int = 0) -> None:
        self.ends = KnownEnds(lambda: NOW)
        self.offsets = [[BIG + 10 * n for n in range(count)] for count in counts]
        self.gone = gone

    def pace(self, topic: str, shard: int) -> ReadPace:
        return ReadPace(topic, shard)

    async def read_shard(self, topic: str, which: Shard, offset: int, *, max_records: int) -> Batch | None:
        shard = which.number
        every = self.offsets[shard]
        kept = every[self.gone :]
        if offset and offset - 1 not in kept and offset not in kept and kept:
            raise OffsetOutOfRange(topic, shard, offset, kept[0], kept[-1] + 1, contiguous=False)
        found = [one for one in kept if one >= offset][:max_records]
        return Batch(topic, shard, found, [Record(None, b"x", NOW)] * len(found)) if found else None


def stream(*shards: Shard) -> Stream:
    return Stream("account:s:1", shards, DAY_MS)


def shard(number: int, *parents: int, is_open: bool = True) -> Shard:
    return Shard(number, parents, 0, 1, is_open)


def starts(found: Stream, known: dict[int, ShardPosition]) -> list[ShardStart]:
    return [ShardStart("s", one, known[one.number], found.retention_ms) for one in readable(found, known)]


async def plan(
    shelf: Any, found: Stream, known: dict[int, ShardPosition], room: int = 1000, size: int = 16 << 20
) -> dict[int, ShardRead]:
    """One batch: what is read of each shard."""
    begin = starts(found, known)
    reads = await read_shards(cast(ShardRecords, shelf), begin, -(-room // max(1, len(begin))), size)
    return {start.shard.number: read for start, read in zip(begin, reads, strict=True)}


async def test_children_wait_for_a_batch_after_their_parents_end() -> None:
    """If this fails, the events of a key come out of order around a split or a merge."""
    split = stream(shard(0, is_open=False), shard(1, is_open=False), shard(2, 0, 1))
    known = list_shards("s", split, {0: ShardPosition(0, NOW), 1: ShardPosition(0, NOW)}, NOW)
    shelf = Shelf([3, 1, 5])
    planned = await plan(shelf, split, known, room=4)
    assert {number: len(one.batches) for number, one in planned.items()} == {0: 1, 1: 1}
    assert [len(planned[n].batches[0].records) for n in (0, 1)] == [2, 1]
    known |= {number: one.position for number, one in planned.items()}
    assert [one.number for one in readable(split, known)] == [0, 1], "more may have come meanwhile"
    known |= {number: one.position for number, one in (await plan(shelf, split, known, room=2)).items()}
    assert (known[0].ended, known[1].ended) == (False, True)
    assert [one.number for one in readable(split, known)] == [0]
    known |= {number: one.position for number, one in (await plan(shelf, split, known)).items()}
    assert [one.number for one in readable(split, known)] == [2]
    assert [
        one.number for one in readable(stream(shard(2, 0, 1)), list_shards("s", stream(shard(2, 0, 1)), known, NOW))
    ] == [2]


async def test_what_is_known_survives_the_checkpoint() -> None:
    """If this fails, an offset of 206 bits is rounded, or a restart reads a shard again that has ended."""
    known = {0: ShardPosition(BIG + 1, NOW, ended=True, retention=DAY_MS, begun=BIG), 11: ShardPosition(0, NOW)}
    assert shards_of(pack_shards({"s": ("a", known)}), "s") == ("a", known)
    assert shards_of(pack_shards({"s": ("a", known)}), "t") == ("", {})


async def test_an_idle_shard_stays_where_it_is() -> None:
    """If this fails, an idle query makes a batch several times a second, or never says that it looked."""
    one, shelf = stream(shard(0)), Shelf([2])
    idle = ShardPosition(BIG + 11, NOW, retention=DAY_MS, begun=BIG)
    assert (await plan(shelf, one, {0: idle}))[0].position == idle
    assert not await has_more(cast(ShardRecords, shelf), starts(one, {0: idle})[0])
    old = idle._replace(settled=NOW - SETTLED_EVERY_MS - 1)
    assert (await plan(shelf, one, {0: old}))[0].position.settled >= NOW
    assert await has_more(cast(ShardRecords, shelf), starts(one, {0: old})[0])
    closed = stream(shard(0, is_open=False))
    assert await has_more(cast(ShardRecords, shelf), starts(closed, {0: idle})[0]), "its end is not recorded yet"
    assert await has_more(cast(ShardRecords, shelf), starts(one, {0: idle._replace(next=BIG + 1)})[0])


async def test_what_expired_unread_is_an_error() -> None:
    """If this fails, events that retention took before they were read are passed over in silence."""
    one, looked, long_ago = stream(shard(0)), NOW - 1000, NOW - DAY_MS - 1000
    behind = Shelf([3], gone=2)
    with pytest.raises(OffsetOutOfRange):
        await plan(behind, one, {0: ShardPosition(BIG + 1, long_ago)})
    kept = await plan(behind, one, {0: ShardPosition(BIG + 1, looked)})
    assert kept[0].position.next == BIG + 21, "what was read is gone, and nothing else"
    with pytest.raises(OffsetOutOfRange):
        await plan(behind, one, {0: ShardPosition(0, long_ago)})
    with pytest.raises(OffsetOutOfRange):
        await plan(Shelf([3], gone=3), one, {0: ShardPosition(BIG + 1, long_ago)})
    assert not (await plan(Shelf([3], gone=3), one, {0: ShardPosition(BIG + 21, looked)}))[0].batches
    assert not (await plan(Shelf([3]), one, {0: ShardPosition(BIG + 21, long_ago)}))[0].batches, "the last one is there"
    with pytest.raises(OffsetOutOfRange):
        list_shards("s", stream(shard(1)), {0: ShardPosition(BIG, long_ago)}, NOW)


async def test_a_child_is_as_old_as_its_parents_last_look() -> None:
    """If this fails, a query that was down across a split takes what it finds of a child for all that there was."""
    split = stream(shard(0, is_open=False), shard(1, 0))
    parent = ShardPosition(BIG, NOW - 5000, retention=DAY_MS // 2)
    assert list_shards("s", split, {0: parent}, NOW)[1] == ShardPosition(0, NOW - 5000, retention=DAY_MS // 2)
    assert list_shards("s", split, {}, NOW)[1] == ShardPosition(0, NOW, retention=DAY_MS)


async def test_a_longer_retention_brings_nothing_back() -> None:
    """If this fails, who raises the retention of a stream that a query is behind on hides what expired before."""
    raised = Stream("account:s:1", (shard(0),), 7 * DAY_MS)
    known = list_shards("s", stream(shard(0)), {0: ShardPosition(BIG + 1, NOW - DAY_MS - 1000)}, NOW - DAY_MS)
    known = list_shards("s", raised, shards_of(pack_shards({"s": ("a", known)}), "s")[1], NOW)
    for lost in (known, {0: known[0]._replace(next=0)}):
        with pytest.raises(OffsetOutOfRange):
            await plan(Shelf([3], gone=2), raised, lost)
    with pytest.raises(OffsetOutOfRange):
        list_shards("s", Stream("account:s:1", (shard(1),), 7 * DAY_MS), known, NOW)
    looked = (await plan(Shelf([1]), raised, {0: ShardPosition(BIG + 1, NOW - DAY_MS // 2, retention=DAY_MS)}))[0]
    assert looked.position.retention == 7 * DAY_MS, "nothing is left that the shorter one could have taken"


class _Connection:
    """In place of `BlockingKinesis`, for one stream; a loop of its own for each call."""

    def __init__(self, reader: Any, found: Stream) -> None:
        self.broker, self._found = SimpleNamespace(reader=reader), found

    def stream(self, _topic: str) -> Stream:
        return self._found

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(work)

    def read(self, topic: str, number: int, offset: int) -> Batch | None:
        one = Shard(number, (), 0, 0, is_open=True)
        found: Batch | None = self.wait(self.broker.reader.read_shard(topic, one, offset, max_records=1000))
        return found

    read_range = BlockingKinesis.read_range


def test_a_batch_that_followed_an_idle_retention_is_read_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If this fails, a crash in the first batch after a quiet day stops the query for good, though nothing is lost."""
    shelf = Shelf([1])
    found = _Connection(shelf, stream(shard(0)))
    monkeypatch.setattr("spark.sources.kinesis.connection", lambda _url: found)
    options = {"broker": "kinesis://x", "topics": "s", "max_events": "100", "checkpoint": f"file://{tmp_path}"}
    start = pack_shards({"s": (found.stream("s").name, {0: ShardPosition(BIG + 1, NOW, retention=DAY_MS, begun=BIG)})})
    shelf.offsets, shelf.gone = [[BIG, BIG + 10, BIG + 20]], 1
    first = KinesisStreamReader(options)
    end = first.latestOffset(start, first.getDefaultReadLimit())
    kinesis = cast(BlockingKinesis, found)
    (task,) = first.partitions(start, end)
    assert isinstance(task, ShardTask)
    assert [offset for batch in read_task(kinesis, task) for offset in batch.offsets] == [BIG + 10, BIG + 20]
    shelf.offsets[0].append(BIG + 30)
    (again,) = KinesisStreamReader(options).partitions(start, end)
    assert [offset for batch in read_task(kinesis, again) for offset in batch.offsets] == [BIG + 10, BIG + 20]
    shelf.gone = 2
    with pytest.raises(OffsetOutOfRange):
        list(read_task(kinesis, again))


async def test_a_batch_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a backlog of large events is taken into memory as one batch."""
    monkeypatch.setattr(planning, "_READ_RECORDS", 1)
    planned = await plan(Shelf([50]), stream(shard(0)), {0: ShardPosition(0, NOW)}, size=100)
    assert len(planned[0].batches) == 2
    assert planned[0].more
    assert planned[0].position.next == BIG + 11


class Shard0:
    """The reader of a stream of one shard, which is read as the real one is."""

    def __init__(self, shard: FakeShard) -> None:
        self.shard = shard

    async def read_shard(self, topic: str, shard: Shard, offset: int, *, max_records: int) -> Batch | None:
        return await read_at(self.shard.source(), offset, max_records)


async def test_a_backlog_fills_a_batch() -> None:
    """If this fails, a batch holds a megabyte of each shard, whatever its bound, and a busy pipe falls behind for good."""
    backlog = FakeShard()
    for _ in range(60):
        backlog.put(range(300), size=300)
    one, beginning = stream(shard(0)), {0: ShardPosition(0, NOW)}
    everything = (await plan(Shard0(backlog), one, beginning, 1 << 62))[0]
    assert everything.records == 60 * 300
    assert not everything.more
    part = (await plan(Shard0(backlog), one, beginning, 1 << 62, size=3 << 20))[0]
    assert 3 << 20 < sum(estimate_size(batch.records) for batch in part.batches) < 5 << 20


async def test_a_shard_that_gives_little_holds_up_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, queries that share a shard read for minutes, a time limit ends their batches, and none goes on."""
    monkeypatch.setattr("spark.sources.shards._READ_RECORDS", 1)
    monkeypatch.setattr("spark.sources.shards._LONGEST_READ_S", -1.0)
    found = stream(shard(0))
    (read,) = (await plan(Shelf([3]), found, {0: ShardPosition(0, NOW)})).values()
    assert (read.records, read.more, read.position.next) == (1, True, BIG + 1)


async def test_after_a_failure_no_other_shard_is_read() -> None:
    """If this fails, a task that failed uses up the limits of other shards beside its next attempt."""

    class Failing(Shelf):
        ended = 0

        async def read_shard(self, topic: str, which: Shard, offset: int, *, max_records: int) -> Batch | None:
            if which.number == 0:
                raise Unavailable("the service refuses it")
            try:
                await asyncio.sleep(3600)
            finally:
                self.ended += 1
            return None

    shelf = Failing([1, 1])
    known = {0: ShardPosition(0, NOW), 1: ShardPosition(0, NOW)}
    with pytest.raises(Unavailable):
        await plan(shelf, stream(shard(0), shard(1)), known)
    assert shelf.ended == 1
