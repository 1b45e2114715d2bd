"""The outcomes of accepted events, step by step: set algebra on the origins of one minute.

Every origin is judged by itself. So the settlement of a set is the sum of those of its parts, and parts that are settled
for good can be kept as counts (`Ledger.fold`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol

import msgspec

from services.core.ledger.report import Node, Outcome
from services.observer.ledger.flow import Flow, Step
from services.observer.ledger.origins import Origins
from services.observer.ledger.retry_tracker import retrier_of

Accepted = Mapping[tuple[Node, str], Origins]
"""By where they were accepted: ("ingest", stream), or ("transform", pipe) for events that a transform made anew."""

OPEN_OUTCOMES: tuple[Outcome, ...] = ("retrying", "parked")
"""Neither lost nor final."""
_TRANSFORM: tuple[Outcome, ...] = ("passed", "dead", "filtered")
_RETRIER: tuple[Outcome, ...] = ("dead", "released")
_EXPEL: tuple[Outcome, ...] = ("delivered", "dead", "parked", "retrying")
"""The first reported outcome of an event counts, in this order: final outcomes before passing ones."""


class Reported(Protocol):
    """What the steps said."""

    def reported(self, step: Step, outcome: Outcome) -> Origins:
        """Everything that this step reported with this outcome, of all minutes."""

    def lost(self, step: Step) -> Origins:
        """The events that this step of the retrier should have released long ago, or this step of expel settled long ago."""


class StepSets(NamedTuple):
    """expected: what the step before passed on. outcomes and missing share it out: every origin is in exactly one."""

    step: Step
    expected: Origins
    outcomes: dict[Outcome, Origins]
    missing: Origins


class Settlement(NamedTuple):
    """Of one pipe."""

    accepted: Origins
    steps: list[StepSets]

    def missing(self) -> Origins:
        """Those that are missing anywhere."""
        return union(step.missing for step in self.steps)

    def waiting(self) -> Origins:
        """Those that wait at any destination for another attempt."""
        lost = {step.step.destination: step.missing for step in self.steps if step.step.node == "retrier"}
        return union(
            step.outcomes.get(outcome, Origins()) - lost.get(step.step.destination, Origins())
            for step in self.steps
            if step.step.node == "expel"
            for outcome in OPEN_OUTCOMES
        )


def settle(flow: Flow, pipe: str, accepted: Accepted, reported: Reported) -> Settlement:
    """The settlement of these accepted events in one pipe."""
    entered = union(arrive(flow, source, accepted, reported) for source in flow.pipes[pipe].sources)
    steps = []
    expected = entered
    if flow.pipes[pipe].transforms:
        made = accepted.get(("transform", pipe), Origins())
        steps.append(_share_out(Step("transform", pipe), entered, _transformed(flow, pipe, entered, reported)))
        expected = steps[0].outcomes["passed"] | made
    for destination in flow.pipes[pipe].destinations:
        step = Step("expel", pipe, destination)
        said = _expelled(step, expected, reported)
        lost = reported.lost(step)
        open_ones = {outcome: said[outcome] - lost for outcome in OPEN_OUTCOMES}
        steps.append(_share_out(step, expected, {**said, **open_ones}))
        if destination in flow.pipes[pipe].retried:
            steps.append(_retry(steps[-1], expected, reported))
    return Settlement(entered, steps)


def arrive(flow: Flow, stream: str, accepted: Accepted, reported: Reported) -> Origins:
    """Which of these came into the stream: those that ingest accepted there, and those that other pipes delivered to it."""
    found = accepted.get(("ingest", stream), Origins())
    every = union(accepted.values())
    for step in flow.feeders(stream):
        found = found | (reported.reported(step, "delivered") & every)
    return found


def _transformed(flow: Flow, pipe: str, entered: Origins, reported: Reported) -> dict[Outcome, Origins]:
    """As the transform said; and what a destination knows has passed, whatever the transform has not said yet."""
    step = Step("transform", pipe)
    found: dict[Outcome, Origins] = {outcome: reported.reported(step, outcome) & entered for outcome in _TRANSFORM}
    for destination in flow.pipes[pipe].destinations:
        known = _expelled(Step("expel", pipe, destination), entered, reported)
        found["passed"] = union((found["passed"], *known.values()))
    return found


def _expelled(step: Step, expected: Origins, reported: Reported) -> dict[Outcome, Origins]:
    found: dict[Outcome, Origins] = {outcome: reported.reported(step, outcome) & expected for outcome in _EXPEL}
    found["dead"] = found["dead"] | (reported.reported(Step("retrier", step.pipe, step.destination), "dead") & expected)
    return found


def _retry(expel: StepSets, expected: Origins, reported: Reported) -> StepSets:
    """What expel ever handed over: lost here, dead, given back at least once, or waiting for it."""
    step = retrier_of(expel.step)
    handed_over = reported.reported(expel.step, "retrying") & expected
    lost = reported.lost(step) & expel.outcomes["retrying"]
    said: dict[Outcome, Origins] = {outcome: reported.reported(step, outcome) & handed_over for outcome in _RETRIER}
    shared = _share_out(step, handed_over - lost, {**said, "retrying": handed_over})
    return shared._replace(expected=handed_over, missing=lost)


def _share_out(step: Step, expected: Origins, said: dict[Outcome, Origins]) -> StepSets:
    """Give each origin the first outcome that was reported of it."""
    left, outcomes = expected, {}
    for outcome, origins in said.items():
        outcomes[outcome] = origins & left
        left = left - origins
    return StepSets(step, expected, outcomes, left)


def union(sets: Iterable[Origins]) -> Origins:
    """All of them in one new set."""
    found = Origins()
    for origins in sets:
        for run, numbers in origins.runs():
            found.add(run, numbers)
    return found


Part = str | None
"""A destination, or None: what comes before them all, from ingest to the transform."""
LATE_EVENTS = "late events may come"


class StepRow(msgspec.Struct, frozen=True):
    """expected: what the step before passed on. outcomes: how many of them settled how. missing: the rest.

    why_open: None when the step's part of the minute is final, else for what it waits.
    """

    node: Node
    destination: str | None
    expected: int
    outcomes: dict[Outcome, int]
    missing: int
    why_open: str | None = LATE_EVENTS


class Row(msgspec.Struct, frozen=True):
    """accepted: what came into the pipe. missing: of these, at any step. waiting: to be tried again.

    why_open: None when every part of the minute is final, else for what the first that is not waits. late: settled after they
    were final as missing, summed over the parts. lost: of those that are missing, the ones at parts that are final. minute: since
    the epoch.
    """

    pipe: str
    minute: int
    accepted: int
    steps: tuple[StepRow, ...]
    missing: int
    waiting: int
    why_open: str | None = LATE_EVENTS
    late: int = 0
    lost: int = 0

    @property
    def loss(self) -> float:
        """Share of the accepted events that is missing, 0..1."""
        return self.missing / self.accepted if self.accepted else 0.0

    @property
    def final_loss(self) -> float:
        """Share of the accepted events that is lost, 0..1, as far as that is final."""
        return self.lost / self.accepted if self.accepted else 0.0

    def missing_by_part(self) -> dict[Part, int]:
        """An event is missing once in a part at most."""
        found: dict[Part, int] = {}
        for step in self.steps:
            found[step.destination] = found.get(step.destination, 0) + step.missing
        return found

    def missing_for(self, part: Part) -> int:
        """On the whole way up to there: what did not pass the transform is missing at every destination."""
        return sum(step.missing for step in self.steps if step.destination in (None, part))


def count(pipe: str, minute: int, settlement: Settlement, is_final: Callable[[Part], bool]) -> Row:
    """The settlement's sizes."""
    steps = tuple(map(_count_step, settlement.steps))
    accepted, missing, waiting = settlement.accepted, settlement.missing(), settlement.waiting()
    lost = union(step.missing for step in settlement.steps if is_final(step.step.destination))
    return Row(pipe, minute, len(accepted), steps, len(missing), len(waiting), lost=len(lost))


def _count_step(step: StepSets) -> StepRow:
    outcomes = {outcome: len(origins) for outcome, origins in step.outcomes.items()}
    return StepRow(step.step.node, step.step.destination, len(step.expected), outcomes, len(step.missing))


def add(row: Row, other: Row) -> Row:
    """Both parts of one minute's origins in one row; steps that only one has stay."""
    theirs = {(step.node, step.destination): step for step in other.steps}
    steps = [_add_step(step, theirs.pop((step.node, step.destination), None)) for step in row.steps]
    return msgspec.structs.replace(
        row,
        accepted=row.accepted + other.accepted,
        steps=(*steps, *theirs.values()),
        missing=row.missing + other.missing,
        waiting=row.waiting + other.waiting,
        lost=row.lost + other.lost,
    )


def _add_step(step: StepRow, other: StepRow | None) -> StepRow:
    if other is None:
        return step
    outcomes = {
        outcome: step.outcomes.get(outcome, 0) + other.outcomes.get(outcome, 0)
        for outcome in (*step.outcomes, *(outcome for outcome in other.outcomes if outcome not in step.outcomes))
    }
    return msgspec.structs.replace(
        step, expected=step.expected + other.expected, outcomes=outcomes, missing=step.missing + other.missing
    )
