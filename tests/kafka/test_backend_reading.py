"""The Kafka consumer against what others write."""

import pytest
from aiokafka import AIOKafkaProducer

from services.core.broker.kafka import KafkaBroker, Timing
from services.core.broker.record import Record
from services.core.jvm.kafka import KafkaCluster
from tests.contract.traffic import read_all, records_of
from tests.support.kafka import make_topic, unique_name

pytestmark = pytest.mark.kafka

_TIMING = Timing(session=2.0, heartbeat=0.3, drain=10.0, request=4.0, metadata=1.0)


async def test_what_others_wrote(kafka_cluster: KafkaCluster) -> None:
    """If it fails, a record of another producer (tombstone, no headers, a header without a value) stops its partition."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic = await make_topic(kafka_cluster.bootstrap, "foreign", configs={"retention.ms": "-1"})
        async with AIOKafkaProducer(bootstrap_servers=kafka_cluster.bootstrap, acks="all") as foreign:
            await foreign.send_and_wait(topic, key=b"k", value=None, timestamp_ms=5)
            await foreign.send_and_wait(topic, value=b"plain", timestamp_ms=6)
            await foreign.send_and_wait(topic, value=b"h", timestamp_ms=7, headers=[("empty", None), ("full", b"1")])
        assert records_of(await read_all(broker, topic, unique_name("g"))) == [
            Record(b"k", None, 5),
            Record(None, b"plain", 6),
            Record(None, b"h", 7, (("empty", b""), ("full", b"1"))),
        ]
