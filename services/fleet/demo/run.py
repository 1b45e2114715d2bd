"""The demo itself: a fleet in a temporary folder, a receiver and a client in this process, and an exact count at the end."""

import asyncio
import time
from itertools import islice

from services.core.scrape import Sample
from services.fleet.console import note
from services.fleet.demo.display import Display
from services.fleet.demo.fidelity import read_loss, show_address
from services.fleet.demo.flights import EXAMPLES, PIPE, Flight, load_flights
from services.fleet.demo.stage import Stage, aim_at, look, perform, send_flights
from services.fleet.demo.summary import DemoResult, make_result
from services.fleet.demo.tracker import Tracker
from services.fleet.receiver import Receiver, serve_receiver
from services.fleet.sender import SendSummary, Target
from services.fleet.settings import UpSettings
from services.fleet.supervisor import Fleet

RATE = 1000.0
"""Events a second: a burst of all at once would only show how long a queue is, not how late an event is."""
BATCH = 50
FIRST = 200
NO_PROGRESS_S = 60.0
LOOK_EVERY_S = 0.5
DUPLICATES_FOR_S = 1.0
RECEIVER_IN_EXAMPLE = "http://127.0.0.1:9000"
ROWS = ("accepted", "transformed", "delivered")


async def run_demo(broker: str) -> DemoResult:
    """Run it; see `perform`."""
    return await perform(broker, _play)


async def _play(stage: Stage) -> DemoResult:
    tracker = Tracker({})
    async with serve_receiver(Receiver((stage.key,), tell=tracker.take), "127.0.0.1", 0) as port:
        settings = await stage.write_pipes(await asyncio.to_thread(_example_pipes, port))
        async with stage.fleet(settings) as fleet:
            show_address(fleet)
            note("real flights of January 2013, their times shifted so that the newest is now", "dim")
            return await _feed(stage, fleet, settings, tracker)


async def _feed(stage: Stage, fleet: Fleet, settings: UpSettings, tracker: Tracker) -> DemoResult:
    """The first events alone until they have arrived, as Spark compiles its query for its first batch; then the rest, paced."""
    target = aim_at(settings, batch=BATCH, rate=RATE)
    sent = SendSummary()
    begun = time.monotonic()
    flights = await asyncio.to_thread(load_flights, time.time())
    with Display(len(flights), ROWS) as display:
        note(f"the first {FIRST} events wait for Spark to compile its query, the rest follow at {RATE:.0f}/s", "dim")
        await _carry(fleet, target, sent, tracker, display, dict(islice(flights.items(), FIRST)))
        flights = await asyncio.to_thread(load_flights, time.time() + (len(flights) - FIRST) / RATE)
        if not tracker.lost:
            await _carry(fleet, target, sent, tracker, display, dict(islice(flights.items(), FIRST, None)))
        seconds = time.monotonic() - begun
        await asyncio.sleep(DUPLICATES_FOR_S)
        sample = await look(fleet)
        display.show(_counts(sent, sample, tracker), {"delivered": ""})
    loss = await read_loss(fleet, PIPE, sent.accepted)
    return make_result(stage.broker, len(flights), sent.accepted, tracker, sample, seconds, loss)


async def _carry(
    fleet: Fleet, target: Target, sent: SendSummary, tracker: Tracker, display: Display, flights: dict[str, Flight]
) -> None:
    """Send these events and wait until they have arrived, or nothing has moved for NO_PROGRESS_S seconds."""
    tracker.flights.update(flights)
    async with asyncio.TaskGroup() as group:
        group.create_task(send_flights(target, sent, flights))
        moved, before = time.monotonic(), -1
        while tracker.lost and time.monotonic() - moved < NO_PROGRESS_S:
            counts = _counts(sent, await look(fleet), tracker)
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
    """The example's pipe file, with the port that this demo's receiver got. Blocking."""
    text = (EXAMPLES / "pipes.yaml").read_text(encoding="utf-8")
    assert RECEIVER_IN_EXAMPLE in text
    return text.replace(RECEIVER_IN_EXAMPLE, f"http://127.0.0.1:{port}")
