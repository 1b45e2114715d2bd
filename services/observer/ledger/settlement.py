"""The outcomes of accepted events, step by step: set algebra on the origins of one minute.

Every origin is settled by itself. So the settlement of a set is the sum of those of its parts, and the parts whose outcome is
final can be kept as counts (`Table`).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from services.core.ledger.report import Node, Outcome
from services.observer.ledger.flow import Flow, Step
from services.observer.ledger.origin_sets import OriginSets
from services.observer.ledger.origins import Origins
from services.observer.ledger.retry_tracker import retrier_of

Accepted = Mapping[tuple[Node, str], Origins]
"""By where they were accepted: ("ingest", stream), or ("transform", pipe) for events that a transform created."""

OPEN_OUTCOMES: tuple[Outcome, ...] = ("retrying", "parked")
"""Neither lost nor final."""
_TRANSFORM: tuple[Outcome, ...] = ("passed", "dead", "filtered", "unknown")
_RETRIER: tuple[Outcome, ...] = ("dead", "released", "unknown")
_EXPEL: tuple[Outcome, ...] = ("delivered", "dead", "parked", "retrying", "filtered", "skipped", "unknown")
"""The first reported outcome of an event counts, in this order: final outcomes before passing ones. Filtered counts after these:
the destination may have had another output at that time. So does an operator's skip: the group may have been set back since, or
the event may wait for another attempt. Then an outcome that only a newer
version knows: the event is not missing."""
_RARE: tuple[Outcome, ...] = ("skipped", "unknown")
_RARE_AT_EXPEL: tuple[Outcome, ...] = ("filtered", *_RARE)


class StepSets(NamedTuple):
    """expected: the origins that the step before passed on. Each of them is in exactly one of the outcomes, or missing."""

    step: Step
    expected: Origins
    outcomes: dict[Outcome, Origins]
    missing: Origins


class Settlement(NamedTuple):
    """Of one pipe."""

    accepted: Origins
    steps: list[StepSets]

    def missing(self) -> Origins:
        return union(step.missing for step in self.steps)

    def waiting(self) -> Origins:
        """The origins that wait at any destination for another attempt."""
        lost = {step.step.destination: step.missing for step in self.steps if step.step.node == "retrier"}
        return union(
            step.outcomes.get(outcome, Origins()) - lost.get(step.step.destination, Origins())
            for step in self.steps
            if step.step.node == "expel"
            for outcome in OPEN_OUTCOMES
        )


def settle(flow: Flow, pipe: str, accepted: Accepted, reported: OriginSets) -> Settlement:
    entered = union(_entered(flow, source, accepted, reported) for source in flow.pipes[pipe].sources)
    steps = []
    expected = entered
    if flow.pipes[pipe].transforms:
        made = accepted.get(("transform", pipe), Origins())
        steps.append(_share_out(Step("transform", pipe), entered, _transformed(flow, pipe, entered, reported)))
        expected = steps[0].outcomes["passed"] | made
    for destination in flow.pipes[pipe].destinations:
        step = Step("expel", pipe, destination)
        outcomes = _expelled(step, expected, reported)
        lost = reported.lost(step)
        steps.append(
            _share_out(step, expected, outcomes | {one: outcomes[one] - lost for one in (*OPEN_OUTCOMES, "skipped")})
        )
        if destination in flow.pipes[pipe].retried:
            steps.append(_retried(steps[-1], expected, reported))
    return Settlement(entered, steps)


def _entered(flow: Flow, stream: str, accepted: Accepted, reported: OriginSets) -> Origins:
    """The origins that ingest accepted in the stream, or that other pipes delivered to it."""
    found = accepted.get(("ingest", stream), Origins())
    every = union(accepted.values())
    for step in flow.feeders(stream):
        found = found | (reported.reported(step, "delivered") & every)
    return found


def _transformed(flow: Flow, pipe: str, entered: Origins, reported: OriginSets) -> dict[Outcome, Origins]:
    """As the transform reported. An event that a destination reported has passed, too."""
    step = Step("transform", pipe)
    found: dict[Outcome, Origins] = {outcome: reported.reported(step, outcome) & entered for outcome in _TRANSFORM}
    for destination in flow.pipes[pipe].destinations:
        known = _expelled(Step("expel", pipe, destination), entered, reported)
        found["passed"] = union((found["passed"], *known.values()))
    return found


def _expelled(step: Step, expected: Origins, reported: OriginSets) -> dict[Outcome, Origins]:
    found: dict[Outcome, Origins] = {outcome: reported.reported(step, outcome) & expected for outcome in _EXPEL}
    found["dead"] = found["dead"] | (reported.reported(retrier_of(step), "dead") & expected)
    return found


def _retried(expel: StepSets, expected: Origins, reported: OriginSets) -> StepSets:
    """Every event that expel ever handed over: lost at the retrier, dead, given back at least once, or still waiting."""
    step = retrier_of(expel.step)
    handed_over = reported.reported(expel.step, "retrying") & expected
    lost = reported.lost(step) & expel.outcomes["retrying"]
    lost = lost - (reported.reported(step, "unknown") & lost)
    outcomes: dict[Outcome, Origins] = {outcome: reported.reported(step, outcome) & handed_over for outcome in _RETRIER}
    shared = _share_out(step, handed_over - lost, {**outcomes, "retrying": handed_over})
    return shared._replace(expected=handed_over, missing=lost)


def _share_out(step: Step, expected: Origins, reported: dict[Outcome, Origins]) -> StepSets:
    """Give each origin its first reported outcome."""
    left, outcomes = expected, {}
    for outcome, origins in reported.items():
        outcomes[outcome] = origins & left
        left = left - origins
    return StepSets(step, expected, outcomes, left)


def union(sets: Iterable[Origins]) -> Origins:
    """All of them in one new set."""
    found = Origins()
    for origins in sets:
        found.update(origins)
    return found


Part = str | None
"""A destination, or None: everything before the destinations, from ingest to the transform."""
LATE_EVENTS = "late events may come"


class StepRow(msgspec.Struct, frozen=True):
    """expected: the number of events that the step before passed on. outcomes: of these, the number by outcome; `skipped`,
    `unknown` and, of expel, `filtered` only where there are any. missing: the rest.

    why_open: why the step's part of the minute is not final; None when it is.
    """

    node: Node
    destination: str | None
    expected: int
    outcomes: dict[Outcome, int]
    missing: int
    why_open: str | None = LATE_EVENTS

    def __add__(self, other: "StepRow") -> "StepRow":
        outcomes = {
            outcome: self.outcomes.get(outcome, 0) + other.outcomes.get(outcome, 0)
            for outcome in self.outcomes | other.outcomes
        }
        return msgspec.structs.replace(
            self, expected=self.expected + other.expected, outcomes=outcomes, missing=self.missing + other.missing
        )


class Row(msgspec.Struct, frozen=True):
    """Of one pipe and minute (since the epoch), the number of events.

    accepted: that entered the pipe. missing: of these, at any step. waiting: for another attempt. why_open: why the first part
    that is not final is not; None when all are. late: settled after they were final as missing, summed over the parts. lost:
    missing at parts that are final.
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
        """Share of the accepted events that is missing at final parts, 0..1."""
        return self.lost / self.accepted if self.accepted else 0.0

    def missing_by_part(self) -> dict[Part, int]:
        """An event is missing at most once in a part."""
        found: dict[Part, int] = {}
        for step in self.steps:
            found[step.destination] = found.get(step.destination, 0) + step.missing
        return found

    def missing_for(self, part: Part) -> int:
        """On the whole way to the part: an event that did not pass the transform is missing at every destination."""
        return sum(step.missing for step in self.steps if step.destination in (None, part))

    def __add__(self, other: "Row") -> "Row":
        """Both parts of one minute's origins in one row; a step that only one of them has stays."""
        theirs = {(step.node, step.destination): step for step in other.steps}
        steps = []
        for step in self.steps:
            same = theirs.pop((step.node, step.destination), None)
            steps.append(step if same is None else step + same)
        return msgspec.structs.replace(
            self,
            accepted=self.accepted + other.accepted,
            steps=(*steps, *theirs.values()),
            missing=self.missing + other.missing,
            waiting=self.waiting + other.waiting,
            lost=self.lost + other.lost,
        )


def _is_rare(step: StepSets, outcome: Outcome) -> bool:
    return outcome in (_RARE_AT_EXPEL if step.step.node == "expel" else _RARE)


def count(pipe: str, minute: int, settlement: Settlement, is_final: Callable[[Part], bool]) -> Row:
    steps = tuple(
        StepRow(
            step.step.node,
            step.step.destination,
            len(step.expected),
            {
                outcome: len(origins)
                for outcome, origins in step.outcomes.items()
                if origins or not _is_rare(step, outcome)
            },
            len(step.missing),
        )
        for step in settlement.steps
    )
    accepted, missing, waiting = settlement.accepted, settlement.missing(), settlement.waiting()
    lost = union(step.missing for step in settlement.steps if is_final(step.step.destination))
    return Row(pipe, minute, len(accepted), steps, len(missing), len(waiting), lost=len(lost))
