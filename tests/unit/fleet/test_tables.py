"""Every table on a narrow and on a wide terminal, with short names and with the longest ones."""

import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from rich.console import Console, Group, RenderableType

from services.core.broker.contract import Lag, PartitionRange
from services.core.broker.log.backup import PartitionCopy, TopicCopy
from services.core.broker.record import Record, TopicPartition
from services.core.control.freezes import Freeze
from services.core.control.pauses import Pause
from services.core.sample import RefusedEvent, SampleRecord, TrialResult
from services.core.security.keys import ApiKey
from services.core.undelivered.causes import Cause, Example, normalise
from services.core.undelivered.dead_letter import DeadLetter, Position
from services.fleet.console import make_table
from services.fleet.cost import FleetSample, Load, Prices, StreamSample, render_cost, summarise_cost
from services.fleet.dead.view import cause_table, letter_table
from services.fleet.demo.chaos import render_chaos
from services.fleet.demo.run import render_result
from services.fleet.observer_client import loss_table, outcome_table
from services.fleet.pipes.trial import Trial
from services.fleet.positions.lanes import Lane
from services.fleet.positions.offsets import LaneOffsets, PartitionOffsets
from services.fleet.status.paused import DestinationState, destination_table
from services.fleet.status.view import render_status
from services.fleet.verbs.backup import topic_table
from services.fleet.verbs.group import offset_table
from services.fleet.verbs.keys import key_table
from services.fleet.verbs.loss import missing_table
from services.fleet.verbs.planned import planned_table
from services.fleet.verbs.scaling import Known, group_table
from services.fleet.verbs.schemas import subject_table, version_table
from services.fleet.verbs.trial import trial_tables


class Names(NamedTuple):
    """Names of the pipe file."""

    stream: str
    pipe: str
    destination: str


class Shown(NamedTuple):
    """Something to print, and the texts that must be in it uncut."""

    table: RenderableType
    kept: list[str]


SHORT = Names("orders", "large-orders", "billing")
LONG = Names("s" * 63, "p" * 63, "d" * 63)
LAGS = {"p50": 12_345.0, "p95": 98_765.0, "p99": 119_000.0}
WORDS = "the transform of the pipe waits for its checkpoint folder, which another process of this machine still holds"


def dead_letters(names: Names) -> Shown:
    position = Position(f"{names.pipe}.dead", 1023, 123_456_789)
    event = "018f2d3c-7a5b-7c3d-9e4f-123456789abc"
    letter = DeadLetter(
        position,
        Record(None, b"{}", 0, (("ce_id", event.encode()),)),
        names.pipe,
        names.destination,
        "expel",
        "http_503",
        WORDS[:79],
        40,
        10**12,
        "",
    )
    kept = [str(position), event, names.pipe, names.destination, "http_503"]
    return Shown(letter_table([letter] * 3, settled=True), kept)


def causes(names: Names) -> Shown:
    position = Position(f"{names.pipe}.dead", 1023, 123_456_789)
    detail = "the receiver answered 422: {'error': 'quantity 99999999 of the article A-4711 is more than the stock'}"
    cause = Cause("item_failed", normalise(detail), 123_456, 10**12, 10**12, Example(position, "o-1", detail))
    return Shown(cause_table([cause, cause]), [str(position), "item_failed", "123456", *detail.split()])


def destinations(names: Names) -> Shown:
    paused = Pause("paused", "operator", "somebody@a-long-host-name", 10**12, WORDS)
    found = DestinationState(names.pipe, names.destination, "paused", paused, 12_345_678)
    return Shown(destination_table([found, found]), [f"{names.pipe}/{names.destination}", "12345678"])


def loss(names: Names) -> Shown:
    steps = [
        {
            "node": node,
            "destination": to,
            "expected": 9422,
            "missing": 4711,
            "outcomes": {"skipped": 4711},
            "final": False,
        }
        for node, to in (("ingest", None), ("transform", None), ("expel", names.destination), ("expel", "archive"))
    ]
    minute = "2026-11-21T08:05Z"
    row = {"minute": minute, "accepted": 1_234_567, "waiting": 12_345, "loss": 0.0, "final_loss": 0.0037}
    rows = [{**row, "late": 12, "steps": steps, "final": final, "why_open": WORDS} for final in (True, False)]
    headings = ["missing at transform", names.destination, "missing at expel to archive"]
    return Shown(loss_table({"minutes": rows, "threshold": 0.01}), [minute, "4711", "0.37%", "accepted", *headings])


def outcomes(names: Names) -> Shown:
    many = dict.fromkeys(("passed", "delivered", "retrying", "dead", "filtered", "skipped", "unknown"), 123_456)
    steps = [
        {"node": node, "destination": to, "expected": 123_456_789, "missing": 0, "outcomes": many, "final": True}
        for node, to in (("transform", None), ("expel", names.destination))
    ]
    kept = [f"expel to {names.destination}", "246913578", "246912", "skipped", "missing"]
    return Shown(outcome_table({"minutes": [{"steps": steps}] * 2}), kept)


def missing(names: Names) -> Shown:
    event, origin = "018f2d3c-7a5b-7c3d-9e4f-123456789abc", "0123456789abcdef:1023:123456789"
    topic = f"{names.pipe}.retry"
    one: dict[str, Any] = {"event_id": event, "origin": origin, "missing_at": "expel", "destination": names.destination}
    one |= {"seen_by": "transform", "topic": topic, "partition": 1023, "offset": 123_456_789}
    return Shown(missing_table([one, one]), [event, origin, f"{topic}:1023:123456789", names.destination])


def keys(names: Names) -> Shown:
    key = ApiKey(
        id="k3v9x0qa", hash="0" * 64, name=WORDS, streams=[names.stream, "orders"], scopes=["ingest"], rate=5000
    )
    return Shown(key_table([key]), ["k3v9x0qa", names.stream])


def cost(names: Names) -> Shown:
    kind = f"com.shop.{names.pipe}.paid"
    sample = StreamSample(names.stream, {kind: Load(kind, 123_456.0, 98_765_432.0)}, entries=50.0)
    found = summarise_cost(FleetSample([sample], {names.stream: 12}), Prices())
    return Shown(render_cost(found), [names.stream, kind, "a stream per namespace", "events per entry", "$/month"])


def status(names: Names) -> Shown:
    stream = {
        "stream": names.stream,
        "rate": 12_345.0,
        "accepted": 123_456_789,
        "refused": 12_345,
        "ingest_time_ms": LAGS,
    }
    transform = {
        "pipe": names.pipe,
        "up": True,
        "rate": 12_345.0,
        "read": 123_456_789,
        "written": 123_456_789,
        "dead": 9,
    }
    paused = {"since": "2026-11-21T08:00:00Z", "by": "ann", "because": "they move", "parked": 12}
    transform |= {"lag_records": 123_456, "lag_out_ms": LAGS, "paused": paused}
    transform |= {"mode": "micro-batch", "why": "batch_timeout"}
    destination = {
        "pipe": names.pipe,
        "destination": names.destination,
        "up": True,
        "rate": 12_345.0,
        "retried": 12_345,
    }
    destination |= {"waiting": 123_456}
    destination |= {"delivered": 123_456_789, "dead": 405, "lag_records": 123_456, "lag_ms": 1_200_000}
    destination |= {
        "e2e_lag_ms": LAGS,
        "paused": paused,
        "breaker": "open",
        "breaker_open": True,
        "next_probe_ms": 299_000,
    }
    table: dict[str, Any] = {"rows": 123_456_789, "behind_ms": 119_000, "rate": 12_345.0}
    table["rebuilt"] = {"at": "2026-11-21T08:00:00.000Z", "reason": "position_out_of_range"}
    retrier = {"up": True, "rate": 12_345.0, "waiting": 123_456, "next_due_ms": 123, "released": 123_456_789, "dead": 1}
    process = {
        "pid": 4_194_303,
        "since": "2026-11-21T08:00:00Z",
        "state": WORDS,
        "restarts": 12,
        "cpu_percent": 199.0,
        "rss_bytes": 12_345_678_901,
    }
    found = {
        "penstock": "10.11.12.dev0",
        "listen": "127.0.0.1:8080",
        "observer": "127.0.0.1:41234",
        "broker": "log:///data/log",
        "since": "2026-11-21T08:00:00.000Z",
        "streams": [stream],
        "tables": [{**table, "table": names.stream}],
        "transforms": [transform],
        "destinations": [destination],
        "retrier": {**retrier, "late_ms": LAGS},
        "processes": [{**process, "name": name} for name in ("transform-1", "observer-1")],
    }
    lane = f"{names.pipe} → {names.destination}"
    return Shown(render_status(found), [names.stream, lane, "transform-1", "observer-1", "4194303", *WORDS.split()])


def _ledger(destination: str) -> dict[str, Any]:
    steps = [
        {"node": node, "destination": to, "missing": 0, "outcomes": {"delivered": 0}, "final": False}
        for node, to in (("ingest", None), ("transform", None), ("expel", destination))
    ]
    row = {
        "minute": "2026-11-21T08:05Z",
        "accepted": 10_000,
        "waiting": 0,
        "lost": 0,
        "loss": 0.0,
        "final_loss": 0.0,
        "late": 0,
    }
    minute = {**row, "steps": steps, "final": False, "why_open": "late events may come"}
    return {"minutes": [minute, minute], "accepted": 20_000, "missing": 0, "threshold": 0.01}


def tried(names: Names) -> Shown:
    event, place = "018f2d3c-7a5b-7c3d-9e4f-123456789abc", f"{names.stream}:1023:123456789"
    record = Record(b"customer-4711", b'{"amount": 12345.67, "vat": 2345.67}', 10**12, (("ce_id", event.encode()),))
    source = SampleRecord(place, names.stream, 1023, "123456789", record)
    letter = DeadLetter(Position("p.dead", 0, 0), record, "p", "", "transform", "schema_mismatch", WORDS, 0, 0, place)
    refused = RefusedEvent(place, "bad-id-characters", WORDS)
    trial = Trial(names.pipe, [source], [refused], TrialResult(), [record], [letter], {}, {}, [], 0)
    return Shown(Group(*trial_tables(trial)), [event, place, "schema_mismatch", "bad-id-characters", "customer-4711"])


def demo(_names: Names) -> Shown:
    counts = dict.fromkeys(("accepted", "transformed", "delivered", "duplicates", "sent"), 10_000)
    wrong = dict.fromkeys(("lost", "wrong", "foreign", "unsigned", "dead"), 0)
    lags = dict.fromkeys(("ingest_time_ms", "transit_time_ms", "expel_time_ms", "first_e2e_lag_ms", "e2e_lag_ms"), LAGS)
    result = {
        "ok": True,
        "broker": "kinesis",
        "seconds": 123.4,
        "ledger": _ledger("dashboard"),
        **counts,
        **wrong,
        **lags,
    }
    return Shown(render_result(result), ["accepted  ", "minute  ", "missing", "2026-11-21T08:05Z"])


def chaos(_names: Names) -> Shown:
    names = ("delivered", "duplicates", "lost", "dead", "wrong", "foreign", "unsigned", "handed_over")
    counts = dict.fromkeys(names, 10_000)
    result = {"ok": True, "lost": 0, "broker": "kinesis", "accepted": 10_000, "most_waiting": 10_000, "seconds": 123.4}
    result |= {"outage_s": 12.3, "recovery_s": 45.6, "ledger": _ledger("partner")}
    result["destinations"] = {"operations": counts, "partner": counts}
    result["steady_lag_ms"] = dict.fromkeys(("before", "during", "after"), LAGS)
    return Shown(render_chaos(result), ["operations", "partner", "handed over", "E2E lag P50 P95 P99"])


def offsets(names: Names) -> Shown:
    """Of a group with offsets of 16 digits, more than any broker gives in years."""
    held = PartitionRange(1_234_567_890_123_456, 9_007_199_254_740_991)
    lane = Lane(names.pipe, names.destination, (names.stream,), retries=True)
    parts = [
        PartitionOffsets(TopicPartition(names.stream, 1023), held, 4_503_599_627_370_496, Lag(123_456_789, 12_345_678))
    ]
    found = LaneOffsets(lane, ["host:4194303:0123456789abcdef"], None, parts * 2)
    return Shown(offset_table(found), [names.stream, "1023", str(held.start), str(held.end), "4503599627370496"])


def planned(names: Names) -> Shown:
    at, by = "2026-11-21T08:05:00.000Z", "somebody@a-long-host-name.example.org"
    one: dict[str, Any] = {"id": "1f0c93ab", "kind": "scaling", "pipe": names.pipe, "from": at, "until": at, "by": by}
    one |= {"token": "deploys", "cancelled_by": by, "cancelled_token": "operators"}
    kept = ["1f0c93ab", at, names.pipe, "scaling", *by.split("@"), "deploys", "operators"]
    return Shown(planned_table([one, one | {"pipe": None, "cancelled_by": None}]), kept)


def scaling(names: Names) -> Shown:
    at = "2026-11-21T08:05:00.000Z"
    report: dict[str, Any] = {"frozen": None, "failed": [f"{names.pipe}-1: crashed"], "hot": f"{names.stream}:1023"}
    report |= {"words": WORDS, "dry_run": True, "action": "hold", "working": 12, "size": 16, "wanted": 16, "at": at}
    freezes = {"transform": Freeze("frozen", "somebody@host", 10**12, WORDS)}
    known = Known({"expel": report, names.destination: report}, freezes, None)
    return Shown(group_table(known), ["expel", "transform", names.destination, "12 of 16", at, *WORDS.split()])


def backup(names: Names) -> Shown:
    parts = [PartitionCopy(number, 0, 123_456_789, 123_456_789) for number in range(2)]
    topics = [TopicCopy(topic, "0123456789abcdef", parts) for topic in (names.stream, f"{names.pipe}.parked")]
    return Shown(topic_table(topics), [f"{names.pipe}.parked", "246,913,578", "123,456,788", "highest offset"])


def subjects(names: Names) -> Shown:
    latest = {"version": 12, "id": 345, "name": f"com.shop.{names.pipe}"}
    one: dict[str, Any] = {"subject": f"{names.stream}-value", "latest": latest, "level": "FULL_TRANSITIVE"}
    one |= {"own_level": False, "streams": [names.stream], "pipes": [names.pipe]}
    kept = [f"{names.stream}-value", f"com.shop.{names.pipe}", names.stream, names.pipe, "FULL_TRANSITIVE", "345"]
    return Shown(subject_table([one]), kept)


def versions(names: Names) -> Shown:
    one: dict[str, Any] = {"version": 12, "id": 345, "fingerprint": "0f" * 32, "name": f"com.shop.{names.pipe}"}
    one |= {"registered": "2026-11-21T08:05:00.000Z", "by": "deploys", "deprecated": True, "note": WORDS}
    return Shown(version_table([one]), ["0f" * 32, f"com.shop.{names.pipe}", "345", *WORDS.split()])


TABLES = (
    *(dead_letters, causes, destinations, loss, outcomes, missing, offsets, keys, cost, status, tried, demo, chaos),
    *(planned, scaling, backup, subjects, versions),
)


def render(table: RenderableType, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines, without trailing spaces."""
    monkeypatch.setenv("COLUMNS", str(width))
    out = io.StringIO()
    Console(file=out, width=width, soft_wrap=True, highlight=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("names", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("make", TABLES)
def test_it_fits_and_nothing_is_cut(
    make: Callable[[Names], Shown], width: int, names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the position for the next command is cut off, a name is `pro…`, or the terminal breaks the rows."""
    table, kept = make(names)
    lines = render(table, width, monkeypatch)
    text = "\n".join(lines)
    assert "…" not in text
    assert [one for one in kept if one not in text] == []
    # A sentence outside of the tables is broken by the terminal, and so is the line with the addresses.
    for line in (line for line in lines if "  " in line and "http://" not in line):
        longest = max(map(len, line.split()), default=0)  # one name or position alone may be longer than a line
        assert len(line) <= width or len(line) - longest <= 30, line


@pytest.mark.parametrize("make", TABLES)
def test_no_heading_is_broken(make: Callable[[Names], Shown], monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: with ordinary names the headings take several lines, and nobody sees which figure is which."""
    wide, narrow = (render(make(SHORT).table, width, monkeypatch) for width in (400, 80))
    heading = next(line for line in wide if "  " in line)
    words = [word for word in heading.split("  ") if word]
    assert [word for word in words if word.strip() not in "\n".join(narrow)] == []


def test_a_pipe_gets_one_line_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: `penstock dead list | grep` finds half a row."""
    monkeypatch.delenv("COLUMNS", raising=False)
    table = make_table("name", "detail", text=["detail"])
    table.add_row("n" * 100, WORDS)
    out = io.StringIO()
    Console(file=out, soft_wrap=True).print(table)
    assert [line.rstrip() for line in out.getvalue().splitlines()][1] == f"{'n' * 100}  {WORDS}"
