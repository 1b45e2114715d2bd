"""Reports on behalf of an ingest process that ended without them, made from the events in its stream.

The reports are appended to the telemetry topic like any other: a restart of the observer finds them there. They have no
reaches: those say what existed at a report's time, and this was read later.
"""

import asyncio
from collections.abc import AsyncIterator, Collection

import msgspec
import structlog
from pyroaring import BitMap

from services.core import metrics
from services.core.broker.contract import Reader
from services.core.broker.reading import scan
from services.core.broker.record import Record
from services.core.event import ORIGIN, Origin, read_arrival
from services.core.ledger.minute import MINUTE_MS, minute_of
from services.core.ledger.report import OriginSet, Report, pack_numbers
from services.observer.ledger.flow import Step
from services.observer.ledger.table import Table

log = structlog.get_logger()

_REPORT_NUMBERS = 100_000
"""So many origins are put into one report: scattered ones take two bytes each."""
NEAR_MS = 10 * MINUTE_MS
UNKNOWN_RECORDS = 3_000_000
"""Read at most for an incarnation that never reported: most of a minute. What is not found by then is not in the table."""
UNKNOWN = "stranger-"
"""Begins the instance's name in reports about incarnations that never reported."""


async def recover(table: Table, reader: Reader, now: int) -> AsyncIterator[Report]:
    """The missing reports, by instance; the last one of each instance is marked as closed.

    Append each and apply it to the table before the next is asked for. Raises BrokerError kinds; call again then. Reads from
    the last report's reach, or from the last offset that is known to be older; a whole partition only when none is.
    """
    for stream, instance, at_ms, incarnations in table.silent_ingests(now):
        head = Report(node="ingest", instance=instance, pipe=stream, at_ms=at_ms)
        async for report in _read_out(table, reader, head, at_ms, incarnations):
            yield report
        yield msgspec.structs.replace(head, closed=True)
    for incarnation, streams, first in table.unknown_incarnations(now):
        async for report in _find_unknown(table, reader, incarnation, streams, first, now):
            yield report


async def _find_unknown(
    table: Table, reader: Reader, incarnation: str, streams: list[str], first: int, now: int
) -> AsyncIterator[Report]:
    """Near the time at which it was first named; else in all whose minutes are kept: a step may have been behind.

    An event of an older minute came back long after it was counted: a letter that was redriven, a group that was rewound.
    """
    heads = [
        Report(node="ingest", instance=f"{UNKNOWN}{incarnation}", pipe=stream, at_ms=first)
        for stream in streams
        if f"{UNKNOWN}{incarnation}" not in table.liveness.heartbeats().get(Step("ingest", stream), {})
    ]
    budget = _Budget(UNKNOWN_RECORDS)
    for since in (first - NEAR_MS, now - table.ages.drop):
        if table.has_unaccepted(incarnation):
            for head in heads:
                async for report in _read_out(table, reader, head, since, {incarnation}, now - table.ages.drop, budget):
                    yield report
    if heads and budget.is_spent:
        metrics.LEDGER_STRANGERS.inc()
        log.warning("stranger_given_up", incarnation=incarnation, streams=streams, records=UNKNOWN_RECORDS)
    for head in heads:
        yield msgspec.structs.replace(head, closed=True)


async def _read_out(
    table: Table,
    reader: Reader,
    head: Report,
    since: int,
    incarnations: Collection[str],
    oldest: int = 0,
    budget: "_Budget | None" = None,
) -> AsyncIterator[Report]:
    """What these incarnations put into the stream of `head` since that time, as reports like it. Nothing for none.

    oldest: ms; events of earlier minutes are left out. budget: None: it is read to its end.
    """
    found = 0
    every = await reader.describe(head.pipe) if incarnations else {}
    for partition, held in every.items():
        start = table.unreported_from(head.pipe, partition, incarnations, since)
        gathered = _GatheredOrigins(incarnations, oldest)
        async for batch in scan(reader, head.pipe, partition, start, None, held):
            if budget is not None and not budget.spend(len(batch.records)):
                break
            for record in batch.records:
                gathered.take(record)
            await asyncio.sleep(0)
            if gathered.count >= _REPORT_NUMBERS:
                yield msgspec.structs.replace(head, sets=gathered.sets())
                found += gathered.count
                gathered = _GatheredOrigins(incarnations, oldest)
        if gathered.count:
            yield msgspec.structs.replace(head, sets=gathered.sets())
        found += gathered.count
    log.info("ingest_recovered", stream=head.pipe, instance=head.instance, events=found)


class _Budget:
    """So many records may be read."""

    def __init__(self, records: int) -> None:
        self._left = records

    @property
    def is_spent(self) -> bool:
        """Whether more was asked for than there was."""
        return self._left < 0

    def spend(self, records: int) -> bool:
        """Whether that may be read still."""
        self._left -= records
        return self._left >= 0


class _GatheredOrigins:
    """Origins of some incarnations."""

    def __init__(self, incarnations: Collection[str], oldest: int) -> None:
        self._incarnations, self._oldest = incarnations, oldest // MINUTE_MS
        self._numbers: dict[tuple[str, int, int], BitMap] = {}
        self.count = 0

    def take(self, record: Record) -> None:
        raw, arrival = record.header(ORIGIN), read_arrival(record)
        if raw is None or arrival is None:
            return
        try:
            origin = Origin.unpack(raw)
        except ValueError:
            return
        if origin.incarnation not in self._incarnations or not 0 <= origin.sequence < 1 << 32:
            return
        key = (origin.incarnation, origin.partition, minute_of(record.timestamp, arrival))
        if key[2] < self._oldest:
            return
        self._numbers.setdefault(key, BitMap()).add(origin.sequence)
        self.count += 1

    def sets(self) -> tuple[OriginSet, ...]:
        return tuple(
            OriginSet("accepted", incarnation, partition, minute, pack_numbers(numbers))
            for (incarnation, partition, minute), numbers in self._numbers.items()
        )
