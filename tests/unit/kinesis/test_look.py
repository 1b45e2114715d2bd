"""Reading a shard without a group: dead letters, pauses, what an operator looks at."""

import pytest

from services.core.broker.errors import OffsetOutOfRange
from services.core.broker.kinesis.frames import MAGIC
from services.core.broker.kinesis.look import lag_behind, look
from services.core.broker.kinesis.offsets import offset_of
from tests.unit.kinesis.fake_shard import FakeShard


async def test_looking_at_the_end_again_costs_one_read() -> None:
    """If it fails, processes that follow a topic use up the five reads a second of its shard, and throttle each other."""
    shard = FakeShard()
    first = shard.put([1, 2])
    assert await look(shard.source(), offset_of(first, 2), 500) is None
    assert shard.reads == 1
    batch = await look(shard.source(), 0, 500)
    assert batch is not None
    assert list(batch.offsets) == [offset_of(first), offset_of(first, 1)]
    assert shard.reads == 2


async def test_damage_comes_by_itself_and_can_be_passed_over() -> None:
    """If it fails, one entry that cannot be read hides what stands before it, or all that stands behind."""
    shard = FakeShard()
    first = shard.put([1])
    bad = shard.put([], data=MAGIC + b"\xc1")
    last = shard.put([2])
    offset, found = offset_of(first), []
    while (batch := await look(shard.source(), offset, 500)) is not None:
        found.append((list(batch.offsets), batch.damage is not None))
        offset = batch.offsets[-1] + 1
    assert found == [([offset_of(first)], False), ([offset_of(bad)], True), ([offset_of(last)], False)]
    assert (await lag_behind(shard.source(), offset_of(first), 100)).records == 2


async def test_what_is_gone_is_not_passed_over() -> None:
    """If it fails, letters that retention took look like none that were ever there."""
    shard = FakeShard()
    first = shard.put([1])
    kept = shard.put([2])
    shard.trim(kept)
    with pytest.raises(OffsetOutOfRange) as gone:
        await look(shard.source(), offset_of(first), 500)
    assert gone.value.start == offset_of(kept)
    with pytest.raises(OffsetOutOfRange):
        await look(shard.source(), offset_of(kept, 2), 500)


async def test_looking_at_a_busy_shard_ends() -> None:
    """If it fails, a command of an operator reads on for as long as somebody writes."""
    shard = FakeShard()
    shard.put([1])
    shard.per_read = 1
    shard.grows = True
    assert (await lag_behind(shard.source(), None, 100)).records <= 3
