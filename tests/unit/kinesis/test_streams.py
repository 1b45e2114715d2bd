"""What is known of a stream while the service does not tell."""

import asyncio
from collections.abc import Callable

import pytest

from services.core.broker.errors import Unavailable, UnknownTopic
from services.core.broker.kinesis import streams as streams_module
from services.core.broker.kinesis.shards import Shard
from services.core.broker.kinesis.streams import Streams
from services.core.broker.kinesis.timing import Timing
from tests.unit.kinesis.fake_stream import FakeStream
from tests.unit.kinesis.test_pace import Clock

SYNC = Timing().sync
OLD, NEW = Shard(0, (), 0, 9, is_open=True), Shard(1, (0,), 0, 9, is_open=True)


class _Time(Clock):
    """In place of the module `time`."""

    monotonic = Clock.__call__


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Time:
    clock = _Time()
    monkeypatch.setattr(streams_module, "time", clock)
    return clock


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("operation", ["ListShards", "ListTagsForStream"])
async def test_no_append_waits_while_the_service_does_not_tell(clock: _Time, operation: str) -> None:
    """If it fails, a throttled ListShards slows every append down to one in seven seconds, though PutRecords is well."""
    stream = FakeStream([OLD], partitions=4)
    streams = Streams(stream, Timing())
    await streams.of("t")
    stream.fail[operation] = "LimitExceededException"
    clock.now += 125.0
    await streams.of("t")
    before = stream.asked[operation]
    for _ in range(20):
        for _ in range(10):
            assert (await streams.of("t")).partitions == 4
            await asyncio.sleep(0)
        clock.now += SYNC / 5
    assert stream.asked[operation] - before <= 4, "once in `sync` seconds, not for each"
    stream.fail.clear()
    stream.shards = [OLD._replace(is_open=False), NEW]
    clock.now += SYNC
    await streams.of("t")
    await until(lambda: stream.asked[operation] > before)
    clock.now += SYNC
    await until(lambda: streams._streams["t"].refreshing is None)
    assert len((await streams.of("t")).shards) == 2
    await streams.close()


async def test_a_busy_writer_does_not_wait_for_what_it_knows(clock: _Time) -> None:
    """If it fails, a ListShards that hangs holds up appends that need nothing of it."""
    stream = FakeStream([OLD])
    streams = Streams(stream, Timing())
    await streams.of("t")
    gate = stream.gate = asyncio.Event()
    clock.now += SYNC + 1
    for _ in range(5):
        async with asyncio.timeout(30):
            assert (await streams.of("t")).shards == (OLD,)
        clock.now += SYNC
    stream.shards.append(NEW)
    gate.set()
    await until(lambda: streams._streams["t"].refreshing is None)
    assert (await streams.of("t")).shards == (OLD, NEW)
    await streams.close()


async def test_new_shards_are_taken_though_the_tag_is_not_told(clock: _Time) -> None:
    """If it fails, what is throttled account-wide, the tags, keeps a writer from shards that were made to help it."""
    stream = FakeStream([OLD], partitions=4)
    streams = Streams(stream, Timing())
    await streams.of("t")
    stream.fail["ListTagsForStream"] = "LimitExceededException"
    stream.shards.append(NEW)
    topology = await streams.of("t", max_age=0)
    assert topology.shards == (OLD, NEW)
    assert topology.partitions == 4
    stream.fail.clear()
    stream.partitions = 8
    clock.now += 2 * SYNC
    assert (await streams.of("t")).partitions == 8, "asked for again soon"


async def test_what_is_known_does_not_hold_for_ever(clock: _Time) -> None:
    """If it fails, a stream that was deleted is written to for ever, or an outage is never told."""
    stream = FakeStream([OLD])
    streams = Streams(stream, Timing())
    await streams.of("t")
    stream.fail["ListShards"] = "InternalFailure"
    clock.now += 301
    with pytest.raises(Unavailable):
        await streams.of("t")
    stream.fail["ListShards"] = "ResourceNotFoundException"
    with pytest.raises(UnknownTopic):
        await streams.of("t")
