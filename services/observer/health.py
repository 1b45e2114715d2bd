"""The health of a pipe, from its loss table and its instances' reports."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from services.core.control.pauses import Pause
from services.core.ledger.minute import MINUTE_MS
from services.core.pipe_file.topic_names import lane_name
from services.core.units import format_count
from services.observer.ledger.flow import Step
from services.observer.ledger.settlement import Row
from services.observer.ledger.table import Table
from services.observer.planned import PlannedWindows, Window

HealthState = Literal["healthy", "degraded", "unstable"]
STATES: tuple[HealthState, ...] = ("healthy", "degraded", "unstable")
"""The worst last."""
Reason = tuple[HealthState, str]
"""A state, and why."""
WATCHED_MINUTES = 15
"""Loss in a final minute makes a pipe unstable for so long after the minute's end, and after the loss was found."""
BEHIND_MS = 30_000


class Health(msgspec.Struct, frozen=True):
    """state: the worst of its reasons; a healthy pipe has none. planned: the kind of a window that excuses them, or None."""

    state: HealthState
    reasons: tuple[str, ...]
    planned: str | None


FindHealth = Callable[[str, int], Health]
"""The health of a pipe at a time (ms)."""


def find_health(
    table: Table, planned: PlannedWindows, pipe: str, now: int, threshold: float, more: Sequence[Reason] = ()
) -> Health:
    """The health of a pipe of the table. threshold: of the loss, 0..1. more: reasons from elsewhere (drifts, pauses).

    In a planned window nothing is worse than degraded, except loss that the window does not excuse. Raises KeyError.
    """
    lossy, others = _lossy(table, pipe, now, threshold), [*_steps(table, pipe, now), *more]
    for_loss = planned.covers(pipe, now, now + 1, loss=True)
    window = for_loss or planned.covers(pipe, now, now + 1)
    state = STATES[max(_worst(lossy, for_loss), _worst(others, window))]
    return Health(state, tuple(reason for _, reason in (*lossy, *others)), window.kind if window is not None else None)


def list_pauses(paused: Mapping[str, Pause], pipe: str, destinations: Iterable[str]) -> list[Reason]:
    """The pauses of the pipe's transform and of its destinations, as reasons. paused: as of `Pauses.paused`."""
    reasons: list[Reason] = [
        ("degraded", f"{name} is paused") for name in destinations if lane_name(pipe, name) in paused
    ]
    if pipe in paused:
        reasons.append(("degraded", f"the transform is {paused[pipe].text}"))
    return reasons


def _worst(found: Sequence[Reason], window: Window | None) -> int:
    """As an index of STATES."""
    worst = max((STATES.index(state) for state, _ in found), default=0)
    return worst if window is None else min(worst, STATES.index("degraded"))


def recent_rows(table: Table, pipe: str, now: int, minutes: int = WATCHED_MINUTES) -> list[Row]:
    """The rows of the last minutes, oldest first."""
    first = now // MINUTE_MS - minutes
    return [table.row(pipe, minute, now) for minute in table.minutes(pipe) if minute >= first]


def _lossy(table: Table, pipe: str, now: int, threshold: float) -> list[Reason]:
    rows = recent_rows(table, pipe, now)
    lossy = [
        row
        for row in {row.minute: row for row in (*rows, *table.found_lately(pipe, now))}.values()
        if row.final_loss > threshold
    ]
    found: list[Reason] = []
    if lossy:
        missing, accepted = sum(row.lost for row in lossy), sum(row.accepted for row in lossy)
        found.append(
            ("unstable", f"{missing} of {accepted} events are missing in {format_count(len(lossy), 'minute')}")
        )
    dead = sum(step.outcomes.get("dead", 0) for row in rows for step in row.steps if step.node != "retrier")
    waiting = sum(row.waiting for row in rows)
    for number, text in ((dead, "went to the dead letters"), (waiting, "wait for another attempt")):
        if number:
            found.append(("degraded", f"{format_count(number, 'event')} of the last {WATCHED_MINUTES} minutes {text}"))
    return found


def _steps(table: Table, pipe: str, now: int) -> list[Reason]:
    found: list[Reason] = []
    for step in table.flow.steps(pipe):
        name = step.full_label
        if not table.liveness.alive(step, now):
            found.append(_why_silent(table, step, name))
        elif (behind := table.liveness.behind_ms(step, now)) is not None and behind > BEHIND_MS:
            found.append(("degraded", f"{name} is behind by {behind / 1000:.0f} s"))
        if (breaker := table.liveness.breaker(step, now)) not in (None, "closed"):
            found.append(("degraded", f"the breaker of {step.destination} is {breaker}"))
    return found


def _why_silent(table: Table, step: Step, name: str) -> Reason:
    heartbeats = table.liveness.heartbeats().get(step, {}).values()
    if not heartbeats:
        return "degraded", f"{name} has not reported yet"
    if max(heartbeats, key=lambda heartbeat: heartbeat.received_ms).closed:
        return "degraded", f"{name} was stopped"
    return "unstable", f"{name} is silent"
