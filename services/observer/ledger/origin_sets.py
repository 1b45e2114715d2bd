"""The union of all reports: the events accepted in each minute, and the outcomes that each step reported.

Only ingest reports minutes. The other steps' sets are one bitmap per incarnation and partition; the part of a minute is an
intersection. Settled events are removed (`fold`), and later reports of them are ignored. So memory grows with unsettled and young
origins, packed, and not with events.
"""

from collections.abc import Iterator, Mapping

import structlog
from pyroaring import BitMap

from services.core.ledger.report import BadReport, Node, OriginSet, Outcome, Report, unpack_numbers
from services.observer.ledger.flow import Step
from services.observer.ledger.origins import Origins, SequenceKey
from services.observer.ledger.retry_tracker import RetryTracker, owner, retrier_of

log = structlog.get_logger()

Place = tuple[Node, str]
"""("ingest", stream) or ("transform", pipe)."""

_ENDS: tuple[Outcome, ...] = ("delivered", "dead", "parked")
"""Until a later outcome is reported."""
_WAITING: tuple[Outcome, ...] = ("retrying", "parked")


class OriginSets:
    """`apply` takes reports in any order and any number of times: the outcome is the same."""

    def __init__(self) -> None:
        self.held: dict[int, dict[Place, Origins]] = {}
        self.reported_sets: dict[tuple[Step, Outcome], Origins] = {}
        self.retries = RetryTracker()
        self.floors: dict[SequenceKey, int] = {}
        """Below it everything is folded but for what `kept` has."""
        self.gone = Origins()
        """What is folded above the floors: minutes overlap a little."""
        self.kept = Origins()
        self.folded: set[int] = set()
        self._touched = Origins()
        self.heard: dict[str, int] = {}
        """When each incarnation was last named, in ms."""
        self.first_named: dict[str, int] = {}

    def apply(self, report: Report) -> None:
        """Unite with what this report says. Sets that are no bitmaps are passed over and logged."""
        step = Step(report.node, report.pipe, report.destination)
        for reported in report.sets:
            try:
                numbers = unpack_numbers(reported.numbers)
            except BadReport as error:
                log.warning("bad_set", node=report.node, instance=report.instance, error=str(error))
                continue
            run = SequenceKey(reported.incarnation, reported.partition)
            self.heard[run.incarnation] = max(self.heard.get(run.incarnation, 0), report.at_ms)
            self.first_named[run.incarnation] = min(self.first_named.get(run.incarnation, report.at_ms), report.at_ms)
            if (floor := self.floors.get(run)) is not None and numbers and numbers.min() < floor:
                kept = numbers & self.kept.numbers(run)
                numbers.remove_range(0, floor)
                numbers |= kept
            numbers -= self.gone.numbers(run)
            self._add(step, reported, run, numbers)

    def _add(self, step: Step, reported: OriginSet, run: SequenceKey, numbers: BitMap) -> None:
        if reported.outcome != "accepted":
            self._tell(step, reported, run, numbers)
        elif reported.minute is not None:
            place = (step.node, step.pipe)
            self.held.setdefault(reported.minute, {}).setdefault(place, Origins()).add(run, numbers)
        self._touched.add(run, numbers)

    def _tell(self, step: Step, reported: OriginSet, run: SequenceKey, numbers: BitMap) -> None:
        """Of parked and dead events only the latest counts, where a time is reported; everything else stays true."""
        if reported.due is not None:
            heard = self.retries.record(step, reported, run, self._not_at_its_end(owner(step), run, numbers))
            for outcome, there in heard.no_more:
                for one in (owner(step), retrier_of(step)):
                    if outcome != "retrying" and (known := self.reported_sets.get((one, outcome))) is not None:
                        known.discard(run, there)
            if reported.outcome in ("parked", "dead", "redriven"):
                numbers = heard.numbers
        if reported.outcome == "redriven":  # as if the retrier had given them back
            self.reported_sets.setdefault((owner(step), "retrying"), Origins()).add(run, numbers)
            self.reported_sets.setdefault((retrier_of(step), "released"), Origins()).add(run, numbers)
        else:
            self.reported_sets.setdefault((step, reported.outcome), Origins()).add(run, numbers)

    def reported(self, step: Step, outcome: Outcome) -> Origins:
        """As in `Reported`; not to be changed."""
        return self.reported_sets.get((step, outcome), _NOTHING)

    def ended(self, step: Step) -> list[Origins]:
        """The events that wait for no other attempt of this step of expel: they are delivered, dead or parked."""
        return [*(self.reported(step, outcome) for outcome in _ENDS), self.reported(retrier_of(step), "dead")]

    def _not_at_its_end(self, step: Step, run: SequenceKey, numbers: BitMap) -> BitMap:
        """Without what is delivered, and what is dead or parked of which nobody said since when."""
        left = numbers - self.reported(step, "delivered").numbers(run)
        ends: tuple[tuple[Step, Outcome], ...] = ((step, "dead"), (retrier_of(step), "dead"), (step, "parked"))
        for one, outcome in ends:
            there = left & self.reported(one, outcome).numbers(run)
            if there:
                left = left - (there - self.retries.timed(step, outcome, run, there))
        return left

    def end_waiting(self, step: Step, now: int) -> None:
        """What waits for a destination that the pipe file no longer has counts as dead from now on (ms): the file had to say
        what becomes of it, and nobody reports when it does. What its expel reports later counts as always."""
        for run, numbers in self.retries.end_waiting(step, now):
            self.reported_sets.setdefault((step, "dead"), Origins()).add(run, numbers)
            for outcome in _WAITING:
                if (known := self.reported_sets.get((step, outcome))) is not None:
                    known.discard(run, numbers)
            self._touched.add(run, numbers)

    def lost(self, step: Step) -> Origins:
        """As in `Reported`; not to be changed."""
        return self.retries.lost.get(step, _NOTHING)

    def touch(self, origins: Origins) -> None:
        """Mark these as changed since the last `drain_touched`."""
        for run, numbers in origins.runs():
            self._touched.add(run, numbers)

    def minutes(self) -> list[int]:
        """Those of which any origin is held, oldest first."""
        return sorted(self.held)

    def accepted(self, minute: int) -> Mapping[Place, Origins]:
        """Those of a minute that are held; not to be changed."""
        return self.held.get(minute, {})

    def is_folded(self, minute: int) -> bool:
        """Whether `fold` was called for it."""
        return minute in self.folded

    def drain_touched(self) -> Origins:
        """The origins that changed since the last call."""
        touched, self._touched = self._touched, Origins()
        return touched

    def unknown_incarnations(self) -> dict[str, set[Step]]:
        """Incarnations that steps have named and ingest has not, and these steps. Such a process died before its first report."""
        known = {run.incarnation for places in self.held.values() for held in places.values() for run, _ in held.runs()}
        known |= {run.incarnation for run in self.floors}
        found: dict[str, set[Step]] = {}
        for (step, _), origins in self.reported_sets.items():
            for run, _ in origins.runs():
                if run.incarnation not in known and step.node != "ingest":
                    found.setdefault(run.incarnation, set()).add(step)
        return found

    def has_unaccepted(self, incarnation: str) -> bool:
        """Whether steps name origins of it that nobody accepted."""
        accepted, named = Origins(), Origins()
        for origins in (origins for places in self.held.values() for origins in places.values()):
            for run, numbers in origins.runs():
                accepted.add(run, numbers)
        for (step, _), origins in self.reported_sets.items():
            for run, numbers in origins.runs():
                if run.incarnation == incarnation and step.node != "ingest":
                    named.add(run, numbers)
        return bool(named - accepted)

    def fold(self, minute: int, settled: Origins) -> None:
        """Forget these origins of the minute: they are counted elsewhere. What is left of it is kept until the next fold."""
        self.folded.add(minute)
        places = self.held.get(minute, {})
        runs = {run for held in places.values() for run, _ in held.runs()}
        for run, numbers in settled.runs():
            self.gone.add(run, numbers)
        for held in places.values():
            held.remove(settled)
            for run, numbers in held.runs():
                self.kept.add(run, numbers)
        self.kept.remove(settled)
        for origins in self._all_sets():
            origins.remove(settled)
        for run in runs:
            self._raise_floor(run)
        if not any(places.values()):
            self.held.pop(minute, None)
            self.folded.discard(minute)
        self.reported_sets = {key: origins for key, origins in self.reported_sets.items() if origins}
        self.retries.prune()

    def _all_sets(self) -> Iterator[Origins]:
        yield from self.reported_sets.values()
        yield from self.retries.every()

    def _raise_floor(self, run: SequenceKey) -> None:
        """Up to the run's first number in a minute that is not folded; behind what was folded when there is none."""
        young = [
            numbers.min()
            for minute, places in self.held.items()
            if minute not in self.folded
            for held in places.values()
            if (numbers := held.numbers(run))
        ]
        floor = self.floors.get(run, 0)
        if young:
            floor = max(floor, min(young))
        elif folded := self.gone.numbers(run) | self.kept.numbers(run):
            floor = max(floor, folded.max() + 1)
        self.floors[run] = floor
        self.gone.remove_below(run, floor, BitMap())
        for origins in self._all_sets():
            origins.remove_below(run, floor, self.kept.numbers(run))

    def find_gone(self, before_ms: int) -> list[str]:
        """Incarnations of which no minute is held and that nobody named since."""
        old = [incarnation for incarnation, at_ms in self.heard.items() if at_ms < before_ms]
        return sorted(set(old) - self._incarnations()) if old else []

    def _incarnations(self) -> set[str]:
        places = [held for places in self.held.values() for held in places.values()]
        return {run.incarnation for held in places for run, _ in held.runs()}

    def forget(self, incarnation: str) -> None:
        """Drop what is known of an incarnation that has no minutes left and will not speak again."""
        self.floors = {run: floor for run, floor in self.floors.items() if run.incarnation != incarnation}
        self.heard.pop(incarnation, None)
        self.first_named.pop(incarnation, None)
        for origins in (self.kept, self.gone, *self._all_sets()):
            origins.forget(incarnation)


_NOTHING = Origins()
