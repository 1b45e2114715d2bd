"""The missing reports of ingest processes that ended, made from the events in their streams.

They are appended to the telemetry topic as any other report, so a restart of the observer finds them there. They have no
reaches, because a reach is an offset that existed at the report's time.
"""

import asyncio
from collections.abc import AsyncIterator, Collection

import msgspec
import structlog

from services.core import metrics
from services.core.broker.contract import Reader
from services.core.broker.reading import scan
from services.core.broker.record import Record
from services.core.event import ORIGIN, Origin, read_arrival
from services.core.ledger.accumulator import SetKey, Sets
from services.core.ledger.minute import MINUTE_MS, minute_of
from services.core.ledger.report import Report
from services.observer.ledger.flow import Step
from services.observer.ledger.table import Table

log = structlog.get_logger()

_REPORT_NUMBERS = 100_000
"""The most origins in one report: scattered ones take two bytes each."""
NEAR_MS = 10 * MINUTE_MS
UNKNOWN_RECORDS = 3_000_000
"""The most records that are read for an incarnation that never reported. Events after them are not found."""
UNKNOWN = "stranger-"
"""The beginning of the instance's name in reports about incarnations that never reported."""


async def recover(table: Table, reader: Reader, now: int) -> AsyncIterator[Report]:
    """The missing reports, by instance; the last one of each instance is closed.

    Append each report and apply it to the table before the next one is requested. Raises BrokerError kinds; then call it again.
    Reads from the last report's reach, or else from the last known older offset, or else the whole partition.
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
    """Search near the time when a step first named it; then all events whose minutes are kept, because that step may have been
    behind.

    An event of an older minute came back long after it was counted: a redriven dead letter, or a group that was set back.
    """
    heads = [
        Report(node="ingest", instance=f"{UNKNOWN}{incarnation}", pipe=stream, at_ms=first)
        for stream in streams
        if f"{UNKNOWN}{incarnation}" not in table.liveness.heartbeats().get(Step("ingest", stream), {})
    ]
    budget = _Budget(UNKNOWN_RECORDS)
    for since in (first - NEAR_MS, now - table.ages.drop):
        if table.origin_sets.has_unaccepted(incarnation):
            for head in heads:
                async for report in _read_out(table, reader, head, since, {incarnation}, now - table.ages.drop, budget):
                    yield report
    if heads and budget.is_spent:
        metrics.LEDGER_STRANGERS.inc()
        log.warning("unknown_incarnation_given_up", incarnation=incarnation, streams=streams, records=UNKNOWN_RECORDS)
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
    """Reports like `head` of the events that these incarnations wrote to its stream since that time (ms).

    oldest: ms; events of earlier minutes are ignored. budget: None: no limit.
    """
    found = count = 0
    every = await reader.describe(head.pipe) if incarnations else {}
    for partition, held in every.items():
        start = table.unreported_from(head.pipe, partition, incarnations, since)
        sets = Sets()
        async for batch in scan(reader, head.pipe, partition, start, None, held):
            if budget is not None and not budget.spend(len(batch.records)):
                break
            for record in batch.records:
                arrival = read_arrival(record)
                if arrival is None or (origin := _read_origin(record, incarnations)) is None:
                    continue
                if (minute := minute_of(record.timestamp, arrival)) >= oldest // MINUTE_MS:
                    sets.numbers(SetKey("accepted", origin.incarnation, origin.partition, minute)).add(origin.sequence)
                    count += 1
            await asyncio.sleep(0)
            if count >= _REPORT_NUMBERS:
                yield msgspec.structs.replace(head, sets=sets.pack())
                sets, found, count = Sets(), found + count, 0
        if sets:
            yield msgspec.structs.replace(head, sets=sets.pack())
        found, count = found + count, 0
    log.info("ingest_recovered", stream=head.pipe, instance=head.instance, events=found)


def _read_origin(record: Record, incarnations: Collection[str]) -> Origin | None:
    """The record's origin, if it is of these incarnations."""
    try:
        origin = Origin.unpack(record.header(ORIGIN) or b"")
    except ValueError:
        return None
    return origin if origin.incarnation in incarnations and 0 <= origin.sequence < 1 << 32 else None


class _Budget:
    """A number of records that may be read."""

    def __init__(self, records: int) -> None:
        self._left = records

    @property
    def is_spent(self) -> bool:
        """Whether more was requested than was left."""
        return self._left < 0

    def spend(self, records: int) -> bool:
        """Whether so many may still be read."""
        self._left -= records
        return self._left >= 0
