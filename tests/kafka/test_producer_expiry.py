"""How long Kafka knows a batch again that it has stored: by the time of its records, which is that of storing in our topics."""

import asyncio
import time
from pathlib import Path

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import Unavailable
from services.core.broker.kafka import KafkaBroker, Timing
from services.core.broker.kafka.appender import KafkaAppender
from services.core.broker.record import Record
from services.core.jvm.kafka import KafkaCluster
from tests.contract.traffic import DEADLINE
from tests.support.kafka import make_topic, unique_name

pytestmark = pytest.mark.kafka

_DAY_MS = 86_400_000


class Repeated:
    """One batch of a partition of its own. It goes out again as if its answer had been lost."""

    def __init__(self, broker: KafkaBroker, topic: str, timestamp: int) -> None:
        self._appender = KafkaAppender(broker._sending, broker._limits)
        self._topic, self._records = topic, [Record(b"k", b"v", timestamp)]

    async def append(self) -> int:
        """The offset that Kafka answers."""
        for target in self._appender._targets.values():
            if target.sequence is not None:  # it has been stored before
                target.sequence.next, target.sequence.doubtful = 0, self._records
        return (await self._appender.append(self._topic, 0, self._records, timeout=DEADLINE)).first

    async def append_first(self) -> int:
        """As `append`; waits for a broker that has just started and gives out no producer ids yet."""
        async with asyncio.timeout(DEADLINE):
            while True:
                try:
                    return await self.append()
                except Unavailable:
                    await asyncio.sleep(0.1)


async def test_a_repeated_batch_is_known_unless_its_records_are_weeks_old(tmp_path: Path) -> None:
    """If it fails, events that were old when they arrived are stored twice when Kafka's answer to them is lost. In a topic that
    keeps the writers' times they must not be weeks old."""
    often = {"producer.id.expiration.check.interval.ms": "500"}
    cluster = await asyncio.to_thread(KafkaCluster, tmp_path / "kafka", brokers=1, settings=often)
    await asyncio.to_thread(cluster.start)
    try:
        async with KafkaBroker.open(cluster.bootstrap, timing=Timing(request=4.0, metadata=1.0)) as broker:
            now = time.time_ns() // 1_000_000
            batches = []
            for age in (0, 3 * _DAY_MS, 30 * _DAY_MS):
                topic = await make_topic(cluster.bootstrap, "topic", configs={"retention.ms": "-1"})
                batches.append(Repeated(broker, topic, now - age))
            topic = unique_name("topic")
            await broker.admin.create_topic(TopicSpec(topic, partitions=1))
            batches.append(Repeated(broker, topic, now - 30 * _DAY_MS))
            new, days_old, weeks_old, ours = batches
            assert [await batch.append_first() for batch in batches] == [0, 0, 0, 0]
            async with asyncio.timeout(DEADLINE):
                while await weeks_old.append() == 0:  # until Kafka has looked for what it may forget
                    await asyncio.sleep(0.1)
            assert [await new.append(), await days_old.append(), await ours.append()] == [0, 0, 0]
    finally:
        await asyncio.to_thread(cluster.stop, grace_s=0)
