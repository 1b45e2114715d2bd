"""The demo: real events through ingest, Spark and expel to a receiver in this process, and an exact count at the end."""

import asyncio
import time
from itertools import islice

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.core.process.scrape import Sample
from services.fleet.console import print_note
from services.fleet.demo.flights import DESTINATION, PIPE, PIPE_FILE, STREAM, Flight, Tracker, load_flights
from services.fleet.demo.stage import (
    DUPLICATES_FOR_S,
    POLL_EVERY_S,
    DemoResult,
    Display,
    Loss,
    PhaseNotes,
    Stage,
    perform,
    poll_until,
    quantiles_of,
    read_loss,
    render_loss,
    scrape_fleet,
    send_flights,
)
from services.fleet.receiver import Receiver, serve_receiver
from services.fleet.sending.sender import SendSummary
from services.fleet.status.reading import quantiles
from services.fleet.status.view import spread
from services.fleet.up.supervisor import Fleet

RATE = 1000.0
"""Events per second. Without a pace the lag would show the length of the queue only."""
BATCH = 50
FIRST = 200
NO_PROGRESS_S = COUNTED_WITHIN_S = 300.0
"""Long: a small or busy machine is slow, and that is no loss. What is waited for is said meanwhile."""
RECEIVER_IN_EXAMPLE = "http://127.0.0.1:9000"


async def run_demo(broker: str) -> DemoResult:
    """Run the demo as `perform` describes. For the result see `make_result`."""
    return await perform(broker, _run)


async def _run(stage: Stage) -> DemoResult:
    tracker = Tracker({})
    async with serve_receiver(Receiver((stage.key,), on_request=tracker.add), "127.0.0.1", 0) as port:
        pipes = await asyncio.to_thread(PIPE_FILE.read_text, encoding="utf-8")
        assert RECEIVER_IN_EXAMPLE in pipes
        async with stage.fleet(pipes.replace(RECEIVER_IN_EXAMPLE, f"http://127.0.0.1:{port}")) as fleet:
            print_note("real flights of January 2013, their times shifted so that the newest is now", "dim")
            return await _send_all(stage, fleet, tracker)


async def _send_all(stage: Stage, fleet: Fleet, tracker: Tracker) -> DemoResult:
    """Send the first events and wait for them, because Spark compiles its query for its first batch; then the rest, paced."""
    sent = SendSummary()
    begun = time.monotonic()
    flights = await asyncio.to_thread(load_flights, time.time())
    with Display(len(flights), ("accepted", "transformed", "delivered")) as display:
        print_note(
            f"the first {FIRST} events wait for Spark to compile its query, the rest follow at {RATE:.0f}/s", "dim"
        )
        await _send_and_wait(fleet, sent, tracker, display, dict(islice(flights.items(), FIRST)))
        first = len(tracker.lags_ms)
        flights = await asyncio.to_thread(load_flights, time.time() + (len(flights) - FIRST) / RATE)
        if not tracker.lost:
            await _send_and_wait(fleet, sent, tracker, display, dict(islice(flights.items(), FIRST, None)))
        seconds = time.monotonic() - begun
        await asyncio.sleep(DUPLICATES_FOR_S)
        loss = await read_loss(fleet, PIPE, sent.accepted)
        sample = await _read_counts(fleet, sent.accepted)
        display.show(_counts(sent, sample, tracker), {"transformed": "", "delivered": ""})
    return make_result(stage.broker, len(flights), sent.accepted, tracker, sample, seconds, loss, first)


async def _read_counts(fleet: Fleet, accepted: int) -> Sample:
    """The metrics, once the transform has counted all events: in real-time mode up to 15 s later than they are delivered."""
    deadline = time.monotonic() + COUNTED_WITHIN_S
    waiting = PhaseNotes("waiting for the transform's own count, which follows its results")
    while True:
        sample = await scrape_fleet(fleet)
        counted = sum(sample.total(f"penstock_transform_events_{end}_total") for end in ("written", "dead"))
        if counted >= accepted or time.monotonic() > deadline:
            return sample
        waiting.say(int(counted), accepted)
        await asyncio.sleep(POLL_EVERY_S)


async def _send_and_wait(
    fleet: Fleet, sent: SendSummary, tracker: Tracker, display: Display, flights: dict[str, Flight]
) -> None:
    """Send these events. Wait until they have arrived, or until NO_PROGRESS_S seconds pass without progress."""
    tracker.flights.update(flights)

    async def poll() -> int:
        counts, lag = _counts(sent, await scrape_fleet(fleet), tracker), tracker.recent_lag()
        lags = "" if lag is None else f"E2E lag P50 {lag} ms"
        display.show(counts, {"transformed": "(counted when a batch of Spark's ends)", "delivered": lags})
        return sum(counts.values())

    async with asyncio.TaskGroup() as group:
        group.create_task(send_flights(fleet, sent, flights, BATCH, RATE))
        await poll_until(lambda: not tracker.lost, poll, NO_PROGRESS_S, renew=True)


def _counts(sent: SendSummary, sample: Sample, tracker: Tracker) -> dict[str, int]:
    transformed = int(sample.total("penstock_transform_events_written_total"))
    return {"accepted": sent.accepted, "transformed": transformed, "delivered": len(tracker.delivered)}


def make_result(
    broker: str, sent: int, accepted: int, tracker: Tracker, sample: Sample, seconds: float, loss: Loss, first: int = 0
) -> DemoResult:
    """Counts of events; times in ms as P50, P95, P99; seconds: from the first event sent to the last one delivered.

    mode: of the transform, `real-time` or `micro-batch`; empty when no metric says so. first: so many deliveries waited for Spark
    to compile its query. Their lags are in `first_e2e_lag_ms`, the others' in `e2e_lag_ms`.
    """
    to = {"pipe": PIPE, "destination": DESTINATION}
    dead = sample.total("penstock_transform_events_dead_total") + sample.total("penstock_expel_events_dead_total")
    counts = tracker.counts(int(dead))
    e2e = quantiles_of(tracker.lags_ms[first:])
    return {
        "ok": accepted == sent and tracker.is_good(int(dead)),
        "broker": broker,
        "mode": next((labels["mode"] for labels, _ in sample.children("penstock_transform_mode", pipe=PIPE)), ""),
        "sent": sent,
        "accepted": accepted,
        "transformed": int(sample.total("penstock_transform_events_written_total", pipe=PIPE)),
        **counts,
        "seconds": round(seconds, 1),
        "ingest_time_ms": quantiles(sample.lag("penstock_ingest_time_seconds", stream=STREAM)),
        "transit_time_ms": quantiles(sample.lag("penstock_transit_time_seconds", **to)),
        "expel_time_ms": quantiles(sample.lag("penstock_expel_time_seconds", **to)),
        "first_e2e_lag_ms": quantiles_of(tracker.lags_ms[:first]),
        "e2e_lag_ms": e2e,
        "ledger": loss,
        **{f"e2e_lag_{name}_ms": value for name, value in e2e.items()},
    }


def render_result(result: DemoResult) -> RenderableType:
    wrongs = {
        "not accepted": result["sent"] - result["accepted"],
        "lost": result["lost"],
        "altered": result["wrong"],
        "foreign": result["foreign"],
        "badly signed requests": result["unsigned"],
        "dead letters": result["dead"],
    }
    text = "nothing lost" if result["ok"] else ", ".join(f"{count} {name}" for name, count in wrongs.items() if count)
    title = Text(
        f"{text}; {result['seconds']} s from the first event to the last delivery; broker: {result['broker']}",
        style="bold green" if result["ok"] else "bold red",
    )
    table = Table(box=None, show_header=False, pad_edge=False, title=title, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    for name, meaning in (
        ("accepted", "stored durably, acknowledged"),
        ("transformed", "classified by PySpark"),
        ("delivered", "distinct, signed, checked"),
        ("duplicates", "delivered again"),
        ("lost", "accepted, not delivered"),
    ):
        bad = name == "lost" and result[name]
        table.add_row(name, Text(f"{result[name]:,}", style="bold red" if bad else "bold"), meaning)
    for name, field, meaning in (
        ("ingest time", "ingest_time_ms", "a request's way to durable"),
        ("transit time", "transit_time_ms", "ingest, Spark, to expel"),
        ("expel time", "expel_time_ms", "expel to the 2xx"),
        ("E2E lag", "first_e2e_lag_ms", f"the first {FIRST}: Spark compiles its query"),
        ("E2E lag", "e2e_lag_ms", "the other events, while Java is still warming up"),
    ):
        table.add_row(f"{name} P50 P95 P99", spread(result[field]), meaning)
    return Group(table, render_loss(result["ledger"]))
