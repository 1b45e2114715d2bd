"""The demo of an outage: one of two destinations goes down for a while and comes back.

There is no transform. Without micro-batches the lag is milliseconds, and a disturbance of the other destination shows.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from types import TracebackType
from typing import Any, Self

import orjson
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.core.lag import LagHistogram
from services.core.scrape import Sample
from services.fleet.console import print_note
from services.fleet.demo.flights import CHAOS_PIPE, SHAKY, STEADY, Flight, Tracker, load_flights
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
from services.fleet.sender import SendSummary
from services.fleet.status import quantiles
from services.fleet.status_view import spread
from services.fleet.supervisor import Fleet

PHASES = ("before", "during", "after")


@dataclass(slots=True)
class OutageRecord:
    """Measurements of the outage. sample: the last metrics of the services. marks: the number of events that had reached the
    steady destination when each of PHASES began. most_waiting: the most events that waited for the other one. outage_s: how
    long it was down. recovery_s: from its return until everything was delivered.
    """

    sample: Sample = field(default_factory=lambda: Sample(0.0))
    marks: list[int] = field(default_factory=list)
    most_waiting: int = 0
    seconds: float = 0.0
    outage_s: float = 0.0
    recovery_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Counts of events at one destination. handed_over: how often an event was written to the global retrier."""

    delivered: int
    duplicates: int
    lost: int
    wrong: int
    foreign: int
    unsigned: int
    dead: int
    handed_over: int

    @property
    def good(self) -> bool:
        """Whether every event arrived unchanged, and no other event."""
        return not (self.lost or self.wrong or self.foreign or self.unsigned or self.dead)


@dataclass(frozen=True, slots=True)
class ChaosResult:
    """outage_s: how long one destination was down. recovery_s: from its return until all was delivered.

    steady_lag_ms: the other destination's E2E lag before, during and after the outage, as P50, P95, P99. ledger: the
    observer's loss table of the same events.
    """

    broker: str
    sent: int
    accepted: int
    destinations: dict[str, Arrivals]
    most_waiting: int
    seconds: float
    outage_s: float
    recovery_s: float
    steady_lag_ms: dict[str, dict[str, float]]
    ledger: Loss

    @property
    def lost(self) -> int:
        """The number of missing deliveries."""
        return sum(arrivals.lost for arrivals in self.destinations.values())

    @property
    def good(self) -> bool:
        """Whether nothing is lost, altered or added."""
        return self.accepted == self.sent and all(arrivals.good for arrivals in self.destinations.values())

    def as_json(self) -> dict[str, Any]:
        """For --json."""
        return {"ok": self.good, "lost": self.lost, **asdict(self)}


def make_chaos_result(
    broker: str, sent: int, accepted: int, trackers: dict[str, Tracker], course: OutageRecord, loss: Loss
) -> ChaosResult:
    """Combine the counts of client, receivers, services and observer."""
    lags = trackers[STEADY].lags_ms
    ends = [*course.marks[1:], len(lags)]
    return ChaosResult(
        broker=broker,
        sent=sent,
        accepted=accepted,
        destinations={name: _arrivals(name, tracker, course.sample) for name, tracker in trackers.items()},
        most_waiting=course.most_waiting,
        seconds=round(course.seconds, 1),
        outage_s=round(course.outage_s, 1),
        recovery_s=round(course.recovery_s, 1),
        steady_lag_ms={
            phase: _quantiles(lags[begin:end]) for phase, begin, end in zip(PHASES, course.marks, ends, strict=True)
        },
        ledger=loss,
    )


def _quantiles(lags_ms: list[int]) -> dict[str, float]:
    histogram = LagHistogram()
    histogram.observe(lags_ms)
    return quantiles(histogram)


def _arrivals(name: str, tracker: Tracker, sample: Sample) -> Arrivals:
    to = {"pipe": CHAOS_PIPE, "destination": name}
    return Arrivals(
        delivered=len(tracker.delivered),
        duplicates=tracker.duplicates,
        lost=tracker.lost,
        wrong=tracker.wrong,
        foreign=tracker.foreign,
        unsigned=tracker.unsigned,
        dead=int(sample.total("penstock_expel_events_dead_total", **to)),
        handed_over=int(sample.total("penstock_expel_events_handed_over_total", **to)),
    )


def render_chaos(result: ChaosResult) -> RenderableType:
    """The tables at the end of the demo."""
    return Group(_title(result), _counts(result), Text(), _lags(result), render_loss(result.ledger))


def _title(result: ChaosResult) -> Text:
    words = f"{result.broker}, {result.seconds} s: {SHAKY} was down for {result.outage_s} s, "
    end = "nothing lost" if result.good else f"{result.lost} lost"
    return Text(words + end, style="bold green" if result.good else "bold red")


def _counts(result: ChaosResult) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("", "accepted", "delivered", "duplicates", "lost", "dead", "altered", "handed over"):
        table.add_column(column, justify="left" if not column else "right", no_wrap=True)
    for name, arrivals in result.destinations.items():
        bad = (arrivals.lost, arrivals.dead, arrivals.wrong + arrivals.foreign + arrivals.unsigned)
        table.add_row(
            Text(name, style="green" if arrivals.good else "red"),
            f"{result.accepted:,}",
            f"{arrivals.delivered:,}",
            f"{arrivals.duplicates:,}",
            *(Text(f"{count:,}", style="bold red" if count else "bold") for count in bad),
            f"{arrivals.handed_over:,}",
        )
    return table


def _lags(result: ChaosResult) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for phase in PHASES:
        table.add_row(
            f"{STEADY} {phase} the outage", spread(result.steady_lag_ms[phase]), Text("E2E lag P50 P95 P99", "dim")
        )
    table.add_row(f"{SHAKY} waiting at most", f"{result.most_waiting:,}", Text("events, on disk", "dim"))
    table.add_row(f"{SHAKY} up to date again", f"{result.recovery_s} s", Text("after its return", "dim"))
    return table


class ReceiverPort:
    """A port that can refuse connections and that no other process gets. An async context manager, open at first."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._listening = AsyncExitStack()
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port: int = self._held.getsockname()[1]
        self.is_open = False

    async def open(self) -> None:
        """Accept requests."""
        await self._listening.enter_async_context(serve_receiver(self._receiver, "127.0.0.1", self.port))
        self.is_open = True

    async def close(self) -> None:
        """Refuse connections. Existing ones are closed after the answer to their request."""
        self.is_open = False
        await self._listening.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()
        self._held.close()


EVENTS, RATE, BATCH = 2600, 200.0, 20
HEALTHY_S = 5.0
DOWN_S = 5.0
"""The outage lasts so long, then until the breaker is open, then `OPEN_S` more: less than the wait before its first probe."""
OPEN_S = 2.0
OPENS_WITHIN_S = 15.0
BEGINS_WITHIN_S = 60.0
NO_PROGRESS_S = 30.0
LOOK_EVERY_S = 0.5
DUPLICATES_FOR_S = 1.0
BREAKER = {0: "closed", 1: "half-open", 2: "open"}
SCHEDULE = ["1s"] + ["2s"] * 31
"""Rounds for about a minute: far longer than the outage."""


async def run_chaos(broker: str) -> ChaosResult:
    """Run the demo as `perform` describes."""
    return await perform(broker, _run)


async def _run(stage: Stage) -> ChaosResult:
    flights = await asyncio.to_thread(_load)
    steady, shaky = Tracker(flights), Tracker(flights)
    async with (
        serve_receiver(Receiver((stage.key,), on_request=steady.add), "127.0.0.1", 0) as port,
        ReceiverPort(Receiver((stage.key,), on_request=shaky.add)) as doorway,
    ):
        settings = await stage.write_pipes(_pipes(port, doorway.port))
        async with stage.fleet(settings) as fleet:
            print_address(fleet)
            sent = SendSummary()
            with Display(EVENTS, ("accepted", STEADY, SHAKY)) as display:
                show = Outage(fleet, sent, steady, shaky, doorway, display)
                async with asyncio.TaskGroup() as group:
                    group.create_task(send_flights(target_of(settings, batch=BATCH, rate=RATE), sent, flights))
                    await show.run()
            loss = await read_loss(fleet, CHAOS_PIPE, sent.accepted)
            trackers = {STEADY: steady, SHAKY: shaky}
            return make_chaos_result(stage.broker, EVENTS, sent.accepted, trackers, show.course, loss)


class Outage:
    """Causes the outage, shows and records its course."""

    def __init__(
        self, fleet: Fleet, sent: SendSummary, steady: Tracker, shaky: Tracker, doorway: ReceiverPort, display: Display
    ) -> None:
        self._fleet, self._sent, self._doorway, self._display = fleet, sent, doorway, display
        self._trackers = {STEADY: steady, SHAKY: shaky}
        self.course = OutageRecord()

    async def run(self) -> None:
        """From the first event until all have arrived, or until there is no progress."""
        begun = time.monotonic()
        self._mark()
        await self._until(lambda: all(tracker.delivered for tracker in self._trackers.values()), BEGINS_WITHIN_S)
        await self._for(HEALTHY_S)
        down = time.monotonic()
        self._mark()
        print_note(f"{SHAKY} goes down: connections are refused", "bold red")
        await self._doorway.close()
        await self._for(DOWN_S)
        await self._until(lambda: self._breaker(SHAKY) == "open", OPENS_WITHIN_S)
        await self._for(OPEN_S)
        await self._doorway.open()
        back = time.monotonic()
        self._mark()
        self.course.outage_s = back - down
        print_note(f"{SHAKY} is back; waiting events are sent at a rising rate", "bold green")
        await self._drain()
        self.course.recovery_s, self.course.seconds = time.monotonic() - back, time.monotonic() - begun
        await self._for(DUPLICATES_FOR_S)

    def _mark(self) -> None:
        self.course.marks.append(len(self._trackers[STEADY].lags_ms))

    async def _drain(self) -> None:
        """Wait until everything has arrived, or until NO_PROGRESS_S seconds pass without progress."""
        moved, before = time.monotonic(), -1
        while not self._is_done() and time.monotonic() - moved < NO_PROGRESS_S:
            if (total := self._moved()) != before:
                moved, before = time.monotonic(), total
            await self._for(LOOK_EVERY_S)

    def _moved(self) -> int:
        return self._sent.accepted + sum(len(tracker.delivered) for tracker in self._trackers.values())

    def _is_done(self) -> bool:
        return self._sent.accepted >= EVENTS and not any(tracker.lost for tracker in self._trackers.values())

    async def _for(self, seconds: float) -> None:
        await self._until(lambda: False, seconds)

    async def _until(self, condition: Callable[[], bool], limit: float) -> None:
        end = time.monotonic() + limit
        while not condition() and (left := end - time.monotonic()) > 0:
            self.course.sample = await scrape_fleet(self._fleet)
            self.course.most_waiting = max(self.course.most_waiting, self._waiting(SHAKY))
            self._draw()
            await asyncio.sleep(min(left, LOOK_EVERY_S))

    def _draw(self) -> None:
        counts = {name: len(tracker.delivered) for name, tracker in self._trackers.items()}
        words = {
            STEADY: self._describe(STEADY, is_open=True),
            SHAKY: self._describe(SHAKY, is_open=self._doorway.is_open),
        }
        self._display.show({"accepted": self._sent.accepted, **counts}, words)

    def _describe(self, name: str, *, is_open: bool) -> str:
        breaker, waiting = self._breaker(name), self._waiting(name)
        state = "[green]up[/]" if is_open else "[bold red]down[/]"
        lag = self._trackers[name].recent_lag() if name == STEADY else None
        parts = [
            state,
            f"breaker {breaker}" if breaker == "closed" else f"[yellow]breaker {breaker}[/]",
            f"{waiting} waiting",
        ]
        return ", ".join([*parts, *([] if lag is None else [f"E2E lag P50 {lag} ms"])])

    def _breaker(self, name: str) -> str:
        return BREAKER.get(int(self.course.sample.total("penstock_expel_breaker_state", destination=name)), "closed")

    def _waiting(self, name: str) -> int:
        """The number of accepted events that are not delivered there."""
        return max(0, self._sent.accepted - len(self._trackers[name].delivered))


def _load() -> dict[str, Flight]:
    """Some of the events, to be delivered unchanged. Blocking."""
    flights = islice(load_flights(time.time()).items(), EVENTS)
    return {event_id: Flight(flight.payload, orjson.loads(flight.payload)) for event_id, flight in flights}


def _pipes(steady_port: int, shaky_port: int) -> str:
    """The pipe file, as JSON (which is YAML): two destinations that differ only in the receiver."""

    def webhook(port: int) -> dict[str, object]:
        return {
            "url": f"http://127.0.0.1:{port}/flights",
            "secret": {"file": "webhook.secret"},
            "retry": {"attempts": 8, "base": "50ms", "max_wait": "250ms"},
            "schedule": SCHEDULE,
        }

    destinations = [
        {"name": STEADY, "webhook": webhook(steady_port)},
        {"name": SHAKY, "webhook": webhook(shaky_port)},
    ]
    stream = {"partitions": 4, "retention": "30d", "id": "id", "key": "tailnum", "time": "time"}
    pipe = {"sources": ["flights"], "destinations": destinations}
    return orjson.dumps({"streams": {"flights": stream}, "pipes": {CHAOS_PIPE: pipe}}).decode()
