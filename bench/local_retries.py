"""How many events need the global retrier while a receiver refuses one request in a hundred: local retries shall do."""

import asyncio
import random
import time
from pathlib import Path

import uvloop
from aiohttp import web

from bench.events import make_event
from bench.figures import Figure
from bench.processes import Child, fetch_metric, free_port
from bench.setup import Setup, make_topics, tell
from services.core.broker.connect import open_broker
from services.core.broker.producer import Producer
from services.core.broker.record import Record

EVENTS, CHUNK = 30_000, 1000
FAILS = 0.01
GOAL = 0.1
DEADLINE_S = 300.0
DELIVERED, HANDED_OVER = "penstock_expel_events_delivered_total", "penstock_expel_events_handed_over_total"
PIPES = """version: 1
streams:
  events: {{id: id, time: time}}
pipes:
  once:
    sources: [events]
    destinations: [{{name: hook, webhook: {{url: "{url}", body: json, concurrency: 64, batch: {{max_events: 1}}}}}}]
"""


def local_retries(setup: Setup) -> list[Figure]:
    """On the embedded log, one event a request, everything else as it is by default."""
    handed_over = uvloop.run(_run(setup))
    return [Figure("1 % random 503s: events for the global retrier", 100 * handed_over / EVENTS, "%", GOAL)]


async def _run(setup: Setup) -> float:
    """How many events of EVENTS were handed over."""
    folder = setup.folder / "local-retries"
    folder.mkdir()
    chance, refused = random.Random(1), 0

    async def take(request: web.Request) -> web.Response:
        nonlocal refused
        await request.read()
        fails = chance.random() < FAILS
        refused += fails
        return web.Response(status=503 if fails else 200)

    app = web.Application()
    app.router.add_post("/", take)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipes = folder / "pipes.yaml"
        pipes.write_text(PIPES.format(url=f"http://127.0.0.1:{runner.addresses[0][1]}/"))
        handed_over = await _deliver(setup.log("local-retries"), pipes, folder)
    finally:
        await runner.cleanup()
    tell(f"local retries: {refused} requests refused, {handed_over:.0f} of {EVENTS} events handed over")
    return handed_over


async def _deliver(broker_url: str, pipes: Path, folder: Path) -> float:
    await asyncio.to_thread(make_topics, broker_url, pipes)
    await _fill(broker_url)
    port = free_port()
    options = ("--broker", broker_url, "--pipes", str(pipes), "--allow-networks", "127.0.0.0/8")
    with Child(folder, "services.expel", *options, "--management", f"127.0.0.1:{port}") as expel:
        await asyncio.to_thread(expel.wait_ready, port)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            delivered, handed_over = [
                await asyncio.to_thread(fetch_metric, port, name) for name in (DELIVERED, HANDED_OVER)
            ]
            if delivered + handed_over >= EVENTS:
                return handed_over
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{delivered:.0f} of {EVENTS} events delivered in {DEADLINE_S:.0f} s; see {expel.log}"
                )
            await asyncio.sleep(0.5)


async def _fill(broker_url: str) -> None:
    """EVENTS in the stream as ingest stores them."""
    now = time.time_ns() // 1_000_000
    async with open_broker(broker_url) as broker, Producer(broker.appender) as producer:
        for start in range(0, EVENTS, CHUNK):
            records = [
                Record(None, make_event(number), now, (("ce_id", b"evt-%012d" % number),))
                for number in range(start, start + CHUNK)
            ]
            (await producer.send("events", records)).raise_first()
