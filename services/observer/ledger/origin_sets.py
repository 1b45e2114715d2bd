"""The union of all reports: the events accepted in each minute, and the outcomes that each step reported.

Only ingest reports minutes. The other steps' sets are one bitmap per incarnation and partition; the part of a minute is an
intersection. Settled events are removed (`fold`), and later reports of them are ignored. So memory grows with unsettled and
young origins, packed, and not with events.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import structlog
from pyroaring import BitMap

from services.core import metrics
from services.core.event import is_of_topic
from services.core.ledger.report import BadReport, Node, OriginSet, Outcome, Report, unpack_numbers
from services.observer.ledger.flow import Step
from services.observer.ledger.origins import (
    Origins,
    PackedOrigins,
    PackedRun,
    PackedRuns,
    SequenceKey,
    clip,
    span,
)
from services.observer.ledger.reported_origins import ReportedOrigins
from services.observer.ledger.retry_tracker import RetryTracker, owner, retrier_of

log = structlog.get_logger()

Place = tuple[Node, str]
"""("ingest", stream) or ("transform", pipe)."""

_ENDS: tuple[Outcome, ...] = ("delivered", "dead", "parked")
"""Until a later outcome is reported."""
_WAITING: tuple[Outcome, ...] = ("retrying", "parked")
_NOTHING = Origins()
_NOT_REPORTED = ReportedOrigins()
_STRIDE = 1 << 18
_MOST_GONE_BYTES = 1 << 20
"""Of one run in `gone`. A topic of others with gaps everywhere needs a bit for each offset: this is room for eight million."""


def named_in(report: Report) -> Origins:
    """All origins in the sets of a report, except in sets that are not bitmaps."""
    found = Origins()
    for one in report.sets:
        with suppress(BadReport):
            found.add(SequenceKey(one.incarnation, one.partition), unpack_numbers(one.numbers))
    return found


class OriginSets:
    """The order and the repetition of reports do not matter."""

    def __init__(self) -> None:
        self.unfolded: dict[int, dict[Place, Origins]] = {}
        """By minute and place, the accepted origins that no `fold` has seen: also late ones of a minute in `packed`."""
        self.packed: dict[int, dict[Place, PackedOrigins]] = {}
        """By minute and place, the accepted origins that a `fold` has left."""
        self.reported_sets: dict[tuple[Step, Outcome], ReportedOrigins] = {}
        self.retries = RetryTracker()
        self.floors: dict[SequenceKey, int] = {}
        """Numbers below it are folded, except those in `packed`."""
        self.gone = Origins()
        """Folded origins at or above the floors: minutes overlap a little. In a topic of others they may be far above: a reader
        may have begun there, and another one may read what is before."""
        self._kept: dict[SequenceKey, PackedRuns] = {}
        """An index of `packed`."""
        self._touched = Origins()
        self.last_named: dict[str, int] = {}
        """When each incarnation was last named, in ms."""
        self.first_named: dict[str, int] = {}

    def apply(self, report: Report) -> None:
        """Unite with this report. Sets that are not bitmaps are logged and ignored."""
        step = Step(report.node, report.pipe, report.destination)
        for reported in report.sets:
            try:
                numbers = unpack_numbers(reported.numbers)
            except BadReport as error:
                log.warning("bad_set", node=report.node, instance=report.instance, error=str(error))
                continue
            run = SequenceKey(reported.incarnation, reported.partition)
            self.last_named[run.incarnation] = max(self.last_named.get(run.incarnation, 0), report.at_ms)
            self.first_named[run.incarnation] = min(self.first_named.get(run.incarnation, report.at_ms), report.at_ms)
            if (floor := self.floors.get(run)) is not None and numbers and numbers.min() < floor:
                kept = self.kept(run, numbers)
                numbers.remove_range(0, floor)
                numbers |= kept
            numbers -= self.gone.numbers(run)
            if reported.outcome != "accepted":
                self._record_outcome(step, reported, run, numbers)
            elif reported.minute is not None and numbers:  # a repetition does not make a counted minute young
                place = (step.node, step.pipe)
                if is_of_topic(run.incarnation):
                    numbers -= self._accepted_before(run, numbers)
                self.unfolded.setdefault(reported.minute, {}).setdefault(place, Origins()).add(run, numbers)
            self._touched.add(run, numbers)

    def _accepted_before(self, run: SequenceKey, numbers: BitMap) -> BitMap:
        """Those of `numbers` that are accepted already, in any minute. Each reader of a topic of others reports the minute in
        which it has read an event; the first report counts."""
        found = self.kept(run, numbers)
        for places in self.unfolded.values():
            for origins in places.values():
                found |= numbers & origins.numbers(run)
        return found

    def _record_outcome(self, step: Step, reported: OriginSet, run: SequenceKey, numbers: BitMap) -> None:
        """Of parked and dead events only the newest report with a time counts; every other outcome stays true."""
        expel, retrier = owner(step), retrier_of(step)
        if reported.due is not None:
            ordered = self.retries.record(step, reported, run, self._not_ended(expel, run, numbers))
            for outcome, there in ordered.no_more:
                if outcome != "retrying":
                    self._discard(expel, outcome, run, there)
                    self._discard(retrier, outcome, run, there)
            if reported.outcome in ("parked", "dead", "redriven"):
                numbers = ordered.numbers
        if reported.outcome == "redriven":  # as if the retrier had given them back
            self._add(expel, "retrying", run, numbers)
            self._add(retrier, "released", run, numbers)
        else:
            self._add(step, reported.outcome, run, numbers)

    def _add(self, step: Step, outcome: Outcome, run: SequenceKey, numbers: BitMap) -> None:
        self.reported_sets.setdefault((step, outcome), ReportedOrigins()).add(run, numbers)

    def _discard(self, step: Step, outcome: Outcome, run: SequenceKey, numbers: BitMap) -> None:
        if (known := self.reported_sets.get((step, outcome))) is not None:
            known.discard(run, numbers)

    def reported(self, step: Step, outcome: Outcome) -> ReportedOrigins:
        """Everything that this step reported with this outcome, of all minutes; not to be changed."""
        return self.reported_sets.get((step, outcome), _NOT_REPORTED)

    def ended(self, step: Step) -> list[ReportedOrigins]:
        """The events that wait for no other attempt of this step of expel: they are delivered, dead or parked."""
        return [*(self.reported(step, outcome) for outcome in _ENDS), self.reported(retrier_of(step), "dead")]

    def _not_ended(self, step: Step, run: SequenceKey, numbers: BitMap) -> BitMap:
        """Without delivered events, and without dead or parked ones for which no time was reported."""
        left = numbers - self.reported(step, "delivered").among(run, numbers)
        ends: tuple[tuple[Step, Outcome], ...] = ((step, "dead"), (retrier_of(step), "dead"), (step, "parked"))
        for one, outcome in ends:
            there = self.reported(one, outcome).among(run, left)
            if there:
                left = left - (there - self.retries.timed(step, outcome, run, there))
        return left

    def end_waiting(self, step: Step, now: int) -> None:
        """Count the events that wait for a removed destination as dead from now on (ms).

        The pipe file says what becomes of them, and no report says when. What its expel reports later counts as always.
        """
        for run, numbers in self.retries.end_waiting(step, now):
            self._add(step, "dead", run, numbers)
            for outcome in _WAITING:
                self._discard(step, outcome, run, numbers)
            self._touched.add(run, numbers)

    def skip(self, step: Step, origins: Origins) -> None:
        """Count these as skipped at this step of expel, as if it had reported so."""
        self.reported_sets.setdefault((step, "skipped"), ReportedOrigins()).update(origins)
        self.touch(origins)

    def lost(self, step: Step) -> Origins:
        """The events that this step of the retrier or of expel lost; not to be changed."""
        return self.retries.lost.get(step, _NOTHING)

    def touch(self, origins: Origins) -> None:
        """Mark these as changed since the last `drain_touched`."""
        self._touched.update(origins)

    def minutes(self) -> list[int]:
        """Those of which any origin is known, oldest first."""
        return sorted(self.unfolded.keys() | self.packed.keys())

    def accepted(self, minute: int) -> Mapping[Place, Origins]:
        """The accepted origins of a minute; not to be changed. Unpacks those of a folded minute each time."""
        young, packed = self.unfolded.get(minute, {}), self.packed.get(minute)
        if packed is None:
            return young
        found = {place: old.unpack() for place, old in packed.items()}
        for place, origins in young.items():
            found.setdefault(place, Origins()).update(origins)
        return found

    def minutes_of(self, origins: Origins) -> list[int]:
        """The minutes that hold any of these, oldest first."""
        found = {
            minute for minute, places in self.unfolded.items() if any(there.meets(origins) for there in places.values())
        }
        for run, numbers in origins.runs():
            known = self._kept.get(run)
            for packed, minute in known.meeting(numbers) if known is not None else ():
                if minute not in found and numbers.intersect(packed.unpack()):
                    found.add(minute)
        return sorted(found)

    def drain_touched(self) -> Origins:
        """The origins that changed since the last call."""
        touched, self._touched = self._touched, Origins()
        return touched

    def unknown_incarnations(self) -> dict[str, set[Step]]:
        """By incarnation that ingest did not report, because it died before: the steps that named it."""
        known = self._known_incarnations() | {run.incarnation for run in self.floors}
        found: dict[str, set[Step]] = {}
        for (step, _), origins in self.reported_sets.items():
            for run, _ in origins.listed():  # the others have a floor
                if run.incarnation not in known and step.node != "ingest" and not is_of_topic(run.incarnation):
                    found.setdefault(run.incarnation, set()).add(step)
        return found

    def has_unaccepted(self, incarnation: str) -> bool:
        """Whether steps name origins of it that no ingest has reported as accepted."""
        accepted, named = Origins(), Origins()
        for places in self.unfolded.values():
            for origins in places.values():
                accepted.update(origins)
        for packed in (one for folded in self.packed.values() for origins in folded.values() for one in origins.runs):
            if packed.incarnation == incarnation:
                accepted.add(packed.run, packed.unpack())
        for (step, _), reported in self.reported_sets.items():
            for run, numbers in reported.listed():  # the others are kept
                if run.incarnation == incarnation and step.node != "ingest":
                    named.add(run, numbers)
        return bool(named - accepted)

    def fold(self, minute: int, settled: Origins) -> None:
        """Remove these origins of the minute, which are counted elsewhere. The others are kept until the next fold."""
        places = {place: origins.copy() for place, origins in self.accepted(minute).items()}
        streams = {run: stream for (_, stream), origins in places.items() for run, _ in origins.runs()}
        self.gone.update(settled)
        for origins in places.values():
            origins.remove(settled)
        self.unfolded.pop(minute, None)
        self._discard_packed(minute)
        for place, origins in places.items():
            self.load_packed(minute, place, PackedOrigins.of(origins).runs)
        for run, stream in streams.items():
            self._raise_floor(run, stream)
        for known in self._all_sets():
            known.remove(settled)
        for origins in places.values():
            for run, numbers in origins.runs():
                self._pack_around(run, numbers)
        self.reported_sets = {key: origins for key, origins in self.reported_sets.items() if origins}
        self.retries.prune()

    def load_packed(self, minute: int, place: Place, runs: Sequence[PackedRun]) -> None:
        """Hold these origins of a folded minute, beside those that are known."""
        if not runs:
            return
        known = self.packed.setdefault(minute, {})
        known[place] = PackedOrigins((*(known[place].runs if place in known else ()), *runs))
        for packed in runs:
            self._kept.setdefault(packed.run, PackedRuns()).add(packed, minute)

    def _discard_packed(self, minute: int) -> None:
        for packed in self.packed.pop(minute, {}).values():
            for one in packed.runs:
                self._kept[one.run].remove(one, minute)
                if not self._kept[one.run]:
                    del self._kept[one.run]

    def kept(self, run: SequenceKey, among: BitMap) -> BitMap:
        """Those of `among` that are origins of folded minutes."""
        found = BitMap()
        for packed, _ in self._kept[run].meeting(among) if run in self._kept else ():
            found |= among & packed.unpack()
        return found

    def pack(self, run: SequenceKey, first: int, end: int, kept: BitMap) -> None:
        """Hold the reported sets in few bytes from `first` to before `end`. kept: all kept events there. Above the floor, nothing
        changes."""
        end = min(end, self.floors.get(run, 0))
        kept = clip(kept, first, end)
        for origins in self.reported_sets.values() if kept else ():
            if origins.is_long(run, first, end, len(kept)):
                origins.pack(run, first, end, kept)

    def pack_all(self) -> None:
        """Hold the reported sets in few bytes, below all floors."""
        for run, known in self._kept.items():
            for first in range(known.lowest, known.highest + 1, _STRIDE):
                end = first + _STRIDE
                self.pack(run, first, end, self.kept(run, span(first, end)))

    def _pack_around(self, run: SequenceKey, kept: BitMap) -> None:
        """Pack from the first of these numbers of a minute to the last one: since it was folded, its events came back."""
        first, end = kept.min(), min(kept.max() + 1, self.floors.get(run, 0))
        if first < end and any(origins.is_long(run, first, end, len(kept)) for origins in self.reported_sets.values()):
            self.pack(run, first, end, self.kept(run, span(first, end)))

    def _all_sets(self) -> Iterator[Origins | ReportedOrigins]:
        yield from self.reported_sets.values()
        yield from self.retries.every()

    def _known_incarnations(self) -> set[str]:
        young = (
            run.incarnation
            for places in self.unfolded.values()
            for origins in places.values()
            for run, _ in origins.runs()
        )
        return {*young, *(run.incarnation for run in self._kept)}

    def _raise_floor(self, run: SequenceKey, stream: str) -> None:
        """To the run's first number that no `fold` has seen; without one, above everything that was folded."""
        young = [
            numbers.min()
            for places in self.unfolded.values()
            for origins in places.values()
            if (numbers := origins.numbers(run))
        ]
        before = floor = self.floors.get(run, 0)
        if is_of_topic(run.incarnation):
            floor = self._first_unread(run, stream, before, min(young, default=None))
        elif young:
            floor = max(floor, min(young))
        else:
            gone = self.gone.numbers(run)
            folded = self._kept[run].highest if run in self._kept else -1
            floor = max(floor, folded + 1, gone.max() + 1 if gone else 0)
        self.floors[run] = floor
        self.gone.remove_range(run, 0, floor, BitMap())  # also what was kept, and is settled now
        kept = self.kept(run, span(before, floor))
        self.pack(run, before, floor, kept)  # first: a range in which all events are takes nothing while it is whole
        for origins in self._all_sets():
            origins.remove_range(run, before, floor, kept)
        for reported in self.reported_sets.values():
            reported.drop_ranges(run, self._kept[run].lowest if run in self._kept else floor)

    def _first_unread(self, run: SequenceKey, stream: str, floor: int, young: int | None) -> int:
        """Of a topic of others: the first number from the floor on that no `fold` has seen. Another reader may still read it. So
        may it read numbers behind it, which are in `gone` until then, or until there is no room for more of them.

        young: the lowest unfolded number.
        """
        gone, first = self.gone.numbers(run), floor
        while not (missing := span(first, first + _STRIDE) - gone - self.kept(run, span(first, first + _STRIDE))):
            first += _STRIDE
        first = missing.min()
        gone.run_optimize()
        if len(gone.serialize()) <= _MOST_GONE_BYTES:
            return first
        end = gone[len(gone) // 2] if young is None else min(gone[len(gone) // 2], young)
        if end <= first:
            return first
        inside = span(first, end)
        unread = len(inside - gone - self.kept(run, inside))
        log.warning(
            "gaps_closed",
            stream=stream,
            partition=run.partition,
            up_to=end,
            unread=unread,
            hint="the topic has too many offsets without an event. What is read there from now on is outside of the loss table",
        )
        metrics.LEDGER_OUTSIDE.labels("observer", stream, "gaps_closed").inc(unread)
        return end

    def find_gone(self, before_ms: int) -> list[str]:
        """Incarnations of which no minute is known and that no report has named since.

        Not those of topics of others: somebody may read their history again, and then it must not count anew.
        """
        old = {name for name, at_ms in self.last_named.items() if at_ms < before_ms and not is_of_topic(name)}
        return sorted(old - self._known_incarnations()) if old else []

    def forget(self, incarnation: str) -> None:
        """Drop everything about an incarnation that has no minutes left and will not report again."""
        self.floors = {run: floor for run, floor in self.floors.items() if run.incarnation != incarnation}
        self.last_named.pop(incarnation, None)
        self.first_named.pop(incarnation, None)
        for origins in (self.gone, *self._all_sets()):
            origins.forget(incarnation)
