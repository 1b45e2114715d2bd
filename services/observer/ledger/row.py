"""One line of the loss table: a pipe's minute, in counts."""

import msgspec

from services.core.ledger.report import Node, Outcome
from services.observer.ledger.settlement import Settlement, StepSets


class StepRow(msgspec.Struct, frozen=True):
    """expected: what the step before passed on. outcomes: how many of them settled how. missing: the rest."""

    node: Node
    destination: str | None
    expected: int
    outcomes: dict[Outcome, int]
    missing: int


class Row(msgspec.Struct, frozen=True):
    """accepted: what came into the pipe. missing: of these, lost at any step. waiting: to be tried again.

    why_open: None when the minute is final, else for what it waits. late: settled after the minute was final.
    minute: since the epoch.
    """

    pipe: str
    minute: int
    accepted: int
    steps: tuple[StepRow, ...]
    missing: int
    waiting: int
    why_open: str | None = "late events may come"
    late: int = 0

    @property
    def loss(self) -> float:
        """Share of the accepted events that is missing, 0..1."""
        return self.missing / self.accepted if self.accepted else 0.0


def count(pipe: str, minute: int, settlement: Settlement) -> Row:
    """The settlement's sizes."""
    steps = tuple(map(_count_step, settlement.steps))
    accepted, missing, waiting = settlement.accepted, settlement.missing(), settlement.waiting()
    return Row(pipe, minute, len(accepted), steps, len(missing), len(waiting))


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
