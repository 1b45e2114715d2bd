"""What became of accepted events, step by step: set algebra on the origins of one minute.

Every origin is judged by itself. So the settlement of a set is the sum of those of its parts, and parts that are settled
for good can be kept as counts (`Ledger.fold`).
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from services.core.ledger.report import Node, Outcome
from services.observer.ledger.flow import Flow, Step
from services.observer.ledger.origins import Origins
from services.observer.ledger.rounds import retrier_of

Accepted = Mapping[tuple[Node, str], Origins]
"""By where they were accepted: ("ingest", stream), or ("transform", pipe) for events that a transform made anew."""

OPEN_OUTCOMES: tuple[Outcome, ...] = ("retrying", "parked")
"""Not lost and not at their end."""
_TRANSFORM: tuple[Outcome, ...] = ("passed", "dead", "filtered")
_RETRIER: tuple[Outcome, ...] = ("dead", "released")
_EXPEL: tuple[Outcome, ...] = ("delivered", "dead", "parked", "retrying")
"""What was told of an event counts in this order: what it came to, before what it went through."""


class Told(Protocol):
    """What the steps said."""

    def told(self, step: Step, outcome: Outcome) -> Origins:
        """Everything that this step reported with this outcome, of all minutes."""

    def lost(self, step: Step) -> Origins:
        """What this step of the retrier or, for what came back or was parked, of expel should have seen to long ago."""


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


def settle(flow: Flow, pipe: str, accepted: Accepted, told: Told) -> Settlement:
    """The settlement of these accepted events in one pipe."""
    entered = union(arrive(flow, source, accepted, told) for source in flow.pipes[pipe].sources)
    steps = []
    expected = entered
    if flow.pipes[pipe].transforms:
        made = accepted.get(("transform", pipe), Origins())
        steps.append(_share_out(Step("transform", pipe), entered, _transformed(flow, pipe, entered, told)))
        expected = steps[0].outcomes["passed"] | made
    for destination in flow.pipes[pipe].destinations:
        step = Step("expel", pipe, destination)
        said = _expelled(step, expected, told)
        lost = told.lost(step)
        open_ones = {outcome: said[outcome] - lost for outcome in OPEN_OUTCOMES}
        steps.append(_share_out(step, expected, {**said, **open_ones}))
        if destination in flow.pipes[pipe].retried:
            steps.append(_retry(steps[-1], expected, told))
    return Settlement(entered, steps)


def arrive(flow: Flow, stream: str, accepted: Accepted, told: Told) -> Origins:
    """Which of these came into the stream: those that ingest accepted there, and those that other pipes delivered to it."""
    found = accepted.get(("ingest", stream), Origins())
    every = union(accepted.values())
    for step in flow.feeders(stream):
        found = found | (told.told(step, "delivered") & every)
    return found


def _transformed(flow: Flow, pipe: str, entered: Origins, told: Told) -> dict[Outcome, Origins]:
    """As the transform said; and what a destination knows has passed, whatever the transform has not said yet."""
    step = Step("transform", pipe)
    found: dict[Outcome, Origins] = {outcome: told.told(step, outcome) & entered for outcome in _TRANSFORM}
    for destination in flow.pipes[pipe].destinations:
        known = _expelled(Step("expel", pipe, destination), entered, told)
        found["passed"] = union((found["passed"], *known.values()))
    return found


def _expelled(step: Step, expected: Origins, told: Told) -> dict[Outcome, Origins]:
    found: dict[Outcome, Origins] = {outcome: told.told(step, outcome) & expected for outcome in _EXPEL}
    found["dead"] = found["dead"] | (told.told(Step("retrier", step.pipe, step.destination), "dead") & expected)
    return found


def _retry(expel: StepSets, expected: Origins, told: Told) -> StepSets:
    """What expel ever handed over: lost here, dead, given back at least once, or waiting for it."""
    step = retrier_of(expel.step)
    handed_over = told.told(expel.step, "retrying") & expected
    lost = told.lost(step) & expel.outcomes["retrying"]
    said: dict[Outcome, Origins] = {outcome: told.told(step, outcome) & handed_over for outcome in _RETRIER}
    shared = _share_out(step, handed_over - lost, {**said, "retrying": handed_over})
    return shared._replace(expected=handed_over, missing=lost)


def _share_out(step: Step, expected: Origins, said: dict[Outcome, Origins]) -> StepSets:
    """Give each origin the first outcome that was told of it."""
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
