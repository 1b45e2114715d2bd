"""A topic's own settings that sending depends on, read once and again where an old answer would matter."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from aiokafka.protocol.admin import DescribeConfigsRequest

from services.core.broker.errors import Unavailable
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.faults import UNKNOWN_TOPIC, raise_for

_TOPIC, _BROKER = 2, 4


@dataclass(frozen=True, slots=True)
class Limits:
    """max_batch_bytes: the topic's max.message.bytes, which is about whole batches. min_in_sync: its min.insync.replicas."""

    max_batch_bytes: int
    min_in_sync: int


async def read_settings(cluster: Cluster, topic: str, names: Sequence[str]) -> dict[str, str]:
    """The topic's settings as they are in force, the cluster's where it has none. Raises UnknownTopic, Unavailable."""
    answer = await cluster.ask_any(DescribeConfigsRequest([(_TOPIC, topic, list(names))]))
    code, _, _, _, entries = answer.resources[0]
    if code == UNKNOWN_TOPIC and topic in await cluster.describe([topic]):
        raise Unavailable(f"settings of {topic}: the node that was asked has not heard of it yet")
    raise_for(code, f"settings of {topic}")
    return {entry[0]: entry[1] for entry in entries}


async def read_broker_setting(cluster: Cluster, name: str) -> str:
    """As one of the nodes has it in force. Raises Unavailable."""
    node = min(broker.nodeId for broker in (await cluster.client()).cluster.brokers())
    answer = await cluster.ask(node, DescribeConfigsRequest([(_BROKER, str(node), [name])]))
    code, _, _, _, entries = answer.resources[0]
    raise_for(code, f"settings of Kafka's node {node}")
    return str(entries[0][1])


class TopicLimits:
    """A cache over DescribeConfigs. Sending never waits for it twice: a node that is frozen must not hold up the others."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[str, tuple[float, Limits]] = {}

    async def of(self, topic: str, *, max_age: float = math.inf) -> Limits:
        """At most `max_age` seconds old. Raises UnknownTopic, Unavailable."""
        known = self._known.get(topic)
        if known is not None and time.monotonic() - known[0] <= max_age:
            return known[1]
        values = await read_settings(self._cluster, topic, ["max.message.bytes", "min.insync.replicas"])
        limits = Limits(int(values["max.message.bytes"]), int(values["min.insync.replicas"]))
        self._known[topic] = (time.monotonic(), limits)
        return limits

    def forget(self, topic: str) -> None:
        """Read it anew next time: the broker just proved it outdated."""
        self._known.pop(topic, None)
