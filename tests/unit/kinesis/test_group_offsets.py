"""Moving a group from outside of it."""

import pytest

from services.core.broker.errors import UnknownTopic
from services.core.broker.kinesis.admin import set_committed
from services.core.broker.kinesis.incarnation import Stream
from services.core.broker.kinesis.leases import Lease
from services.core.broker.kinesis.streams import Shard
from tests.unit.kinesis.group_world import TIMING, Actor, MemoryTable, World

STREAM = Stream("1:t:1", (Shard(3, (2,), 0, 9, is_open=True),), 86_400_000)


async def test_what_aged_out_can_be_passed_over() -> None:
    """If it fails, a shard that retention took from a slow group stops all that came after it, and no operator can help."""
    table = MemoryTable()
    stuck = Lease(STREAM.name, 2, settled=1)
    await table.add(stuck)
    await set_committed(table, STREAM, {2: 5}, TIMING, 1000)
    assert table.stored[stuck.key].is_done
    world = World({3: STREAM.shards[0]}, {3: []}, table=table)
    actor = Actor(world)
    await actor.heartbeat()
    assert actor.readable() == {3}, "its child begins"
    await actor.die()


async def test_a_shard_of_nobody_is_refused() -> None:
    """If it fails, a slip in a shard's number looks as if the group had been moved."""
    table = MemoryTable()
    with pytest.raises(UnknownTopic):
        await set_committed(table, STREAM, {2: 5}, TIMING, 1000)
    assert table.stored == {}
