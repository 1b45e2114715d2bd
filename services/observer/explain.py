"""Names the missing events of a minute, and the place where each was last found."""

import asyncio
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from pyroaring import BitMap

from services.core.broker.contract import PartitionRange, Reader
from services.core.broker.errors import UnknownTopic
from services.core.broker.reading import READ_RECORDS, scan
from services.core.broker.record import Batch, Record
from services.core.event import ORIGIN, Origin, is_of_topic, offset_of, read_id
from services.core.ledger.report import Node, Span, longest_wait_s
from services.core.pipe_file.topic_names import DELAYS_S, RETRY_IN, delay_topic, output_topic, retry_topic
from services.core.undelivered.retry_state import BadRetryRecord, read_wait
from services.observer.ledger.flow import Step
from services.observer.ledger.origins import Origins, SequenceKey
from services.observer.ledger.settlement import StepSets
from services.observer.ledger.table import Table

Found = tuple[str | None, str, int, int]
"""Event id, topic, partition, offset."""


class Search:
    """found: by key, the last record. count: records that were read. complete: every range was read to its end."""

    def __init__(self, reader: Reader, most: int) -> None:
        self._reader, self._most = reader, most
        self.found: dict[Any, Found] = {}
        self.count = 0
        self.complete = True

    async def read(
        self,
        topic: str,
        partition: int,
        start: int | None,
        end: int | None,
        wanted: Collection[Hashable],
        key: Callable[[Record], Hashable],
        stored: PartitionRange | None = None,
    ) -> None:
        """Search this range for wanted records, until all are found or `most` were read. Raises as `scan`."""
        async for batch in scan(self._reader, topic, partition, start, end, stored):
            if self.count >= self._most:
                self.complete = False
                return
            self.count += len(batch.records)
            self._find(batch, wanted, key)
            if all(one in self.found and self.found[one][1] == topic for one in wanted):
                return
            await asyncio.sleep(0)

    def _find(self, batch: Batch, wanted: Collection[Hashable], key: Callable[[Record], Hashable]) -> None:
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            if (found := key(record)) in wanted:
                self.found[found] = read_id(record), batch.topic, batch.partition, offset


def read_origin(record: Record) -> bytes | None:
    """The key of a record in a stream."""
    return record.header(ORIGIN)


EARLY_S = 60
"""The search begins earlier by this time: clocks differ."""

Key = tuple[bytes, str | None]
"""An origin and the destination for which it waited."""


async def search_retrier(search: Search, reader: Reader, table: Table, pipe: str, wanted: Sequence[Key]) -> None:
    """Search the retrier's topics for these, by their newest reported attempt. Raises BrokerError kinds.

    Against the direction of the events: first `.retry`, then the delays from the shortest on, then retry-in. The time of a
    record in them is when it was written.
    """
    spans = _find_spans(table, pipe, wanted)
    if not spans:
        return
    origins = {origin for origin, _ in spans}

    def key_of(record: Record) -> Key | None:
        origin = record.header(ORIGIN)
        if origin not in origins:
            return None
        try:
            whose, destination, due = read_wait(record)
        except BadRetryRecord:
            return None
        span = spans.get((origin, destination)) if whose == pipe else None
        return (origin, destination) if span is not None and span[0] <= due // 1000 < span[1] else None

    first = min(span[0] - longest_wait_s(span) for span in spans.values()) - EARLY_S
    for topic in _topics(pipe, max(map(longest_wait_s, spans.values()))):
        left = spans.keys() - search.found.keys()
        if not left or not search.complete:
            return
        try:
            starts = await reader.offsets_at(topic, datetime.fromtimestamp(first, UTC))
        except UnknownTopic:
            continue
        for partition, start in starts.items():
            await search.read(topic, partition, start, None, left, key_of)


def _topics(pipe: str, wait_s: int) -> Iterator[str]:
    yield retry_topic(pipe)
    yield from (delay_topic(delay) for delay in DELAYS_S if delay <= wait_s)
    yield RETRY_IN


def _find_spans(table: Table, pipe: str, wanted: Sequence[Key]) -> dict[Key, Span]:
    """The newest span in which each was due."""
    found: dict[Key, Span] = {}
    for destination in {destination for _, destination in wanted}:
        mine = Origins()
        for origin in (Origin.unpack(key[0]) for key in wanted if key[1] == destination):
            mine.add(SequenceKey(origin.incarnation, origin.partition), BitMap([origin.sequence]))
        for span, origins in table.handed_over(Step("expel", pipe, destination)):
            found |= {(origin.pack(), destination): span for origin in (origins & mine).first(len(wanted))}
    return found


MAX_NAMED = 1_000
MAX_READ = 300_000
"""The most records that are read for one answer."""


class Missing(msgspec.Struct, frozen=True):
    """One event. missing_at, destination: the step that did not settle it. seen_by: the last step that settled it.

    topic, partition, offset, event_id: of its last record, in the pipe's streams or, handed over to the retrier, in its topics;
    None when it was not found. The offset is a text: not every JSON parser keeps numbers of so many digits.
    """

    origin: str
    missing_at: Node
    destination: str | None
    seen_by: Node
    event_id: str | None = None
    topic: str | None = None
    partition: int | None = None
    offset: str | None = None


class Explanation(msgspec.Struct, frozen=True):
    """named: at most `MAX_NAMED` of the missing events. complete: every range that can have them was read to its end."""

    pipe: str
    minute: int
    missing: int
    named: tuple[Missing, ...]
    records_read: int
    complete: bool


async def explain(table: Table, reader: Reader, pipe: str, minute: int) -> Explanation:
    """Name the missing events of a pipe's minute. Reads at most `MAX_READ` records. Raises KeyError, BrokerError kinds."""
    settlement = table.settlement(pipe, minute)
    missing = [one for step in settlement.steps for one in _name(step, table, pipe)]
    named = missing[:MAX_NAMED]
    wanted = {one.origin.encode() for one in named}
    search = Search(reader, MAX_READ)
    if wanted:
        for stream in table.flow.pipes[pipe].sources:
            if stream in table.flow.others:
                await _search_topic(search, reader, stream, wanted)
                continue
            for partition, stored in (await _partitions(reader, stream)).items():
                start, end = table.stored_between(stream, partition, minute)
                await search.read(stream, partition, start, end, wanted, read_origin, stored)
        passed = table.flow.pipes[pipe].transforms
        if behind := {one.origin.encode() for one in named if passed and one.seen_by != "ingest"}:
            await _search_output(search, reader, output_topic(pipe), minute, behind)
    again = Search(reader, MAX_READ - search.count)
    retried = [_key(one) for one in named if "retrier" in (one.missing_at, one.seen_by)]
    await search_retrier(again, reader, table, pipe, retried)
    return Explanation(
        pipe,
        minute,
        len(settlement.missing()),
        tuple(_place(one, again.found.get(_key(one)) or search.found.get(one.origin.encode())) for one in named),
        search.count + again.count,
        search.complete and again.complete,
    )


def _key(missing: Missing) -> tuple[bytes, str | None]:
    return missing.origin.encode(), missing.destination


def _place(missing: Missing, found: Found | None) -> Missing:
    if found is None:
        return missing
    event_id, topic, partition, offset = found
    return msgspec.structs.replace(missing, event_id=event_id, topic=topic, partition=partition, offset=str(offset))


def _name(step: StepSets, table: Table, pipe: str) -> Iterable[Missing]:
    node, transforms = step.step.node, table.flow.pipes[pipe].transforms
    seen_by: Node = "expel" if node == "retrier" else "transform" if transforms and node == "expel" else "ingest"
    again, stored = Origins(), Origins()
    if node == "expel":
        again, stored = (step.missing & lost for lost in table.lost_on_return(step.step))
    places: tuple[tuple[Origins, Node], ...] = (
        (step.missing - again, seen_by),
        (again - stored, "retrier"),
        (stored, "expel"),
    )
    for those, last in places:
        for origin in those.first(MAX_NAMED):
            yield Missing(origin.pack().decode(), node, step.step.destination, last)


async def _search_topic(search: Search, reader: Reader, stream: str, wanted: set[bytes]) -> None:
    """In a topic of others, where the origin is the place."""
    places: dict[int, list[int]] = {}
    for origin in map(Origin.unpack, wanted):
        if is_of_topic(origin.incarnation):
            places.setdefault(origin.partition, []).append(offset_of(origin))
    for partition, stored in (await _partitions(reader, stream)).items():
        offsets = sorted(places.get(partition, ()))
        while offsets:
            first = offsets[0]
            near = [offset for offset in offsets if offset - first < READ_RECORDS]
            await search.read(stream, partition, first, near[-1] + 1, wanted, read_origin, stored)
            offsets = offsets[len(near) :]


async def _search_output(search: Search, reader: Reader, topic: str, minute: int, wanted: set[bytes]) -> None:
    """By the time of the records: no report has the offsets of a transform's output. To the end: on Kafka the date is compared
    with when they were stored, and a transform may have been behind."""
    starts = await reader.offsets_at(topic, datetime.fromtimestamp((minute - 1) * 60, UTC))
    for partition, start in starts.items():
        await search.read(topic, partition, start, None, wanted, read_origin)


async def _partitions(reader: Reader, topic: str) -> dict[int, PartitionRange]:
    try:
        return await reader.describe(topic)
    except UnknownTopic:
        return {}
