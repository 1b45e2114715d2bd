"""Whether a topic that others made keeps what acks=all promises: an acknowledged record survives the loss of a broker.

And whether the cluster keeps the offsets of a group that is away for as long as it keeps what that group has still to read. If it
does not, a group that comes back stops (`placement`), so this is a warning and no refusal: nothing is lost by it, and
the setting is the cluster's, which may not be ours to change.
"""

import math
from collections.abc import Collection, Iterator, Mapping

import structlog

from services.core.broker.errors import UnsafeTopic
from services.core.broker.kafka.cluster import Cluster, TopicState
from services.core.broker.kafka.limits import read_broker_setting, read_settings

log = structlog.get_logger()

MIN_IN_SYNC = "min.insync.replicas"
UNCLEAN = "unclean.leader.election.enable"
REPLICAS = "replication.factor"

_ENOUGH = 3
"""From so many brokers on, two can have every record while one is away."""

OFFSETS = "offsets.retention.minutes"
RETENTION = "retention.ms"

_Problem = tuple[str, str, str]


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
    if kept:
        warn_of_short_offsets(int(await read_broker_setting(cluster, OFFSETS)), kept)


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
            hint=f"a destination that is away for longer than its offsets are kept stops and waits for you. Try: {OFFSETS} of at "
            f"least {math.ceil(longer[topic] / 60_000)} in the brokers' configuration",
        )


def find_problems(topic: str, state: TopicState, min_in_sync: str, unclean: str, brokers: int) -> Iterator[_Problem]:
    """What is wrong: (topic, key, text). `brokers`: how many the cluster has; those of the moment are what it knows of."""
    replicas = [partition.replicas for partition in state.partitions.values()]
    fewest, most, needed = min(replicas), max(replicas), int(min_in_sync)
    if fewest < needed:
        text = f"{fewest} replicas and {MIN_IN_SYNC} {needed}: no write can ever be acknowledged. "
        text += f"Try: kafka-reassign-partitions for more replicas, or kafka-configs to set {MIN_IN_SYNC} to {fewest}"
        yield topic, REPLICAS, text
    elif needed == 1 and max(brokers, most) >= _ENOUGH:
        text = f"1 of {fewest} replicas: an acknowledged event may lie on one broker alone, and is lost with it. Try: "
        text += "" if fewest > 1 else "kafka-reassign-partitions for three replicas, then "
        yield topic, MIN_IN_SYNC, text + f"kafka-configs to set {MIN_IN_SYNC} to 2"
    if unclean == "true" and most > 1:
        text = "true: a broker without the newest acknowledged events may become leader, and they are lost. "
        yield topic, UNCLEAN, text + f"Try: kafka-configs to set {UNCLEAN} to false"
