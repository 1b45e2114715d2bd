"""The outcomes that the nodes reported for some events, with the times of the reports."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pyroaring import BitMap

from services.core.broker.contract import Reader
from services.core.broker.errors import UnknownTopic
from services.core.broker.reading import scan
from services.core.event import Origin
from services.core.ledger.report import TELEMETRY, BadReport, Outcome, Report, decode_report, unpack_numbers
from services.core.pipe_file.topic_names import lane_name
from services.core.story.search import EARLY_MS, Budget, Search
from services.core.times import date_of
from services.core.undelivered.failed_attempts import FailedAttempt, parse_attempts

Step = tuple[str, str, str | None]
"""Node, pipe (of ingest the stream), destination."""


class ReportedOutcome(NamedTuple):
    """One outcome of one event. at_ms: when the report was made, about a second after the outcome at most."""

    outcome: Outcome
    at_ms: int


def present_lane(pipe: str, destination: str, renames: Mapping[str, str]) -> tuple[str, str]:
    """Pipe and destination by their present names."""
    now = renames.get(lane_name(pipe, destination), "")
    return (now.partition("/")[0], now.partition("/")[2]) if now else (pipe, destination)


@dataclass(slots=True)
class Reports:
    """by_event: by origin and step, the outcomes in the order of their reports.

    complete: the reports were read from before the events' acceptance to the end, or until all that was asked for was known.
    behind: by step, the age in ms of its oldest unprocessed record, by the newest report that has it. heard: the steps that
    reported anything; the ledger may be off. first_ms: by step, the time of its first report among those that were read.
    done_ms: by step, the time before which it has processed all records that were stored.
    renames: as `pipes.renames_of`; what a destination reported under a former name is the present one's.
    failures: by event, step and the time of the report of a delivery, where attempts are recorded.
    """

    by_event: dict[Origin, dict[Step, list[ReportedOutcome]]] = field(default_factory=dict)
    complete: bool = False
    behind: dict[Step, int] = field(default_factory=dict)
    heard: set[Step] = field(default_factory=set)
    first_ms: dict[Step, int] = field(default_factory=dict)
    done_ms: dict[Step, int] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    failures: dict[tuple[Origin, Step, int], Sequence[FailedAttempt]] = field(default_factory=dict)

    def of(self, origin: Origin | None, step: Step) -> list[ReportedOutcome]:
        return [] if origin is None else self.by_event.get(origin, {}).get(step, [])

    def first(self, origin: Origin | None, step: Step, outcome: Outcome) -> int | None:
        """When this outcome was first reported, ms."""
        return self.first_since(origin, step, outcome, None)

    def first_since(self, origin: Origin | None, step: Step, outcome: Outcome, since_ms: int | None) -> int | None:
        """When this outcome was first reported at or after a time, ms. None: at any time."""
        times = (reported.at_ms for reported in self.of(origin, step) if reported.outcome == outcome)
        return next((at_ms for at_ms in times if since_ms is None or at_ms >= since_ms), None)

    def failed_before(self, origin: Origin | None, step: Step, at_ms: int) -> Sequence[FailedAttempt] | None:
        """The failed attempts of the round that ended with the delivery that was reported then. None: not recorded."""
        return None if origin is None else self.failures.get((origin, step, at_ms))

    def add(self, report: Report, wanted: dict[tuple[str, int], BitMap]) -> None:
        step: Step = (report.node, report.pipe, report.destination)
        if report.destination is not None:
            step = (report.node, *present_lane(report.pipe, report.destination, self.renames))
        self.heard.add(step)
        self.first_ms.setdefault(step, report.at_ms)
        if report.behind_ms is not None:
            self.behind[step] = report.behind_ms
            self.done_ms[step] = report.at_ms - report.behind_ms
        for one in report.sets:
            numbers = wanted.get((one.incarnation, one.partition))
            if numbers is None:
                continue
            for number in _common(numbers, one.numbers):
                origin = Origin(one.incarnation, one.partition, number)
                known = self.by_event.setdefault(origin, {}).setdefault(step, [])
                if (reported := ReportedOutcome(one.outcome, report.at_ms)) not in known[-1:]:
                    known.append(reported)
                if one.outcome == "delivered" and report.failures is not None:
                    self.failures.setdefault((origin, step, report.at_ms), ())
        for failed in report.failures or ():
            numbers = wanted.get((failed.incarnation, failed.partition))
            for number in () if numbers is None else _common(numbers, failed.numbers):
                origin = Origin(failed.incarnation, failed.partition, number)
                self.failures[origin, step, report.at_ms] = parse_attempts(failed.failures)


def _common(wanted: BitMap, packed: bytes) -> BitMap:
    try:
        return wanted & unpack_numbers(packed)
    except BadReport:
        return BitMap()


async def read_reports(
    search: Search,
    reader: Reader,
    origins: Collection[Origin],
    since_ms: int,
    budget: Budget,
    is_done: Callable[[Reports], bool],
    renames: Mapping[str, str],
) -> Reports:
    """Read the reports since then, until the end or until `is_done`. Raises BrokerError kinds."""
    reports = Reports(renames=renames)
    wanted: dict[tuple[str, int], BitMap] = {}
    for origin in origins:
        wanted.setdefault((origin.incarnation, origin.partition), BitMap()).add(origin.sequence)
    since = date_of(since_ms - EARLY_MS)
    try:
        stored = (await reader.describe(TELEMETRY))[0]
        start = (await reader.offsets_at(TELEMETRY, since))[0]
    except UnknownTopic:
        return reports
    is_kept = start > stored.start or stored.start == 0
    async for batch in scan(reader, TELEMETRY, 0, start, None, stored):
        if batch.records and batch.records[0].timestamp < since_ms:
            is_kept = True
        search.count(batch, budget)
        for record in batch.records:
            if record.key is not None and record.key.startswith(b"ingest/"):
                continue
            try:
                reports.add(decode_report(record.value), wanted)
            except BadReport:
                continue
        if is_done(reports):
            reports.complete = True
            return reports
        if budget.is_spent:
            return reports
        await asyncio.sleep(0)
    reports.complete = is_kept
    return reports
