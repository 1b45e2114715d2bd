"""What an ingest that died could not say any more, read from its stream and said in its name.

The reports are appended to the telemetry topic like any other: a restart of the observer finds them there.
"""

from collections.abc import AsyncIterator, Collection

import structlog
from pyroaring import BitMap

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
STRANGER = "stranger-"
"""Begins the instance's name in reports about incarnations that never reported."""


async def recover(table: Table, admin: Admin, now: int) -> AsyncIterator[Report]:
    """The reports that are missing, by instance; the last of each says goodbye for it. Append each before the next is asked for.

    Raises BrokerError kinds; call again then. Reads from the last report's reach, or from the last offset that is known to be
    older; a whole partition only when nothing of it was ever told.
    """
    for stream in sorted({source for pipe in table.flow.pipes.values() for source in pipe.sources}):
        step = Step("ingest", stream)
        for instance, word in table.presence.fallen_silent(step, now).items():
            runs = table.reaches.runs.get((stream, instance), set())
            async for report in _speak_for(table, admin, stream, instance, word.at_ms, runs):
                yield report
    for incarnation, steps in table.book.strangers().items():
        since = table.book.heard[incarnation]
        if now - since < SILENT_AFTER_MS:
            continue
        for stream in sorted({source for step in steps for source in table.flow.pipes[step.pipe].sources}):
            instance = f"{STRANGER}{incarnation}"
            if instance in table.presence.words().get(Step("ingest", stream), {}):
                continue  # looked for already
            async for report in _speak_for(table, admin, stream, instance, since - MINUTE_MS, {incarnation}):
                yield report


async def _speak_for(
    table: Table, admin: Admin, stream: str, instance: str, at_ms: int, incarnations: Collection[str]
) -> AsyncIterator[Report]:
    found = 0
    for partition in sorted(await admin.describe(stream)) if incarnations else ():
        starts = [table.reaches.start(stream, Run(one, partition), at_ms) for one in incarnations]
        start = None if None in starts else min(one for one in starts if one is not None)
        gathered = _Gathered(incarnations)
        async for batch in scan(admin, stream, partition, start, None):
            for record in batch.records:
                gathered.take(record)
            if gathered.count >= _REPORT_NUMBERS:
                yield _say(stream, instance, at_ms, gathered)
                found += gathered.count
                gathered = _Gathered(incarnations)
        yield _say(stream, instance, at_ms, gathered)
        found += gathered.count
    log.info("ingest_recovered", stream=stream, instance=instance, events=found)
    yield Report(node="ingest", instance=instance, pipe=stream, at_ms=at_ms, closed=True)


def _say(stream: str, instance: str, at_ms: int, gathered: "_Gathered") -> Report:
    """Without reaches: those say what existed at the report's time, and this was read later."""
    return Report(node="ingest", instance=instance, pipe=stream, at_ms=at_ms, sets=gathered.sets())


class _Gathered:
    """Origins of some incarnations."""

    def __init__(self, incarnations: Collection[str]) -> None:
        self._incarnations = incarnations
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
        self._numbers.setdefault(key, BitMap()).add(origin.sequence)
        self.count += 1

    def sets(self) -> tuple[OriginSet, ...]:
        return tuple(
            OriginSet("accepted", incarnation, partition, minute, pack_numbers(numbers))
            for (incarnation, partition, minute), numbers in self._numbers.items()
        )
