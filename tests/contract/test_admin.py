"""Administration of topics."""

import pytest

from services.core.broker.contract import Broker, Start, TopicSpec
from services.core.broker.errors import OffsetOutOfRange, TopicExists, UnknownTopic
from services.core.broker.record import Record, TopicPartition
from tests.contract.harness import Harness
from tests.contract.traffic import append, ignore_revoke, marks_of, numbered, numbers_of, own, read, record, until_async

_LONG_MS = 100 * 365 * 86_400_000
"""The records are of 2023, and Kafka counts retention from their times."""


async def test_what_was_acknowledged_is_below_a_fence(harness: Harness) -> None:
    """If it fails, a migration ends its copy before an acknowledged event, which is lost."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker, 2)
        offset = (await broker.reader.fence(topic))[0]
        for number in range(3):
            placed = await append(broker, topic, [record(number)])
            end = await broker.reader.fence(topic)
            batch = await broker.reader.read(topic, 0, offset, max_records=10)
            assert batch is not None
            assert offset <= placed.first <= batch.offsets[-1] < end[0]
            assert list(batch.records) == [record(number)]
            assert await broker.reader.read(topic, 0, end[0], max_records=10) is None
            assert end.keys() == {0, 1}
            offset = end[0]


async def test_create_describe_delete(harness: Harness) -> None:
    """If it fails, the fleet cannot set up or take down a pipe's streams."""
    async with harness.open() as broker:
        name = harness.fresh_name("topic")
        await broker.admin.create_topic(TopicSpec(name, partitions=3, retention_ms=_LONG_MS))
        with pytest.raises(TopicExists):
            await broker.admin.create_topic(TopicSpec(name, partitions=1))
        assert (await broker.admin.topics())[name] == 3

        async def counted() -> bool:
            return await broker.appender.partition_count(name) == 3

        await until_async(counted, "the producer's side sees it")
        placed = await append(broker, name, numbered(range(4)), 1)
        ranges = await broker.reader.describe(name)
        assert set(ranges) == {0, 1, 2}
        assert ranges[0].start == ranges[0].end
        assert (ranges[1].start, ranges[1].end) == (placed.first, placed.last + 1)
        least = await broker.reader.next_at_least(name)
        assert set(least) == {0, 1, 2}
        assert placed.first < least[1] <= ranges[1].end
        await broker.admin.delete_topic(name)

        async def gone() -> bool:
            return name not in await broker.admin.topics()

        await until_async(gone, "the topic is gone")
        with pytest.raises(UnknownTopic):
            await broker.reader.describe(name)


async def create_again(broker: Broker, name: str) -> None:
    """The topic was deleted. Its name is free a moment later."""

    async def is_created() -> bool:
        if name in await broker.admin.topics():
            return False
        await broker.admin.create_topic(TopicSpec(name, partitions=1))
        return True

    await until_async(is_created, "the name is free again")


async def test_a_topic_that_was_created_again_is_not_deleted_for_the_former_one(harness: Harness) -> None:
    """If it fails, a command that was frozen before it deletes a former topic deletes the stream that has the name by now."""
    async with harness.open() as broker:
        name = harness.fresh_name("topic")
        await broker.admin.create_topic(TopicSpec(name, partitions=1))
        former = await broker.admin.incarnation(name)
        await broker.admin.delete_topic(name, former)
        await create_again(broker, name)
        await append(broker, name, [record(77)])
        for other in (former, "id of another kind of broker"):
            with pytest.raises(UnknownTopic):
                await broker.admin.delete_topic(name, other)
        assert (await broker.reader.describe(name))[0].end > 0
        await broker.admin.delete_topic(name, await broker.admin.incarnation(name))
        with pytest.raises(UnknownTopic):
            await broker.reader.describe(name)


@pytest.mark.parametrize("start", ["earliest", "latest"])
async def test_deleting_forgets_the_groups_offsets(harness: Harness, start: Start) -> None:
    """If it fails, a topic created again starts in the middle, or at its end for `latest`: its first events are skipped."""
    async with harness.open() as broker:
        name, group = harness.fresh_name("topic"), harness.fresh_name("g")
        await broker.admin.create_topic(TopicSpec(name, partitions=1))
        await append(broker, name, numbered(range(5)))
        async with broker.consumer(group, [name], start="earliest", on_revoke=ignore_revoke) as consumer:
            await consumer.commit(marks_of(await read(consumer, 5)))
        await broker.admin.delete_topic(name)
        await create_again(broker, name)
        await append(broker, name, [record(77)])
        async with broker.consumer(group, [name], start=start, on_revoke=ignore_revoke) as consumer:
            assert numbers_of(await read(consumer, 1)) == [77]


async def test_add_partitions(harness: Harness) -> None:
    """If it fails, a stream cannot grow, or members never notice the partitions that were added."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker, partitions=1)
        await append(broker, topic, [record(0)], 0)
        group = harness.fresh_name("g")
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            await own(consumer, 1)
            await broker.admin.add_partitions(topic, 3)

            async def grown() -> bool:
                return await broker.appender.partition_count(topic) == 3

            await until_async(grown, "the producer's side sees it within seconds")
            await append(broker, topic, [record(2)], 2)
            numbers: set[int] = set()
            while numbers != {0, 2}:
                batches = await read(consumer, 1)
                await consumer.commit(marks_of(batches))
                numbers |= set(numbers_of(batches))
            await own(consumer, 3)
            assert batches[-1].source in consumer.assignment()
        for partitions in (3, 1):
            with pytest.raises(ValueError, match="3"):
                await broker.admin.add_partitions(topic, partitions)


async def test_new_partitions_are_read_from_their_beginning(harness: Harness) -> None:
    """If it fails, what was sent to a new partition before a "latest" group noticed it is lost."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker, partitions=1)
        group = harness.fresh_name("g")
        async with broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
            await own(consumer, 1)
            await append(broker, topic, [record(0)], 0)
            await consumer.commit(marks_of(await read(consumer, 1)))
            await broker.admin.add_partitions(topic, 2)
            await append(broker, topic, [record(1)], 1)
            assert numbers_of(await read(consumer, 1)) == [1]


async def test_internal_topics_are_not_listed(harness: Harness) -> None:
    """If it fails, an operator sees, and may delete, what the backend keeps its offsets in."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        await append(broker, topic, [record(0)])
        async with broker.consumer(
            harness.fresh_name("g"), [topic], start="earliest", on_revoke=ignore_revoke
        ) as consumer:
            await consumer.commit(marks_of(await read(consumer, 1)))
        names = await broker.admin.topics()
        assert topic in names
        assert await broker.admin.present([topic, harness.fresh_name("no")]) == {topic}
        assert not [name for name in names if name.startswith("_")]


async def test_nothing_committed_is_absent(harness: Harness) -> None:
    """If it fails, "never committed" looks like "processed the first record"."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker, partitions=2)
        assert await broker.admin.committed(harness.fresh_name("g"), topic) == {}


async def read_on(broker: Broker, topic: str, offset: int, max_records: int) -> tuple[list[int], list[Record]]:
    """Page through partition 0 to its end."""
    offsets: list[int] = []
    records: list[Record] = []
    while (batch := await broker.reader.read(topic, 0, offset, max_records=max_records)) is not None:
        assert 1 <= len(batch.records) <= max_records
        assert batch.source == TopicPartition(topic, 0)
        offsets += batch.offsets
        records += batch.records
        offset = batch.offsets[-1] + 1
    return offsets, records


async def test_read_without_a_group(harness: Harness) -> None:
    """If it fails, an operator sees dead letters out of order, altered, or not all of them."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        assert await broker.reader.read(topic, 0, 0, max_records=5) is None
        odd = Record(None, b"\x00\xff", 1, (("h", b"\x00\xfe"), ("h", b""), ("\u00fc", b"2")))
        placed = await append(broker, topic, numbered(range(10)))
        await append(broker, topic, [odd, *numbered(range(11, 30))])
        expected = [*numbered(range(10)), odd, *numbered(range(11, 30))]
        for page in (1, 7, 100):
            offsets, records = await read_on(broker, topic, placed.first, page)
            assert records == expected
            assert offsets == sorted(set(offsets))
        if broker.features.contiguous_offsets:
            assert await read_on(broker, topic, placed.first + 15, 4) == (
                list(range(placed.first + 15, placed.first + 30)),
                expected[15:],
            )


async def test_read_outside_of_what_is_stored(harness: Harness) -> None:
    """If it fails, records that retention took look like none that were ever there."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        placed = await append(broker, topic, numbered(range(5)))
        kept = await append(broker, topic, numbered(range(5, 10)))
        end = (await broker.reader.describe(topic))[0].end
        assert await broker.reader.read(topic, 0, end, max_records=5) is None
        with pytest.raises(OffsetOutOfRange):
            await broker.reader.read(topic, 0, end + 1, max_records=5)
        for partition in (1, -1):
            with pytest.raises(UnknownTopic):
                await broker.reader.read(topic, partition, 0, max_records=5)
        with pytest.raises(UnknownTopic):
            await broker.reader.read(harness.fresh_name("nothing"), 0, 0, max_records=5)
        await harness.expire(topic, 0, placed.last + 1)
        with pytest.raises(OffsetOutOfRange) as caught:
            await broker.reader.read(topic, 0, placed.first, max_records=5)
        assert caught.value.start == kept.first
