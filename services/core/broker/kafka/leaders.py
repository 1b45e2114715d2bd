"""What the leaders of partitions answer: where a log begins and ends, its records from an offset on, and a group's lag."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.record.memory_records import MemoryRecords

from services.core.broker.contract import Lag, Start
from services.core.broker.errors import DataDamaged, Unavailable, UnknownTopic
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.error_codes import CORRUPT, raise_for_leader
from services.core.broker.kafka.record_batch import drop_aborted, end_of
from services.core.broker.record import TopicPartition
from services.core.event import restore_time

LATEST, EARLIEST = -1, -2
NONE = -1
"""No offset, in answers."""
_BY_STORING = 1
"""The kind of timestamps (`message.timestamp.type`) of a batch: LogAppendTime."""
_READ_COMMITTED = 1
"""Other producers may write in transactions. Rolled-back records do not count; the end is before the first open transaction."""
_FIRST_WITH_REPLICA = 11
"""Fetch answers from this version on name a replica between the rolled-back transactions and the data."""
_FETCH_WAIT_MS = 500
REMEDY = "Try: make another replica the leader (kafka-reassign-partitions). Its copy may be intact"


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


async def ask_nodes(
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
    for answer in await ask_nodes(cluster, leaders, when, lambda rows: OffsetRequest(-1, _READ_COMMITTED, rows)):
        for topic, partitions in answer.topics:
            for partition, code, _, offset in partitions:
                raise_for_leader(code, f"offsets of {topic}[{partition}]", f"Describe on topic {topic}")
                if offset != NONE:
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
