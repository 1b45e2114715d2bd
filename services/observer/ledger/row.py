"""One line of the loss table: a pipe's minute, in counts."""

from collections.abc import Callable

import msgspec

from services.core.ledger.report import Node, Outcome
from services.observer.ledger.settlement import Settlement, StepSets, union

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
