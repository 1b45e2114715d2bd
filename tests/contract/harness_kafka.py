"""Kafka's way into the contract suite: the session's three brokers, RF 3, min ISR 2."""

import asyncio
from contextlib import AbstractAsyncContextManager

from aiokafka.admin import RecordsToDelete
from aiokafka.structs import TopicPartition

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import Unavailable
from services.core.broker.kafka import KafkaBroker, Timing
from services.core.broker.kafka.cluster import Cluster
from services.core.jvm.kafka import KafkaCluster
from tests.support.kafka import open_admin, unique_name

_TIMING = Timing(session=2.0, heartbeat=0.3, drain=10.0, request=4.0, metadata=1.0)
"""Short, so that tests need not wait for a lost member or a rebalance."""

_ELECTION_SECONDS = 30.0


def open_for_tests(bootstrap: str) -> AbstractAsyncContextManager[Broker]:
    """A connection with short group time-outs."""
    return KafkaBroker.open(bootstrap, timing=_TIMING)


class KafkaHarness:
    """See `harness.Harness`."""

    member_timeout = _TIMING.session
    poll_interval = 1.0

    def __init__(self, cluster: KafkaCluster) -> None:
        self._cluster = cluster
        self.spec = f"kafka:{cluster.bootstrap}"
        self.url = f"kafka://{cluster.bootstrap}"

    def open(self) -> AbstractAsyncContextManager[Broker]:
        return open_for_tests(self._cluster.bootstrap)

    def fresh_name(self, hint: str) -> str:
        return unique_name(hint)

    async def create_topic(self, broker: Broker, partitions: int = 1) -> str:
        name = unique_name("topic")
        await broker.admin.create_topic(TopicSpec(name, partitions=partitions))
        return name

    async def crash(self, topic: str, partition: int = 0) -> None:
        """SIGKILL the leader, wait until another one is elected, start the dead one again."""
        dead = await self._leader(topic, partition)
        await asyncio.to_thread(self._cluster.kill, dead)
        async with asyncio.timeout(_ELECTION_SECONDS):
            while await self._leader(topic, partition) in (dead, -1):
                await asyncio.sleep(0.2)
        await asyncio.to_thread(self._cluster.restart, dead)

    async def restart(self) -> None:
        await asyncio.to_thread(self._cluster.stop)
        await asyncio.to_thread(self._cluster.start)

    async def expire(self, topic: str, partition: int, before: int) -> None:
        async with open_admin(self._cluster.bootstrap) as admin:
            await admin.delete_records({TopicPartition(topic, partition): RecordsToDelete(before)})

    async def _leader(self, topic: str, partition: int) -> int:
        """-1 while there is none, or nobody can be asked."""
        asking = Cluster(self._cluster.bootstrap, "harness", _TIMING)
        try:
            return (await asking.describe([topic]))[topic].partitions[partition].leader
        except Unavailable:
            return -1
        finally:
            await asking.close()
