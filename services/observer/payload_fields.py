"""Statistics of payload fields by step and minute, and the fields that have drifted."""

import math
import time
from collections.abc import Iterator

import msgspec

from services.core.ledger.fields import MAX_FIELDS, FieldSet, FieldStats, PackedStats
from services.core.ledger.minute import MINUTE_MS
from services.core.ledger.report import Report
from services.observer.ledger.flow import Step

KEEP_MINUTES = 60
MAX_NAMES = 100
"""The most fields of a step over all minutes."""
RECENT_MINUTES = 5
"""The minutes that are compared with those before."""
MIN_EVENTS = 200
"""The fewest sampled events for a comparison, on either side."""
NULLS, MISSING = 0.1, 0.1
"""A drift is a greater change of these shares."""
SPREADS, ERRORS = 0.5, 6.0
"""A mean drifts when it moves by more than half its usual standard deviation, and by six standard errors: not by chance."""
DISTINCT = 3.0
"""The number of different values among as many events drifts when it is multiplied or divided by more than this."""


class FieldFigures(msgspec.Struct, frozen=True):
    """A field at a step. events: all sampled ones. present: the share of these that have it. nulls: the share of those with
    null. distinct: different values, estimated. mean: of its numbers; None without one."""

    events: int
    present: float
    nulls: float
    distinct: int
    mean: float | None


class Drift(msgspec.Struct, frozen=True):
    """A change of a field. what: present, nulls, mean or distinct. text: for a person."""

    step: Step
    field: str
    what: str
    text: str


DriftKey = tuple[str, Step, str, str]
"""Of a pipe: the drift's step, field and what."""


class _Minute:
    """The united reports of all instances of a step for one minute."""

    __slots__ = ("events", "fields", "reported")

    def __init__(self) -> None:
        self.events = 0
        self.fields: dict[str, PackedStats] = {}
        self.reported: set[str] = set()
        """The instances: each reports a minute once, so a second report is a repeated one."""

    def add(self, instance: str, reported: FieldSet) -> None:
        if instance in self.reported:
            return
        self.reported.add(instance)
        self.events += reported.events
        for name, stats in reported.fields.items():
            known = self.fields.get(name)
            if known is not None:
                stats.merge(known)
            elif len(self.fields) >= MAX_FIELDS:
                continue
            self.fields[name] = PackedStats.pack(stats)


class FieldTable:
    """The last hour, by step and minute. Grows with steps, minutes and fields (at most `MAX_FIELDS`), not with events or
    instances.

    `figures` and `drifts` return the results of the last `refresh`: they are called far more often than they change.
    """

    def __init__(self) -> None:
        self._by_step: dict[Step, dict[int, _Minute]] = {}
        self._newest = 0
        self._figures: dict[Step, dict[str, FieldFigures]] = {}
        self._drifts: dict[Step, tuple[Drift, ...]] = {}
        self._changed: dict[Step, None] = {}
        """Steps to compute again, oldest first."""

    def record(self, report: Report) -> None:
        """Add the report's statistics. Every report lets time pass: statistics that are an hour older are forgotten."""
        over = report.at_ms // MINUTE_MS - 1
        if over > self._newest:
            self._newest = over
            self._changed |= dict.fromkeys(self._by_step)
            self._forget()
        step = Step(report.node, report.pipe, report.destination)
        for reported in report.fields:
            if -1 <= self._newest - reported.minute < KEEP_MINUTES:
                minutes = self._by_step.setdefault(step, {})
                minutes.setdefault(reported.minute, _Minute()).add(report.instance, reported)
                self._changed[step] = None

    def _forget(self) -> None:
        for minutes in self._by_step.values():
            for minute in [one for one in minutes if not -1 <= self._newest - one < KEEP_MINUTES]:
                del minutes[minute]
        self._by_step = {step: minutes for step, minutes in self._by_step.items() if minutes}

    def refresh(self, seconds: float = math.inf) -> None:
        """Compute the steps that have changed, for about so many seconds (some 20 ms a step); later calls do the others."""
        until = time.monotonic() + seconds
        while self._changed:
            step = next(iter(self._changed))
            del self._changed[step]
            events, fields = self._merge(step, self._newest - KEEP_MINUTES, self._newest + 1)
            self._figures[step] = {name: _figures(events, stats) for name, stats in sorted(fields.items())}
            self._drifts[step] = tuple(self._find_drifts(step))
            if step not in self._by_step:
                del self._figures[step], self._drifts[step]
            if time.monotonic() > until:
                return

    def figures(self, step: Step) -> dict[str, FieldFigures]:
        """Each field over the last hour."""
        return self._figures.get(step, {})

    def _merge(self, step: Step, after: int, last: int) -> tuple[int, dict[str, FieldStats]]:
        """Unite these minutes: their events, and the first MAX_NAMES fields."""
        events, merged = 0, dict[str, FieldStats]()
        for minute, reported in self._by_step.get(step, {}).items():
            if after < minute <= last:
                events += reported.events
                for name, stats in reported.fields.items():
                    if name in merged or len(merged) < MAX_NAMES:
                        merged.setdefault(name, FieldStats()).merge(stats)
        return events, merged

    def drifts(self, step: Step) -> tuple[Drift, ...]:
        """Fields whose last minutes differ from those before. A field that always changes, as a counter, has no drift."""
        return self._drifts.get(step, ())

    def _find_drifts(self, step: Step) -> Iterator[Drift]:
        border = self._newest - RECENT_MINUTES
        middle = border - (KEEP_MINUTES - RECENT_MINUTES) // 2
        spans = ((self._newest - KEEP_MINUTES, middle), (middle, border), (border, self._newest))
        (count, earlier), (count_before, before), (count_now, now) = (self._merge(step, *span) for span in spans)
        if min(count, count_before, count_now) < MIN_EVENTS:
            return
        for name in sorted(now.keys() | before.keys()):
            three = [fields.get(name, FieldStats()) for fields in (earlier, before, now)]
            usual = {what for what, _ in _compare(three[0], count, three[1], count_before)}
            for what, text in _compare(three[1], count_before, three[2], count_now):
                if what not in usual:
                    yield Drift(step, name, what, f"{name}: {text}")


def _figures(events: int, stats: FieldStats) -> FieldFigures:
    seen = max(1, stats.seen)
    return FieldFigures(events, stats.seen / events, stats.nulls / seen, round(stats.distinct()), _mean(stats))


def _mean(stats: FieldStats) -> float | None:
    mean = stats.total / stats.numbers if stats.numbers else math.nan
    return mean if math.isfinite(mean) else None


def _compare(then: FieldStats, count_then: int, now: FieldStats, count_now: int) -> Iterator[tuple[str, str]]:
    presence = then.seen / count_then, now.seen / count_now
    if abs(presence[1] - presence[0]) > MISSING:
        yield "present", f"in {presence[1]:.0%} of the events, {presence[0]:.0%} before"
    if min(then.seen, now.seen) < MIN_EVENTS:
        return
    nulls = then.nulls / then.seen, now.nulls / now.seen
    if abs(nulls[1] - nulls[0]) > NULLS:
        yield "nulls", f"null in {nulls[1]:.0%}, {nulls[0]:.0%} before"
    if min(then.numbers, now.numbers) >= MIN_EVENTS and _has_moved(then, now):
        yield "mean", f"mean {_mean(now):.6g}, {_mean(then):.6g} before"
    distinct = then.distinct() / then.seen, now.distinct() / now.seen
    if _has_another_variety(then, now):
        yield "distinct", f"{distinct[1]:.1%} of its values are different, {distinct[0]:.1%} before"


def _has_moved(then: FieldStats, now: FieldStats) -> bool:
    before, after = _mean(then), _mean(now)
    if before is None or after is None:
        return False
    variance = then.squares / then.numbers - before * before
    spread = math.sqrt(variance) if math.isfinite(variance) and variance > 0 else 0.0
    error = spread * math.sqrt(1 / then.numbers + 1 / now.numbers)
    return abs(after - before) > max(SPREADS * spread, ERRORS * error, 1e-9 * abs(before))


def _has_another_variety(then: FieldStats, now: FieldStats) -> bool:
    """As events are added, the share of different values falls from 1 by itself. A change that this can explain is no drift."""
    natural = then.seen / now.seen
    low, high = min(1.0, natural), max(1.0, natural)
    before = then.distinct() / then.seen
    ratio = now.distinct() / now.seen / before if before else math.inf
    return ratio > DISTINCT * high or ratio < low / DISTINCT
