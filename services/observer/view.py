"""The content of the page, from the ledger: the last hour of each pipe."""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from services.core.group_report import GroupReport
from services.core.lag import LagHistogram
from services.core.ledger.minute import MINUTE_MS
from services.observer.dead_letters import LaneState
from services.observer.follower import Follower
from services.observer.health import FindHealth, HealthState, recent_rows
from services.observer.ledger.finality import GIVEN_UP
from services.observer.ledger.flow import Step
from services.observer.ledger.settlement import Row
from services.observer.transforms import TransformView

CellState = Literal["open", "behind", "final", "unknown"]
"""open: late events may come. behind: its group has older records to process. final: missing events are lost. unknown: the
minute was forgotten before it was final."""


class LossCell(msgspec.Struct, frozen=True):
    """missing: events of a minute that the node before it passed on and this node did not settle."""

    missing: int
    state: CellState


class LossRow(msgspec.Struct, frozen=True):
    """One minute. cells: in the order of `PipeView.nodes`. loss: end to end, 0..1, at final destinations. state: of the first
    destination that is not final. late: events that were settled after they had been final."""

    minute: int
    accepted: int
    cells: tuple[LossCell, ...]
    loss: float
    state: CellState
    late: int = 0


class DurationRow(msgspec.Struct, frozen=True):
    """The median duration of each step in a minute, in the order of `PipeView.steps`."""

    minute: int
    millis: tuple[float, ...]


class LagRow(msgspec.Struct, frozen=True):
    """End to end, from arrival to the receiver's 2xx."""

    minute: int
    p50: float
    p95: float
    p99: float


class CauseView(msgspec.Struct, frozen=True):
    """Why events could not be delivered. last_ms: when it was last seen. event_id: of the newest dead letter."""

    reason: str
    count: int
    last_ms: int
    event_id: str | None = None


class DestinationView(msgspec.Struct, frozen=True):
    """state: active, paused or unknown. breaker: closed, half-open, open or unknown. The numbers are of the last hour.

    filtered: events that are in other outputs of the transform."""

    name: str
    state: str
    breaker: str
    delivered: int
    retrying: int
    parked: int
    dead: int
    causes: tuple[CauseView, ...] = ()
    skipped: int = 0
    filtered: int = 0


class ShardView(msgspec.Struct, frozen=True):
    """The lag of one group in one topic. furthest: the partition with the greatest lag. millis: age of the oldest
    unprocessed record."""

    topic: str
    group: str
    partitions: int
    furthest: int | None
    records: int
    millis: int


class FieldView(msgspec.Struct, frozen=True):
    """A field in a sample of the last hour's events at one step. present: share of the events that have it. nulls: share of
    these. drift: how it has changed; empty when it has not."""

    step: str
    name: str
    present: float
    nulls: float
    distinct: int
    mean: float | None
    drift: str


class PipeView(msgspec.Struct, frozen=True):
    """Rows are oldest first, one per minute, at most an hour. transform: None without one, or when it does not report."""

    name: str
    health: HealthState
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
    transform: TransformView | None = None


class GroupView(msgspec.Struct, frozen=True):
    """All instances of one service. behind_ms: of the slowest; None: unknown."""

    service: str
    instances: int
    behind_ms: int | None


class PlannedView(msgspec.Struct, frozen=True):
    """A planned action that lasts. pipe: None for all. who: as its client says, and the name of the client's token."""

    id: str
    kind: str
    pipe: str | None
    who: str
    until_ms: int


class View(msgspec.Struct, frozen=True):
    """threshold: the loss above which an alarm is raised, 0..1. catching_up: after a start, reports are still being read.

    speaks: whether this observer raises the alarms. planned: the actions that last. scaling: the autoscaler's last decisions.
    """

    at_ms: int
    threshold: float
    catching_up: bool
    pipes: tuple[PipeView, ...]
    groups: tuple[GroupView, ...]
    speaks: bool = True
    planned: tuple[PlannedView, ...] = ()
    scaling: tuple[GroupReport, ...] = ()


MINUTES = 60
_DURATIONS = (
    ("ingest", "ingest", "ingest_time"),
    ("transit", "expel", "transit_time"),
    ("transform", "transform", "process_time"),
    ("expel", "expel", "expel_time"),
)
"""Name in the chart, node, and kind of lag. They add up: the transform's own duration is subtracted from the transit time
between ingest and expel, if it is known."""

Causes = Callable[[str, str], tuple[CauseView, ...]]
Shards = Callable[[str], tuple[ShardView, ...]]


def make_view(
    follower: Follower,
    now: int,
    threshold: float,
    find_health: FindHealth,
    state: LaneState,
    causes: Causes,
    shards: Shards,
) -> View:
    """The whole page. find_health: health by pipe and time. state, causes: by pipe and destination. shards: by pipe."""
    pipes = tuple(_pipe(follower, pipe, now, find_health, state, causes, shards) for pipe in follower.table.flow.pipes)
    planned = tuple(
        PlannedView(
            one.id, one.kind, one.pipe, f"{one.by or 'somebody'} (token {one.asked_with or 'unknown'})", one.until_ms
        )
        for one in follower.planned.all()
        if one.from_ms <= now < one.until_ms
    )
    groups = _groups(follower, now)
    return View(now, threshold, follower.catching_up, pipes, groups, speaks=follower.speaks, planned=planned)


def _pipe(
    follower: Follower, pipe: str, now: int, find_health: FindHealth, state: LaneState, causes: Causes, shards: Shards
) -> PipeView:
    rows = recent_rows(follower.table, pipe, now, MINUTES)
    health = find_health(pipe, now)
    lags = _Lags(follower, pipe)
    names = tuple(name for name, node, kind in _DURATIONS if lags.has(node, kind))
    last = next((row for row in reversed(rows) if row.minute < now // MINUTE_MS), None)
    return PipeView(
        name=pipe,
        health=health.state,
        reasons=health.reasons,
        per_second=last.accepted / 60 if last is not None and last.minute == now // MINUTE_MS - 1 else 0.0,
        nodes=tuple(Step(step.node, pipe, step.destination).label for step in rows[-1].steps) if rows else (),
        loss=tuple(map(_loss, rows)),
        steps=names,
        durations=lags.durations([(node, kind) for name, node, kind in _DURATIONS if name in names]),
        lag=lags.end_to_end(),
        destinations=tuple(
            _destination(
                rows,
                name,
                state(pipe, name) or "unknown",
                follower.table.liveness.breaker(Step("expel", pipe, name), now) or "unknown",
                causes(pipe, name),
            )
            for name in follower.table.flow.pipes[pipe].destinations
        ),
        shards=shards(pipe),
        fields=_fields(follower, pipe),
        transform=follower.transforms.view(
            pipe,
            now,
            lambda: lags.newest_p95("transform", "lag_out"),
            follower.table.liveness.behind_ms(Step("transform", pipe), now),
        ),
    )


def _loss(row: Row) -> LossRow:
    cells = tuple(LossCell(step.missing, _state(step.why_open) if step.missing else "final") for step in row.steps)
    return LossRow(row.minute, row.accepted, cells, row.final_loss, _state(row.why_open), row.late)


def _state(why_open: str | None) -> CellState:
    if why_open is None:
        return "final"
    return "unknown" if why_open == GIVEN_UP else "behind" if "behind" in why_open else "open"


def _destination(
    rows: Sequence[Row], name: str, state: str, breaker: str, causes: tuple[CauseView, ...]
) -> DestinationView:
    """From expel's steps: the retrier's dead events are among theirs, and its lost ones are among their retrying ones."""
    steps = [step for row in rows for step in row.steps if step.destination == name]
    delivered, retrying, parked, dead, skipped, filtered = (
        sum(step.outcomes.get(outcome, 0) for step in steps if step.node == "expel")
        for outcome in ("delivered", "retrying", "parked", "dead", "skipped", "filtered")
    )
    lost = sum(step.missing for step in steps if step.node == "retrier")
    return DestinationView(name, state, breaker, delivered, retrying - lost, parked, dead, causes, skipped, filtered)


def _fields(follower: Follower, pipe: str) -> tuple[FieldView, ...]:
    """By name; of one name, in the order of the steps."""
    fields, found = follower.fields, []
    for step in follower.table.flow.steps(pipe):
        for field, one in fields.figures(step).items():
            changed = "; ".join(drift.text for drift in fields.drifts(step) if drift.field == field)
            found.append(FieldView(step.full_label, field, one.present, one.nulls, one.distinct, one.mean, changed))
    return tuple(sorted(found, key=lambda one: one.name))


def _groups(follower: Follower, now: int) -> tuple[GroupView, ...]:
    liveness = follower.table.liveness
    found = []
    for service in ("ingest", "transform", "expel", "retrier"):
        steps = [step for step in liveness.heartbeats() if step.node == service]
        instances = {name for step in steps for name in liveness.alive(step, now)}
        behind = [one for step in steps if (one := liveness.behind_ms(step, now)) is not None]
        if steps:
            found.append(GroupView(service, len(instances), max(behind, default=None)))
    return tuple(found)


class _Lags:
    def __init__(self, follower: Follower, pipe: str) -> None:
        self._lags = follower.lags
        self._steps = follower.table.flow.steps(pipe)

    def has(self, node: str, kind: str) -> bool:
        return any(self._merged(node, kind, minute).count for minute in self._lags.minutes())

    def _merged(self, node: str, kind: str, minute: int) -> LagHistogram:
        merged = LagHistogram()
        for step in self._steps:
            if step.node == node and (histogram := self._lags.kinds(minute).get((step, kind))) is not None:
                merged.merge(histogram)
        return merged

    def newest_p95(self, node: str, kind: str) -> float | None:
        """Of the last minute that has any."""
        for minute in reversed(self._lags.minutes()):
            merged = self._merged(node, kind, minute)
            if merged.count:
                return merged.quantiles([0.95])[0]
        return None

    def durations(self, wanted: Sequence[tuple[str, str]]) -> tuple[DurationRow, ...]:
        return tuple(DurationRow(minute, self._medians(wanted, minute)) for minute in self._lags.minutes())

    def _medians(self, wanted: Sequence[tuple[str, str]], minute: int) -> tuple[float, ...]:
        """The duration of the transform is part of the transit time, and is subtracted from it."""
        medians = {node_kind: self._merged(*node_kind, minute).quantiles([0.5])[0] for node_kind in wanted}
        transit, own = ("expel", "transit_time"), ("transform", "process_time")
        if transit in medians and own in medians:
            medians[own] = min(medians[own], medians[transit])
            medians[transit] -= medians[own]
        return tuple(medians.values())

    def end_to_end(self) -> tuple[LagRow, ...]:
        found = ((minute, self._merged("expel", "e2e", minute)) for minute in self._lags.minutes())
        return tuple(LagRow(minute, *merged.quantiles([0.5, 0.95, 0.99])) for minute, merged in found if merged.count)
