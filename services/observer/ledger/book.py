"""What all reports say, united: which events were accepted in which minute, and what each step said of which origins.

Only ingest knows minutes; the others' sets are one bitmap per run, from which a minute's part is cut by intersection. What
is settled for good is taken out again (`fold`), and what is told of it afterwards is passed over. So this grows with the
origins that are unsettled or young, packed, not with events.
"""

from collections.abc import Iterator, Mapping

import structlog
from pyroaring import BitMap

from services.core.ledger.report import BadReport, Node, OriginSet, Outcome, Report, unpack_numbers
from services.observer.ledger.flow import Step
from services.observer.ledger.origins import Origins, Run
from services.observer.ledger.rounds import Rounds, owner, retrier_of

log = structlog.get_logger()

Place = tuple[Node, str]
"""("ingest", stream) or ("transform", pipe)."""

_ENDS: tuple[Outcome, ...] = ("delivered", "dead", "parked")
"""Until something later is told."""


class Book:
    """`apply` takes reports in any order and any number of times: the outcome is the same."""

    def __init__(self) -> None:
        self.held: dict[int, dict[Place, Origins]] = {}
        self.all_told: dict[tuple[Step, Outcome], Origins] = {}
        self.rounds = Rounds()
        self.floors: dict[Run, int] = {}
        """Below it everything is folded but for what `kept` has."""
        self.gone = Origins()
        """What is folded above the floors: minutes overlap a little."""
        self.kept = Origins()
        self.folded: set[int] = set()
        self._touched = Origins()
        self.heard: dict[str, int] = {}
        """When each incarnation was last named, in ms."""
        self.first_heard: dict[str, int] = {}

    def apply(self, report: Report) -> None:
        """Unite with what this report says. Sets that are no bitmaps are passed over and logged."""
        step = Step(report.node, report.pipe, report.destination)
        for told in report.sets:
            try:
                numbers = unpack_numbers(told.numbers)
            except BadReport as error:
                log.warning("bad_set", node=report.node, instance=report.instance, error=str(error))
                continue
            run = Run(told.incarnation, told.partition)
            self.heard[run.incarnation] = max(self.heard.get(run.incarnation, 0), report.at_ms)
            self.first_heard[run.incarnation] = min(self.first_heard.get(run.incarnation, report.at_ms), report.at_ms)
            if (floor := self.floors.get(run)) is not None and numbers and numbers.min() < floor:
                kept = numbers & self.kept.numbers(run)
                numbers.remove_range(0, floor)
                numbers |= kept
            numbers -= self.gone.numbers(run)
            self._add(step, told, run, numbers)

    def _add(self, step: Step, told: OriginSet, run: Run, numbers: BitMap) -> None:
        if told.outcome != "accepted":
            self._tell(step, told, run, numbers)
        elif told.minute is not None:
            place = (step.node, step.pipe)
            self.held.setdefault(told.minute, {}).setdefault(place, Origins()).add(run, numbers)
        self._touched.add(run, numbers)

    def _tell(self, step: Step, told: OriginSet, run: Run, numbers: BitMap) -> None:
        """Of parked and dead events only the latest counts, where a time is told; everything else stays true."""
        if told.due is not None:
            heard = self.rounds.hear(step, told, run, self._not_at_its_end(owner(step), run, numbers))
            for outcome, there in heard.no_more:
                for one in (owner(step), retrier_of(step)):
                    if outcome != "retrying" and (known := self.all_told.get((one, outcome))) is not None:
                        known.discard(run, there)
            if told.outcome in ("parked", "dead", "redriven"):
                numbers = heard.numbers
        if told.outcome == "redriven":  # as if the retrier had given them back
            self.all_told.setdefault((owner(step), "retrying"), Origins()).add(run, numbers)
            self.all_told.setdefault((retrier_of(step), "released"), Origins()).add(run, numbers)
        else:
            self.all_told.setdefault((step, told.outcome), Origins()).add(run, numbers)

    def told(self, step: Step, outcome: Outcome) -> Origins:
        """As in `Told`; not to be changed."""
        return self.all_told.get((step, outcome), _NOTHING)

    def ended(self, step: Step) -> list[Origins]:
        """What waits for no other attempt of this step of expel: it is at its end, or parked."""
        return [*(self.told(step, outcome) for outcome in _ENDS), self.told(retrier_of(step), "dead")]

    def _not_at_its_end(self, step: Step, run: Run, numbers: BitMap) -> BitMap:
        """Without what is delivered, and what is dead or parked of which nobody said since when."""
        left = numbers - self.told(step, "delivered").numbers(run)
        ends: tuple[tuple[Step, Outcome], ...] = ((step, "dead"), (retrier_of(step), "dead"), (step, "parked"))
        for one, outcome in ends:
            there = left & self.told(one, outcome).numbers(run)
            if there:
                left = left - (there - self.rounds.timed(step, outcome, run, there))
        return left

    def lost(self, step: Step) -> Origins:
        """As in `Told`; not to be changed."""
        return self.rounds.lost.get(step, _NOTHING)

    def touch(self, origins: Origins) -> None:
        """Something else is known of these than at the last `take_touched`."""
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

    def take_touched(self) -> Origins:
        """The origins that any report named since the last call."""
        touched, self._touched = self._touched, Origins()
        return touched

    def strangers(self) -> dict[str, set[Step]]:
        """Incarnations that steps name and ingest does not: who named them. They died before their first report."""
        known = {run.incarnation for places in self.held.values() for held in places.values() for run, _ in held.runs()}
        known |= {run.incarnation for run in self.floors}
        found: dict[str, set[Step]] = {}
        for (step, _), origins in self.all_told.items():
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
        for (step, _), origins in self.all_told.items():
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
        self.all_told = {key: origins for key, origins in self.all_told.items() if origins}
        self.rounds.prune()

    def _all_sets(self) -> Iterator[Origins]:
        yield from self.all_told.values()
        yield from self.rounds.every()

    def _raise_floor(self, run: Run) -> None:
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
        self.first_heard.pop(incarnation, None)
        for origins in (self.kept, self.gone, *self._all_sets()):
            origins.forget(incarnation)


_NOTHING = Origins()
