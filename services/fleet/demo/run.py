"""The demo: a fleet in a temporary folder, a receiver and a client in this process, and an exact count at the end."""

import asyncio
import time
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.core.lag import LagHistogram
from services.core.scrape import Sample
from services.fleet.console import print_note
from services.fleet.demo.flights import DESTINATION, EXAMPLES, PIPE, STREAM, Flight, Tracker, load_flights
from services.fleet.demo.stage import (
    Display,
    Loss,
    Stage,
    perform,
    print_address,
    read_loss,
    render_loss,
    scrape_fleet,
    send_flights,
    target_of,
)
from services.fleet.receiver import Receiver, serve_receiver
from services.fleet.sender import SendSummary, Target
from services.fleet.settings import UpSettings
from services.fleet.status import quantiles
from services.fleet.status_view import millis
from services.fleet.supervisor import Fleet


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Counts of events; times in ms as P50, P95, P99; seconds: from the first event sent to the last one delivered.

    ledger: the observer's loss table of the same events.
    """

    broker: str
    sent: int
    accepted: int
    transformed: int
    delivered: int
    duplicates: int
    lost: int
    wrong: int
    foreign: int
    unsigned: int
    dead: int
    seconds: float
    ingest_time_ms: dict[str, float]
    transit_time_ms: dict[str, float]
    expel_time_ms: dict[str, float]
    e2e_lag_ms: dict[str, float]
    ledger: Loss

    @property
    def good(self) -> bool:
        """Whether nothing is lost, altered or added."""
        return self.accepted == self.sent and not (
            self.lost or self.wrong or self.foreign or self.unsigned or self.dead
        )

    def as_json(self) -> dict[str, Any]:
        """For --json: all fields, and the E2E lags again under names of their own."""
        flat = {f"e2e_lag_{name}_ms": value for name, value in self.e2e_lag_ms.items()}
        return {"ok": self.good, **asdict(self), **flat}


def make_result(
    broker: str, sent: int, accepted: int, tracker: Tracker, sample: Sample, seconds: float, loss: Loss
) -> DemoResult:
    """Combine the counts of client, receiver, services and observer."""
    e2e = LagHistogram()
    e2e.observe(tracker.lags_ms)
    to = {"pipe": PIPE, "destination": DESTINATION}
    dead = sample.total("penstock_transform_events_dead_total") + sample.total("penstock_expel_events_dead_total")
    return DemoResult(
        broker=broker,
        sent=sent,
        accepted=accepted,
        transformed=int(sample.total("penstock_transform_events_written_total", pipe=PIPE)),
        delivered=len(tracker.delivered),
        duplicates=tracker.duplicates,
        lost=tracker.lost,
        wrong=tracker.wrong,
        foreign=tracker.foreign,
        unsigned=tracker.unsigned,
        dead=int(dead),
        seconds=round(seconds, 1),
        ingest_time_ms=quantiles(sample.lag("penstock_ingest_time_seconds", stream=STREAM)),
        transit_time_ms=quantiles(sample.lag("penstock_transit_time_seconds", **to)),
        expel_time_ms=quantiles(sample.lag("penstock_expel_time_seconds", **to)),
        e2e_lag_ms=quantiles(e2e),
        ledger=loss,
    )


def render_result(result: DemoResult) -> RenderableType:
    """The tables at the end of the demo."""
    table = Table(box=None, show_header=False, pad_edge=False, title=_title(result), title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim")
    counts = [
        ("accepted", result.accepted, "stored durably and acknowledged"),
        ("transformed", result.transformed, "classified by PySpark"),
        ("delivered", result.delivered, "distinct, signed, each checked"),
        ("duplicates", result.duplicates, "delivered again"),
        ("lost", result.lost, "accepted, not delivered"),
    ]
    for name, count, meaning in counts:
        bad = name == "lost" and count
        table.add_row(name, Text(f"{count:,}", style="bold red" if bad else "bold"), meaning)
    times = [
        ("ingest time", result.ingest_time_ms, "a request's way to durable"),
        ("transit time", result.transit_time_ms, "ingest, Spark, to expel"),
        ("expel time", result.expel_time_ms, "expel to the 2xx"),
        ("E2E lag", result.e2e_lag_ms, "all of it, each event"),
    ]
    for name, values, meaning in times:
        table.add_row(f"{name} P50 P95 P99", "  ".join(millis(value) for value in values.values()), f"{meaning}")
    return Group(table, render_loss(result.ledger))


def _title(result: DemoResult) -> Text:
    words = [f"{count} {what}" for what, count in _wrongs(result) if count]
    text = "nothing lost" if result.good else ", ".join(words)
    return Text(f"{result.broker}, {result.seconds} s: {text}", style="bold green" if result.good else "bold red")


def _wrongs(result: DemoResult) -> list[tuple[str, int]]:
    return [
        ("not accepted", result.sent - result.accepted),
        ("lost", result.lost),
        ("altered", result.wrong),
        ("foreign", result.foreign),
        ("badly signed requests", result.unsigned),
        ("dead letters", result.dead),
    ]


RATE = 1000.0
"""Events per second. Without a pace the lag would show the length of the queue only."""
BATCH = 50
FIRST = 200
NO_PROGRESS_S = 60.0
LOOK_EVERY_S = 0.5
DUPLICATES_FOR_S = 1.0
RECEIVER_IN_EXAMPLE = "http://127.0.0.1:9000"
ROWS = ("accepted", "transformed", "delivered")


async def run_demo(broker: str) -> DemoResult:
    """Run the demo as `perform` describes."""
    return await perform(broker, _run)


async def _run(stage: Stage) -> DemoResult:
    tracker = Tracker({})
    async with serve_receiver(Receiver((stage.key,), on_request=tracker.add), "127.0.0.1", 0) as port:
        settings = await stage.write_pipes(await asyncio.to_thread(_example_pipes, port))
        async with stage.fleet(settings) as fleet:
            print_address(fleet)
            print_note("real flights of January 2013, their times shifted so that the newest is now", "dim")
            return await _send_all(stage, fleet, settings, tracker)


async def _send_all(stage: Stage, fleet: Fleet, settings: UpSettings, tracker: Tracker) -> DemoResult:
    """Send the first events and wait for them, because Spark compiles its query for its first batch; then the rest, paced."""
    target = target_of(settings, batch=BATCH, rate=RATE)
    sent = SendSummary()
    begun = time.monotonic()
    flights = await asyncio.to_thread(load_flights, time.time())
    with Display(len(flights), ROWS) as display:
        print_note(
            f"the first {FIRST} events wait for Spark to compile its query, the rest follow at {RATE:.0f}/s", "dim"
        )
        await _send_and_wait(fleet, target, sent, tracker, display, dict(islice(flights.items(), FIRST)))
        flights = await asyncio.to_thread(load_flights, time.time() + (len(flights) - FIRST) / RATE)
        if not tracker.lost:
            await _send_and_wait(fleet, target, sent, tracker, display, dict(islice(flights.items(), FIRST, None)))
        seconds = time.monotonic() - begun
        await asyncio.sleep(DUPLICATES_FOR_S)
        sample = await scrape_fleet(fleet)
        display.show(_counts(sent, sample, tracker), {"delivered": ""})
    loss = await read_loss(fleet, PIPE, sent.accepted)
    return make_result(stage.broker, len(flights), sent.accepted, tracker, sample, seconds, loss)


async def _send_and_wait(
    fleet: Fleet, target: Target, sent: SendSummary, tracker: Tracker, display: Display, flights: dict[str, Flight]
) -> None:
    """Send these events. Wait until they have arrived, or until NO_PROGRESS_S seconds pass without progress."""
    tracker.flights.update(flights)
    async with asyncio.TaskGroup() as group:
        group.create_task(send_flights(target, sent, flights))
        moved, before = time.monotonic(), -1
        while tracker.lost and time.monotonic() - moved < NO_PROGRESS_S:
            counts = _counts(sent, await scrape_fleet(fleet), tracker)
            display.show(counts, {"delivered": _lag_so_far(tracker)})
            if (total := sum(counts.values())) != before:
                moved, before = time.monotonic(), total
            await asyncio.sleep(LOOK_EVERY_S)


def _counts(sent: SendSummary, sample: Sample, tracker: Tracker) -> dict[str, int]:
    transformed = int(sample.total("penstock_transform_events_written_total"))
    return {"accepted": sent.accepted, "transformed": transformed, "delivered": len(tracker.delivered)}


def _lag_so_far(tracker: Tracker) -> str:
    lag = tracker.recent_lag()
    return "" if lag is None else f"E2E lag P50 {lag} ms"


def _example_pipes(port: int) -> str:
    """The example's pipe file with the port of this demo's receiver. Blocking."""
    text = (EXAMPLES / "pipes.yaml").read_text(encoding="utf-8")
    assert RECEIVER_IN_EXAMPLE in text
    return text.replace(RECEIVER_IN_EXAMPLE, f"http://127.0.0.1:{port}")
