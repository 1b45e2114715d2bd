"""The demo of an outage: one of two destinations goes down, stays down for a while and comes back.

There is no transform: what is shown is delivery, and a lag of milliseconds shows a disturbance that a micro-batch would hide.
"""

import asyncio
import time
from collections.abc import Callable
from itertools import islice

import orjson

from services.fleet.console import note
from services.fleet.demo.chaos_summary import ChaosResult, Course, make_chaos_result
from services.fleet.demo.display import Display
from services.fleet.demo.doorway import Doorway
from services.fleet.demo.fidelity import read_loss, show_address
from services.fleet.demo.flights import CHAOS_PIPE, SHAKY, STEADY, Flight, load_flights
from services.fleet.demo.stage import Stage, aim_at, look, perform, send_flights
from services.fleet.demo.tracker import Tracker
from services.fleet.receiver import Receiver, serve_receiver
from services.fleet.sender import SendSummary
from services.fleet.supervisor import Fleet

EVENTS, RATE, BATCH = 2600, 200.0, 20
HEALTHY_S = 5.0
DOWN_S = 5.0
"""The outage lasts so long, and until the breaker is open, and `OPEN_S` more: less than the wait before its first probe."""
OPEN_S = 2.0
OPENS_WITHIN_S = 15.0
BEGINS_WITHIN_S = 60.0
NO_PROGRESS_S = 30.0
LOOK_EVERY_S = 0.5
DUPLICATES_FOR_S = 1.0
BREAKER = {0: "closed", 1: "half-open", 2: "open"}
SCHEDULE = ["1s"] + ["2s"] * 31
"""About a minute of rounds: far longer than the outage."""


async def run_chaos(broker: str) -> ChaosResult:
    """Run it; see `perform`."""
    return await perform(broker, _play)


async def _play(stage: Stage) -> ChaosResult:
    flights = await asyncio.to_thread(_load)
    steady, shaky = Tracker(flights), Tracker(flights)
    async with (
        serve_receiver(Receiver((stage.key,), tell=steady.take), "127.0.0.1", 0) as port,
        Doorway(Receiver((stage.key,), tell=shaky.take)) as doorway,
    ):
        settings = await stage.write_pipes(_pipes(port, doorway.port))
        async with stage.fleet(settings) as fleet:
            show_address(fleet)
            sent = SendSummary()
            with Display(EVENTS, ("accepted", STEADY, SHAKY)) as display:
                show = Show(fleet, sent, steady, shaky, doorway, display)
                async with asyncio.TaskGroup() as group:
                    group.create_task(send_flights(aim_at(settings, batch=BATCH, rate=RATE), sent, flights))
                    await show.run()
            loss = await read_loss(fleet, CHAOS_PIPE, sent.accepted)
            trackers = {STEADY: steady, SHAKY: shaky}
            return make_chaos_result(stage.broker, EVENTS, sent.accepted, trackers, show.course, loss)


class Show:
    """Makes the outage, and shows and notes its course."""

    def __init__(
        self, fleet: Fleet, sent: SendSummary, steady: Tracker, shaky: Tracker, doorway: Doorway, display: Display
    ) -> None:
        self._fleet, self._sent, self._doorway, self._display = fleet, sent, doorway, display
        self._trackers = {STEADY: steady, SHAKY: shaky}
        self.course = Course()

    async def run(self) -> None:
        """From the first event to the last, or until nothing more can be hoped for."""
        begun = time.monotonic()
        self._mark()
        await self._until(lambda: all(tracker.delivered for tracker in self._trackers.values()), BEGINS_WITHIN_S)
        await self._for(HEALTHY_S)
        down = time.monotonic()
        self._mark()
        note(f"{SHAKY} goes down: connections are refused", "bold red")
        await self._doorway.close()
        await self._for(DOWN_S)
        await self._until(lambda: self._breaker(SHAKY) == "open", OPENS_WITHIN_S)
        await self._for(OPEN_S)
        await self._doorway.open()
        back = time.monotonic()
        self._mark()
        self.course.outage_s = back - down
        note(f"{SHAKY} is back; what waits for it comes at a rising rate", "bold green")
        await self._drain()
        self.course.recovery_s, self.course.seconds = time.monotonic() - back, time.monotonic() - begun
        await self._for(DUPLICATES_FOR_S)

    def _mark(self) -> None:
        self.course.marks.append(len(self._trackers[STEADY].lags_ms))

    async def _drain(self) -> None:
        """Until everything has arrived, or nothing has moved for NO_PROGRESS_S seconds."""
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
            self.course.sample = await look(self._fleet)
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
        """Acknowledged to the client, and not delivered there."""
        return max(0, self._sent.accepted - len(self._trackers[name].delivered))


def _load() -> dict[str, Flight]:
    """Some of the events, to be delivered as they are. Blocking."""
    flights = islice(load_flights(time.time()).items(), EVENTS)
    return {event_id: Flight(flight.payload, orjson.loads(flight.payload)) for event_id, flight in flights}


def _pipes(steady_port: int, shaky_port: int) -> str:
    """YAML, as JSON is: two destinations that differ in nothing but who receives."""

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
