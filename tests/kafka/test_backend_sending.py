"""The Kafka appender against what only Kafka does: elections, silent brokers, topics with limits of their own."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import BrokerError, OutcomeUnknown, RecordTooLarge, Unavailable
from services.core.broker.kafka import KafkaBroker, Timing
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.broker.retry import AppendPolicy
from services.core.jvm.kafka import KafkaCluster
from tests.contract.traffic import (
    BASE_TIME,
    DEADLINE,
    append,
    marks_of,
    numbered,
    numbers_of,
    poll,
    read,
    read_all,
    record,
    until_async,
)
from tests.support.kafka import describe_partitions, make_topic, unique_name

pytestmark = pytest.mark.kafka

_TIMING = Timing(session=2.0, heartbeat=0.3, drain=10.0, request=4.0, metadata=1.0)
_PATIENT = AppendPolicy(deadline=DEADLINE, append_timeout=3)


async def _topic(broker: KafkaBroker, partitions: int = 1) -> str:
    name = unique_name("topic")
    await broker.admin.create_topic(TopicSpec(name, partitions=partitions))
    return name


async def _leader(cluster: KafkaCluster, topic: str, partition: int = 0) -> int:
    leader: int = (await describe_partitions(cluster.bootstrap, topic))[partition]["leader"]
    return leader


@contextmanager
def _frozen(cluster: KafkaCluster) -> Iterator[None]:
    """No broker answers. All of them: on a busy machine a partition may get another leader just before the leader is frozen."""
    pids = [broker.pid for broker in cluster.brokers.values() if broker.pid is not None]
    assert len(pids) == len(cluster.brokers)
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


async def test_a_batch_of_unknown_fate_is_stored_once(kafka_cluster: KafkaCluster) -> None:
    """If it fails, every time-out doubles events, or the repeat is refused for ever (a broken sequence)."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic = await _topic(broker)
        await append(broker, topic, numbered(range(3)))
        records = numbered(range(3, 6))
        with _frozen(kafka_cluster), pytest.raises(OutcomeUnknown):
            await broker.appender.append(topic, 0, records, timeout=1)
        await append(broker, topic, records)
        await append(broker, topic, numbered(range(6, 8)))
        assert numbers_of(await read_all(broker, topic, unique_name("g"))) == list(range(8))


async def test_other_records_after_an_unknown_batch_are_not_taken_for_it(kafka_cluster: KafkaCluster) -> None:
    """If it fails, the broker drops new events as duplicates of a batch whose answer was lost."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic = await _topic(broker)
        await append(broker, topic, numbered(range(3)))
        with _frozen(kafka_cluster), pytest.raises(OutcomeUnknown):
            await broker.appender.append(topic, 0, numbered(range(3, 6)), timeout=1)
        await append(broker, topic, numbered(range(10, 13)))
        numbers = numbers_of(await read_all(broker, topic, unique_name("g")))
        assert [n for n in numbers if n < 3] == [0, 1, 2]
        assert [n for n in numbers if n >= 10] == [10, 11, 12]


async def test_a_killed_leader_doubles_nothing(kafka_cluster: KafkaCluster) -> None:
    """If it fails, an election under load doubles the batches that were under way."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic = await _topic(broker)
        async with Producer(broker.appender, policy=_PATIENT) as producer, asyncio.TaskGroup() as sends:
            for start in range(0, 1000, 10):
                if start == 300:
                    dead = await _leader(kafka_cluster, topic)
                    sends.create_task(asyncio.to_thread(kafka_cluster.kill, dead))
                sends.create_task(producer.send_to(topic, {0: numbered(range(start, start + 10))}))
                await asyncio.sleep(0.02)
        assert numbers_of(await read_all(broker, topic, unique_name("g"))) == list(range(1000))


async def test_too_few_replicas_no_ack_and_recovery(kafka_cluster: KafkaCluster) -> None:
    """If it fails, with two of three brokers dead events are acknowledged that one disk holds, or nothing recovers."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic = await _topic(broker)
        await append(broker, topic, [record(0)])
        leader = await _leader(kafka_cluster, topic)
        dead = [node for node in kafka_cluster.brokers if node != leader]
        for node in dead:
            await asyncio.to_thread(kafka_cluster.kill, node)
        started = time.monotonic()
        with pytest.raises(BrokerError) as refused:
            await broker.appender.append(topic, 0, [record(1)], timeout=3)
        assert refused.value.retriable
        assert time.monotonic() - started < 3 + DEADLINE
        await asyncio.to_thread(kafka_cluster.restart, *dead)
        await append(broker, topic, [record(2)])

        async def healthy() -> bool:
            await broker.probe(topic, timeout=5)
            return True

        await until_async(healthy, "the probe is content again")
        numbers = numbers_of(await read_all(broker, topic, unique_name("g")))
        assert numbers[0] == 0
        assert numbers[-1] == 2


async def test_everything_goes_on_after_a_total_outage(kafka_cluster: KafkaCluster) -> None:
    """If it fails, services have to be restarted after Kafka was away."""

    async def nothing(_: object) -> None:
        return

    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic = await _topic(broker)
        await append(broker, topic, [record(0)])
        group = unique_name("g")
        async with broker.consumer(group, [topic], start="earliest", on_revoke=nothing) as consumer:
            await consumer.commit(marks_of(await read(consumer, 1)))
            await asyncio.to_thread(kafka_cluster.stop, grace_s=0)
            with pytest.raises(BrokerError):
                await broker.appender.append(topic, 0, [record(1)], timeout=1)
            await asyncio.to_thread(kafka_cluster.start)
            await append(broker, topic, [record(2)])
            numbers: list[int] = []
            async with asyncio.timeout(DEADLINE):
                while 2 not in numbers:
                    batches = await poll(consumer)
                    numbers += numbers_of(batches)

            async def committed() -> bool:
                await consumer.commit(marks_of(batches))
                return True

            await until_async(committed, "commits are taken again")


async def test_a_partition_without_leader_holds_up_no_other(kafka_cluster: KafkaCluster) -> None:
    """If it fails, one dead node stops the traffic of all partitions."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic = await make_topic(kafka_cluster.bootstrap, "spread", partitions=6, configs={"min.insync.replicas": "2"})
        for partition in range(6):
            await append(broker, topic, [record(partition)], partition)
        leaders = {p["partition"]: p["leader"] for p in await describe_partitions(kafka_cluster.bootstrap, topic)}
        dead = leaders[0]
        living = next(partition for partition, leader in leaders.items() if leader != dead)
        await asyncio.to_thread(kafka_cluster.kill, dead)
        refused: BrokerError | None = None
        try:
            await broker.appender.append(topic, 0, [record(100)], timeout=1)
        except BrokerError as error:
            refused = error
        assert refused is None or refused.retriable  # on a busy machine another leader may be there already
        await append(broker, topic, [record(101)], living)


async def test_a_topics_own_limit_counts(kafka_cluster: KafkaCluster) -> None:
    """If it fails, a topic with a small max.message.bytes takes no batch at all, or a bad record spoils its batch."""
    topic = await make_topic(
        kafka_cluster.bootstrap, "small", configs={"max.message.bytes": "2000", "retention.ms": "-1"}
    )
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        await append(broker, topic, [record(300)])
        big = Record(b"k", b"x" * 2000, BASE_TIME)
        records = [*numbered(range(200)), big, *numbered(range(200, 300))]
        appended = await broker.appender.append(topic, 0, records, timeout=20)
        assert [(index, type(error)) for index, error in appended.failed] == [(200, RecordTooLarge)]
        assert (appended.first, appended.last) == (1, 300)
        assert numbers_of(await read_all(broker, topic, unique_name("g"))) == [300, *range(300)]


async def test_a_time_that_a_foreign_topic_refuses_fails_alone(kafka_cluster: KafkaCluster) -> None:
    """If it fails, one event from the future takes the whole batch with it."""
    configs = {"message.timestamp.after.max.ms": "60000", "retention.ms": "-1"}
    topic = await make_topic(kafka_cluster.bootstrap, "strict", configs=configs)
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        await append(broker, topic, [record(15)])
        ahead = Record(b"k", b"77", int(time.time() * 1000) + 3_600_000)
        records = [*numbered(range(10)), ahead, *numbered(range(10, 15)), ahead]
        appended = await broker.appender.append(topic, 0, records, timeout=20)
        assert [index for index, _ in appended.failed] == [10, 16]
        assert not any(error.retriable for _, error in appended.failed if isinstance(error, BrokerError))
        assert numbers_of(await read_all(broker, topic, unique_name("g"))) == [15, *range(15)]


async def test_closing_is_bounded_when_every_broker_is_gone(kafka_cluster: KafkaCluster) -> None:
    """If it fails, a service cannot stop while Kafka is away, and is killed with work undone."""

    async def nothing(_: object) -> None:
        return

    broker_closed = consumer_left = False
    async with asyncio.timeout(2 * DEADLINE):
        async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
            topic = await _topic(broker)
            await append(broker, topic, [record(0)])
            async with broker.consumer(unique_name("g"), [topic], start="earliest", on_revoke=nothing) as consumer:
                while not await consumer.poll(max_records=1, max_wait=1):
                    pass
                await asyncio.to_thread(kafka_cluster.stop, grace_s=0)
                with pytest.raises(BrokerError):
                    await broker.appender.append(topic, 0, [record(1)], timeout=2)
                with pytest.raises(Unavailable):
                    await broker.probe(topic, timeout=2)
            consumer_left = True
        broker_closed = True
    assert consumer_left
    assert broker_closed


async def test_opening_says_when_nobody_is_there() -> None:
    """If it fails, a wrong address hangs, or ends in a traceback of the client library."""
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
        async with KafkaBroker.open("127.0.0.1:9", timing=_TIMING):
            raise AssertionError("nothing listens there")
