"""What the page shows: one `View`, whole, as JSON. The page keeps no state of its own beside what a person opened.

Times: `minute` in minutes since the epoch, `at_ms` in milliseconds. Lags and durations in milliseconds.
"""

from typing import Literal

import msgspec

Health = Literal["healthy", "degraded", "unstable"]
CellState = Literal["open", "behind", "final", "unknown"]
"""open: late events may come. behind: its group has older records to process. final: what is missing is lost. unknown: it was
forgotten before that was known."""


class LossCell(msgspec.Struct, frozen=True):
    """A node's events of a minute. missing: passed on by the node before it, and not settled here."""

    missing: int
    state: CellState


class LossRow(msgspec.Struct, frozen=True):
    """One minute. cells: as `PipeView.nodes`. loss: end to end, 0..1, at the destinations that are final. state: of the first
    one that is not. late: settled after they were final."""

    minute: int
    accepted: int
    cells: tuple[LossCell, ...]
    loss: float
    state: CellState
    late: int = 0


class DurationRow(msgspec.Struct, frozen=True):
    """Median of what each step took in a minute, as `PipeView.steps`."""

    minute: int
    millis: tuple[float, ...]


class LagRow(msgspec.Struct, frozen=True):
    """End to end, arrival to the receiver's 2xx."""

    minute: int
    p50: float
    p95: float
    p99: float


class Cause(msgspec.Struct, frozen=True):
    """Why events could not be delivered: a normalised reason, how often, and when last."""

    reason: str
    count: int
    last_ms: int


class DestinationView(msgspec.Struct, frozen=True):
    """state, for a person: active, paused, unknown. breaker: closed, half-open, open, or unknown."""

    name: str
    state: str
    breaker: str
    delivered: int
    retrying: int
    parked: int
    dead: int
    causes: tuple[Cause, ...] = ()


class ShardView(msgspec.Struct, frozen=True):
    """How far one group is behind in one topic. furthest: the partition that is behind most, None when none is. millis: age of
    the oldest record that is not processed."""

    topic: str
    group: str
    partitions: int
    furthest: int | None
    records: int
    millis: int


class FieldView(msgspec.Struct, frozen=True):
    """A field of a sample of the last hour's events at one step. present: share of the events that have it. nulls: share of
    these. drift: how it differs from before, empty when it does not."""

    step: str
    name: str
    present: float
    nulls: float
    distinct: int
    mean: float | None
    drift: str


class PipeView(msgspec.Struct, frozen=True):
    """Rows are oldest first, one a minute, at most an hour of them."""

    name: str
    health: Health
    reasons: tuple[str, ...]
    per_second: float
    nodes: tuple[str, ...]
    loss: tuple[LossRow, ...]
    steps: tuple[str, ...]
    durations: tuple[DurationRow, ...]
    lag: tuple[LagRow, ...]
    destinations: tuple[DestinationView, ...]
    shards: tuple[ShardView, ...] = ()
    fields: tuple[FieldView, ...] = ()


class GroupView(msgspec.Struct, frozen=True):
    """All instances of one service. behind_ms: of the slowest; None when nobody knows."""

    service: str
    instances: int
    behind_ms: int | None


class View(msgspec.Struct, frozen=True):
    """Everything. threshold: loss above which an alarm is raised, 0..1. catching_up: the observer has not read all yet."""

    at_ms: int
    threshold: float
    catching_up: bool
    pipes: tuple[PipeView, ...]
    groups: tuple[GroupView, ...]
