"""A killed member's partitions, long before Kafka misses its heartbeats."""

import asyncio
import sys

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.kafka import KafkaBroker, Timing
from services.core.jvm.kafka import KafkaCluster
from tests.contract.traffic import DEADLINE, append, ignore_revoke, numbered, numbers_of, own, read
from tests.support.kafka import unique_name

pytestmark = pytest.mark.kafka

_SLOW = Timing(session=1500.0, heartbeat=0.3, drain=1500.0, request=4.0, metadata=1.0)
"""Far beyond what a test waits, and below the half hour that Kafka allows."""
_MEMBER = f"""
import asyncio, sys
from services.core.broker.kafka import KafkaBroker, Timing
from tests.contract.traffic import ignore_revoke, own

async def main(bootstrap, topic, group):
    timing = Timing(session={_SLOW.session}, heartbeat=0.3, drain={_SLOW.drain}, request=4.0, metadata=1.0)
    async with (
        KafkaBroker.open(bootstrap, timing=timing) as broker,
        broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer,
    ):
        await own(consumer, 2)
        print("owns", flush=True)
        await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_a_killed_member_is_replaced_at_once(kafka_cluster: KafkaCluster) -> None:
    """If it fails, what a killed expel owned stands still for the session time-out, 10 s, each time."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_SLOW) as broker:
        topic, group = unique_name("topic"), unique_name("g")
        await broker.admin.create_topic(TopicSpec(topic, partitions=2))
        await append(broker, topic, numbered(range(5)))
        member = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _MEMBER, kafka_cluster.bootstrap, topic, group, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert member.stdout is not None
            async with asyncio.timeout(DEADLINE):
                while await member.stdout.readline() != b"owns\n":
                    assert member.returncode is None
        finally:
            member.kill()
            await member.wait()
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            await own(consumer, 2)
            assert numbers_of(await read(consumer, 5)) == list(range(5))


async def test_a_living_member_keeps_its_share(kafka_cluster: KafkaCluster) -> None:
    """If it fails, members of one machine throw each other out of the group."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_SLOW) as broker:
        topic, group = unique_name("topic"), unique_name("g")
        await broker.admin.create_topic(TopicSpec(topic, partitions=2))
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as first:
            await own(first, 2)
            name = first._client._coordinator.member_id  # type: ignore[attr-defined]
            async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as second:
                await asyncio.gather(own(first, 1), own(second, 1))
                assert first._client._coordinator.member_id == name  # type: ignore[attr-defined]
