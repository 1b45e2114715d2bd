"""The position at which a member begins to read an assigned partition, and the record of where each group has begun.

A group goes on behind its commit. Without a commit it begins at `Start`, and that position is committed at once. Otherwise a
group that began at "latest" would begin there again after every restart, and skip the records in between. And retention could
remove records that a group without a commit has not read, unnoticed.

Three cases in which the commit does not decide:
- Kafka has expired it: the record says that the group has begun, so it stops instead of beginning again.
- It is for an earlier topic of the same name: the group begins with the oldest record of the new topic.
- It is beyond the offset at which the log was cut off (`find_truncations`): the group goes on at the cut.

A partition that was added to the topic after the group began is read from its beginning, whatever `Start` says: its first
records are new. The number of partitions when the group began is in the metadata of every commit.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from uuid import UUID

import msgspec
import structlog

from services.core import metrics
from services.core.broker.contract import Start, TopicSpec, start_in
from services.core.broker.errors import BrokerError, DataDamaged, PositionLost, TopicExists, Unavailable, UnknownTopic
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.leaders import EARLIEST, Ids, ends, list_offsets, starts
from services.core.broker.kafka.log_truncation import find_truncations
from services.core.broker.kafka.offsets import CommitMetadata, Committed, fetch_committed
from services.core.broker.kafka.reader import ErrorFactory, read_at
from services.core.broker.record import Batch, Record, TopicPartition

log = structlog.get_logger()

# Kafka drops the offsets of a group that has had no members for `offsets.retention.minutes` (seven days by default). Without a
# record of our own, such a group would be taken for a new one. At "latest" it would skip the records that waited for it; at
# "earliest" it would deliver everything again. So the topic `penstock.groups` keeps where each group has begun: one partition,
# compacted, kept for ever, a small record per group and partition. The record is written after the first commit and before the
# first record is read. A crash in between leaves a commit without a record; the next assignment writes it.

GROUPS = "penstock.groups"
_NO_ID = str(UUID(int=0))
_SEPARATOR = "\n"
_PAGE = 5000
_REMEDY = (
    "Try: make another replica the leader (kafka-reassign-partitions). Its copy may be intact. Or, if every group has "
    "offsets (kafka-consumer-groups --describe), delete %s. Penstock then writes this topic anew from the offsets"
)
_FOREIGN = "the record is skipped. Try: let nobody but Penstock write to this topic"

Append = Callable[[str, Sequence[Record]], Awaitable[None]]


class GroupStart(msgspec.Struct, frozen=True, array_like=True):
    """topic: the id of the topic in which the group began. partitions: its number of partitions then.

    Stored as a JSON array. A reader passes over elements that a newer version adds; Penstock 0.1 refuses them.
    """

    topic: str
    partitions: int


class GroupStarts:
    """The content of `penstock.groups`; each call reads the records that were added since. Safe for concurrent use."""

    def __init__(
        self, cluster: Cluster, create: Callable[[TopicSpec], Awaitable[None]], append: Append, prefix: str = ""
    ) -> None:
        """prefix: of the fleet's names on the cluster, and so of this topic, and of the groups and topics in its records."""
        self._name = prefix + GROUPS
        self._source = TopicPartition(self._name, 0)
        self._cluster, self._create, self._append = cluster, create, append
        self._known: dict[str, GroupStart] = {}
        self._topic, self._next = "", 0
        self._reading = asyncio.Lock()

    async def create_topic(self) -> None:
        """Create `penstock.groups` where it is missing. Raises BrokerError kinds."""
        if self._name not in await self._cluster.describe([self._name]):
            with suppress(TopicExists):  # another process creates it now
                await self._create(TopicSpec(self._name, 1, compact=True))

    async def find(self, group: str, sources: Collection[TopicPartition]) -> dict[TopicPartition, GroupStart]:
        """The partitions in which the group has begun. Raises Unavailable, also when the topic is damaged."""
        async with self._reading:
            await self._read_on()
        keys = {source: _key(group, source) for source in sources}
        return {source: self._known[key] for source, key in keys.items() if key in self._known}

    async def record(self, group: str, begun: Mapping[TopicPartition, GroupStart]) -> None:
        """Write the rows that are new; durable when it returns. Raises BrokerError kinds."""
        new = {key: row for source, row in begun.items() if self._known.get(key := _key(group, source)) != row}
        if not new:
            return
        if not self._topic:  # `penstock apply` of an earlier version did not make it
            await self.create_topic()
        records = [Record(key.encode(), msgspec.json.encode(row), 0) for key, row in new.items()]
        await self._append(self._name, records)
        self._known |= new

    async def copy(self, group: str, to: str, sources: Collection[TopicPartition]) -> bool:
        """Record that group `to` has begun where `group` has, if it has not yet. Gives whether there was anything to record."""
        theirs, own = await self.find(group, sources), await self.find(to, sources)
        rows = {source: row for source, row in theirs.items() if source not in own}
        await self.record(to, rows)
        return bool(rows)

    async def _read_on(self) -> None:
        state = (await self._cluster.describe_agreed([self._name])).get(self._name)
        found = "" if state is None else state.id
        if found != self._topic:
            self._topic, self._next, self._known = found, 0, {}
        if not found:
            return
        ids = {self._name: found}  # a node that hears no news would not know where other groups have begun
        end = (await ends(self._cluster, [self._source], ids))[self._source]
        while self._next < end:
            first = (await list_offsets(self._cluster, {self._source: EARLIEST}, ids))[self._source]
            try:
                batch = await read_at(self._cluster, self._source, max(first, self._next), _PAGE)
            except DataDamaged as error:
                raise Unavailable(f"{error}; {_REMEDY % self._name}") from error
            if batch is not None:
                self._record_batch(batch)
            self._next = end if batch is None else batch.offsets[-1] + 1

    def _record_batch(self, batch: Batch) -> None:
        """Raises Unavailable for a damaged one: without its record, a group would begin again and skip waiting events."""
        if batch.damage is not None:
            first, last, detail = batch.damage
            raise Unavailable(
                f"{self._name}[0]: offsets {first} to {last} are damaged: {detail}. {_REMEDY % self._name}"
            )
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            try:
                begun = msgspec.json.decode(record.value or b"", type=GroupStart)
                self._known[(record.key or b"").decode()] = begun
            except (ValueError, msgspec.MsgspecError) as error:
                log.warning(
                    "groups_record_unreadable", topic=self._name, offset=offset, error=str(error), hint=_FOREIGN
                )


def _key(group: str, source: TopicPartition) -> str:
    return _SEPARATOR.join((group, source.topic, str(source.partition)))


@dataclass(frozen=True, slots=True)
class StartPositions:
    """position: the next offset to read, by partition. fresh: the partitions to commit at once.

    lost: partitions whose commit is gone, with the error to raise; their position is the oldest record's, and nothing is read.
    metadata: for the commits of this assignment. begun: to be recorded in `GroupStarts` after the fresh positions are committed.
    """

    position: dict[TopicPartition, int] = field(default_factory=dict)
    fresh: set[TopicPartition] = field(default_factory=set)
    lost: dict[TopicPartition, ErrorFactory] = field(default_factory=dict)
    metadata: dict[TopicPartition, CommitMetadata] = field(default_factory=dict)
    begun: dict[TopicPartition, GroupStart] = field(default_factory=dict)


async def find_positions(
    cluster: Cluster,
    begun: GroupStarts,
    group: str,
    sources: Collection[TopicPartition],
    start: Start,
    prefix: str = "",
    *,
    dealt: Mapping[str, int] | None = None,
    others: Collection[str] = (),
) -> StartPositions:
    """Decide, changing nothing. prefix: of the fleet's names on the cluster, which all names here have. dealt: how many
    partitions each topic had when the group dealt them out; one that was added since is nobody's yet, and new. others: topics of
    others, which have any name. Raises UnknownTopic, Unavailable."""
    topics = sorted({source.topic for source in sources})
    states = await cluster.describe_agreed(topics)
    if missing := set(topics) - states.keys():
        raise UnknownTopic(f"Kafka has no topic {min(missing)!r}. Try: declare it under `streams:` in the pipe file")
    for topic, number in sources:
        if number not in states[topic].partitions:  # just added, or the topic was made anew with fewer
            raise Unavailable(f"a node knows no {topic}[{number}]")
    everything = [TopicPartition(topic, number) for topic in topics for number in sorted(states[topic].partitions)]
    ids = {topic: states[topic].id for topic in topics}
    if _NO_ID in ids.values():
        raise BrokerError(
            "Kafka has no ids of topics. Try: Kafka 3.1 or later, and inter.broker.protocol.version 2.8 or later"
        )
    committed = await fetch_committed(cluster, group, everything)
    on_record = await begun.find(group, everything)
    live = {source: row for source, row in committed.items() if row.metadata.topic in ("", ids[source.topic])}
    known = {source: row for source, row in on_record.items() if row.topic == ids[source.topic]}
    expired = known.keys() - committed.keys()
    replaced = {source.topic for source in (committed.keys() - live) | (on_record.keys() - known)}
    counts = count_at_beginning(everything, live, known)
    counts |= {topic: min(counts[topic], count) for topic, count in (dealt or {}).items() if topic in counts}
    found = StartPositions()
    wanted: dict[TopicPartition, Start] = {}
    for source in sources:
        epoch = states[source.topic].partitions[source.partition].epoch
        found.metadata[source] = CommitMetadata(counts[source.topic], ids[source.topic], epoch if epoch >= 0 else None)
        found.begun[source] = GroupStart(ids[source.topic], counts[source.topic])
        if source in live:
            found.position[source] = live[source].position
            found.metadata[source] = found.metadata[source]._replace(epoch=live[source].metadata.epoch)
            continue
        if source.topic in replaced:
            metrics.BROKER_MADE_ANEW.labels(group.removeprefix(prefix), source.topic.removeprefix(prefix)).inc()
            log.warning(
                "stream_made_anew", group=group, topic=source.topic, partition=source.partition, hint=_MADE_ANEW
            )
        is_new = source.topic in replaced or source.partition >= counts[source.topic]
        beginning = start if source.topic in others else start_in(source.topic.removeprefix(prefix), start)
        wanted[source] = "earliest" if is_new or source in expired else beginning
    for beginning in set(wanted.values()):
        those = [source for source, each in wanted.items() if each == beginning]
        found.position.update(await starts(cluster, those, beginning, ids))
    await _confirm_epochs(cluster, found, wanted, ids)
    found.fresh.update(wanted.keys() - expired)
    await _stop_lost(cluster, group, found, [source for source in wanted if source in expired], ids)
    await _go_to_cuts(cluster, group, found, ids, prefix)
    return found


async def _confirm_epochs(
    cluster: Cluster, found: StartPositions, sources: Collection[TopicPartition], ids: Ids
) -> None:
    """These positions are of the logs of these leaders' epochs. Else a cut is seen where there is none, or none where one is."""
    read = {
        source: (found.position[source], epoch)
        for source in sources
        if (epoch := found.metadata[source].epoch) is not None
    }
    if await find_truncations(cluster, read, ids):
        raise Unavailable("a partition got another leader while the group's position in it was found")


_MADE_ANEW = "it is read from its oldest record; records of the old topic that the group had not read are gone"


def count_at_beginning(
    everything: Collection[TopicPartition],
    committed: Mapping[TopicPartition, Committed],
    begun: Mapping[TopicPartition, GroupStart],
) -> dict[str, int]:
    """By topic: the number of partitions when the group began, from its commits and the record; else the present number."""
    counts: dict[str, int] = {}
    for source in everything:
        counts[source.topic] = counts.get(source.topic, 0) + 1
    recorded = [(source.topic, row.metadata.partitions) for source, row in committed.items()]
    recorded += [(source.topic, row.partitions) for source, row in begun.items()]
    for topic, count in recorded:
        if count is not None:
            counts[topic] = min(counts[topic], count)
    return counts


async def _stop_lost(
    cluster: Cluster, group: str, found: StartPositions, lost: Collection[TopicPartition], ids: Ids
) -> None:
    if not lost:
        return
    end = await ends(cluster, lost, ids)
    for source in lost:
        found.lost[source] = partial(PositionLost, group, *source, found.position[source], end[source])


async def _go_to_cuts(cluster: Cluster, group: str, found: StartPositions, ids: Ids, prefix: str) -> None:
    """Where the log was cut off below the commit, go on at the cut: the records there were written since."""
    read = {
        source: (found.position[source], note.epoch)
        for source, note in found.metadata.items()
        if note.epoch is not None and source not in found.fresh and source not in found.lost
    }
    cuts = await find_truncations(cluster, read, ids)
    first = await list_offsets(cluster, dict.fromkeys(cuts, EARLIEST), ids)
    for source, cut in cuts.items():
        metrics.BROKER_LOGS_CUT_OFF.labels(group.removeprefix(prefix), source.topic.removeprefix(prefix)).inc()
        log.error(
            "kafka_log_cut_off",
            group=group,
            topic=source.topic,
            partition=source.partition,
            committed=found.position[source],
            cut_off_at=None if cut is None else cut.offset,
            hint="Kafka lost its newest records here. This group had read them; other groups may not have. This group "
            "goes on at the cut. Try: set unclean.leader.election.enable to false, and find out whether a broker's disk was "
            "restored",
        )
        found.position[source] = first[source] if cut is None else max(first[source], cut.offset)
        known = None if cut is None or cut.offset < first[source] else cut.epoch
        found.metadata[source] = found.metadata[source]._replace(epoch=known)
        if cut is not None:
            found.fresh.add(source)
    await _stop_lost(cluster, group, found, [source for source, cut in cuts.items() if cut is None], ids)
