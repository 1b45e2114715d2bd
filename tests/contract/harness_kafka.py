"""Kafka's way into the contract suite: the session's three brokers, RF 3, min ISR 2."""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from aiokafka.admin import RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.structs import TopicPartition

from services.core.broker.connect import parse_kafka_url
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import Unavailable
from services.core.broker.kafka import Timing, open_kafka
from services.core.broker.kafka.cluster import Cluster
from services.core.jvm.kafka import KafkaCluster
from tests.support.kafka import open_admin, unique_name

_TIMING = Timing(session=4.0, heartbeat=0.3, drain=10.0, request=4.0, metadata=1.0)
"""Short, so that tests need not wait for a lost member or a rebalance."""

_ELECTION_SECONDS = 300.0
_TOPIC_SOURCE = 1
"""Of a setting in an answer of DescribeConfigs: it is the topic's own."""


def open_for_tests(url: str, patience: float | None = None) -> AbstractAsyncContextManager[Broker]:
    """A connection with short group time-outs."""
    address = parse_kafka_url(url)
    timing = _TIMING if patience is None else replace(_TIMING, session=patience, drain=patience)
    return open_kafka(address.bootstrap, timing=timing, prefix=address.prefix)


class KafkaHarness:
    """See `harness.Harness`."""

    member_timeout = _TIMING.session
    poll_interval = 1.0

    def __init__(self, cluster: KafkaCluster, prefix: str = "") -> None:
        self._cluster, self._prefix = cluster, prefix
        self.url = f"kafka://{cluster.bootstrap}" + (f"?prefix={prefix}" if prefix else "")
        self.spec = f"kafka:{self.url}"

    def open(self, patience: float | None = None) -> AbstractAsyncContextManager[Broker]:
        return open_for_tests(self.url, patience)

    def other_fleet(self, prefix: str) -> "KafkaHarness":
        """The same cluster with another prefix."""
        return KafkaHarness(self._cluster, prefix)

    async def names(self) -> set[str]:
        """Every name of ours on the cluster: topics and groups."""
        async with open_admin(self._cluster.bootstrap) as admin:
            groups = {group[0] for group in await admin.list_consumer_groups()}
            return set(await admin.list_topics()) | groups

    def fresh_name(self, hint: str) -> str:
        return unique_name(hint)

    async def create_topic(self, broker: Broker, partitions: int = 1) -> str:
        name = unique_name("topic")
        await broker.admin.create_topic(TopicSpec(name, partitions=partitions))
        return name

    async def crash(self, topic: str, partition: int = 0) -> None:
        """SIGKILL the leader, wait until another one is elected, start the dead one again."""
        topic = self._prefix + topic
        dead = await self._leader(topic, partition)
        await asyncio.to_thread(self._cluster.kill, dead)
        async with asyncio.timeout(_ELECTION_SECONDS):
            while await self._leader(topic, partition) in (dead, -1):
                await asyncio.sleep(0.2)
        await asyncio.to_thread(self._cluster.restart, dead)

    async def restart(self) -> None:
        await asyncio.to_thread(self._cluster.stop)
        await asyncio.to_thread(self._cluster.start)

    compacts = True

    async def compact(self, topic: str) -> None:
        """Kafka compacts what is in a segment that is closed: let it close one soon, and clean whatever there is."""
        hurry = {"segment.ms": "100", "min.cleanable.dirty.ratio": "0.001"}
        resource = ConfigResource(ConfigResourceType.TOPIC, self._prefix + topic, configs=hurry)
        async with open_admin(self._cluster.bootstrap) as admin:
            found = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, self._prefix + topic)])
            own = {entry[0]: entry[1] for entry in found[0].resources[0][4] if entry[3] == _TOPIC_SOURCE}
            resource.configs = {**own, **hurry}
            await admin.alter_configs([resource])

    async def expire(self, topic: str, partition: int, before: int) -> None:
        async with open_admin(self._cluster.bootstrap) as admin:
            await admin.delete_records({TopicPartition(self._prefix + topic, partition): RecordsToDelete(before)})

    async def _leader(self, topic: str, partition: int) -> int:
        """-1 while there is none, or nobody can be asked."""
        asking = Cluster(self._cluster.bootstrap, "harness", _TIMING)
        try:
            return (await asking.describe([topic]))[topic].partitions[partition].leader
        except Unavailable:
            return -1
        finally:
            await asking.close()
