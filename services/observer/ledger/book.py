"""What all reports say, united: which events were accepted in which minute, and what each step said of which origins.

Only ingest knows minutes; the others' sets are one bitmap per run, from which a minute's part is cut by intersection. What
is settled for good is taken out again (`fold`), and what is told of it afterwards is passed over. So this grows with the
origins that are unsettled or young, packed, not with events.
"""

from collections.abc import Mapping

import structlog
from pyroaring import BitMap

from services.core.ledger.report import BadReport, Node, OriginSet, Outcome, Report, unpack_numbers
from services.observer.ledger.flow import Step
from services.observer.ledger.origins import Origins, Run

log = structlog.get_logger()

Place = tuple[Node, str]
"""("ingest", stream) or ("transform", pipe)."""


class Book:
    """`apply` takes reports in any order and any number of times: the outcome is the same."""

    def __init__(self) -> None:
        self._accepted: dict[int, dict[Place, Origins]] = {}
        self._told: dict[tuple[Step, Outcome], Origins] = {}
        self._makers: set[str] = set()
        self._floors: dict[Run, int] = {}
        """Below it everything is folded but for what `_kept` has."""
        self._gone = Origins()
        """What is folded above the floors: minutes overlap a little."""
        self._kept = Origins()
        self._folded: set[int] = set()
        self._touched = Origins()
        self._heard: dict[str, int] = {}
        """When each incarnation was last named, in ms."""

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
            self._heard[run.incarnation] = max(self._heard.get(run.incarnation, 0), report.at_ms)
            if (floor := self._floors.get(run)) is not None and numbers and numbers.min() < floor:
                kept = numbers & self._kept.numbers(run)
                numbers.remove_range(0, floor)
                numbers |= kept
            numbers -= self._gone.numbers(run)
            self._add(step, told, run, numbers)

    def _add(self, step: Step, told: OriginSet, run: Run, numbers: BitMap) -> None:
        if told.outcome != "accepted":
            self._told.setdefault((step, told.outcome), Origins()).add(run, numbers)
        elif told.minute is not None:
            place = (step.node, step.pipe)
            self._accepted.setdefault(told.minute, {}).setdefault(place, Origins()).add(run, numbers)
            if step.node == "transform":
                self._makers.add(step.pipe)
        self._touched.add(run, numbers)

    def told(self, step: Step, outcome: Outcome) -> Origins:
        """As in `Told`; not to be changed."""
        return self._told.get((step, outcome), _NOTHING)

    def makes_new(self, pipe: str) -> bool:
        """As in `Told`: whether it ever told of new ones."""
        return pipe in self._makers

    def minutes(self) -> list[int]:
        """Those of which any origin is held, oldest first."""
        return sorted(self._accepted)

    def accepted(self, minute: int) -> Mapping[Place, Origins]:
        """Those of a minute that are held; not to be changed."""
        return self._accepted.get(minute, {})

    def is_folded(self, minute: int) -> bool:
        """Whether `fold` was called for it."""
        return minute in self._folded

    def take_touched(self) -> Origins:
        """The origins that any report named since the last call."""
        touched, self._touched = self._touched, Origins()
        return touched

    def strangers(self) -> dict[str, set[Step]]:
        """Incarnations that steps name and ingest does not: who named them. They died before their first report."""
        known = {
            run.incarnation for places in self._accepted.values() for held in places.values() for run, _ in held.runs()
        }
        known |= {run.incarnation for run in self._floors}
        found: dict[str, set[Step]] = {}
        for (step, _), origins in self._told.items():
            for run, _ in origins.runs():
                if run.incarnation not in known and step.node != "ingest":
                    found.setdefault(run.incarnation, set()).add(step)
        return found

    def fold(self, minute: int, settled: Origins) -> None:
        """Forget these origins of the minute: they are counted elsewhere. What is left of it is kept until the next fold."""
        self._folded.add(minute)
        places = self._accepted.get(minute, {})
        runs = {run for held in places.values() for run, _ in held.runs()}
        for run, numbers in settled.runs():
            self._gone.add(run, numbers)
        for held in places.values():
            held.remove(settled)
            for run, numbers in held.runs():
                self._kept.add(run, numbers)
        self._kept.remove(settled)
        for origins in self._told.values():
            origins.remove(settled)
        for run in runs:
            self._raise_floor(run)
        if not any(places.values()):
            self._accepted.pop(minute, None)
            self._folded.discard(minute)
        self._told = {key: origins for key, origins in self._told.items() if origins}

    def _raise_floor(self, run: Run) -> None:
        """Up to the run's first number in a minute that is not folded; behind what was folded when there is none."""
        young = [
            numbers.min()
            for minute, places in self._accepted.items()
            if minute not in self._folded
            for held in places.values()
            if (numbers := held.numbers(run))
        ]
        floor = self._floors.get(run, 0)
        if young:
            floor = max(floor, min(young))
        elif folded := self._gone.numbers(run) | self._kept.numbers(run):
            floor = max(floor, folded.max() + 1)
        self._floors[run] = floor
        self._gone.remove_below(run, floor, BitMap())
        for origins in self._told.values():
            origins.remove_below(run, floor, self._kept.numbers(run))

    def heard(self, incarnation: str) -> int:
        """When a report last named it, in ms; 0 for never."""
        return self._heard.get(incarnation, 0)

    def find_gone(self, before_ms: int) -> list[str]:
        """Incarnations of which no minute is held and that nobody named since."""
        old = [incarnation for incarnation, at_ms in self._heard.items() if at_ms < before_ms]
        return sorted(set(old) - self._held()) if old else []

    def _held(self) -> set[str]:
        places = [held for places in self._accepted.values() for held in places.values()]
        return {run.incarnation for held in places for run, _ in held.runs()}

    def forget(self, incarnation: str) -> None:
        """Drop what is known of an incarnation that has no minutes left and will not speak again."""
        self._floors = {run: floor for run, floor in self._floors.items() if run.incarnation != incarnation}
        self._heard.pop(incarnation, None)
        for origins in (self._kept, self._gone, *self._told.values()):
            origins.forget(incarnation)


_NOTHING = Origins()
