"""What is known of a stream while the service does not tell."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from services.core.broker.errors import BrokerError, Unavailable, UnknownTopic
from services.core.broker.kinesis import streams as streams_module
from services.core.broker.kinesis.aws import Clients, PutRecords, Timing
from services.core.broker.kinesis.resharding import KinesisResharding
from services.core.broker.kinesis.streams import Shard, Streams
from tests.support.clock import Clock
from tests.unit.kinesis.fake_stream import FakeStream

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
    async with asyncio.timeout(600):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("operation", ["ListShards", "ListTagsForStream"])
async def test_no_append_waits_while_the_service_does_not_tell(clock: _Time, operation: str) -> None:
    """If it fails, a throttled ListShards slows every append down to one in seven seconds, though PutRecords is well."""
    stream = FakeStream([OLD], partitions=4)
    streams = Streams(stream, Timing())
    await streams.find("t")
    stream.fail[operation] = "LimitExceededException"
    clock.now += 125.0
    await streams.find("t")
    before = stream.asked[operation]
    for _ in range(20):
        for _ in range(10):
            assert (await streams.find("t")).partitions == 4
            await asyncio.sleep(0)
        clock.now += SYNC / 5
    assert stream.asked[operation] - before <= 4, "once in `sync` seconds, not for each"
    stream.fail.clear()
    stream.shards = [OLD._replace(is_open=False), NEW]
    clock.now += SYNC
    await streams.find("t")
    await until(lambda: stream.asked[operation] > before)
    clock.now += SYNC
    await until(lambda: streams._streams["t"].refreshing is None)
    assert len((await streams.find("t")).shards) == 2
    await streams.close()


async def test_a_busy_writer_does_not_wait_for_what_it_knows(clock: _Time) -> None:
    """If it fails, a ListShards that hangs holds up appends that need nothing of it."""
    stream = FakeStream([OLD])
    streams = Streams(stream, Timing())
    await streams.find("t")
    gate = stream.gate = asyncio.Event()
    clock.now += SYNC + 1
    for _ in range(5):
        async with asyncio.timeout(600):
            assert (await streams.find("t")).shards == (OLD,)
        clock.now += SYNC
    stream.shards.append(NEW)
    gate.set()
    await until(lambda: streams._streams["t"].refreshing is None)
    assert (await streams.find("t")).shards == (OLD, NEW)
    await streams.close()


async def test_new_shards_are_taken_though_the_tag_is_not_told(clock: _Time) -> None:
    """If it fails, what is throttled account-wide, the tags, keeps a writer from shards that were made to help it."""
    stream = FakeStream([OLD], partitions=4)
    streams = Streams(stream, Timing())
    await streams.find("t")
    stream.fail["ListTagsForStream"] = "LimitExceededException"
    stream.shards.append(NEW)
    topology = await streams.find("t", max_age=0)
    assert topology.shards == (OLD, NEW)
    assert topology.partitions == 4
    stream.fail.clear()
    stream.partitions = 8
    clock.now += 2 * SYNC
    assert (await streams.find("t")).partitions == 8, "asked for again soon"


async def test_what_is_known_does_not_hold_for_ever(clock: _Time) -> None:
    """If it fails, a stream that was deleted is written to for ever, or an outage is never told."""
    stream = FakeStream([OLD])
    streams = Streams(stream, Timing())
    await streams.find("t")
    stream.fail["ListShards"] = "InternalFailure"
    clock.now += 301
    with pytest.raises(Unavailable):
        await streams.find("t")
    stream.fail["ListShards"] = "ResourceNotFoundException"
    with pytest.raises(UnknownTopic):
        await streams.find("t")


def _missing() -> float | None:
    return REGISTRY.get_sample_value("penstock_broker_partitions_tag_missing", {"topic": "t"})


@pytest.mark.parametrize("tag", [None, 2])
async def test_partitions_stay_when_their_tag_goes(clock: _Time, tag: int | None) -> None:
    """If it fails, infrastructure code that removes tags it does not know moves most keys to another partition, in silence."""
    stream = FakeStream([OLD, NEW], partitions=16)
    streams = Streams(stream, Timing())
    assert (await streams.find("t")).partitions == 16
    assert _missing() == 0
    stream.partitions = tag
    with capture_logs() as logs:
        for _ in range(3):
            clock.now += 121
            assert (await streams.find("t")).partitions == 16
        streams.invalidate("t")
        assert (await streams.find("t")).partitions == 16
    assert [one["event"] for one in logs if one["log_level"] == "error"] == ["partitions_tag_missing"], "said once"
    assert _missing() == 1
    stream.partitions = 16
    clock.now += 121
    await streams.find("t")
    assert _missing() == 0


async def test_a_reshard_of_an_untagged_stream_moves_no_key_and_is_told(clock: _Time) -> None:
    """If it fails, a merge by hand of a stream that was made elsewhere spreads its keys over fewer partitions."""
    stream = FakeStream([shard._replace(parents=()) for shard in (OLD, NEW)])
    streams = Streams(stream, Timing())
    assert (await streams.find("t")).partitions == 2
    assert _missing() == 0
    closed = [shard._replace(is_open=False) for shard in stream.shards]
    stream.shards = [*closed, Shard(2, (0, 1), 0, 9, is_open=True)]
    clock.now += 2 * SYNC
    assert (await streams.find("t")).partitions == 2
    assert _missing() == 1
    stream.partitions = 2
    clock.now += 121
    assert (await streams.find("t")).is_tagged
    assert _missing() == 0


async def test_a_tag_corrects_what_a_resharded_stream_seemed_to_have(clock: _Time) -> None:
    """If it fails, an operator who puts the tag back is not believed by processes that began without it."""
    stream = FakeStream([OLD, NEW])
    streams = Streams(stream, Timing())
    assert (await streams.find("t")).partitions == 2
    assert _missing() == 1, "a child among them: it was split"
    stream.partitions = 1
    clock.now += 121
    assert (await streams.find("t")).partitions == 1


async def test_an_untagged_stream_gets_its_tag_before_our_first_change() -> None:
    """If it fails, the autoscaler's first merge of a stream that was made elsewhere moves half of its keys."""
    stream = FakeStream([Shard(n, (), n, n, is_open=True) for n in range(4)])
    resharding = KinesisResharding(_clients(stream), Streams(stream, Timing()), Timing())
    await resharding.merge("t", 0, 1)
    await resharding.split("t", 2, 1)
    assert stream.tag_at_change == [4, 4]
    assert stream.asked["AddTagsToStream"] == 1


async def test_a_tag_that_went_is_put_back_before_our_next_change() -> None:
    """If it fails, the autoscaler's next merge makes the loss of the tag a loss of order."""
    stream = FakeStream([OLD._replace(is_open=False), NEW], partitions=16)
    streams = Streams(stream, Timing())
    await streams.find("t")
    stream.partitions = None
    await KinesisResharding(_clients(stream), streams, Timing()).split("t", 1, 1)
    assert stream.tag_at_change == [16]


async def test_a_resharded_stream_without_a_tag_is_left_alone() -> None:
    """If it fails, the autoscaler writes down the number of shards as that of partitions, and every process takes it."""
    stream = FakeStream([OLD._replace(is_open=False), NEW])
    resharding = KinesisResharding(_clients(stream), Streams(stream, Timing()), Timing())
    with pytest.raises(BrokerError, match="Try: aws kinesis add-tags-to-stream"):
        await resharding.split("t", 1, 1)
    assert stream.partitions is None
    assert stream.tag_at_change == []


def _clients(stream: FakeStream) -> Clients:
    return Clients(stream, None, cast("PutRecords", None), None)
