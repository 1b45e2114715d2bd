"""Reports the events of topics of others as accepted: there is no ingest for them, so whoever reads them first does it.

Several readers may read the same event, and each reports it, in the minute in which it has read it. The observer counts the
event in the minute of the report that comes first (`services/observer/ledger/origin_sets.py`). So the loss table of such a stream
begins at its first reader, and says nothing about what happened before.

The reports are those of an ingest of the stream, because the observer counts events by the stream in which they came.
"""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress

from services.core import metrics
from services.core.broker.contract import Broker
from services.core.broker.errors import GroupHasMembers
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record
from services.core.event import ORIGIN, TOPIC_NUMBERS, Origin, read_arrival
from services.core.ledger.accumulator import SetKey, Sets
from services.core.ledger.minute import MINUTE_MS
from services.core.ledger.reporter import Reporter, new_instance

LONGEST_MS = 86_400_000
"""The observer keeps the minutes of a day."""


def find_young(records: Sequence[Record], now: int) -> Sequence[Record]:
    """Those that were stored in the last day, by their timestamps, and those without a timestamp. now: ms.

    Of older ones the observer may have forgotten that others have read them; then they would be missing there.
    """
    oldest = now - LONGEST_MS
    if not records or min(_stored(records[0]), _stored(records[-1])) >= oldest:
        return records
    return [record for record in records if not 0 < _stored(record) < oldest]


def _stored(record: Record) -> int:
    return read_arrival(record) or 0


def add_read(sets: Sets, records: Sequence[Record], minute: int) -> None:
    """Add the origins of these records of one partition, in the order of their offsets, as accepted in this minute."""
    if not records:
        return
    first, last = _origin(records[0]), _origin(records[-1])
    if (
        first is not None
        and last is not None
        and first[:2] == last[:2]
        and last.sequence - first.sequence + 1 == len(records)
    ):
        sets.add_range(SetKey("accepted", *first[:2], minute), first.sequence, len(records))
        return
    numbers: dict[tuple[str, int], list[int]] = {}
    for origin in map(_origin, records):
        if origin is not None:
            numbers.setdefault(origin[:2], []).append(origin.sequence)
    for place, found in numbers.items():
        sets.add(SetKey("accepted", *place, minute), found)


def _origin(record: Record) -> Origin | None:
    return Origin.read(record.header(ORIGIN))


class LateStart:
    """A group that begins at the newest records of topics of others. Other groups may read what was stored before and report it
    as accepted; this one skips it. Without a report it would be missing here.

    So the report is durable before the group begins, and the group begins where the report ends. A crash in between repeats both.
    """

    def __init__(self, broker: Broker, group: str, topics: Collection[str]) -> None:
        self._broker, self._group, self._topics = broker, group, topics
        self._ends: dict[str, dict[int, int]] = {}
        """Of the topics that the group has not begun."""

    async def find_skipped(self, sets: Sets) -> None:
        """Add what is stored now in topics that the group has not begun. Raises BrokerError kinds."""
        self._ends = {}
        for topic in self._topics:
            if not await self._broker.admin.has_begun(self._group, topic):
                stored = await self._broker.reader.describe(topic)
                for partition, one in stored.items():
                    await self._skip(sets, topic, partition, one.start, one.end)
                self._ends[topic] = {partition: one.end for partition, one in stored.items()}

    async def begin(self) -> None:
        """Let the group begin behind what `find_skipped` added, which is reported now. Raises BrokerError kinds.

        While the group has members it begins at their join, a moment later: then `skip_rest` adds what came in between.
        """
        for topic in list(self._ends):
            before = {partition: end - 1 for partition, end in self._ends[topic].items()}
            with suppress(GroupHasMembers):
                await self._broker.admin.set_committed(self._group, topic, before)
                del self._ends[topic]

    async def skip_rest(self, sets: Sets) -> None:
        """Call it after the join. Raises BrokerError kinds."""
        for topic, ends in self._ends.items():
            for partition, position in (await self._broker.admin.positions(self._group, topic)).items():
                await self._skip(sets, topic, partition, ends.get(partition, position), position)
        self._ends = {}

    async def _skip(self, sets: Sets, topic: str, partition: int, start: int, end: int) -> None:
        """Add these offsets."""
        batch = None if start >= end else await self._broker.reader.read(topic, partition, start, max_records=1)
        origin = None if batch is None or batch.damage is not None else _origin(batch.records[0])
        if origin is None:
            return
        run = origin.incarnation.rpartition("e")[0]
        for epoch in range(start // TOPIC_NUMBERS, (end - 1) // TOPIC_NUMBERS + 1):
            first = max(start - epoch * TOPIC_NUMBERS, 0)
            last = min(end - epoch * TOPIC_NUMBERS, TOPIC_NUMBERS)
            sets.add_range(SetKey("skipped", f"{run}e{epoch}", partition), first, last - first)


class FirstReader:
    """The reports of one reader about some streams. Not thread-safe."""

    def __init__(self, producer: Producer, streams: Collection[str]) -> None:
        """streams: those whose topics are others'."""
        self._reporters = {
            stream: Reporter(producer, new_instance(), "ingest", stream, has_backlog=False) for stream in streams
        }

    def add(self, batch: Batch) -> None:
        """This batch was polled. Batches of other topics, and damaged ones, are ignored."""
        reporter = self._reporters.get(batch.topic)
        if reporter is not None and batch.damage is None:
            now = time.time_ns() // 1_000_000
            records = find_young(batch.records, now)
            if old := len(batch.records) - len(records):
                metrics.LEDGER_OUTSIDE.labels("ingest", batch.topic, "old").inc(old)
            add_read(reporter.sets, records, now // MINUTE_MS)

    async def report(self, *, closed: bool = False) -> None:
        """As `Reporter.report`, for each stream. Raises Unavailable."""
        for reporter in self._reporters.values():
            await reporter.report(closed=closed)
