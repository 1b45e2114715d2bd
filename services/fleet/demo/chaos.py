"""The demo of an outage: one of two destinations goes down for a while and comes back.

There is no transform. Without micro-batches the lag is milliseconds, and a disturbance of the other destination shows.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from itertools import islice, pairwise

import orjson
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.core.process.scrape import Sample
from services.fleet.console import make_table, print_note
from services.fleet.demo.flights import CHAOS_PIPE, SHAKY, STEADY, Flight, Tracker, load_flights
from services.fleet.demo.stage import (
    DUPLICATES_FOR_S,
    DemoResult,
    Display,
    Loss,
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
from services.fleet.status.reading import BREAKER_STATES, worst_breaker
from services.fleet.status.view import spread
from services.fleet.up.supervisor import Fleet

EVENTS, RATE, BATCH = 2600, 200.0, 20
HEALTHY_S = 5.0
DOWN_S = 5.0
"""The outage lasts so long, then until the breaker is open, then `OPEN_S` more."""
OPEN_S = 2.0
OPENS_WITHIN_S = 60.0
BEGINS_WITHIN_S = NO_PROGRESS_S = 300.0
PHASES = ("before", "during", "after")
SCHEDULE = ["1s"] + ["2s"] * 31
"""Rounds for about a minute: far longer than the outage."""


async def run_chaos(broker: str) -> DemoResult:
    """Run the demo as `perform` describes. For the result see `Outage.result`."""
    return await perform(broker, _run)


async def _run(stage: Stage) -> DemoResult:
    flights = await asyncio.to_thread(_load)
    outage = Outage({STEADY: Tracker(flights), SHAKY: Tracker(flights)})
    steady, shaky = (Receiver((stage.key,), on_request=tracker.add) for tracker in outage.trackers.values())
    with socket.socket() as reserved:  # bound without listening: no other process gets the port during the outage
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        shaky_port: int = reserved.getsockname()[1]
        async with serve_receiver(steady, "127.0.0.1", 0) as port, stage.fleet(_pipes(port, shaky_port)) as fleet:
            with Display(EVENTS, ("accepted", STEADY, SHAKY)) as display:
                async with asyncio.TaskGroup() as group:
                    group.create_task(send_flights(fleet, outage.sent, flights, BATCH, RATE))
                    await outage.run(fleet, display, shaky, shaky_port)
            loss = await read_loss(fleet, CHAOS_PIPE, outage.sent.accepted)
            return outage.result(stage.broker, EVENTS, loss)


class Outage:
    """Causes the outage, shows and records its course. marks: how many events had reached the steady destination when each
    of PHASES began. most_waiting: the most events that waited for the other one. sample: the last metrics of the services.
    """

    def __init__(self, trackers: dict[str, Tracker]) -> None:
        self.trackers, self.sent = trackers, SendSummary()
        self.sample, self.marks, self.most_waiting = Sample(0.0), list[int](), 0
        self.seconds = self.outage_s = self.recovery_s = 0.0
        self._is_up = True

    async def run(self, fleet: Fleet, display: Display, receiver: Receiver, port: int) -> None:
        """From the first event until all have arrived, or until there is no progress. receiver, port: of the other one."""

        async def poll() -> int:
            self.sample = await scrape_fleet(fleet)
            self.most_waiting = max(self.most_waiting, self._waiting(SHAKY))
            counts = {"accepted": self.sent.accepted}
            counts |= {name: len(tracker.delivered) for name, tracker in self.trackers.items()}
            display.show(counts, {name: self._describe(name) for name in self.trackers})
            return sum(counts.values())

        async def until(done: Callable[[], bool], limit: float) -> None:
            await poll_until(done, poll, limit)

        async def wait(seconds: float) -> None:
            await until(lambda: False, seconds)

        async with AsyncExitStack() as listening:
            await listening.enter_async_context(serve_receiver(receiver, "127.0.0.1", port))
            begun = self._begin_phase()
            await until(lambda: all(tracker.delivered for tracker in self.trackers.values()), BEGINS_WITHIN_S)
            await wait(HEALTHY_S)
            down = self._begin_phase()
            print_note(f"{SHAKY} goes down: connections are refused", "bold red")
            self._is_up = False
            await listening.aclose()
            await wait(DOWN_S)
            await until(lambda: self._breaker(SHAKY) == "open", OPENS_WITHIN_S)
            await wait(OPEN_S)
            await listening.enter_async_context(serve_receiver(receiver, "127.0.0.1", port))
            self._is_up = True
            back = self._begin_phase()
            print_note(f"{SHAKY} is back; waiting events are sent as fast as its answers allow", "bold green")
            await poll_until(self._is_done, poll, NO_PROGRESS_S, renew=True)
            end = time.monotonic()
            self.outage_s, self.recovery_s, self.seconds = back - down, end - back, end - begun
            await wait(DUPLICATES_FOR_S)

    def _begin_phase(self) -> float:
        self.marks.append(len(self.trackers[STEADY].lags_ms))
        return time.monotonic()

    def _is_done(self) -> bool:
        return self.sent.accepted >= EVENTS and not any(tracker.lost for tracker in self.trackers.values())

    def _breaker(self, name: str) -> str:
        return BREAKER_STATES[worst_breaker(self.sample, {"destination": name})]

    def _waiting(self, name: str) -> int:
        """The number of accepted events that are not delivered there."""
        return max(0, self.sent.accepted - len(self.trackers[name].delivered))

    def _describe(self, name: str) -> str:
        breaker, lag = self._breaker(name), self.trackers[STEADY].recent_lag()
        parts = [
            "[green]up[/]" if self._is_up or name == STEADY else "[bold red]down[/]",
            f"breaker {breaker}" if breaker == "closed" else f"[yellow]breaker {breaker}[/]",
            f"{self._waiting(name)} waiting",
        ]
        return ", ".join(parts if name != STEADY or lag is None else [*parts, f"E2E lag P50 {lag} ms"])

    def result(self, broker: str, events: int, loss: Loss) -> DemoResult:
        """The counts per destination, times in s, and the lag of the steady destination in each of PHASES, in ms.

        handed_over: how often an event was written to the global retrier. recovery_s: from the return until all was delivered.
        """
        good, destinations = self.sent.accepted == events, {}
        for name, tracker in self.trackers.items():
            to = {"pipe": CHAOS_PIPE, "destination": name}
            dead = int(self.sample.total("penstock_expel_events_dead_total", **to))
            handed_over = int(self.sample.total("penstock_expel_events_handed_over_total", **to))
            destinations[name] = {**tracker.counts(dead), "handed_over": handed_over}
            good = good and tracker.is_good(dead)
        lags = self.trackers[STEADY].lags_ms
        spans = pairwise([*self.marks, len(lags)])
        return {
            "ok": good,
            "lost": sum(tracker.lost for tracker in self.trackers.values()),
            "broker": broker,
            "sent": events,
            "accepted": self.sent.accepted,
            "destinations": destinations,
            "most_waiting": self.most_waiting,
            "seconds": round(self.seconds, 1),
            "outage_s": round(self.outage_s, 1),
            "recovery_s": round(self.recovery_s, 1),
            "steady_lag_ms": {
                phase: quantiles_of(lags[begin:end]) for phase, (begin, end) in zip(PHASES, spans, strict=True)
            },
            "ledger": loss,
        }


def render_chaos(result: DemoResult) -> RenderableType:
    words = f"{result['broker']}, {result['seconds']} s from the first event to the last delivery: {SHAKY} was down "
    words += f"for {result['outage_s']} s, "
    end = "nothing lost" if result["ok"] else f"{result['lost']} lost"
    title = Text(words + end, style="bold green" if result["ok"] else "bold red")
    columns = ("accepted", "delivered", "duplicates", "lost", "dead", "altered", "handed over")
    counts = make_table("", *columns, right=columns)
    for name, found in result["destinations"].items():
        bad = (found["lost"], found["dead"], found["wrong"] + found["foreign"] + found["unsigned"])
        counts.add_row(
            Text(name, style="red" if any(bad) else "green"),
            f"{result['accepted']:,}",
            f"{found['delivered']:,}",
            f"{found['duplicates']:,}",
            *(Text(f"{count:,}", style="bold red" if count else "bold") for count in bad),
            f"{found['handed_over']:,}",
        )
    lags = Table(box=None, show_header=False, pad_edge=False)
    for phase, spans in result["steady_lag_ms"].items():
        lags.add_row(f"{STEADY} {phase} the outage", spread(spans), Text("E2E lag P50 P95 P99", "dim"))
    lags.add_row(f"{SHAKY} waiting at most", f"{result['most_waiting']:,}", Text("events, on disk", "dim"))
    lags.add_row(f"{SHAKY} up to date again", f"{result['recovery_s']} s", Text("after its return", "dim"))
    return Group(title, counts, Text(), lags, render_loss(result["ledger"]))


def _load() -> dict[str, Flight]:
    """Some of the events, to be delivered unchanged. Blocking."""
    flights = islice(load_flights(time.time()).items(), EVENTS)
    return {event_id: Flight(flight.payload, orjson.loads(flight.payload)) for event_id, flight in flights}


def _pipes(steady_port: int, shaky_port: int) -> str:
    """The pipe file, as JSON (which is YAML): two destinations that differ only in the receiver."""
    destinations = [
        {
            "name": name,
            "webhook": {
                "url": f"http://127.0.0.1:{port}/flights",
                "secret": {"file": "webhook.secret"},
                "retry": {"attempts": 8, "base": "50ms", "max_wait": "250ms"},
                "schedule": SCHEDULE,
            },
        }
        for name, port in ((STEADY, steady_port), (SHAKY, shaky_port))
    ]
    stream = {"partitions": 4, "retention": "30d", "id": "id", "key": "tailnum", "time": "time"}
    pipe = {"sources": ["flights"], "destinations": destinations}
    return orjson.dumps({"streams": {"flights": stream}, "pipes": {CHAOS_PIPE: pipe}}).decode()
