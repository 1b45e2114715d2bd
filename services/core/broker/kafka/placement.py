"""Where a member begins to read a partition that it was just given.

Behind the group's commit. Without one at `Start`, and that position is committed at once: else a group that began at
"latest" would begin there again after every restart, and skip what was sent meanwhile; and retention could pass a group
that never committed without anybody noticing.

A partition that was added to the topic after the group began is read from its beginning, whatever `Start` says: its first
records are new. How many partitions there were when the group began travels as a note with every commit.
"""

from collections.abc import Collection
from dataclasses import dataclass

from services.core.broker.contract import Start
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.offsets import Committed, fetch_committed, partitions_of, starts
from services.core.broker.record import TopicPartition

_NOTE = "partitions="


@dataclass(frozen=True, slots=True)
class Placement:
    """position: the next offset to read, by partition. fresh: those without a commit. notes: by topic, for commits."""

    position: dict[TopicPartition, int]
    fresh: frozenset[TopicPartition]
    notes: dict[str, str]


async def place(cluster: Cluster, group: str, sources: Collection[TopicPartition], start: Start) -> Placement:
    """Decide, changing nothing. Raises UnknownTopic, Unavailable."""
    everything = await partitions_of(cluster, sorted({source.topic for source in sources}))
    committed = await fetch_committed(cluster, group, everything)
    counts = _counts_at_beginning(everything, committed)
    fresh = [source for source in sources if source not in committed]
    added = [source for source in fresh if source.partition >= counts[source.topic]]
    begun = [source for source in fresh if source.partition < counts[source.topic]]
    position = {source: committed[source].position for source in sources if source in committed}
    if added:
        position |= await starts(cluster, added, "earliest")
    if begun:
        position |= await starts(cluster, begun, start)
    notes = {topic: f"{_NOTE}{count}" for topic, count in counts.items()}
    return Placement(position, frozenset(fresh), notes)


def _counts_at_beginning(
    everything: Collection[TopicPartition], committed: dict[TopicPartition, Committed]
) -> dict[str, int]:
    """Per topic: the partitions when the group began, as its commits say; those of now when no commit says it."""
    counts: dict[str, int] = {}
    for source in everything:
        counts[source.topic] = counts.get(source.topic, 0) + 1
    for source, stored in committed.items():
        digits = stored.note.removeprefix(_NOTE)
        if stored.note.startswith(_NOTE) and digits.isdecimal():
            counts[source.topic] = min(counts[source.topic], int(digits))
    return counts
