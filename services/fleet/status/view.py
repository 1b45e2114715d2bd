"""Renders the status as tables."""

import time
from collections.abc import Collection
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.fleet.console import make_table
from services.fleet.dead.view import plain
from services.fleet.pipes.expected_modes import describe_micro_batches

_NOT_KNOWN = "not yet"
_FAR_MS = 10_000
"""A table that is further behind answers with 503, unless its setting `behind` says otherwise."""
_CLOCKS = (
    "event age: from the event's own time; E2E lag: from its arrival at ingest. P50, P95 and P99 are of all events since the\n"
    "start of the processes, so a delay of the last minutes hardly changes them. The observer has them by minute:\n"
    "GET /v1/pipes/PIPE/lag"
)
_BEHIND = (
    "behind: the number of events from the first unsettled one on, and how long that one has waited. For a destination behind a\n"
    "transform: the results of the transform. retried: events that were sent again, once for each\n"
    "attempt. waiting: events in PIPE.retry (due, but held, as by an open circuit breaker), with the global retrier (not due;\n"
    "the table `retries` has their number), or parked. How many are in PIPE.retry or parked: penstock group show PIPE/DESTINATION"
)
_DUE = (
    "a waiting event is sent when its next round is due: by the destination's schedule, and not before the next test of a\n"
    "receiver whose circuit breaker is open. It cannot be brought forward. Why it waits: penstock doctor"
)
_DEAD = "dead: events that became dead letters, with the reason; later redrives do not lower it. See penstock dead list"


def render_status(status: dict[str, Any]) -> RenderableType:
    """Tables of streams, tables, transforms, destinations and processes."""
    version = f"   penstock {status['penstock']}" if status["penstock"] else ""
    addresses = f"ingest http://{status['listen']}   observer http://{status['observer']}"
    since = f"\ncounts since {status['since']}; of a restarted process since its restart" if status["since"] else ""
    head = Text(f"{addresses}   broker {status['broker']}{version}{since}", style="dim")
    parts: list[RenderableType] = [head, _streams(status["streams"])]
    if status["tables"]:
        parts.append(_tables(status["tables"]))
    if status["transforms"]:
        parts.append(_transforms(status["transforms"]))
        whys = ((row["pipe"], row["why"]) for row in status["transforms"] if row["why"] is not None)
        parts += [Text(line, style="dim") for _, line in describe_micro_batches(whys)]
        if not status["destinations"]:
            parts.append(Text(_CLOCKS, style="dim"))
        parts += [_paused_transform(row) for row in status["transforms"] if row["paused"] is not None]
        parts += [_unbegun(row) for row in status["transforms"] if row["paused"] is None and _is_unbegun(row)]
    if status["destinations"]:
        parts.append(_destinations(status["destinations"]))
        parts.append(Text(f"{_CLOCKS}\n{_BEHIND}", style="dim"))
        parts += [_failing(row) for row in status["destinations"] if row["breaker_open"] and row["paused"] is None]
        parts += [_paused(row) for row in status["destinations"] if row["paused"] is not None]
    if status["retrier"] is not None:
        parts.append(_retrier(status["retrier"]))
        if status["retrier"]["waiting"]:
            parts.append(Text(_DUE, style="dim"))
    if any(row["dead"] for row in (*status["transforms"], *status["destinations"])):
        parts.append(Text(_DEAD, style="dim"))
    return Group(*parts, _processes(status["processes"]))


def _table(title: str, *columns: str, text: Collection[str] = ()) -> Table:
    right = [column for column in columns[1:] if column not in text]
    return make_table(*columns, right=right, text=text, title=title)


def _streams(rows: list[dict[str, Any]]) -> Table:
    table = _table("streams", "stream", "events/s", "accepted", "refused", "ingest time P50 P95 P99")
    for row in rows:
        counts = (_rate(row["rate"]), str(row["accepted"]), str(row["refused"]))
        table.add_row(row["stream"], *counts, spread(row["ingest_time_ms"]))
    return table


def _tables(rows: list[dict[str, Any]]) -> Table:
    table = _table("tables", "table", "events/s", "rows", "behind", "last rebuild", text=["last rebuild"])
    for row in rows:
        behind, rebuilt = row["behind_ms"], row["rebuilt"]
        table.add_row(
            _named(row["table"], up=behind is not None and behind < _FAR_MS),
            _rate(row["rate"]),
            _NOT_KNOWN if row["rows"] is None else str(row["rows"]),
            _NOT_KNOWN if behind is None else millis(behind),
            "" if rebuilt is None else f"{rebuilt['at']} ({rebuilt['reason']})",
        )
    return table


def _transforms(rows: list[dict[str, Any]]) -> Table:
    table = _table(
        "transforms", "pipe", "mode", "events/s", "read", "written", "dead", "behind", "event age P50 P95 P99"
    )
    for row in rows:
        table.add_row(
            _named(row["pipe"], up=row["up"]),
            row["mode"] or _NOT_KNOWN,
            _rate(row["rate"]),
            str(row["read"]),
            str(row["written"]),
            _bad(row["dead"]),
            _NOT_KNOWN if row["lag_records"] is None else str(row["lag_records"]),
            spread(row["lag_out_ms"]),
        )
    return table


def _destinations(rows: list[dict[str, Any]]) -> Table:
    table = _table(
        "destinations",
        "destination",
        "events/s",
        "delivered",
        "retried",
        "dead",
        "behind",
        "waiting",
        "E2E lag P50 P95 P99",
    )
    for row in rows:
        table.add_row(
            _named(f"{row['pipe']} → {row['destination']}", up=row["up"]),
            _rate(row["rate"]),
            str(row["delivered"]),
            str(row["retried"]),
            _bad(row["dead"]),
            _behind(row["lag_records"], row["lag_ms"]),
            "?" if row["waiting"] is None else str(row["waiting"]),
            spread(row["e2e_lag_ms"]),
        )
    return table


def _failing(row: dict[str, Any]) -> Text:
    """A line for a destination whose circuit breaker is not closed."""
    name = Text(f"{row['pipe']} → {row['destination']}", style="red")
    wait = row["next_probe_ms"]
    when = f"In {millis(wait)} the" if wait else "The"
    fails = f" fails: its circuit breaker is {row['breaker']}. {when} next event that is due tests its receiver."
    return Text.assemble(name, f"{fails} Try: penstock doctor")


def _paused(row: dict[str, Any]) -> Text:
    """A line for a paused destination: since when, by whom and why."""
    paused = row["paused"]
    name = Text(f"{row['pipe']} → {row['destination']}", style="yellow")
    parked = "?" if paused["parked"] is None else f"up to {paused['parked']}"
    return Text.assemble(name, _since(paused), f", {parked} events parked")


def _paused_transform(row: dict[str, Any]) -> Text:
    """A line for a paused transform: since when, by whom and why."""
    name = Text(row["pipe"], style="yellow")
    return Text.assemble("the transform of ", name, _since(row["paused"]), "; its events wait in its streams")


def _is_unbegun(row: dict[str, Any]) -> bool:
    return not row["up"] and row["mode"] is None


def _unbegun(row: dict[str, Any]) -> Text:
    """A line for a transform without figures."""
    return Text.assemble(
        "the transform of ", Text(row["pipe"], style="yellow"), " has not begun to run; its events wait in its streams"
    )


def _since(paused: dict[str, Any]) -> str:
    return f" is paused since {paused['since']} by {plain(paused['by'], 100)} because: {plain(paused['because'], 200)}"


def _retrier(row: dict[str, Any]) -> Table:
    table = _table("retries", "", "events/s", "waiting", "next due", "released", "dead", "late P50 P95 P99")
    table.add_row(
        _named("global retrier", up=row["up"]),
        _rate(row["rate"]),
        "?" if row["waiting"] is None else str(row["waiting"]),
        "" if row["next_due_ms"] is None else f"in {millis(row['next_due_ms'])}",
        str(row["released"]),
        _bad(row["dead"]),
        spread(row["late_ms"]),
    )
    return table


def _behind(records: int | None, lag_ms: int | None) -> str:
    """The number of waiting events, and the age of the oldest."""
    if records is None or lag_ms is None:
        return "?"
    return f"{records}, {millis(lag_ms)}" if records else "0"


def _processes(rows: list[dict[str, Any]]) -> Table:
    table = _table("processes", "process", "pid", "state", "restarts", "CPU", "memory", text=["state"])
    for row in rows:
        table.add_row(
            _named(row["name"], up=row["state"] == "ready"),
            str(row["pid"] or ""),
            _state(row),
            _bad(row["restarts"]),
            f"{row['cpu_percent']:.0f} %",
            f"{row['rss_bytes'] / 1e6:.0f} MB",
        )
    return table


def _state(row: dict[str, Any]) -> str:
    """Of a process that is not ready, with the time since its start."""
    state: str = row["state"]
    if row["since"] is None or state == "ready":
        return state
    seconds = max(0.0, time.time() - datetime.fromisoformat(row["since"]).timestamp())
    return f"{state} ({millis(seconds * 1000)} after its start)"


def _named(name: str, *, up: bool) -> Text:
    return Text(name, style="green" if up else "red")


def _bad(count: int) -> Text:
    return Text(str(count), style="red" if count else "")


def _rate(rate: float) -> str:
    return f"{rate:,.0f}"


def spread(lags: dict[str, float]) -> str:
    """P50, P95 and P99 in one cell; a dash when nothing was measured."""
    if not any(lags.values()):
        return "–"  # noqa: RUF001
    return "  ".join(millis(value) for value in lags.values())


def millis(value: float) -> str:
    """Milliseconds in a readable unit."""
    if value < 1000:
        return f"{value:.0f} ms"
    if value < 120_000:
        return f"{value / 1000:.1f} s"
    return f"{value / 60_000:.0f} min" if value < 7_200_000 else f"{value / 3_600_000:.0f} h"
