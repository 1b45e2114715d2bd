"""Offsets: where partitions begin and end, the group's commits and their metadata, lag, and where a log was cut off.

Kafka commits the next offset to read, the contract the last processed one. This file, `consumer` and `admin` convert them.
"""

import asyncio
import re
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple, Self

from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.record.memory_records import MemoryRecords

from services.core.broker.contract import Lag, Start
from services.core.broker.errors import DataDamaged, GroupHasMembers, Unavailable, UnknownTopic
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.error_codes import CORRUPT, FENCED, raise_for, raise_for_leader
from services.core.broker.kafka.protocol import EpochEndRequest
from services.core.broker.kafka.record_batch import drop_aborted, end_of
from services.core.broker.record import TopicPartition
from services.core.event import restore_time

_PART = re.compile(r"(partitions|topic|epoch)=([0-9a-zA-Z-]{1,40})")


class CommitMetadata(NamedTuple):
    """The metadata of every commit, for the next owner of the partition. None, "": not known (an administrator made the commit).

    partitions: the topic's number of partitions when the group began. topic: the topic's id; a commit for an earlier topic
    of this name does not count. epoch: of the leader that wrote the last processed record; by it `find_cuts` finds whether
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


LATEST, EARLIEST = -1, -2
_NONE = -1
_BY_STORING = 1
"""The kind of timestamps (`message.timestamp.type`) of a batch: LogAppendTime."""
_READ_COMMITTED = 1
"""Other producers may write in transactions. Rolled-back records do not count; the end is before the first open transaction."""
_FIRST_WITH_REPLICA = 11
"""Fetch answers from this version on name a replica between the rolled-back transactions and the data."""
_FETCH_WAIT_MS = 500
REMEDY = "Try: another leader for the partition, whose copy may be intact (kafka-reassign-partitions)"


async def partitions_of(cluster: Cluster, topics: Collection[str]) -> list[TopicPartition]:
    """Every partition of these topics. Raises UnknownTopic."""
    states = await cluster.describe(list(topics))
    for topic in topics:
        if topic not in states:
            raise UnknownTopic(f"Kafka has no topic {topic!r}. Try: declare it under `streams:` in the pipe file")
    return [TopicPartition(topic, number) for topic in topics for number in sorted(states[topic].partitions)]


def by_topic(rows: Iterable[tuple[TopicPartition, Any]]) -> list[tuple[str, list[tuple[Any, ...]]]]:
    """Rows in the shape of requests: [(topic, [(partition, *values), …]), …]."""
    topics: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
    for source, values in rows:
        topics[source.topic].append((source.partition, *values))
    return list(topics.items())


Ids = Mapping[str, str]
"""The id of each topic that is meant."""


async def leaders_of(
    cluster: Cluster, sources: Collection[TopicPartition], ids: Ids | None = None
) -> dict[TopicPartition, int]:
    """The leading node of each. Raises UnknownTopic, and Unavailable when one has none, or is not known.

    ids: if given, the leaders are those that most nodes agree on, and Unavailable is raised as well when a leader does not know a
    topic by its id. A node that hears no news still leads the partitions of a topic that was deleted and created again, and would
    answer for the deleted one.
    """
    topics = sorted({source.topic for source in sources})
    states = await (cluster.describe(topics) if ids is None else cluster.describe_agreed(topics))
    leaders = {}
    for source in sources:
        state = states.get(source.topic)
        if state is None:
            raise UnknownTopic(f"Kafka has no topic {source.topic!r}")
        if source.partition not in state.partitions:  # just added, or the topic was made anew with fewer
            raise Unavailable(f"a node knows no {source.topic}[{source.partition}]")
        leaders[source] = state.partitions[source.partition].leader
        if leaders[source] < 0:
            raise Unavailable(f"{source.topic}[{source.partition}] has no leader now")
    if ids is not None:
        led: defaultdict[int, set[str]] = defaultdict(set)
        for source, node in leaders.items():
            led[node].add(source.topic)
        await asyncio.gather(
            *(_confirm(cluster, node, {name: ids[name] for name in names}) for node, names in led.items())
        )
    return leaders


async def _confirm(cluster: Cluster, node: int, ids: Ids) -> None:
    """The node has heard of these topics; it forgets none of them for an earlier one."""
    found = await cluster.describe_at(node, sorted(ids))
    for topic, wanted in ids.items():
        if topic not in found or found[topic].id != wanted:
            raise Unavailable(f"node {node} knows another topic {topic!r} than the one that is read")


_Rows = list[tuple[str, list[tuple[Any, ...]]]]


async def _ask_nodes(
    cluster: Cluster,
    nodes: Mapping[TopicPartition, int],
    asked: Mapping[TopicPartition, int],
    make_request: Callable[[_Rows], Any],
) -> list[Any]:
    """Ask the node of each partition about its number in `asked`, in one request for each node. Gives the answers."""
    by_node: defaultdict[int, list[tuple[TopicPartition, tuple[int]]]] = defaultdict(list)
    for source, number in asked.items():
        by_node[nodes[source]].append((source, (number,)))
    return await asyncio.gather(*(cluster.ask(node, make_request(by_topic(rows))) for node, rows in by_node.items()))


async def list_offsets(
    cluster: Cluster, when: Mapping[TopicPartition, int], ids: Ids | None = None
) -> dict[TopicPartition, int]:
    """Offset by partition for LATEST, EARLIEST or a time in ms (the first record not older; absent when there is none).

    ids: as in `leaders_of`, and so everywhere below.
    """
    found: dict[TopicPartition, int] = {}
    leaders = await leaders_of(cluster, when, ids)
    for answer in await _ask_nodes(cluster, leaders, when, lambda rows: OffsetRequest(-1, _READ_COMMITTED, rows)):
        for topic, partitions in answer.topics:
            for partition, code, _, offset in partitions:
                raise_for_leader(code, f"offsets of {topic}[{partition}]", f"Describe on topic {topic}")
                if offset != _NONE:
                    found[TopicPartition(topic, partition)] = offset
    return found


async def ends(
    cluster: Cluster, sources: Collection[TopicPartition], ids: Ids | None = None
) -> dict[TopicPartition, int]:
    """One behind the last readable record, by partition."""
    return await list_offsets(cluster, dict.fromkeys(sources, LATEST), ids)


async def starts(
    cluster: Cluster, sources: Collection[TopicPartition], start: Start, ids: Ids | None = None
) -> dict[TopicPartition, int]:
    """Where a read from `start` begins, by partition."""
    if not isinstance(start, datetime):
        return await list_offsets(cluster, dict.fromkeys(sources, EARLIEST if start == "earliest" else LATEST), ids)
    millis = max(0, round(start.timestamp() * 1000))
    dated = await list_offsets(cluster, dict.fromkeys(sources, millis), ids)
    undated = [source for source in sources if source not in dated]
    return dated | (await ends(cluster, undated, ids) if undated else {})


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
            if offset != _NONE:
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


class Fetched(NamedTuple):
    """data: raw batches. aborted: (producer id, first offset) of the rolled-back transactions in them."""

    data: bytes
    aborted: Collection[tuple[int, int]] = ()


async def fetch(
    cluster: Cluster, source: TopicPartition, node: int, offset: int, *, max_bytes: int = 1 << 20
) -> Fetched:
    """The raw batches from the one with `offset` on: at least one, cut off at `max_bytes`. Empty when there is none. Raises
    DataDamaged when the node itself does not find it."""
    wanted = [(source.topic, [(source.partition, offset, max_bytes)])]
    answer = await cluster.ask(node, FetchRequest(_FETCH_WAIT_MS, 1, max_bytes, _READ_COMMITTED, wanted))
    for _, partitions in answer.topics:
        for _, code, *rest in partitions:
            if code == CORRUPT:
                ranges = ((source.partition, offset, offset),)
                raise DataDamaged(source.topic, ranges, f"Kafka cannot read its own log. {REMEDY}")
            raise_for_leader(
                code, f"read {source.topic}[{source.partition}] at {offset}", f"Read on topic {source.topic}"
            )
            aborted = rest[-3] if answer.API_VERSION >= _FIRST_WITH_REPLICA else rest[-2]
            return Fetched(bytes(rest[-1] or b""), aborted or ())
    return Fetched(b"")


class Times(NamedTuple):
    """Of a record, ms. event: as in `Record`. stored: None in a topic that keeps only the writer's time."""

    event: int
    stored: int | None = None


async def time_of(cluster: Cluster, source: TopicPartition, node: int, offset: int) -> Times | None:
    """Of the first record at or behind `offset`; None when there is none (only marks of transactions). Raises DataDamaged when
    it cannot be read."""
    while True:
        fetched = await fetch(cluster, source, node, offset)
        try:
            found = _first_time(drop_aborted(*fetched), offset)
        except Exception as error:  # altered bytes make a decoder raise anything
            ranges = ((source.partition, offset, offset),)
            raise DataDamaged(source.topic, ranges, f"{error!r}. {REMEDY}") from error
        if found is not None:
            return found
        end = end_of(fetched.data, offset)
        if end == offset:
            return None
        offset = end


def _first_time(data: bytes, offset: int) -> Times | None:
    batches = MemoryRecords(data)
    while batches.has_next():
        batch = batches.next_batch()
        if batch.is_control_batch:
            continue
        for record in batch:
            if record.offset >= offset:
                event, _ = restore_time(record.timestamp, tuple(record.headers))
                return Times(event, record.timestamp if record.timestamp_type == _BY_STORING else None)
    return None


async def _time_or_now(cluster: Cluster, source: TopicPartition, node: int, offset: int) -> Times | None:
    """As `time_of`; where the record cannot be read, its age counts from now."""
    try:
        return await time_of(cluster, source, node, offset)
    except DataDamaged:
        return Times(time.time_ns() // 1_000_000)


_NO_LAG = Lag(0, 0)


class LagMeter:
    """Measures lag. A small read finds the time of a partition's oldest record; it is kept until the position moves."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._times: dict[TopicPartition, tuple[int, Times | None]] = {}

    async def measure(
        self, positions: Mapping[TopicPartition, int], ids: Ids | None = None
    ) -> dict[TopicPartition, Lag]:
        """Lag by partition, counted from the next offset to process. Raises UnknownTopic, Unavailable."""
        if not positions:
            return {}
        end = await ends(self._cluster, positions, ids)
        behind = {source: offset for source, offset in positions.items() if offset < end[source]}
        if unknown := {source: offset for source, offset in behind.items() if not self._is_known(source, offset)}:
            await self._find_times(unknown, ids)
        now = time.time_ns() // 1_000_000
        lags = dict.fromkeys(positions, _NO_LAG)
        for source, offset in behind.items():
            oldest = self._times[source][1]
            if oldest is not None:  # else there are only marks of transactions and rolled-back records
                since = oldest.event if oldest.stored is None else oldest.stored
                lags[source] = Lag(end[source] - offset, max(0, now - since), oldest.stored)
        return lags

    def _is_known(self, source: TopicPartition, offset: int) -> bool:
        at, time_of_it = self._times.get(source, (-1, None))
        return at == offset and time_of_it is not None

    async def _find_times(self, positions: Mapping[TopicPartition, int], ids: Ids | None) -> None:
        """If the position itself has expired, the oldest stored record counts."""
        leaders = await leaders_of(self._cluster, positions, ids)
        kept = await list_offsets(self._cluster, dict.fromkeys(positions, EARLIEST), ids)
        reads = [
            _time_or_now(self._cluster, source, leaders[source], max(offset, kept[source]))
            for source, offset in positions.items()
        ]
        for (source, offset), found in zip(positions.items(), await asyncio.gather(*reads), strict=True):
            self._times[source] = (offset, found)


# Every batch carries the epoch of the leader that wrote it. A log that lost its end (an unclean election, a restored disk) goes
# on at lower offsets under a higher epoch. The position alone does not show this: once there are enough new records, the position
# is valid again, and the records between the cut and the position would be skipped. So a commit carries the epoch of its last
# record, and the next owner asks the leader where that epoch ended (KIP-320).

_KEPT = 100


class EpochHistory:
    """The epochs that wrote one partition's records, each with its first offset, in the order of reading."""

    def __init__(self, starts: Iterable[tuple[int, int]] = ()) -> None:
        self._starts = list(starts)

    def record(self, first: int, epoch: int) -> None:
        """Records from offset `first` on were written under `epoch`. This replaces earlier entries about them."""
        while self._starts and self._starts[-1][0] >= first:
            self._starts.pop()
        if not self._starts or self._starts[-1][1] != epoch:
            self._starts.append((first, epoch))
            del self._starts[:-_KEPT]

    def find(self, offset: int) -> int | None:
        """The epoch of the record at this offset; None when it is not known."""
        index = bisect_right(self._starts, offset, key=lambda start: start[0])
        return self._starts[index - 1][1] if index else None

    def between(self, first: int, last: int) -> list[tuple[int, int]]:
        """The epochs of the records from `first` to `last`, each as (first offset, epoch)."""
        epoch = self.find(first)
        known = [] if epoch is None else [(first, epoch)]
        return known + [start for start in self._starts if first < start[0] <= last]


class Cut(NamedTuple):
    """Where a log was cut off. epoch: of the last record below that offset, by which a second cut is found; None: not known."""

    offset: int
    epoch: int | None


async def find_cuts(
    cluster: Cluster,
    read: Mapping[TopicPartition, tuple[int, int]],
    ids: Ids | None = None,
    *,
    fetched: Mapping[TopicPartition, int] | None = None,
) -> dict[TopicPartition, Cut | None]:
    """The partitions whose log was cut off below `read` (next offset, epoch of the last record), with the cut.

    None: the offset is unknown, because no node knows an epoch that high. fetched: epochs of records that were fetched since.
    Raises UnknownTopic, and Unavailable, also when a leader is asked that knows less than others: it hears no news, and its log
    is as it was before another one became leader.
    """
    if not read:
        return {}
    epochs = {source: epoch for source, (_, epoch) in read.items()}
    leaders = await leaders_of(cluster, epochs, ids)
    for asked in (fetched or {}, epochs):
        found = await _epoch_ends(cluster, leaders, asked)
        await _refuse_newer(cluster, {source: asked[source] for source, (_, end) in found.items() if end < 0})
    return {
        source: Cut(end, epoch if epoch >= 0 else None) if end >= 0 else None
        for source, (epoch, end) in found.items()
        if end < read[source][0]
    }


async def _epoch_ends(
    cluster: Cluster, leaders: Mapping[TopicPartition, int], epochs: Mapping[TopicPartition, int]
) -> dict[TopicPartition, tuple[int, int]]:
    """(the newest epoch that is not newer, where it ended), as these nodes know it; -1 where they know none that high."""
    found = {}
    for answer in await _ask_nodes(cluster, leaders, epochs, EpochEndRequest):
        for topic, partitions in answer.topics:
            for code, partition, epoch, end in partitions:
                raise_for_leader(
                    code, f"where a leader's epoch ended in {topic}[{partition}]", f"Describe on topic {topic}"
                )
                found[TopicPartition(topic, partition)] = (epoch, end)
    return found


async def _refuse_newer(cluster: Cluster, epochs: Mapping[TopicPartition, int]) -> None:
    """Raise Unavailable when any node knows an epoch that high: the leader that was asked, which does not, is none any more.

    It would say that nothing was cut off, and what the newer leader stored in place of the lost records would be skipped.
    """
    if not epochs:
        return
    async for states in cluster.describe_by_node(sorted({source.topic for source in epochs})):
        for source, epoch in epochs.items():
            state = states.get(source.topic)
            known = None if state is None else state.partitions.get(source.partition)
            if known is not None and known.epoch >= epoch:
                raise Unavailable(
                    f"{source.topic}[{source.partition}]: a former leader was asked, not that of epoch {epoch}"
                )
