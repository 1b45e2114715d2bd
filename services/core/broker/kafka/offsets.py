"""The committed offsets of groups, and the metadata of each commit.

Kafka commits the next offset to read, the contract the last processed one. This file, `consumer` and `admin` convert them.
"""

import re
from collections.abc import Collection, Mapping
from typing import NamedTuple, Self

from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest

from services.core.broker.errors import GroupHasMembers, UnknownTopic
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.error_codes import FENCED, raise_for
from services.core.broker.kafka.leaders import NONE, by_topic, partitions_of
from services.core.broker.record import TopicPartition

_PART = re.compile(r"(partitions|topic|epoch)=([0-9a-zA-Z-]{1,40})")


class CommitMetadata(NamedTuple):
    """The metadata of every commit, for the next owner of the partition. None, "": not known (an administrator made the commit).

    partitions: the topic's number of partitions when the group began. topic: the topic's id; a commit for an earlier topic
    of this name does not count. epoch: of the leader that wrote the last processed record; by it `find_truncations` finds whether
    the log was cut off below the commit since.
    """

    partitions: int | None = None
    topic: str = ""
    epoch: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Unknown parts are left out: other programs commit with metadata of their own."""
        found = {part[1]: part[2] for part in map(_PART.fullmatch, text.split(";")) if part}
        partitions, epoch = found.get("partitions", ""), found.get("epoch", "")
        return cls(
            int(partitions) if partitions.isdecimal() else None,
            found.get("topic", ""),
            int(epoch) if epoch.isdecimal() else None,
        )

    def __str__(self) -> str:
        parts = {"partitions": self.partitions, "topic": self.topic or None, "epoch": self.epoch}
        return ";".join(f"{name}={value}" for name, value in parts.items() if value is not None)


class Committed(NamedTuple):
    """A group's commit in a partition. position: the next offset to read."""

    position: int
    metadata: CommitMetadata


async def fetch_committed(
    cluster: Cluster, group: str, sources: Collection[TopicPartition]
) -> dict[TopicPartition, Committed]:
    """The group's commits, also those for an earlier topic of this name; partitions without a commit are absent."""
    topics = [(topic, [row[0] for row in rows]) for topic, rows in by_topic((source, ()) for source in sources)]
    answer = await cluster.ask_coordinator(group, OffsetFetchRequest(group, topics))
    raise_for(getattr(answer, "error_code", 0), f"committed offsets of group {group}", f"Describe on group {group}")
    found = {}
    for topic, partitions in answer.topics:
        for partition, offset, note, code in partitions:
            rights = f"Describe on group {group}", f"Describe on topic {topic}"
            raise_for(code, f"committed offset of group {group} in {topic}[{partition}]", *rights)
            if offset != NONE:
                found[TopicPartition(topic, partition)] = Committed(offset, CommitMetadata.parse(note or ""))
    return found


async def fetch_positions(cluster: Cluster, group: str, topic: str) -> dict[TopicPartition, int]:
    """The next offset to read by partition of the topic that has the name now; absent without a commit. Raises UnknownTopic."""
    sources = await partitions_of(cluster, [topic])
    now = (await cluster.describe_agreed([topic]))[topic].id
    found = await fetch_committed(cluster, group, sources)
    return {source: stored.position for source, stored in found.items() if stored.metadata.topic in ("", now)}


async def commit_without_member(
    cluster: Cluster, group: str, topic: str, positions: Mapping[int, int]
) -> CommitMetadata:
    """Set the next offset to read of a group that has no members, by partition. Gives the metadata of these commits. Raises
    UnknownTopic, and GroupHasMembers when it has members."""
    sources = await partitions_of(cluster, [topic])
    if unknown := positions.keys() - {source.partition for source in sources}:
        raise UnknownTopic(f"{topic} has no partitions {sorted(unknown)}")
    now = (await cluster.describe_agreed([topic]))[topic].id
    stored = await fetch_committed(cluster, group, sources)
    counts = [
        row.metadata.partitions
        for row in stored.values()
        if row.metadata.partitions and row.metadata.topic in ("", now)
    ]
    # Partitions that are added from now on are new to the group: it reads them from their beginning.
    note = CommitMetadata(min(counts, default=len(sources)), now)
    await _commit_rows(cluster, group, topic, [(one, position, str(note)) for one, position in positions.items()])
    return note


async def copy_positions(cluster: Cluster, group: str, to: str, topic: str) -> bool:
    """Copy the commits of `group`, with their metadata, to group `to`, where that has none. Gives whether any was copied.

    Raises as `commit_without_member`.
    """
    sources = await partitions_of(cluster, [topic])
    now = (await cluster.describe_agreed([topic]))[topic].id
    theirs, own = [
        {source: row for source, row in found.items() if row.metadata.topic in ("", now)}
        for found in [await fetch_committed(cluster, each, sources) for each in (group, to)]
    ]
    rows = [
        (source.partition, row.position, str(row.metadata._replace(topic=now)))
        for source, row in theirs.items()
        if source not in own
    ]
    if rows:
        await _commit_rows(cluster, to, topic, rows)
    return bool(rows)


async def _commit_rows(cluster: Cluster, group: str, topic: str, rows: list[tuple[int, int, str]]) -> None:
    answer = await cluster.ask_coordinator(group, OffsetCommitRequest(group, -1, "", -1, [(topic, rows)]))
    for _, partitions in answer.topics:
        for partition, code in partitions:
            if code in FENCED:
                raise GroupHasMembers(f"group {group} has members. Try: stop them first")
            rights = f"Read on group {group}", f"Read on topic {topic}"
            raise_for(code, f"commit of group {group} in {topic}[{partition}]", *rights)
