"""What a shard holds, as far as it has to be known."""

import time
from typing import cast

import pytest

from services.core.broker.kinesis.admin import KinesisAdmin
from services.core.broker.kinesis.aws import Clients, PutRecords, Timing
from services.core.broker.kinesis.consumer import SharedResources
from services.core.broker.kinesis.incarnation import Incarnations
from services.core.broker.kinesis.pace import ReadPaces
from services.core.broker.kinesis.record_format import offset_of
from services.core.broker.kinesis.shard_lookup import next_at_least
from services.core.broker.kinesis.streams import Shard, Streams
from tests.unit.kinesis.fake_shard import FakeShard
from tests.unit.kinesis.fake_stream import FakeStream


@pytest.mark.parametrize(("ago", "most"), [(5, 1), (50, 2), (900, 4), (40_000, 6)])
async def test_a_long_history_is_not_read_to_find_where_new_records_go(ago: int, most: int) -> None:
    """If it fails, ingest reads gigabytes before it is ready, on a busy stream for ever."""
    shard = FakeShard()
    newest = round(time.time() * 1000) - ago * 1000
    sequences = []
    for second in range(3600, -1, -1):
        shard.now_ms = newest - second * 1000
        sequences.append(shard.put([second]))
    least = await next_at_least(shard.source())
    assert offset_of(sequences[0]) < least <= offset_of(sequences[-1], 1)
    assert shard.reads <= most


async def test_nothing_is_there() -> None:
    """If it fails, a new stream is never ready."""
    assert await next_at_least(FakeShard().source()) == 0


async def test_closed_shards_are_not_asked() -> None:
    """If it fails, each resharding within the retention makes the next start of ingest slower."""
    stream, timing = FakeStream([Shard(0, (), 0, 9, is_open=False), Shard(1, (0,), 0, 9, is_open=True)]), Timing()
    clients = Clients(stream, None, cast("PutRecords", None), None)
    admin = KinesisAdmin(
        SharedResources(clients, Streams(stream, timing), Incarnations(stream, timing), ReadPaces(), timing)
    )
    assert await admin.next_at_least("t") == {1: 0}
    assert stream.read == {1}
