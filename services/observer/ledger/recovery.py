"""What an ingest that died could not say any more, read from its stream and said in its name.

The reports are appended to the telemetry topic like any other: a restart of the observer finds them there. They have no
reaches: those say what existed at a report's time, and this was read later.
"""

import asyncio
from collections.abc import AsyncIterator, Collection

import msgspec
import structlog
from pyroaring import BitMap

from services.core import metrics
from services.core.broker.contract import Admin
from services.core.broker.record import Record
from services.core.event import ORIGIN, Origin, read_arrival
from services.core.ledger.minute import MINUTE_MS, minute_of
from services.core.ledger.report import OriginSet, Report, pack_numbers
from services.observer.ledger.flow import Step
from services.observer.ledger.origins import Run
from services.observer.ledger.presence import SILENT_AFTER_MS
from services.observer.ledger.scan import scan
from services.observer.ledger.table import Table

log = structlog.get_logger()

_REPORT_NUMBERS = 100_000
"""So many origins are put into one report: scattered ones take two bytes each."""
NEAR_MS = 10 * MINUTE_MS
STRANGER_RECORDS = 3_000_000
"""Read at most for an incarnation that never reported: most of a minute. What is not found by then is not in the table."""
STRANGER = "stranger-"
"""Begins the instance's name in reports about incarnations that never reported."""


async def recover(table: Table, admin: Admin, now: int) -> AsyncIterator[Report]:
    """The reports that are missing, by instance; the last of each says goodbye for it.

    Append each and apply it to the table before the next is asked for. Raises BrokerError kinds; call again then. Reads from
    the last report's reach, or from the last offset that is known to be older; a whole partition only when none is.
    """
    for stream in sorted({source for pipe in table.flow.pipes.values() for source in pipe.sources}):
        for instance, word in table.presence.fallen_silent(Step("ingest", stream), now).items():
            told = Report(node="ingest", instance=instance, pipe=stream, at_ms=word.at_ms)
            runs = table.reaches.runs.get((stream, instance), set())
            async for report in _read_out(table, admin, told, word.at_ms, runs):
                yield report
            yield msgspec.structs.replace(told, closed=True)
    for incarnation, steps in table.book.strangers().items():
        first = table.book.first_heard.get(incarnation)  # None: forgotten while another one was looked for
        if first is not None and now - first >= SILENT_AFTER_MS:
            known = [step for step in steps if table.flow.knows(step)]  # a snapshot may tell of a pipe that is gone
            streams = sorted({source for step in known for source in table.flow.pipes[step.pipe].sources})
            async for report in _find_stranger(table, admin, incarnation, streams, first, now):
                yield report


async def _find_stranger(
    table: Table, admin: Admin, incarnation: str, streams: list[str], first: int, now: int
) -> AsyncIterator[Report]:
    """Near the time at which it was first named; else in all whose minutes are kept: a step may have been behind.

    An event of an older minute came back long after it was counted: a letter that was redriven, a group that was rewound.
    """
    heads = [
        Report(node="ingest", instance=f"{STRANGER}{incarnation}", pipe=stream, at_ms=first)
        for stream in streams
        if f"{STRANGER}{incarnation}" not in table.presence.words().get(Step("ingest", stream), {})
    ]
    budget = _Budget(STRANGER_RECORDS)
    for since in (first - NEAR_MS, now - table.ages.drop):
        if table.book.has_unaccepted(incarnation):
            for told in heads:
                async for report in _read_out(table, admin, told, since, {incarnation}, now - table.ages.drop, budget):
                    yield report
    if heads and budget.is_spent:
        metrics.LEDGER_STRANGERS.inc()
        log.warning("stranger_given_up", incarnation=incarnation, streams=streams, records=STRANGER_RECORDS)
    for told in heads:
        yield msgspec.structs.replace(told, closed=True)


async def _read_out(
    table: Table,
    admin: Admin,
    told: Report,
    since: int,
    incarnations: Collection[str],
    oldest: int = 0,
    budget: "_Budget | None" = None,
) -> AsyncIterator[Report]:
    """What these incarnations put into the stream of `told` since that time, as reports like it. Nothing for none.

    oldest: ms; events of earlier minutes are left out. budget: None: it is read to its end.
    """
    found = 0
    every = await admin.describe(told.pipe) if incarnations else {}
    for partition, held in every.items():
        starts = [table.reaches.start(told.pipe, Run(one, partition), since) for one in incarnations]
        start = None if None in starts else min(one for one in starts if one is not None)
        gathered = _Gathered(incarnations, oldest)
        async for batch in scan(admin, told.pipe, partition, start, None, held):
            if budget is not None and not budget.spend(len(batch.records)):
                break
            for record in batch.records:
                gathered.take(record)
            await asyncio.sleep(0)
            if gathered.count >= _REPORT_NUMBERS:
                yield msgspec.structs.replace(told, sets=gathered.sets())
                found += gathered.count
                gathered = _Gathered(incarnations, oldest)
        if gathered.count:
            yield msgspec.structs.replace(told, sets=gathered.sets())
        found += gathered.count
    log.info("ingest_recovered", stream=told.pipe, instance=told.instance, events=found)


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


class _Gathered:
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
