"""Where a member begins to read a partition that it was just given.

Behind the group's commit. Without one at `Start`, and that position is committed at once: else a group that began at
"latest" would begin there again after every restart, and skip what was sent meanwhile; and retention could pass a group
that never committed without anybody noticing.

Three commits are not believed. One that Kafka has expired: the group is on record (`begun`), so it stops there and does not
begin anew. One for a topic that had the same name: the group begins with the oldest record of the new one. One beyond
where the log was cut off (`leader_epochs`): the group goes on at the cut.

A partition that was added to the topic after the group began is read from its beginning, whatever `Start` says: its first
records are new. How many partitions there were when the group began travels as a note with every commit.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import structlog

from services.core import metrics
from services.core.broker.contract import Start, start_in
from services.core.broker.errors import PositionLost, UnknownTopic
from services.core.broker.kafka.begun import Begun, BegunGroups
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.commit_note import CommitNote
from services.core.broker.kafka.damage import Fault
from services.core.broker.kafka.leader_epochs import find_cuts
from services.core.broker.kafka.offsets import EARLIEST, Committed, ends, fetch_committed, list_offsets, starts
from services.core.broker.record import TopicPartition

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Placement:
    """position: the next offset to read, by partition. fresh: those of them to be committed at once.

    lost: partitions whose commit is gone, with what to raise; their position is the oldest record's, and not to be read from.
    notes: for the commits of this ownership. begun: for the record, once the fresh ones are committed.
    """

    position: dict[TopicPartition, int] = field(default_factory=dict)
    fresh: set[TopicPartition] = field(default_factory=set)
    lost: dict[TopicPartition, Fault] = field(default_factory=dict)
    notes: dict[TopicPartition, CommitNote] = field(default_factory=dict)
    begun: dict[TopicPartition, Begun] = field(default_factory=dict)


async def place(
    cluster: Cluster, begun: BegunGroups, group: str, sources: Collection[TopicPartition], start: Start
) -> Placement:
    """Decide, changing nothing. Raises UnknownTopic, Unavailable."""
    topics = sorted({source.topic for source in sources})
    states = await cluster.describe(topics)
    if missing := set(topics) - states.keys():
        raise UnknownTopic(f"Kafka has no topic {min(missing)!r}. Try: declare it under `streams:` in the pipe file")
    everything = [TopicPartition(topic, number) for topic in topics for number in sorted(states[topic].partitions)]
    ids = {topic: states[topic].id for topic in topics}
    committed = await fetch_committed(cluster, group, everything)
    on_record = await begun.of(group, everything)
    live = {source: row for source, row in committed.items() if row.note.topic in ("", ids[source.topic])}
    known = {source: row for source, row in on_record.items() if row.topic == ids[source.topic]}
    expired = known.keys() - committed.keys()
    replaced = {source.topic for source in (committed.keys() - live) | (on_record.keys() - known)}
    counts = count_at_beginning(everything, live, known)
    placement = Placement()
    wanted: dict[TopicPartition, Start] = {}
    for source in sources:
        epoch = states[source.topic].partitions[source.partition].epoch
        placement.notes[source] = CommitNote(counts[source.topic], ids[source.topic], epoch if epoch >= 0 else None)
        placement.begun[source] = Begun(ids[source.topic], counts[source.topic])
        if source in live:
            placement.position[source] = live[source].position
            placement.notes[source] = placement.notes[source]._replace(epoch=live[source].note.epoch)
            continue
        if source.topic in replaced:
            metrics.BROKER_MADE_ANEW.labels(group, source.topic).inc()
            log.warning(
                "stream_made_anew", group=group, topic=source.topic, partition=source.partition, hint=_MADE_ANEW
            )
        is_new = source.topic in replaced or source.partition >= counts[source.topic]
        wanted[source] = "earliest" if is_new or source in expired else start_in(source.topic, start)
    for beginning in set(wanted.values()):
        those = [source for source, each in wanted.items() if each == beginning]
        placement.position.update(await starts(cluster, those, beginning))
    placement.fresh.update(wanted.keys() - expired)
    await _stop_lost(cluster, group, placement, [source for source in wanted if source in expired])
    await _go_to_cuts(cluster, group, placement)
    return placement


_MADE_ANEW = "it is read from its oldest record; what the group had not read of the old topic is gone"


def count_at_beginning(
    everything: Collection[TopicPartition],
    committed: Mapping[TopicPartition, Committed],
    begun: Mapping[TopicPartition, Begun],
) -> dict[str, int]:
    """Per topic: the partitions when the group began, as its commits and the record say; those of now when neither does."""
    counts: dict[str, int] = {}
    for source in everything:
        counts[source.topic] = counts.get(source.topic, 0) + 1
    said = [(source.topic, row.note.partitions) for source, row in committed.items()]
    said += [(source.topic, row.partitions) for source, row in begun.items()]
    for topic, count in said:
        if count is not None:
            counts[topic] = min(counts[topic], count)
    return counts


async def _stop_lost(cluster: Cluster, group: str, placement: Placement, lost: Collection[TopicPartition]) -> None:
    if not lost:
        return
    end = await ends(cluster, lost)
    for source in lost:
        placement.lost[source] = _lost(group, source, placement.position[source], end[source])


def _lost(group: str, source: TopicPartition, start: int, end: int) -> Fault:
    return lambda: PositionLost(group, *source, start, end)


async def _go_to_cuts(cluster: Cluster, group: str, placement: Placement) -> None:
    """Where the log was cut off below the commit, go on at the cut: what is read there now was written since."""
    read = {
        source: (placement.position[source], note.epoch)
        for source, note in placement.notes.items()
        if note.epoch is not None and source not in placement.fresh and source not in placement.lost
    }
    cuts = await find_cuts(cluster, read)
    first = await list_offsets(cluster, dict.fromkeys(cuts, EARLIEST))
    for source, cut in cuts.items():
        metrics.BROKER_LOGS_CUT_OFF.labels(group, source.topic).inc()
        log.error(
            "kafka_log_cut_off",
            group=group,
            topic=source.topic,
            partition=source.partition,
            committed=placement.position[source],
            cut_off_at=cut,
            hint="Kafka lost its newest records here; this group had read them, others may not have. It goes on at "
            "the cut. Try: unclean.leader.election.enable false, and see whether a broker's disk was restored",
        )
        placement.position[source] = first[source] if cut is None else max(first[source], cut)
        placement.notes[source] = placement.notes[source]._replace(epoch=None)
        if cut is not None:
            placement.fresh.add(source)
    await _stop_lost(cluster, group, placement, [source for source, cut in cuts.items() if cut is None])
