"""What tests need of the Kafka cluster beside the fixture `kafka_cluster` (tests/conftest.py)."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaConnectionError
from aiokafka.protocol.admin import DeleteGroupsRequest

from services.core.broker.kafka import Timing
from services.core.broker.kafka.cluster import Cluster
from tests.support.pacing import Pace


def unique_name(hint: str) -> str:
    """A topic or group name that no other test uses: the cluster lives as long as the test session."""
    return f"{hint}-{uuid4().hex[:12]}"


@asynccontextmanager
async def open_admin(bootstrap: str) -> AsyncIterator[AIOKafkaAdminClient]:
    """A connected admin client."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        await admin.start()
        yield admin
    finally:
        await admin.close()


async def wait_until_all_are_known(bootstrap: str) -> None:
    """Each broker that is named follows the controller at its own pace. A topic that is made before it knows all of them has too
    few replicas."""
    addresses = bootstrap.split(",")
    for address in addresses:
        async with asyncio.timeout(300), open_admin(address) as admin:
            pace = Pace()
            while len((await admin.describe_cluster())["brokers"]) < len(addresses):
                await pace.rest()


async def make_topic(
    bootstrap: str,
    hint: str,
    *,
    partitions: int = 1,
    replicas: int | None = None,
    configs: Mapping[str, str] | None = None,
) -> str:
    """Create a topic of its own for one test, with a replica on each of three brokers, and return its name once every
    broker that answers knows its leaders."""
    name = unique_name(hint)
    async with open_admin(bootstrap) as admin:
        copies = replicas or min(3, len(bootstrap.split(",")))
        answer = await admin.create_topics([NewTopic(name, partitions, copies, topic_configs=dict(configs or {}))])
        errors = [error for error in answer.topic_errors if error[1] != 0]
        assert not errors, f"the cluster refused the topic: {errors}"
    for address in bootstrap.split(","):
        async with asyncio.timeout(300):
            pace = Pace()
            while not await _has_leaders(address, name, partitions):
                await pace.rest()
    return name


async def describe_partitions(bootstrap: str, topic: str) -> list[dict[str, Any]]:
    """The partitions of a topic: `partition`, `leader` (node id, -1: none), `replicas`, `isr`.

    Waits until the broker that answers has heard of the topic: each broker follows the controller at its own pace.
    """
    async with asyncio.timeout(300), open_admin(bootstrap) as admin:
        pace = Pace()
        while True:
            (description,) = await admin.describe_topics([topic])
            partitions: list[dict[str, Any]] = description["partitions"]
            if partitions:
                return sorted(partitions, key=lambda partition: partition["partition"])
            await pace.rest()


async def delete_group(bootstrap: str, group: str) -> None:
    """What Kafka does to a group without members after `offsets.retention.minutes`, and a person with
    `kafka-consumer-groups --delete`."""
    asking = Cluster(bootstrap, "test", Timing(session=2.0, heartbeat=0.3, drain=10.0, request=4.0, metadata=1.0))
    try:
        async with asyncio.timeout(300):
            pace = Pace()
            while any(code for _, code in (await asking.ask_coordinator(group, DeleteGroupsRequest([group]))).results):
                await pace.rest()
    finally:
        await asking.close()


async def _has_leaders(address: str, topic: str, partitions: int) -> bool:
    try:
        found = await describe_partitions(address, topic)
    except KafkaConnectionError:
        return True  # a test may have stopped this one
    return len(found) == partitions and all(partition["leader"] >= 0 for partition in found)
