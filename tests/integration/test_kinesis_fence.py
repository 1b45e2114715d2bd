"""The exact end of a stream on Kinesis, and a stream that was created by half, against the emulator."""

import asyncio
from unittest.mock import AsyncMock

import pytest

from services.core.aws_emulator import AwsEmulator
from services.core.broker.contract import TopicSpec
from services.core.broker.errors import TopicExists, Unavailable
from services.core.broker.kinesis.broker import KinesisBroker
from services.core.broker.kinesis.leases import StartPosition
from services.core.broker.kinesis.shard_lookup import offset_from
from services.core.broker.producer import Producer
from tests.contract.harness_kinesis import KinesisHarness
from tests.contract.traffic import ignore_revoke, record
from tests.support.kinesis_limits import KinesisLimits


async def test_everything_acknowledged_is_below_a_fence(
    kinesis_emulator: AwsEmulator, kinesis_limits: KinesisLimits
) -> None:
    """Broken: a migration ends its copy before an acknowledged event, which is lost."""
    harness = KinesisHarness(kinesis_emulator, kinesis_limits)
    async with harness.open() as broker, Producer(broker.appender) as producer:
        topic = await harness.create_topic(broker, 2)
        empty = await broker.reader.fence(topic)
        assert empty.keys() == {0, 1}
        assert await broker.reader.read(topic, 0, empty[0], max_records=10) is None
        for number in range(3):
            (await producer.send_to(topic, {0: [record(number)]})).raise_first()
            end = await broker.reader.fence(topic)
            batch = await broker.reader.read(topic, 0, empty[0], max_records=10)
            assert batch is not None
            assert len(batch.records) == number + 1
            assert empty[0] < batch.offsets[-1] < end[0]
            assert end[1] > empty[1]
        late = await broker.appender.append(topic, 0, [record(9)], timeout=600)
        assert late.first >= end[0]


async def test_members_pass_fences_over(kinesis_emulator: AwsEmulator, kinesis_limits: KinesisLimits) -> None:
    """Broken: a group that a migration has moved to an empty shard stops there, or has a lag for ever."""
    harness = KinesisHarness(kinesis_emulator, kinesis_limits)
    async with harness.open() as broker:
        topic, group = await harness.create_topic(broker), harness.fresh_name("group")
        fence = await broker.reader.fence(topic)
        await broker.admin.set_committed(group, topic, {0: fence[0] - 1})
        assert await broker.admin.positions(group, topic) == {0: fence[0]}
        later = await broker.reader.fence(topic)
        joining = broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke)
        async with joining as consumer, asyncio.timeout(600):
            await broker.appender.append(topic, 0, [record(1)], timeout=600)
            while not (batches := await consumer.poll(max_records=10, max_wait=1.0)):
                pass
            assert [one for batch in batches for one in batch.records] == [record(1)]
            assert batches[0].offsets[0] > later[0]
            await consumer.commit({batches[0].source: batches[0].offsets[-1]})
            end = await broker.reader.fence(topic)
            while (await broker.admin.positions(group, topic))[0] < end[0]:
                await asyncio.sleep(0.2)


async def test_a_stream_that_was_created_by_half_keeps_its_events_as_long_as_it_should(
    kinesis_emulator: AwsEmulator, kinesis_limits: KinesisLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration was killed between the two requests. Else the events of the copy are gone after a day."""
    harness = KinesisHarness(kinesis_emulator, kinesis_limits)
    async with harness.open() as broker:
        assert isinstance(broker, KinesisBroker)
        topic, hour = harness.fresh_name("half"), 3_600_000
        with monkeypatch.context() as patch:
            patch.setattr(broker.admin, "_raise_retention", AsyncMock(side_effect=Unavailable("killed")))
            with pytest.raises(Unavailable):
                await broker.admin.create_topic(TopicSpec(topic, 2, retention_ms=72 * hour))
        incarnations = broker.admin._shared.incarnations
        assert (await incarnations.find(topic, max_age=0.0)).retention_ms == 24 * hour
        for partitions, retention, hours in ((3, 72, 24), (2, 72, 72), (2, 48, 72)):
            with pytest.raises(TopicExists):
                await broker.admin.create_topic(TopicSpec(topic, partitions, retention_ms=retention * hour))
            assert (await incarnations.find(topic, max_age=0.0)).retention_ms == hours * hour


async def test_a_group_that_began_at_the_latest_event_is_not_behind_what_is_stored(
    kinesis_emulator: AwsEmulator, kinesis_limits: KinesisLimits
) -> None:
    """It has committed nothing, and a read ends early: at the end of the shard the group would skip events."""
    harness = KinesisHarness(kinesis_emulator, kinesis_limits)
    async with harness.open() as broker:
        assert isinstance(broker, KinesisBroker)
        topic = await harness.create_topic(broker, 1)
        shard = (await broker.admin._streams.find(topic)).shards[0]
        source, start = broker.admin._source(topic, shard), StartPosition("arrival", 1)
        assert await offset_from(source, start) == 0
        with pytest.raises(Unavailable, match="is not there now"):
            await offset_from(source, start, sees_some=True)
        fence = await broker.reader.fence(topic)
        assert await offset_from(source, start, sees_some=True) == fence[0]
