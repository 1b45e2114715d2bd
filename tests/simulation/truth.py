"""The observer's ledger against the oracle: nothing lost that it calls delivered, nothing missing that arrived.

An event that its client sent again may be stored twice, as two origins of which receivers see one id: of those nothing is said.
Nor is it of one that an ingest accepted that died before it could tell, and that was taken away with its stream.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from services.core.event import ORIGIN, Origin
from services.core.ledger.minute import MINUTE_MS
from services.observer.ledger.origins import Origins, SequenceKey
from services.observer.ledger.settlement import StepSets
from services.observer.ledger.table import Table
from tests.simulation.oracle import Event, Route
from tests.simulation.transform import is_filtered
from tests.support.oracle import Fate

if TYPE_CHECKING:
    from tests.simulation.fleet_history import FleetHistory

FINAL_AFTER = "65s"
FINAL_S = 900.0
"""Everything is final by then; parked events and retries are judged with a slack of two minutes and more."""
LOST_S = 400.0
_MOST = 8


async def judge_ledger(history: "FleetHistory") -> list[str]:
    """Wait until the observer's table is final; what it says that is not so."""
    if not await history.wait_for(lambda: _is_final(history), FINAL_S):
        return [f"the ledger is not final: {_why_open(history)}"]
    if any(_lost(history, route) for route in history.oracle.routes.values()):
        await history.wait_for(lambda: not _complain(history), LOST_S)
    return _complain(history)


def _table(history: "FleetHistory") -> Table | None:
    found = history.fleet.found("observer")
    table: Table | None = found[0].follower.table if found else None
    return table


def _why_open(history: "FleetHistory") -> str:
    table, now = _table(history), history.cluster.store.wall_ms()
    if table is None:
        return "no observer runs"
    for pipe in history.pipes.pipes:
        minutes = table.minutes(pipe)
        if not minutes:
            return "no minute is known"
        for minute in minutes:
            if (why := table.row(pipe, minute, now).why_open) is not None:
                return f"{pipe}, minute {minute - now // MINUTE_MS}: {why}"
    return ""


def is_final_for(history: "FleetHistory", pipe: str, names: set[str]) -> bool:
    """Whether all minutes are final for these destinations of the pipe, whatever becomes of the others."""
    table, now = _table(history), history.cluster.store.wall_ms()
    if table is None:
        return False
    minutes = [minute for minute in table.minutes(pipe) if table.row(pipe, minute, now).accepted]
    return all(table.finality.is_final((pipe, minute), name) for minute in minutes for name in names)


def _is_final(history: "FleetHistory") -> bool:
    return not _why_open(history)


def _complain(history: "FleetHistory") -> list[str]:
    table = _table(history)
    if table is None:
        return ["no observer runs"]
    origins = _origins(history)
    return [text for route in history.oracle.routes.values() for text in _judge_route(history, table, route, origins)]


def _judge_route(history: "FleetHistory", table: Table, route: Route, origins: dict[int, Origin]) -> Iterator[str]:
    said = list(_steps(table, route))
    missing = [
        event.id
        for event in _arrived(history, route)
        if event.number in origins and _is_missing(said, origins[event.number])
    ]
    if missing:
        yield f"{route.pipe}/{route.name}: the ledger misses {len(missing)} that arrived: {missing[:_MOST]}"
    lost = [event for event in _lost(history, route) if event.number in origins]
    settled = [event.id for event in lost if _is_settled(said, origins[event.number])]
    if settled:
        yield f"{route.pipe}/{route.name}: the ledger calls {len(settled)} settled that are lost: {settled[:_MOST]}"
    known = [event for event in lost if any(_has(step.expected, origins[event.number]) for step in said)]
    untold = [event for event in known if not _is_missing(said, origins[event.number])]
    if _begins_at_latest(history, route):
        untold = [event for event in untold if not _is_skipped(said, origins[event.number])]
    unseen = [event.id for event in untold]
    if unseen and not settled:
        yield f"{route.pipe}/{route.name}: the ledger does not miss {len(unseen)} that are lost: {unseen[:_MOST]}"


def _steps(table: Table, route: Route) -> Iterator[StepSets]:
    for minute in table.minutes(route.pipe):
        for step in table.settlement(route.pipe, minute).steps:
            if step.step.destination in (None, route.name):
                yield step


def _has(origins: Origins, one: Origin) -> bool:
    return one.sequence in origins.numbers(SequenceKey(one.incarnation, one.partition))


def _is_missing(said: list[StepSets], one: Origin) -> bool:
    return any(_has(step.missing, one) for step in said)


def _is_settled(said: list[StepSets], one: Origin) -> bool:
    return any(_has(step.outcomes.get(outcome, Origins()), one) for step in said for outcome in ("delivered", "dead"))


def _begins_at_latest(history: "FleetHistory", route: Route) -> bool:
    """Then the ledger counts as skipped what is missing at its first report (docs/fidelity.md, "start: latest")."""
    pipe = history.pipes.pipes.get(route.pipe)
    return pipe is not None and any(one.name == route.name and one.start == "latest" for one in pipe.destinations)


def _is_skipped(said: list[StepSets], one: Origin) -> bool:
    return any(_has(step.outcomes.get("skipped", Origins()), one) for step in said)


def _arrived(history: "FleetHistory", route: Route) -> list[Event]:
    return [
        event
        for event in history.oracle.events
        if history.oracle.is_owed(route, event) and (event.number in route.arrived or event.number in route.dead)
    ]


def _lost(history: "FleetHistory", route: Route) -> list[Event]:
    """What somebody took away before it had arrived."""
    return [
        event
        for event in history.oracle.events
        if event.fate is Fate.OBLIGED
        and event.number in route.excused
        and not (route.is_transformed and is_filtered(event.id))
        and event.number not in route.arrived
        and event.number not in route.dead
    ]


def _origins(history: "FleetHistory") -> dict[int, Origin]:
    """Of events that are stored once."""
    from tests.simulation.fleet_history import event_of

    found: dict[int, Origin | None] = {}
    for stored in history.cluster.store.appends:
        if stored.topic not in history.pipes.streams:
            continue
        for record in stored.records:
            raw, number = record.header(ORIGIN), event_of(record.value)
            if raw is not None:
                found[number] = None if number in found else Origin.unpack(raw)
    return {number: origin for number, origin in found.items() if origin is not None}
