"""The Kafka consumer against what others write, and against damage."""

import asyncio
from pathlib import Path

import pytest
from aiokafka import AIOKafkaProducer

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import DataDamaged
from services.core.broker.kafka import KafkaBroker, Timing
from services.core.broker.record import Record, TopicPartition
from services.core.jvm.kafka_server import KafkaCluster
from tests.contract.traffic import (
    DEADLINE,
    append,
    ignore_revoke,
    numbered,
    numbers_of,
    own,
    poll,
    read,
    read_all,
    record,
    records_of,
)
from tests.support.kafka import describe_partitions, unique_name

pytestmark = pytest.mark.kafka

_TIMING = Timing(session=2.0, heartbeat=0.3, drain=10.0, request=4.0, metadata=1.0)


async def test_what_others_wrote(kafka_cluster: KafkaCluster) -> None:
    """If it fails, a record of another producer (tombstone, no headers, a header without a value) stops its partition."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic = unique_name("topic")
        await broker.admin.create_topic(TopicSpec(topic, partitions=1))
        async with AIOKafkaProducer(bootstrap_servers=kafka_cluster.bootstrap, acks="all") as foreign:
            await foreign.send_and_wait(topic, key=b"k", value=None, timestamp_ms=5)
            await foreign.send_and_wait(topic, value=b"plain", timestamp_ms=6)
            await foreign.send_and_wait(topic, value=b"h", timestamp_ms=7, headers=[("empty", None), ("full", b"1")])
        assert records_of(await read_all(broker, topic, unique_name("g"))) == [
            Record(b"k", None, 5),
            Record(None, b"plain", 6),
            Record(None, b"h", 7, (("empty", b""), ("full", b"1"))),
        ]


async def test_a_flipped_bit_is_named_and_the_rest_goes_on(kafka_cluster: KafkaCluster) -> None:
    """If it fails, damage is skipped in silence, or takes with it what other partitions had delivered."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic = unique_name("topic")
        await broker.admin.create_topic(TopicSpec(topic, partitions=2))
        await append(broker, topic, numbered(range(10)), 0)
        await append(broker, topic, [record(10), Record(b"k", b"unlucky", 0), record(12)], 0)
        await append(broker, topic, numbered(range(13, 20)), 0)
        await append(broker, topic, numbered(range(100, 120)), 1)
        leader = (await describe_partitions(kafka_cluster.bootstrap, topic))[0]["leader"]
        folder = kafka_cluster.brokers[leader].data / f"{topic}-0"
        await asyncio.to_thread(_flip, folder / "00000000000000000000.log", b"unlucky")
        async with broker.consumer(unique_name("g"), [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            await own(consumer, 2)
            seen: list[int] = []
            errors: list[DataDamaged] = []
            async with asyncio.timeout(DEADLINE):
                while len(seen) < 30:
                    try:
                        seen += numbers_of(await poll(consumer))
                    except DataDamaged as error:
                        errors.append(error)
                        consumer.pause([TopicPartition(error.topic, error.ranges[0][0])])
            assert sorted(seen) == [*range(10), *range(100, 120)]
            consumer.resume([TopicPartition(topic, 0)])
            for _ in range(2):
                with pytest.raises(DataDamaged) as damaged:
                    await read(consumer, 1)
                assert damaged.value.ranges == ((0, 10, 12),)
            assert [error.ranges for error in errors] in ([], [((0, 10, 12),)])


def _flip(path: Path, value: bytes) -> None:
    """Change the last byte of the record with this value, as a bad disk would."""
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(content.index(value) + len(value) - 1)
        file.write(b"#")
