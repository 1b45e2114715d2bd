"""The status of a fleet, from metrics."""

import os
import re
import time
from pathlib import Path
from unittest.mock import AsyncMock

import psutil
import pytest
from rich.console import Console

from services.core.control.pauses import Pause
from services.core.lag import LagHistogram
from services.core.pipe_file.pipes import PipeFile
from services.core.process.scrape import Sample
from services.core.times import format_time
from services.fleet.folder import FleetState, ProcessState
from services.fleet.status import reading as status
from services.fleet.status.reading import StatusReading, summarise
from services.fleet.status.view import render_status, spread

_HOUR_MS = 3_600_000


def _histogram(lag_ms: int) -> LagHistogram:
    histogram = LagHistogram()
    histogram.observe([lag_ms])
    return histogram


async def test_the_clock_of_each_lag_is_named(tmp_path: Path) -> None:
    """Broken: old events are sent, a transform has a lag of an hour beside an E2E lag of seconds, and nothing says why."""
    to = frozenset({("pipe", "p"), ("destination", "d")})
    lags = {
        ("penstock_lag_out_seconds", frozenset({("pipe", "p"), ("node", "transform")})): _histogram(_HOUR_MS),
        ("penstock_e2e_lag_seconds", to): _histogram(3_000),
        ("penstock_event_lag_seconds", to): _histogram(_HOUR_MS + 3_000),
    }
    pipe = {
        "sources": ["s"],
        "transform": {"sql": "SELECT * FROM s"},
        "destinations": [{"name": "d", "webhook": {"url": "https://example.com/"}}],
    }
    pipes = PipeFile.model_validate({"streams": {"s": {}}, "pipes": {"p": pipe}})
    state = FleetState(os.getpid(), "", f"log:{tmp_path}", "pipes.yaml", "127.0.0.1:1", "127.0.0.1:2", [])
    status = await summarise(StatusReading(state, Sample(0.0, {}, lags), None), pipes)
    [transform], [destination] = status["transforms"], status["destinations"]
    assert transform["lag_out_ms"]["p50"] > 0.99 * _HOUR_MS
    assert destination["event_lag_ms"]["p50"] > 0.99 * _HOUR_MS
    assert destination["e2e_lag_ms"]["p50"] < 3_100
    console = Console(width=200, record=True)
    console.print(render_status(status))
    text = console.export_text()
    assert "event age P50 P95 P99" in text
    assert "event age: from the event's own time; E2E lag: from its arrival at ingest" in text
    assert "P50, P95 and P99 are of all events since the start" in " ".join(text.split())
    assert f"counts since {format_time(int(psutil.Process().create_time() * 1000))}; of a restarted process" in text
    assert "penstock group show PIPE/DESTINATION" in text, "where the waiting events are"
    assert "fails: its circuit breaker is open" not in text
    assert "penstock dead list" not in text


async def test_an_open_circuit_breaker_is_named(tmp_path: Path) -> None:
    """Broken: a receiver is down, and the status has only growing numbers."""
    pipe = {"sources": ["s"], "destinations": [{"name": name, "webhook": {"url": "https://e.org/"}} for name in "de"]}
    pipes = PipeFile.model_validate({"streams": {"s": {}}, "pipes": {"p": pipe}})
    lanes = {name: frozenset({("pipe", "p"), ("destination", name)}) for name in "de"}
    values = {
        ("penstock_expel_breaker_state", lane): state for lane, state in zip(lanes.values(), (2.0, 0.0), strict=True)
    }
    values["penstock_expel_next_probe_timestamp_seconds", lanes["d"]] = time.time() + 90
    state = FleetState(os.getpid(), "", f"log:{tmp_path}", "pipes.yaml", "127.0.0.1:1", "127.0.0.1:2", [])
    values["penstock_ledger_waiting_events", lanes["d"]] = 41_577.0
    values["penstock_expel_events_dead_total", lanes["d"] | {("reason", "http_404")}] = 1.0
    status = await summarise(StatusReading(state, Sample(0.0, values), None), pipes)
    assert [row["breaker_open"] for row in status["destinations"]] == [True, False]
    assert [row["breaker"] for row in status["destinations"]] == ["open", "closed"]
    assert [row["waiting"] for row in status["destinations"]] == [41_577, None], "unknown is not zero"
    console = Console(width=200, record=True)
    console.print(render_status(status))
    text = console.export_text()
    assert text.count("fails: its circuit breaker is open. In ") == 1, "how long it may still take"
    assert [60_000 < (row["next_probe_ms"] or 0) <= 90_000 for row in status["destinations"]] == [True, False]
    assert "Try: penstock doctor" in text
    assert "penstock dead list" in text
    assert "41577" in text
    status["retrier"] |= {"waiting": 5}
    console.print(render_status(status))
    assert "and not before the next test of a receiver" in " ".join(console.export_text().split())
    values["penstock_expel_breaker_state", lanes["d"]] = 1.0
    half_open = await summarise(StatusReading(state, Sample(0.0, values), None), pipes)
    console.print(render_status(half_open))
    assert "its circuit breaker is half-open. In " in console.export_text(), "as `penstock destination show` says"
    half_open["destinations"][0]["paused"] = {"since": "now", "by": "me", "because": "x", "parked": 7}
    console.print(render_status(half_open))
    text = console.export_text()
    assert "up to 7 events parked" in text
    assert "fails: its circuit breaker" not in text, "nothing tests the receiver of a paused destination"


@pytest.mark.parametrize(("behind", "waiting", "expected"), [(14, 7, 7), (3, 7, 3), (14, None, 14), (None, None, None)])
async def test_no_more_events_are_parked_than_wait(
    monkeypatch: pytest.MonkeyPatch, behind: int | None, waiting: int | None, expected: int | None
) -> None:
    """Broken: after a rename the events of a paused destination are counted twice, or as many times as there are destinations."""
    monkeypatch.setattr(status, "_group_lag", AsyncMock(return_value=(behind, None)))
    found = await status._paused(None, "p", "d", Pause("paused", "operator", "me", 1), waiting)
    assert found["parked"] == expected


async def test_a_start_is_told_with_its_time(tmp_path: Path) -> None:
    """Broken: a new user sees `?` and zeros while Spark starts, and does not know for how long, nor where the events are."""
    pipe = {"sources": ["s"], "transform": {"sql": "SELECT * FROM s"}, "destinations": [{"name": "d", "stream": "t"}]}
    pipes = PipeFile.model_validate({"streams": {"s": {}, "t": {}}, "pipes": {"p": pipe}})
    process = ProcessState("transform-1", "transform", os.getpid(), "127.0.0.1:3", 0, "")
    where = (f"log:{tmp_path}", "pipes.yaml", "127.0.0.1:1", "127.0.0.1:2")
    shown = []
    for reason in ({"127.0.0.1:3": "p: starting"}, {}):
        sample = Sample(0.0, {}, unready=reason)
        status = await summarise(StatusReading(FleetState(os.getpid(), "", *where, [process]), sample, None), pipes)
        console = Console(width=200, record=True)
        console.print(render_status(status))
        shown.append(console.export_text())
    assert re.search(r"p: starting \(\d.* after its start\)", shown[0])
    assert "the transform of p has not begun to run; its events wait in its streams" in shown[0]
    assert "after its start" not in shown[1]


async def test_tables(tmp_path: Path) -> None:
    """Broken: a table that nobody reads yet seems to be empty; or nobody sees that one was built again, and why."""
    streams = {"s": {}, "t": {"key": "id", "compact": True}, "u": {"key": "id", "compact": True}}
    pipes = PipeFile.model_validate({"streams": streams})
    table = frozenset({("stream", "t")})
    rebuilt = "penstock_table_rebuilt_timestamp_seconds"
    values = {
        ("penstock_table_keys", table): 41_577.0,
        ("penstock_table_behind_seconds", table): 61.5,
        (rebuilt, table | {("reason", "away_too_long")}): 1_000.0,
        (rebuilt, table | {("reason", "damaged_file")}): 2_000.0,
    }
    state = FleetState(os.getpid(), "", f"log:{tmp_path}", "pipes.yaml", "127.0.0.1:1", "127.0.0.1:2", [])
    status = await summarise(StatusReading(state, Sample(0.0, values), None), pipes)
    last = {"at": "1970-01-01T00:33:20.000Z", "reason": "damaged_file"}
    assert status["tables"] == [
        {"table": "t", "rows": 41_577, "behind_ms": 61_500, "rate": 0.0, "rebuilt": last},
        {"table": "u", "rows": None, "behind_ms": None, "rate": 0.0, "rebuilt": None},
    ]
    console = Console(width=200, record=True)
    console.print(render_status(status))
    text = console.export_text()
    assert re.search(r"t +0 +41577 +61.5 s +1970-01-01T00:33:20.000Z \(damaged_file\)", text)
    assert re.search(r"u +0 +not yet +not yet", text)


def test_nothing_measured_is_no_measured_zero() -> None:
    """Broken: a destination without deliveries seems to be the fastest."""
    assert spread({"p50": 0.0, "p95": 0.0, "p99": 0.0}) == "–"  # noqa: RUF001
    assert spread({"p50": 0.0, "p95": 3.0, "p99": 2500.0}) == "0 ms  3 ms  2.5 s"
