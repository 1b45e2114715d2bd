"""Whether a topic that others made keeps what acks=all promises: an acknowledged record survives the loss of a broker."""

from collections.abc import Collection, Iterator

from services.core.broker.errors import UnsafeTopic
from services.core.broker.kafka.cluster import Cluster, TopicState
from services.core.broker.kafka.limits import read_settings

MIN_IN_SYNC = "min.insync.replicas"
UNCLEAN = "unclean.leader.election.enable"
REPLICAS = "replication.factor"

_ENOUGH = 3
"""From so many brokers on, two can have every record while one is away."""

_Problem = tuple[str, str, str]


async def check_durability(cluster: Cluster, topics: Collection[str]) -> None:
    """See `contract.Admin`. One request per topic. Raises UnsafeTopic, Unavailable."""
    states = await cluster.describe(list(topics))
    brokers = len((await cluster.client()).cluster.brokers())
    problems: list[_Problem] = []
    for topic, state in states.items():
        settings = await read_settings(cluster, topic, [MIN_IN_SYNC, UNCLEAN])
        problems += find_problems(topic, state, settings[MIN_IN_SYNC], settings[UNCLEAN], brokers)
    if problems:
        raise UnsafeTopic(problems)


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
