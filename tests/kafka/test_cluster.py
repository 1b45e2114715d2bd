"""The real Kafka that tests, demo and benches stand on keeps its word when brokers die."""

import asyncio

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.errors import KafkaError

from services.core.jvm.kafka import KafkaCluster
from tests.support.kafka import describe_partitions, make_topic


async def send_until_acked(producer: AIOKafkaProducer, topic: str, value: bytes) -> None:
    """A leader election takes seconds; meanwhile sends fail."""
    async with asyncio.timeout(600):
        while True:
            try:
                await producer.send_and_wait(topic, value, partition=0)
            except KafkaError:
                await asyncio.sleep(0.1)
            else:
                return


async def read_values(bootstrap: str, topic: str) -> list[bytes]:
    consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False, auto_offset_reset="earliest")
    await consumer.start()
    try:
        partition = TopicPartition(topic, 0)
        consumer.assign([partition])
        end = (await consumer.end_offsets([partition]))[partition]
        values: list[bytes] = []
        async with asyncio.timeout(300):
            while await consumer.position(partition) < end:
                batches = await consumer.getmany(timeout_ms=500)
                values += [record.value for records in batches.values() for record in records]
        return values
    finally:
        await consumer.stop()


async def test_acknowledged_record_survives_its_leader(kafka_cluster: KafkaCluster) -> None:
    """If this fails, acks=all does not mean two of three disks here, and no test on this cluster proves durability."""
    topic = await make_topic(kafka_cluster.bootstrap, "leader")
    (before,) = await describe_partitions(kafka_cluster.bootstrap, topic)
    assert len(before["replicas"]) == 3
    producer = AIOKafkaProducer(bootstrap_servers=kafka_cluster.bootstrap, acks="all", request_timeout_ms=10_000)
    await producer.start()
    try:
        await producer.send_and_wait(topic, b"before", partition=0)
        await asyncio.to_thread(kafka_cluster.kill, before["leader"])
        assert not kafka_cluster.brokers[before["leader"]].is_running
        await send_until_acked(producer, topic, b"after")
    finally:
        await producer.stop()
    (without,) = await describe_partitions(kafka_cluster.bootstrap, topic)
    assert without["leader"] not in (-1, before["leader"])
    values = await read_values(kafka_cluster.bootstrap, topic)
    assert values[0] == b"before"
    assert values[-1] == b"after"

    await asyncio.to_thread(kafka_cluster.restart, before["leader"])
    async with asyncio.timeout(600):
        while len((await describe_partitions(kafka_cluster.bootstrap, topic))[0]["isr"]) < 3:
            await asyncio.sleep(0.2)


async def test_no_ack_with_one_broker_of_three(kafka_cluster: KafkaCluster) -> None:
    """If this fails, min.insync.replicas is not in force and a record on a single disk counts as safe."""
    topic = await make_topic(kafka_cluster.bootstrap, "min-isr")
    (partition,) = await describe_partitions(kafka_cluster.bootstrap, topic)
    producer = AIOKafkaProducer(bootstrap_servers=kafka_cluster.bootstrap, acks="all", request_timeout_ms=3_000)
    await producer.start()
    try:
        await producer.send_and_wait(topic, b"first", partition=0)
        # In good order, so that the cluster takes both out of the in-sync replicas while it still has a majority.
        for node_id in set(partition["replicas"]) - {partition["leader"]}:
            await asyncio.to_thread(kafka_cluster.brokers[node_id].stop, grace_s=600.0)
        (alone,) = await describe_partitions(kafka_cluster.brokers[partition["leader"]].address, topic)
        assert alone["isr"] == [partition["leader"]]
        with pytest.raises(KafkaError):
            await producer.send_and_wait(topic, b"unsafe", partition=0)
        await asyncio.to_thread(kafka_cluster.restart)
        await send_until_acked(producer, topic, b"last")
    finally:
        await producer.stop()
    assert (await read_values(kafka_cluster.bootstrap, topic))[-1] == b"last"


async def test_unknown_topic_is_not_created_by_accident(kafka_cluster: KafkaCluster) -> None:
    """If this fails, a mistyped stream name makes a topic with nobody reading it."""
    producer = AIOKafkaProducer(bootstrap_servers=kafka_cluster.bootstrap, acks="all", request_timeout_ms=2_000)
    await producer.start()
    try:
        with pytest.raises(KafkaError):
            await producer.send_and_wait("never-made", b"lost")
    finally:
        await producer.stop()


def test_every_broker_is_up_again_for_the_next_test(kafka_cluster: KafkaCluster) -> None:
    """If this fails, a test that kills a broker breaks the tests after it."""
    assert [broker.is_running for broker in kafka_cluster.brokers.values()] == [True, True, True]
