"""Finds records in topics by a header, without an index: reads a range of time, with limits."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from services.core.broker.contract import Broker, PartitionRange, Reader
from services.core.broker.errors import DataDamaged, OffsetOutOfRange, UnknownTopic
from services.core.broker.reading import READ_RECORDS, read_topic, scan
from services.core.broker.record import Batch, Record
from services.core.event import read_arrival
from services.core.times import date_of
from services.core.undelivered.dead_letter import Position

Header = tuple[str, bytes]
"""A name and a value."""

EARLY_MS = 60_000
"""The search begins earlier and ends later by this time: clocks differ."""
MOST_FOUND = 200
"""More records are not looked for: clients may give the same id to every event."""
MOST_HELD = 32 << 20
"""Bytes of the records that one search has found. Beyond that it looks for no more."""
_SLICE = 2 * READ_RECORDS
"""Offsets of one partition that are read before another one is continued, newest first."""


class TimeRange(NamedTuple):
    """first <= time <= last, ms."""

    first: int
    last: int


class Found(NamedTuple):
    """A record and its place."""

    position: Position
    record: Record


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one search. linger: seconds for more records of the same id, once there is one."""

    seconds: float
    records: int
    bytes: int
    linger: float = 3.0


@dataclass(slots=True)
class TopicResult:
    """complete: the whole range was read. back_to: else, everything that is younger than this was read (ms); None: unknown."""

    complete: bool = True
    back_to: int | None = None


class Progress(NamedTuple):
    """records: that were read so far. topic: that is read now. back_to: the time that was reached there, ms, if it is known."""

    records: int
    topic: str
    back_to: int | None


Show = Callable[[Progress], None]


def time_of(record: Record) -> int:
    """When ingest accepted the event, ms; of a record that others wrote, its timestamp."""
    arrival = read_arrival(record)
    return record.timestamp if arrival is None else arrival


class Budget:
    """The part of the limits that one step of a search may use."""

    def __init__(self, limits: Limits, share: float) -> None:
        self._until = time.monotonic() + limits.seconds * share
        self._records, self._bytes = limits.records * share, limits.bytes * share

    def spend(self, batch: Batch) -> None:
        self._records -= len(batch.records)
        self._bytes -= sum([len(record.value or b"") for record in batch.records])

    def end_within(self, seconds: float) -> None:
        self._until = min(self._until, time.monotonic() + seconds)

    @property
    def is_spent(self) -> bool:
        return self._records <= 0 or self._bytes <= 0 or time.monotonic() >= self._until


@dataclass(slots=True)
class _Part:
    """The unread rest of one partition: `start <= offset < end`. end None: forwards, to the first page that arrived after
    `last` (ms), or to the end."""

    topic: str
    partition: int
    start: int
    end: int | None
    last: int | None = None
    back_to: int | None = None


class Search:
    """One search. It reads on the caller's event loop, in slices, and keeps only the records that it looks for.

    by_topic: how far each topic was read. show: called after each page.
    """

    def __init__(self, broker: Broker, limits: Limits, show: Show = lambda _progress: None) -> None:
        self._broker, self._reader, self.limits, self._show = broker, broker.reader, limits, show
        self.by_topic: dict[str, TopicResult] = {}
        self.records = 0
        self._held = 0

    def budget(self, share: float) -> Budget:
        """share: of the limits, 0 to 1."""
        return Budget(self.limits, share)

    def count(self, batch: Batch, budget: Budget, back_to: int | None = None) -> None:
        """Count a page that was read."""
        self.records += len(batch.records)
        budget.spend(batch)
        self._show(Progress(self.records, batch.topic, back_to))

    async def by_arrival(
        self,
        topics: Iterable[str],
        wanted: Set[Header],
        span: TimeRange,
        budget: Budget,
        *,
        lingers: bool = False,
    ) -> list[Found]:
        """The records with one of the wanted headers, in topics whose records are about in the order of their arrival.

        lingers: once there is one, the search ends after `Limits.linger`. Topics that do not exist have none. Raises
        BrokerError kinds.
        """
        return await self._find(topics, wanted, budget, lambda topic: self._open(topic, span), lingers=lingers)

    async def by_timestamp(
        self, topics: Iterable[str], wanted: Set[Header], first_ms: int, budget: Budget
    ) -> list[Found]:
        """The same in topics whose records have the time of their writing, from this time on."""
        return await self._find(topics, wanted, budget, lambda topic: self._open_since(topic, first_ms))

    async def _find(
        self,
        topics: Iterable[str],
        wanted: Set[Header],
        budget: Budget,
        open_topic: Callable[[str], AsyncIterator[_Part]],
        *,
        lingers: bool = False,
    ) -> list[Found]:
        parts: deque[_Part] = deque()
        for topic in topics:
            if budget.is_spent:  # on Kinesis each topic takes about a second to open
                self.by_topic[topic] = TopicResult(complete=False)
                continue
            with suppress(UnknownTopic):
                parts.extend([part async for part in open_topic(topic)])
                self.by_topic.setdefault(topic, TopicResult())
        found: list[Found] = []
        while parts and not budget.is_spent and not self._has_enough(found):
            part = parts.popleft()
            if await self._read_slice(part, wanted, found, budget):
                parts.append(part)
            if found and lingers:
                budget.end_within(self.limits.linger)
        for part in parts:  # what was not read
            result = self.by_topic[part.topic]
            known = [time for time in (result.back_to, part.back_to) if time is not None]
            is_known = part.back_to is not None and (result.complete or result.back_to is not None)
            result.complete, result.back_to = False, max(known) if is_known else None
        for one in found[MOST_FOUND:]:
            self.by_topic[one.position.topic] = TopicResult(complete=False)
        return found[:MOST_FOUND]

    def _pick(self, batch: Batch, wanted: Set[Header], found: list[Found]) -> None:
        """Add the wanted records."""
        picked = _pick(batch, wanted)
        self._held += sum([_size_of(one.record) for one in picked])
        found += picked

    def _has_enough(self, found: list[Found]) -> bool:
        return len(found) >= MOST_FOUND or self._held >= MOST_HELD

    async def _open(self, topic: str, span: TimeRange) -> AsyncIterator[_Part]:
        first, last = span.first - EARLY_MS, span.last + EARLY_MS
        if not self._broker.is_contiguous(topic):
            async for part in self._open_since(topic, first):
                part.last = last
                yield part
            return
        for partition, stored in (await self._reader.describe(topic)).items():
            start, _ = await around(self._reader, topic, partition, stored, first)
            _, end = await around(self._reader, topic, partition, PartitionRange(start, stored.end), last)
            if start < end:
                yield _Part(topic, partition, start, end)

    async def _open_since(self, topic: str, first_ms: int) -> AsyncIterator[_Part]:
        contiguous = self._broker.is_contiguous(topic)
        starts = await self._reader.offsets_at(topic, date_of(first_ms))
        stored = await self._reader.describe(topic) if contiguous else {}
        for partition, start in starts.items():
            end = stored[partition].end if partition in stored else None
            if end is None or start < end:
                yield _Part(topic, partition, start, end)

    async def _read_slice(self, part: _Part, wanted: Set[Header], found: list[Found], budget: Budget) -> bool:
        """Read the newest slice. Returns whether there is more to read."""
        if part.end is None:
            async for batch in scan(self._reader, part.topic, part.partition, part.start, None):
                self._pick(batch, wanted, found)
                part.start = batch.offsets[-1] + 1
                self.count(batch, budget)
                await asyncio.sleep(0)
                if part.last is not None and time_of(batch.records[0]) > part.last:
                    break
                if budget.is_spent or self._has_enough(found):
                    return True
            return False
        begin, first = max(part.start, part.end - _SLICE), None
        stored = PartitionRange(begin, part.end)
        with suppress(OffsetOutOfRange):  # the topic was created again meanwhile
            async for batch in read_topic(
                self._reader, part.topic, part.partition, stored, page=READ_RECORDS, skips_damage=True
            ):
                self._pick(batch, wanted, found)
                first = time_of(batch.records[0]) if first is None else first
                self.count(batch, budget, first)
                await asyncio.sleep(0)
                if (budget.is_spent or self._has_enough(found)) and batch.offsets[-1] + 1 < part.end:
                    return True
        part.end, part.back_to = begin, part.back_to if first is None else first
        return begin > part.start


def _pick(batch: Batch, wanted: Set[Header]) -> list[Found]:
    return [
        Found(Position(batch.topic, batch.partition, offset), record)
        for offset, record in zip(batch.offsets, batch.records, strict=True)
        if not wanted.isdisjoint(record.headers)
    ]


def _size_of(record: Record) -> int:
    return len(record.value or b"") + sum([len(value) for _, value in record.headers])


async def around(reader: Reader, topic: str, partition: int, stored: PartitionRange, at_ms: int) -> tuple[int, int]:
    """Offsets between which the first record is that arrived at this time or later; near each other. Offsets must count records.

    It reads single records. Where one cannot be read, the range stays wide.
    """
    low, high = stored.start, stored.end
    while high - low > _SLICE:
        middle = (low + high) // 2
        try:
            batch = await reader.read(topic, partition, middle, max_records=1)
        except (DataDamaged, OffsetOutOfRange):
            break
        if batch is None or batch.damage is not None:
            break
        if time_of(batch.records[0]) < at_ms:
            low = middle
        else:
            high = middle
    return low, high
