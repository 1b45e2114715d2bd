"""What a group's offsets are worth on real brokers: expired, of a topic made anew, beyond where the log was cut off."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.protocol.commit import OffsetCommitRequest
from structlog.testing import capture_logs

from services.core.broker.contract import Consumer, Lag, Start, TopicSpec
from services.core.broker.errors import PositionLost
from services.core.broker.kafka import KafkaBroker, Timing
from services.core.broker.kafka.aiokafka_internals import POLL_BYTES, FetchBudget
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.offsets import CommitMetadata
from services.core.broker.record import TopicPartition
from services.core.jvm.kafka import KafkaCluster
from tests.contract.traffic import (
    DEADLINE,
    append,
    ignore_revoke,
    marks_of,
    numbered,
    numbers_of,
    poll,
    read,
    record,
    until,
    until_async,
)
from tests.support.kafka import delete_group, describe_partitions, make_topic, unique_name

pytestmark = pytest.mark.kafka

_TIMING = Timing(session=2.0, heartbeat=0.3, drain=10.0, request=4.0, metadata=1.0)


@asynccontextmanager
async def _asking(cluster: KafkaCluster) -> AsyncIterator[Cluster]:
    asking = Cluster(cluster.bootstrap, "test", _TIMING)
    try:
        yield asking
    finally:
        await asking.close()


async def _begin(consumer: Consumer) -> None:
    """Placed, and that is committed. Polls, because at first the group may have no coordinator."""
    async with asyncio.timeout(DEADLINE):
        while not consumer.assignment():
            assert await poll(consumer, max_wait=0.1) == []


@pytest.mark.parametrize("start", ["latest", "earliest"])
async def test_offsets_that_kafka_expired_are_a_stop(kafka_cluster: KafkaCluster, start: Start) -> None:
    """If it fails, a destination that was away for a week skips what waited for it, or gets everything again."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic, group = unique_name("topic"), unique_name("g")
        await broker.admin.create_topic(TopicSpec(topic, partitions=1))
        async with broker.consumer(group, [topic], start=start, on_revoke=ignore_revoke) as consumer:
            await _begin(consumer)
            await append(broker, topic, numbered(range(5)))
            await consumer.commit(marks_of(await read(consumer, 5)))
        await append(broker, topic, numbered(range(5, 8)))
    await delete_group(kafka_cluster.bootstrap, group)
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        async with broker.consumer(group, [topic], start=start, on_revoke=ignore_revoke) as consumer:
            for _ in range(2):
                with pytest.raises(PositionLost, match=r"offsets\.retention\.minutes.*Try: ") as lost:
                    await read(consumer, 1)
                assert (lost.value.topic, lost.value.partition, lost.value.missing) == (topic, 0, 0)
            assert await broker.admin.committed(group, topic) == {}
        await broker.admin.set_committed(group, topic, {0: 4})
        async with broker.consumer(group, [topic], start=start, on_revoke=ignore_revoke) as consumer:
            assert numbers_of(await read(consumer, 3)) == [5, 6, 7]


async def test_a_group_that_is_renamed_after_its_offsets_expired_stops_too(kafka_cluster: KafkaCluster) -> None:
    """If it fails, a destination that is renamed after a week away skips what waited for it: it begins at the latest event."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic, group, renamed = unique_name("topic"), unique_name("g"), unique_name("g")
        await broker.admin.create_topic(TopicSpec(topic, partitions=1))
        async with broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
            await _begin(consumer)
            await append(broker, topic, numbered(range(5)))
            await consumer.commit(marks_of(await read(consumer, 5)))
        await append(broker, topic, numbered(range(5, 8)))
    await delete_group(kafka_cluster.bootstrap, group)
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        assert await broker.admin.copy_positions(group, renamed, topic)
        assert not await broker.admin.copy_positions(group, renamed, topic)
        async with broker.consumer(renamed, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
            with pytest.raises(PositionLost):
                await read(consumer, 1)


async def test_a_partition_added_to_a_group_that_was_moved_is_read_from_its_beginning(
    kafka_cluster: KafkaCluster,
) -> None:
    """If it fails, an operator who moves a group makes it skip the first events of partitions that are added later."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic, group = unique_name("topic"), unique_name("g")
        await broker.admin.create_topic(TopicSpec(topic, partitions=1))
        await append(broker, topic, numbered(range(5)))
        async with broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
            await _begin(consumer)
        await broker.admin.set_committed(group, topic, {0: 4})
        await broker.admin.add_partitions(topic, 2)
        await append(broker, topic, numbered(range(10, 15)), 1)
        async with broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
            assert numbers_of(await read(consumer, 5)) == [10, 11, 12, 13, 14]


async def test_a_group_that_was_placed_before_its_first_member_has_begun(kafka_cluster: KafkaCluster) -> None:
    """If it fails, a destination whose stream was moved to Kafka skips the first events of partitions that are added before it is
    back, and all that waits for it when it is away for a week."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic, group = unique_name("topic"), unique_name("g")
        await broker.admin.create_topic(TopicSpec(topic, partitions=1))
        await append(broker, topic, numbered(range(5)))
        await broker.admin.set_committed(group, topic, {0: 4})
        await broker.admin.add_partitions(topic, 2)
        await append(broker, topic, numbered(range(5, 8)), partition=1)
        async with broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
            assert numbers_of(await read(consumer, 3)) == [5, 6, 7]
        await broker.admin.set_committed(other := unique_name("g"), topic, {0: 2, 1: 0})
        await delete_group(kafka_cluster.bootstrap, other)
        async with broker.consumer(other, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
            with pytest.raises(PositionLost):
                await read(consumer, 1)


async def test_a_commit_for_an_earlier_topic_of_the_name_says_nothing(kafka_cluster: KafkaCluster) -> None:
    """If it fails, a commit that arrives behind the deletion of its topic skips the new topic's first events."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic, group = unique_name("topic"), unique_name("g")
        await broker.admin.create_topic(TopicSpec(topic, partitions=1))
        await append(broker, topic, numbered(range(8)))
        note = CommitMetadata(1, "00000000-1111-2222-3333-444444444444", 0)
        async with _asking(kafka_cluster) as asking:
            late = OffsetCommitRequest(group, -1, "", -1, [(topic, [(0, 5, str(note))])])
            answer = await asking.ask_coordinator(group, late)
            assert answer.topics == [(topic, [(0, 0)])]
        assert await broker.admin.committed(group, topic) == {}
        assert (await broker.admin.group_lag(group, topic))[0].records == 8
        with capture_logs() as logs:
            async with broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
                assert numbers_of(await read(consumer, 8)) == list(range(8))
        assert {entry["topic"] for entry in logs if entry["event"] == "stream_made_anew"} == {topic}


async def test_a_stream_made_anew_under_a_member_is_read_from_its_oldest_record(kafka_cluster: KafkaCluster) -> None:
    """If it fails, a stream that is deleted and made again in service loses its first events: they lie below the position."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic, group = unique_name("topic"), unique_name("g")
        await broker.admin.create_topic(TopicSpec(topic, partitions=1))
        await append(broker, topic, numbered(range(5)))
        revoked: list[frozenset[TopicPartition]] = []

        async def on_revoke(partitions: frozenset[TopicPartition]) -> None:
            revoked.append(partitions)

        async with broker.consumer(group, [topic], start="earliest", on_revoke=on_revoke) as consumer:
            await consumer.commit(marks_of(await read(consumer, 5)))
            await broker.admin.delete_topic(topic)
            await broker.admin.create_topic(TopicSpec(topic, partitions=1))
            for start in range(100, 120, 5):
                await append(broker, topic, numbered(range(start, start + 5)))
            numbers: set[int] = set()
            async with asyncio.timeout(DEADLINE):
                while not numbers >= set(range(100, 120)):
                    batches = await poll(consumer)
                    numbers |= set(numbers_of(batches))
            assert revoked, "the old topic's marks must be given up"
            await consumer.commit({TopicPartition(topic, 0): 19})
        assert await broker.admin.committed(group, topic) == {0: 19}


def _cut_off(folder: Path, batches: int) -> None:
    """Leave so many batches; the rest of the log never was."""
    path = folder / "00000000000000000000.log"
    content, at = path.read_bytes(), 0
    for _ in range(batches):
        at += 12 + int.from_bytes(content[at + 8 : at + 12])
    with path.open("r+b") as file:
        file.truncate(at)
    for index in folder.glob("*index"):
        index.unlink()


async def test_a_log_that_was_cut_off_is_read_on_at_the_cut(kafka_cluster: KafkaCluster) -> None:
    """If it fails, a broker that comes back with an older disk makes groups skip what it acknowledges next."""
    topic = await make_topic(
        kafka_cluster.bootstrap, "cut", replicas=1, configs={"min.insync.replicas": "1", "retention.ms": "-1"}
    )
    group = unique_name("g")
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        for start in range(0, 100, 10):
            await append(broker, topic, numbered(range(start, start + 10)))
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            await consumer.commit(marks_of(await read(consumer, 100)))
        (partition,) = await describe_partitions(kafka_cluster.bootstrap, topic)
        node = partition["leader"]
        await asyncio.to_thread(kafka_cluster.brokers[node].stop, grace_s=DEADLINE)
        await asyncio.to_thread(_cut_off, kafka_cluster.brokers[node].data / f"{topic}-0", 9)
        await asyncio.to_thread(kafka_cluster.restart, node)
        placed = await append(broker, topic, numbered(range(200, 220)))
        assert placed.first == 90, "the log was not cut off"
        with capture_logs() as logs:
            async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
                assert numbers_of(await read(consumer, 20)) == list(range(200, 220))
        assert {
            (entry["committed"], entry["cut_off_at"]) for entry in logs if entry["event"] == "kafka_log_cut_off"
        } == {(100, 90)}


async def test_rolled_back_transactions_are_not_delivered_and_are_no_lag(kafka_cluster: KafkaCluster) -> None:
    """If it fails, events that their producer took back are delivered, or a group is behind for ever with nothing to read."""
    topic = await make_topic(kafka_cluster.bootstrap, "transactions")
    group = unique_name("g")
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        async with AIOKafkaProducer(
            bootstrap_servers=kafka_cluster.bootstrap, transactional_id=unique_name("id")
        ) as foreign:
            for number, commits in ((0, True), (1, False), (2, True), (3, False)):
                await foreign.begin_transaction()
                await foreign.send_and_wait(topic, value=b"%d" % number)
                await (foreign.commit_transaction() if commits else foreign.abort_transaction())

        async def all_are_settled() -> bool:
            return (await broker.reader.describe(topic))[0].end == 8

        await until_async(all_are_settled, "the marks of all transactions are written")
        found = await broker.reader.read(topic, 0, 0, max_records=10)
        assert found is not None
        assert numbers_of([found]) == [0, 2]
        assert await broker.reader.read(topic, 0, found.offsets[-1] + 1, max_records=10) is None
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            batches = await read(consumer, 2)
            assert numbers_of(batches) == [0, 2]
            await consumer.commit(marks_of(batches))
            assert await consumer.lag() == {TopicPartition(topic, 0): Lag(0, 0)}
        assert await broker.admin.group_lag(group, topic) == {0: Lag(0, 0)}


async def test_a_member_that_nobody_polls_keeps_little_and_loses_nothing(
    kafka_cluster: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, members whose destinations are slow buffer a megabyte a partition, beside every bound."""
    monkeypatch.setattr(FetchBudget, "is_spent", True)
    partitions, size = 8, 200_000
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic = unique_name("topic")
        await broker.admin.create_topic(TopicSpec(topic, partitions=partitions))
        for partition in range(partitions):
            for start in range(0, 8, 4):
                numbers = range(partition * 10 + start, partition * 10 + start + 4)
                await append(broker, topic, [record(number, size=size) for number in numbers], partition)
        async with broker.consumer(unique_name("g"), [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            fetcher = consumer._client._fetcher  # type: ignore[attr-defined]
            seen: list[int] = []
            async with asyncio.timeout(DEADLINE):
                while not consumer.assignment():
                    seen += numbers_of(await poll(consumer, max_wait=0.1))
                while len(seen) < partitions * 8:
                    await until(lambda: fetcher.waiting_bytes() > 0, "something is fetched")
                    await asyncio.sleep(0.3)  # longer than aiokafka waits before it reads ahead behind what nobody took
                    assert fetcher.waiting_bytes() < 2 * 4 * size + POLL_BYTES
                    batches = await poll(consumer)
                    assert sum(len(one.value or b"") for batch in batches for one in batch.records) <= 2 * 4 * size
                    seen += numbers_of(batches)
        assert sorted(seen) == sorted(p * 10 + n for p in range(partitions) for n in range(8))
