"""Settings of topics and brokers: the limits of an append, and whether a topic keeps acknowledged records safe."""

import asyncio
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog
from aiokafka.protocol.admin import DescribeConfigsRequest

from services.core.broker.errors import NotAllowed, Unavailable, UnsafeTopic
from services.core.broker.kafka.cluster import Cluster, TopicState
from services.core.broker.kafka.error_codes import UNKNOWN_TOPIC, bounded, raise_for
from services.core.broker.kafka.protocol import AlterConfigRequest

log = structlog.get_logger()

_TOPIC, _BROKER = 2, 4


@dataclass(frozen=True, slots=True)
class Limits:
    """max_batch_bytes: the topic's max.message.bytes, which is about whole batches. min_in_sync: its min.insync.replicas."""

    max_batch_bytes: int
    min_in_sync: int


async def read_settings(cluster: Cluster, topic: str, names: Sequence[str]) -> dict[str, str]:
    """The topic's effective settings: its own, else the cluster's. Raises UnknownTopic, Unavailable."""
    answer = await cluster.ask_any(DescribeConfigsRequest([(_TOPIC, topic, list(names))]))
    code, _, _, _, entries = answer.resources[0]
    if code == UNKNOWN_TOPIC and topic in await cluster.describe([topic]):
        raise Unavailable(f"settings of {topic}: the node that was asked does not know it yet")
    raise_for(code, f"settings of {topic}", f"DescribeConfigs on topic {topic}")
    return {entry[0]: entry[1] for entry in entries}


async def read_broker_setting(cluster: Cluster, name: str) -> str:
    """The setting of one of the nodes. Raises Unavailable."""
    node = min(broker.nodeId for broker in (await cluster.client()).cluster.brokers())
    answer = await cluster.ask(node, DescribeConfigsRequest([(_BROKER, str(node), [name])]))
    code, _, _, _, entries = answer.resources[0]
    raise_for(code, f"settings of Kafka's node {node}", "DescribeConfigs on the cluster")
    return str(entries[0][1])


class TopicLimits:
    """A cache over DescribeConfigs. An append waits for it once per topic: a frozen node must not delay the others."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[str, tuple[float, Limits]] = {}

    async def find(self, topic: str, *, max_age: float = math.inf) -> Limits:
        """At most `max_age` seconds old. Raises UnknownTopic, Unavailable."""
        known = self._known.get(topic)
        if known is not None and time.monotonic() - known[0] <= max_age:
            return known[1]
        values = await read_settings(self._cluster, topic, ["max.message.bytes", "min.insync.replicas"])
        limits = Limits(int(values["max.message.bytes"]), int(values["min.insync.replicas"]))
        self._known[topic] = (time.monotonic(), limits)
        return limits

    def forget(self, topic: str) -> None:
        """Read it again next time: an answer of the broker shows that it has changed."""
        self._known.pop(topic, None)


# acks=all promises that an acknowledged record survives the loss of a broker. The settings of a topic that others created may
# break that promise. A cluster may also drop a group's offsets sooner than the topic's records. A group that comes back then
# stops (see `positions`). That is only a warning: nothing is lost, and the setting is for the whole cluster.

MIN_IN_SYNC = "min.insync.replicas"
UNCLEAN = "unclean.leader.election.enable"
REPLICAS = "replication.factor"
CLEANUP = "cleanup.policy"

_ENOUGH = 3
"""With this many brokers, two can have every record while one is away."""

TIMESTAMPS = "message.timestamp.type"
BY_STORING = "LogAppendTime"
"""The value with which retention counts from storing. The other one is CreateTime: from the writer's timestamps."""

OFFSETS = "offsets.retention.minutes"
RETENTION = "retention.ms"

_Problem = tuple[str, str, str]
_PAUSE_S = 0.05


async def check_durability(cluster: Cluster, topics: Collection[str]) -> None:
    """See `contract.Admin`. One request per topic. Raises UnsafeTopic, Unavailable."""
    states = await cluster.describe(list(topics))
    brokers = len((await cluster.client()).cluster.brokers())
    problems: list[_Problem] = []
    kept: dict[str, int] = {}
    for topic, state in states.items():
        settings = await read_settings(cluster, topic, [MIN_IN_SYNC, UNCLEAN, RETENTION])
        problems += find_problems(topic, state, settings[MIN_IN_SYNC], settings[UNCLEAN], brokers)
        kept[topic] = int(settings[RETENTION])
    if problems:
        raise UnsafeTopic(problems)
    with suppress(NotAllowed):  # many clusters show it to nobody, and it is only a warning
        if kept:
            warn_of_short_offsets(int(await read_broker_setting(cluster, OFFSETS)), kept)


async def find_by_event_time(cluster: Cluster, topics: Collection[str]) -> frozenset[str]:
    """See `contract.Admin.kept_by_event_time`. Raises Unavailable, NotAllowed."""
    existing = await cluster.describe(list(topics)) if topics else {}
    kinds = {topic: (await read_settings(cluster, topic, [TIMESTAMPS]))[TIMESTAMPS] for topic in existing}
    return frozenset(topic for topic, kind in kinds.items() if kind != BY_STORING)


async def keep_by_storing(cluster: Cluster, topics: Collection[str]) -> None:
    """See `contract.Admin`. Returns when it is read back."""
    for topic in topics:
        answer = await cluster.ask_any(AlterConfigRequest(topic, TIMESTAMPS, BY_STORING))
        for code, message, *_ in answer.responses:
            raise_for(code, f"settings of {topic}: {message or 'refused'}", f"AlterConfigs on topic {topic}")
    async with bounded(f"{TIMESTAMPS} {BY_STORING}", cluster.timing.request):
        while await find_by_event_time(cluster, topics):  # noqa: ASYNC110 - Kafka sends no notice
            await asyncio.sleep(_PAUSE_S)


def warn_of_short_offsets(minutes: int, kept: Mapping[str, int]) -> None:
    """`minutes`: for which the offsets of a group without members are kept. kept: topics' retention, ms; -1: for ever."""
    longer = {topic: ms for topic, ms in kept.items() if ms > minutes * 60_000}
    if longer:
        topic = max(longer, key=lambda topic: longer[topic])
        log.warning(
            "kafka_offsets_expire_early",
            offsets_kept_hours=minutes / 60,
            longest_kept_topic=topic,
            its_retention_hours=longer[topic] / 3_600_000,
            hint="if a destination is away for longer than Kafka keeps its offsets, it stops until a person decides. Try: "
            f"{OFFSETS} of at least {math.ceil(longer[topic] / 60_000)} in the brokers' configuration",
        )


def find_problems(topic: str, state: TopicState, min_in_sync: str, unclean: str, brokers: int) -> Iterator[_Problem]:
    """The problems of a topic: (topic, key, text). `brokers`: the number of nodes that are up."""
    replicas = [partition.replicas for partition in state.partitions.values()]
    fewest, most, needed = min(replicas), max(replicas), int(min_in_sync)
    if fewest < needed:
        text = f"{fewest} replicas and {MIN_IN_SYNC} {needed}: no write can ever be acknowledged. "
        text += f"Try: kafka-reassign-partitions for more replicas, or kafka-configs to set {MIN_IN_SYNC} to {fewest}"
        yield topic, REPLICAS, text
    elif needed == 1 and max(brokers, most) >= _ENOUGH:
        text = f"1 of {fewest} replicas: an acknowledged event may be on one broker only, and is lost with that broker. Try: "
        text += "" if fewest > 1 else "kafka-reassign-partitions for three replicas, then "
        yield topic, MIN_IN_SYNC, text + f"kafka-configs to set {MIN_IN_SYNC} to 2"
    if unclean == "true" and most > 1:
        text = "true: a broker without the newest acknowledged events may become leader, and they are lost. "
        yield topic, UNCLEAN, text + f"Try: kafka-configs to set {UNCLEAN} to false"
