"""How late an event is at its receiver: a whole fleet (`penstock up`), a paced sender, a receiver, one clock.

E2E lag = receive time - event time; the event time is when the event was due to be sent, so waiting counts, too.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec
import uvloop
from aiohttp import web

from bench.figures import Figure
from bench.processes import Child, free_port
from bench.setup import Setup, tell

PARTITIONS = 4
TICK_S = 0.02
WARM_UP_S, MEASURED_S = 180.0, 60.0
"""Java compiles for two to three minutes of a light load."""
PATIENCE_S = 60.0
_PADDING = "x" * 190
PIPES = """version: 1
streams:
  events:
    partitions: {partitions}
    id: id
    key: user
    time: time
    columns: "id STRING, user STRING, time BIGINT, price DOUBLE, note STRING"
pipes:
  straight:
    sources: [events]
    destinations: [{{name: hook, webhook: {{url: "{sink}straight", body: json, batch: {{max_wait: 10ms}}}}}}]
  through:
    sources: [events]
    transform:
      sql: SELECT event, id, user, time, round(price * 1.19, 2) AS gross, note FROM events WHERE price > 0
    destinations: [{{name: hook, webhook: {{url: "{sink}through", body: json, batch: {{max_wait: 10ms}}}}}}]
"""


class Arrived(msgspec.Struct):
    """What the receiver reads of an event."""

    id: str
    time: int


_decode = msgspec.json.Decoder(list[Arrived]).decode


@dataclass
class Sink:
    """lags: milliseconds by pipe, of events that were due between `since` and `until` (ms). seen: all ids by pipe."""

    since: float = float("inf")
    until: float = float("inf")
    lags: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    seen: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    async def take(self, request: web.Request) -> web.Response:
        """One delivery."""
        body, now = await request.read(), time.time() * 1000
        pipe = request.match_info["pipe"]
        for event in _decode(body):
            self.seen[pipe].add(event.id)
            if self.since <= event.time < self.until:
                self.lags[pipe].append(now - event.time)
        return web.Response()


@asynccontextmanager
async def open_sink() -> AsyncIterator[tuple[Sink, str]]:
    """A running receiver and its URL, which ends with a slash."""
    sink = Sink()
    app = web.Application(client_max_size=16 << 20)
    app.router.add_post("/{pipe}", sink.take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield sink, f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


async def send_paced(session: aiohttp.ClientSession, url: str, rate: int, first: int, seconds: float) -> int:
    """`rate` events a second for so long, a request each TICK_S whether or not the last has its answer; the next number."""
    size, started, sent = round(rate * TICK_S), time.time(), 0
    async with asyncio.TaskGroup() as group:
        while sent * TICK_S < seconds:
            due = started + sent * TICK_S
            await asyncio.sleep(due - time.time())
            group.create_task(_post(session, url, range(first, first + size), round(due * 1000)))
            first, sent = first + size, sent + 1
    return first


async def _post(session: aiohttp.ClientSession, url: str, numbers: range, due: int) -> None:
    rows = [
        b'{"id":"evt-%012d","user":"user-%04d","time":%d,"price":12.5,"note":"%s"}'
        % (number, number % 1000, due, _PADDING.encode())
        for number in numbers
    ]
    async with session.post(url, data=b"[" + b",".join(rows) + b"]", headers=_JSON) as answer:
        await answer.read()
        if answer.status != 200:
            raise RuntimeError(f"ingest answered {answer.status}")


_JSON = {"Content-Type": "application/json"}


async def _measure(sink: Sink, url: str, rate: int) -> None:
    """Warm up, measure, wait until everything came out of both pipes."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        number = await send_paced(session, url, rate, 0, WARM_UP_S)
        sink.since = time.time() * 1000
        number = await send_paced(session, url, rate, number, MEASURED_S)
        sink.until = time.time() * 1000
        deadline = time.monotonic() + PATIENCE_S
        while any(len(sink.seen[pipe]) < number for pipe in ("straight", "through")):
            if time.monotonic() > deadline:
                raise RuntimeError(f"of {number} events came { ({k: len(v) for k, v in sink.seen.items()}) }")
            await asyncio.sleep(0.1)


async def _run(setup: Setup, broker: str, rate: int) -> dict[str, list[float]]:
    """Sorted lags in ms by pipe. With the default settings."""
    folder = setup.folder / f"lag-{broker.partition(':')[0]}-{rate}"
    folder.mkdir()
    listen = f"127.0.0.1:{free_port()}"
    async with open_sink() as (sink, address):
        pipes = folder / "pipes.yaml"
        pipes.write_text(PIPES.format(partitions=PARTITIONS, sink=address))
        options = ["--broker", broker, "--pipes", str(pipes), "--data", str(folder / "data"), "--listen", listen]
        fleet = Child(folder, "services.fleet", "up", *options, "--allow-networks", "127.0.0.0/8")
        with fleet:
            await asyncio.to_thread(fleet.wait_said, "Penstock runs")
            await _measure(sink, f"http://{listen}/v1/streams/events/events", rate)
    return {pipe: sorted(lags) for pipe, lags in sink.lags.items()}


def _figures(label: str, rate: int, lags: dict[str, list[float]], goal: float, goal_99: float) -> list[Figure]:
    figures = []
    for pipe, way in (("through", label), ("straight", f"{label.partition(',')[0]}, without Spark")):
        p50, p95, p99 = (lags[pipe][int(share * (len(lags[pipe]) - 1))] for share in (0.5, 0.95, 0.99))
        tell(
            f"E2E lag at {rate} events/s, {way}: P50 {p50:.0f} ms, P95 {p95:.0f} ms, P99 {p99:.0f} ms, {len(lags[pipe])} events"
        )
        figures.append(Figure(f"E2E lag at {rate} events/s, {way}, P95", p95, "ms", goal))
        figures.append(Figure(f"E2E lag at {rate} events/s, {way}, P99", p99, "ms", goal_99))
    return figures


def log_lag(setup: Setup) -> list[Figure]:
    """On the embedded log, through Spark in micro-batches and without Spark."""
    return _figures("log, micro-batches", 1000, uvloop.run(_run(setup, setup.log("lag"), 1000)), 500, 1000)


def kafka_lag(setup: Setup) -> list[Figure]:
    """On Kafka, through Spark in real-time mode and without Spark."""
    figures = []
    for rate in (1000, 5000):
        # A fleet of its own: a topic with events of the former run would begin with a backlog.
        broker = f"{setup.kafka}?prefix=lag{rate}."
        lags = uvloop.run(_run(setup, broker, rate))
        figures += _figures("Kafka, real-time mode", rate, lags, 50, 250)
    return figures
