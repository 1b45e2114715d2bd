"""What one dead destination of ten costs the other nine: healthy and dead phases in turn, one run, one machine.

A phase waits until the retrier has put away what the last one left (in a dead phase also until the dead lane has), sends at a
steady rate (how late the nine get their events), then a burst (how fast they get it). Each dead phase is compared with the
healthy phases on both sides of it. Each healthy phase, too: that is the noise of the machine.
"""

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from bench.figures import Figure
from bench.processes import Child, fetch_metric, free_port
from bench.setup import Setup, make_topics, tell

Way = Literal["healthy", "refused", "hanging", "500"]
WAYS: tuple[Way, ...] = ("refused", "hanging", "500")
NAMES = [f"d{number}" for number in range(10)]
DEAD, OTHERS = NAMES[0], NAMES[1:]
REPEATS = 3
RATE, TICK_S = 500, 0.02
"""Events a second into the stream: ten times as many deliveries."""
STRIKE_S, PACED_S = 5.0, 12.0
"""How long a destination has been dead when measuring starts; how long lags are measured."""
BURST, BURST_REQUEST = 10_000, 500
PATIENCE_S, QUIET_S = 120.0, 3.0
GOAL = 1.05
SCHEDULE = '["5s", "1h"]'
"""As the default begins, but what failed twice stays away for the rest of the run: a phase shall not deliver another's events."""
_JSON = {"Content-Type": "application/json"}
_PADDING = "x" * 200


class Phase(NamedTuple):
    """p95: ms from when it was due to be sent to its arrival at the nine. rate: deliveries to them a second, in the burst."""

    way: Way
    p95: float
    rate: float


class Arrived(msgspec.Struct):
    """What a receiver reads of an event."""

    number: int
    time: int


_decode = msgspec.json.Decoder(list[Arrived]).decode


@dataclass
class Receivers:
    """Ten, of which one does as it is told. lags: ms of the nine since they were cleared; counts: what each of them got."""

    url: str
    way: Way = "healthy"

    def __post_init__(self) -> None:
        self.lags: list[float] = []
        self.counts = dict.fromkeys(OTHERS, 0)
        self.dead_url = f"http://127.0.0.1:{free_port()}/"
        self._answering = asyncio.Event()
        self._dead: web.AppRunner | None = None

    async def take(self, request: web.Request) -> web.Response:
        """A delivery to one of the nine."""
        body, now = await request.read(), time.time() * 1000
        events = _decode(body)
        self.counts[request.match_info["name"]] += len(events)
        self.lags += [now - event.time for event in events]
        return web.Response()

    async def _take_badly(self, request: web.Request) -> web.Response:
        await request.read()
        if self.way == "hanging":
            await self._answering.wait()
        return web.Response(status=500 if self.way == "500" else 200)

    async def become(self, way: Way) -> None:
        """What the tenth does from now on. Refusing closes what is open."""
        self.way = way
        self._answering.set()
        self._answering = asyncio.Event()
        if way == "refused":
            await self.close()
        elif self._dead is None:
            self._dead = await _serve("/", self._take_badly, int(self.dead_url.rsplit(":", 1)[1][:-1]))

    async def close(self) -> None:
        """Stop listening as the tenth."""
        self._answering.set()
        if self._dead is not None:
            await self._dead.cleanup()
            self._dead = None


async def _serve(path: str, handle: Callable[[web.Request], Awaitable[web.Response]], port: int) -> web.AppRunner:
    app = web.Application(client_max_size=16 << 20)
    app.router.add_post(path, handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    return runner


@asynccontextmanager
async def open_receivers() -> AsyncIterator[Receivers]:
    """All healthy."""
    port = free_port()
    receivers = Receivers(f"http://127.0.0.1:{port}/")
    runner = await _serve("/{name}", receivers.take, port)
    try:
        await receivers.become("healthy")
        yield receivers
    finally:
        await receivers.close()
        await runner.cleanup()


class Isolation:
    """The run: services are up, all ten healthy."""

    def __init__(
        self,
        receivers: Receivers,
        session: aiohttp.ClientSession,
        ingest: str,
        ports: Mapping[str, int],
        services: Mapping[str, Child],
    ) -> None:
        self._receivers, self._session, self._ingest, self._ports = receivers, session, ingest, ports
        self._services = services
        self._sent = 0

    async def run_phase(self, way: Way) -> Phase:
        """One phase."""
        await self._receivers.become(way)
        await self._send_paced(STRIKE_S)
        await self._wait_put_away()
        if way != "healthy":
            await self._wait_caught_up()
        self._receivers.lags.clear()
        await self._send_paced(PACED_S)
        lags = sorted(self._receivers.lags)
        used = {name: child.cpu_seconds() for name, child in self._services.items()}
        began = time.monotonic()
        await self._send_burst()
        rate = BURST * len(OTHERS) / (time.monotonic() - began)
        phase = Phase(way, lags[int(0.95 * (len(lags) - 1))], rate)
        spent = ", ".join(f"{name} {child.cpu_seconds() - used[name]:.2f}" for name, child in self._services.items())
        late = f"P50 {statistics.median(lags):.1f} ms, P95 {phase.p95:.1f} ms"
        tell(f"isolation, {way}: {late}; burst: {rate:,.0f} deliveries/s, CPU-s: {spent}")
        return phase

    async def _send_paced(self, seconds: float) -> None:
        """RATE events a second, a request each TICK_S whether or not the last has its answer; until the nine have them."""
        size, started = round(RATE * TICK_S), time.time()
        async with asyncio.TaskGroup() as group:
            for tick in range(round(seconds / TICK_S)):
                due = started + tick * TICK_S
                await asyncio.sleep(due - time.time())
                group.create_task(self._post(size, round(due * 1000)))
        await self._wait_arrived()

    async def _send_burst(self) -> None:
        """BURST events as fast as ingest takes them; until the nine have them."""
        for _ in range(BURST // BURST_REQUEST):
            await self._post(BURST_REQUEST, round(time.time() * 1000))
        await self._wait_arrived()

    async def _post(self, size: int, due: int) -> None:
        numbers = range(self._sent, self._sent + size)
        self._sent += size
        rows = [b'{"number":%d,"time":%d,"note":"%s"}' % (number, due, _PADDING.encode()) for number in numbers]
        async with self._session.post(self._ingest, data=b"[" + b",".join(rows) + b"]", headers=_JSON) as answer:
            await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"ingest answered {answer.status}")

    async def _wait_arrived(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while min(self._receivers.counts.values()) < self._sent:
                await asyncio.sleep(0.005)

    async def _wait_put_away(self) -> None:
        """Until the retrier moves only what a phase brings: nothing of an earlier one's burst is on its way any more."""
        async with asyncio.timeout(PATIENCE_S):
            moved, since = -1.0, time.monotonic()
            while time.monotonic() - since < QUIET_S:
                await asyncio.sleep(0.5)
                now = await asyncio.to_thread(_count_moves, self._ports["retrier"])
                if now != moved:
                    moved, since = now, time.monotonic()

    async def _wait_caught_up(self) -> None:
        """Until no lane is behind: what a burst left in the dead one's stream is not this phase's."""
        async with asyncio.timeout(PATIENCE_S):
            while await asyncio.to_thread(fetch_metric, self._ports["expel"], "penstock_broker_lag_records"):
                await asyncio.sleep(0.5)


def _count_moves(port: int) -> float:
    names = ("penstock_retrier_events_moved_total", "penstock_retrier_events_released_total")
    return sum(fetch_metric(port, name) for name in names)


async def _run(setup: Setup) -> list[Phase]:
    folder = setup.folder / "isolation"
    folder.mkdir()
    listen = f"127.0.0.1:{free_port()}"
    ports = {name: free_port() for name in ("ingest", "expel", "retrier")}
    async with AsyncExitStack() as stack:
        receivers = await stack.enter_async_context(open_receivers())
        pipes = _write_pipes(folder, receivers)
        await asyncio.to_thread(make_topics, setup.kafka, pipes)
        options = {name: ["--broker", setup.kafka, "--management", f"127.0.0.1:{port}"] for name, port in ports.items()}
        services = {
            "ingest": Child(folder, "services.ingest", *options["ingest"], "--pipes", str(pipes), "--listen", listen),
            "expel": Child(
                folder, "services.expel", *options["expel"], "--pipes", str(pipes), "--allow-networks", "127.0.0.0/8"
            ),
            "retrier": Child(folder, "services.global_retrier", *options["retrier"]),
        }
        for name, child in services.items():
            stack.enter_context(child)
            await asyncio.to_thread(child.wait_ready, ports[name])
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)))
        run = Isolation(receivers, session, f"http://{listen}/v1/streams/events/events", ports, services)
        await run.run_phase("healthy")  # connections, caches and positions warm
        phases = [await run.run_phase("healthy")]
        for _ in range(REPEATS):
            for way in WAYS:
                phases += [await run.run_phase(way), await run.run_phase("healthy")]
        return phases


def _write_pipes(folder: Path, receivers: Receivers) -> Path:
    lines = [
        "version: 1",
        "streams:",
        "  events: {id: number, time: time}",
        "pipes:",
        "  fan:",
        "    sources: [events]",
    ]
    lines += ["    destinations:"]
    for name in NAMES:
        url = receivers.dead_url if name == DEAD else receivers.url + name
        lines.append(
            f'      - {{name: {name}, webhook: {{url: "{url}", body: json, schedule: {SCHEDULE}, batch: {{max_wait: 20ms}}}}}}'
        )
    path = folder / "pipes.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def compare(phases: Sequence[Phase], way: Way, of: Literal["p95", "rate"]) -> list[float]:
    """Each phase of this way with healthy ones on both sides, as a ratio to the mean of the nearest two."""
    reach = 2 if way == "healthy" else 1
    return [
        getattr(phase, of) / statistics.mean([getattr(phases[at - reach], of), getattr(phases[at + reach], of)])
        for at, phase in enumerate(phases)
        if phase.way == way and reach <= at < len(phases) - reach
    ]


def isolation_figures(setup: Setup) -> list[Figure]:
    """P95 and the time per delivery of the nine, dead beside healthy, for each way to be dead."""
    phases = uvloop.run(_run(setup))
    healthy = [phase for phase in phases if phase.way == "healthy"]
    p95 = statistics.median(phase.p95 for phase in healthy)
    rate = statistics.median(phase.rate for phase in healthy)
    for of in ("p95", "rate"):
        noise = ", ".join(f"{ratio - 1:+.1%}" for ratio in compare(phases, "healthy", of))
        tell(f"isolation, {of}, healthy against the healthy phases around it (the noise): {noise}")
    figures = []
    for way in WAYS:
        late, fast = compare(phases, way, "p95"), compare(phases, way, "rate")
        tell(
            f"isolation, {way}: P95 {', '.join(f'{x - 1:+.1%}' for x in late)}; rate {', '.join(f'{x - 1:+.1%}' for x in fast)}"
        )
        name = f"one of ten {way}, the other nine:"
        figures += [
            Figure(f"{name} E2E P95", p95 * statistics.median(late), "ms", GOAL, p95),
            Figure(f"{name} time per delivery", 1e6 / rate / statistics.median(fast), "us", GOAL, 1e6 / rate),
        ]
    return figures
