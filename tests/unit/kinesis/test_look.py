"""Reading a shard without a group: dead letters, pauses, what an operator looks at."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError

from services.core.broker.contract import Lag, PartitionRange
from services.core.broker.errors import OffsetOutOfRange, Unavailable
from services.core.broker.kinesis.leases import Lease, StartPosition
from services.core.broker.kinesis.record_format import FRAME_MAGIC, offset_of
from services.core.broker.kinesis.shard_lookup import (
    KnownEnds,
    count_lag,
    lag_of,
    next_at_least,
    offset_at,
    read_at,
    retry_briefly,
    stored_range,
)
from tests.unit.kinesis.fake_shard import FakeShard


async def test_looking_at_the_end_again_costs_one_read() -> None:
    """If it fails, processes that follow a topic use up the five reads a second of its shard, and throttle each other."""
    shard = FakeShard()
    first = shard.put([1, 2])
    assert await read_at(shard.source(), offset_of(first, 2), 500) is None
    assert shard.reads == 1
    batch = await read_at(shard.source(), 0, 500)
    assert batch is not None
    assert list(batch.offsets) == [offset_of(first), offset_of(first, 1)]
    assert shard.reads == 2


async def test_damage_comes_by_itself_and_can_be_passed_over() -> None:
    """If it fails, one entry that cannot be read hides what stands before it, or all that stands behind."""
    shard = FakeShard()
    first = shard.put([1])
    bad = shard.put([], data=FRAME_MAGIC + b"\xc1")
    last = shard.put([2])
    offset, found = offset_of(first), []
    while (batch := await read_at(shard.source(), offset, 500)) is not None:
        found.append((list(batch.offsets), batch.damage is not None))
        offset = batch.offsets[-1] + 1
    assert found == [([offset_of(first)], False), ([offset_of(bad)], True), ([offset_of(last)], False)]
    assert (await count_lag(shard.source(), offset_of(first), 100)).records == 2


async def test_what_is_gone_is_not_passed_over() -> None:
    """If it fails, letters that retention took look like none that were ever there."""
    shard = FakeShard()
    first = shard.put([1])
    kept = shard.put([2])
    shard.trim(kept)
    with pytest.raises(OffsetOutOfRange) as gone:
        await read_at(shard.source(), offset_of(first), 500)
    assert gone.value.start == offset_of(kept)
    with pytest.raises(OffsetOutOfRange):
        await read_at(shard.source(), offset_of(kept, 2), 500)


async def test_looking_at_a_busy_shard_ends() -> None:
    """If it fails, a command of an operator reads on for as long as somebody writes."""
    shard = FakeShard()
    shard.put([1])
    shard.per_read = 1
    shard.grows = True
    assert (await count_lag(shard.source(), None, 100)).records <= 3


async def test_a_group_is_not_behind_in_what_was_stored_before_it_began() -> None:
    """If it fails, a destination with the start "latest" shows lag that nobody will ever read, until its first event."""
    shard = FakeShard()
    shard.put([1])
    shard.now_ms += 5_000
    row = Lease("s", 0, start=StartPosition("arrival", shard.now_ms))
    assert (await lag_of(shard.source(), row, 100)).records == 0
    assert (await lag_of(shard.source(), None, 100)).records == 1
    shard.put([2])
    second = shard.put([3])
    assert (await lag_of(shard.source(), row, 100)).records == 2
    assert (await lag_of(shard.source(), row._replace(committed=offset_of(second)), 100)).records == 0
    assert await lag_of(shard.source(), row._replace(is_done=True), 100) == Lag(0, 0)


@pytest.mark.parametrize("code", ["InternalFailure", "ProvisionedThroughputExceededException"])
async def test_a_failure_that_passes_is_waited_for(code: str) -> None:
    """If it fails, one answer 500 of the service ends a Spark query."""
    shard = FakeShard()
    shard.put([1])
    shard.fail = [code] * 2
    async with asyncio.timeout(600):
        batch = await retry_briefly(lambda: read_at(shard.source(), 0, 500))
    assert batch is not None
    assert not shard.fail


async def test_a_failure_that_stays_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, an operator's command waits for ever for a service that is away."""
    monkeypatch.setattr("services.core.broker.kinesis.shard_lookup._PATIENCE_SECONDS", 0.2)
    shard = FakeShard()
    shard.fail = ["InternalFailure"] * 100
    with pytest.raises(Unavailable):
        await retry_briefly(lambda: read_at(shard.source(), 0, 500))


async def test_a_closed_shard_ends_where_no_iterator_follows() -> None:
    """If it fails, Spark takes a parent for read, goes on with its children, and never reads the parent's last events."""
    shard = FakeShard()
    first, last = shard.put([1]), shard.put([2])
    shard.closed, shard.hesitates = True, 2
    batch = await read_at(shard.source(), offset_of(first, 1), 500)
    assert batch is not None
    assert list(batch.offsets) == [offset_of(last)]
    assert await read_at(shard.source(), offset_of(last, 1), 500) is None


async def test_going_on_does_not_read_the_last_entry_again() -> None:
    """If it fails, Spark reads large entries twice, at half of what a shard gives to all its readers."""
    shard = FakeShard()
    ends = KnownEnds(lambda: shard.now_ms)
    first, last = shard.put([1, 2]), shard.put([3, 4])
    assert await read_at(shard.source(), offset_of(first), 3, ends=ends) is not None
    batch = await read_at(shard.source(), offset_of(last, 1), 3, ends=ends)
    assert batch is not None, "an entry that was returned in part is read again"
    assert list(batch.offsets) == [offset_of(last, 1)]
    shard.given = 0
    assert await read_at(shard.source(), offset_of(last, 2), 3, ends=ends) is None
    new = shard.put([5])
    batch = await read_at(shard.source(), offset_of(last, 2), 3, ends=ends)
    assert batch is not None
    assert list(batch.offsets) == [offset_of(new)]
    assert shard.given == 1


async def test_an_entry_that_may_be_gone_is_asked_for() -> None:
    """If it fails, entries that retention deleted after the last read entry are skipped silently."""
    shard = FakeShard()
    ends = KnownEnds(lambda: shard.now_ms)
    first, _, kept = shard.put([1]), shard.put([2]), shard.put([3])
    assert await read_at(shard.source(), offset_of(first), 1, ends=ends) is not None
    shard.now_ms += 86_400_000
    shard.trim(kept)
    with pytest.raises(OffsetOutOfRange):
        await read_at(shard.source(), offset_of(first, 1), 1, ends=ends)


async def test_a_closed_shard_is_measured_to_its_end() -> None:
    """If it fails, an operator, a date or an alarm sees a parent's last events as not there: "nothing waits"."""
    source_of: list[Callable[[FakeShard], Awaitable[object]]] = [
        lambda shard: stored_range(shard.source()),
        lambda shard: offset_at(shard.source(), "latest"),
        lambda shard: offset_at(shard.source(), datetime.fromtimestamp(0.002, UTC)),
        lambda shard: count_lag(shard.source(), None, 100),
    ]
    found = []
    for ask in source_of:
        shard = FakeShard()
        first, last = shard.put([1]), shard.put([2])
        shard.closed, shard.hesitates = True, 2
        found.append(await ask(shard))
    assert found[:3] == [PartitionRange(offset_of(first), offset_of(last, 1)), offset_of(last, 1), offset_of(last)]
    assert isinstance(found[3], Lag)
    assert found[3].records == 2


async def test_a_clock_that_is_ahead_hides_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, `describe` fails wherever this machine's clock is more than ten seconds ahead of the service's."""
    shard = FakeShard()
    first, last = shard.put([1]), shard.put([2])
    true_iterator = shard.get_shard_iterator

    async def no_future(**asked: Any) -> dict[str, Any]:
        if asked["ShardIteratorType"] == "AT_TIMESTAMP":
            raise ClientError({"Error": {"Code": "InvalidArgumentException", "Message": ""}}, "GetShardIterator")
        return await true_iterator(**asked)

    monkeypatch.setattr(shard, "get_shard_iterator", no_future)
    assert await stored_range(shard.source()) == PartitionRange(offset_of(first), offset_of(last, 1))
    assert await next_at_least(shard.source()) == offset_of(first, 1)
