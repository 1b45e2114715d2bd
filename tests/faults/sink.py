"""The receiver of the fault tests: never faulted itself, checks every payload, answers badly only on command."""

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import orjson
from aiohttp import web

from tests.support.oracle import Ledger, make_payload
from tests.support.serving import serve_on_loopback


class Item(msgspec.Struct):
    """One CloudEvent of a batch, its payload as it came."""

    id: str
    data: msgspec.Raw


def number_of(event_id: str) -> int:
    """The number in an event's id."""
    return int(event_id.rpartition("-")[2])


_decode = msgspec.json.Decoder(list[Item]).decode


@dataclass
class Sink:
    """slow: seconds before each answer. fail: the share of requests answered with 503 (nothing of them counts).

    firsts: (number, worker) in the order of first arrival; `worker` is what the request's x-worker header says.
    traces: unless None, (monotonic seconds, worker) of each delivery of each event.
    hold: while it is cleared, nothing is answered. dooms: events (by number) that are refused with 503 however often they come;
    tries: for each of these, when it came (monotonic seconds).
    """

    ledger: Ledger
    chance: random.Random
    by_value: bool = False
    keeps_order: bool = True
    slow: float = 0.0
    fail: float = 0.0
    refused: int = 0
    requests: int = 0
    url: str = ""
    firsts: list[tuple[int, str]] = field(default_factory=list)
    traces: dict[int, list[tuple[float, str]]] | None = None
    dooms: Callable[[int], bool] = lambda _number: False
    tries: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    hold: asyncio.Event = field(default_factory=asyncio.Event)

    async def take(self, request: web.Request) -> web.Response:
        """Answer one delivery."""
        body = await request.read()
        self.requests += 1
        await self.hold.wait()
        if self.slow:
            await asyncio.sleep(self.slow)
        items = _decode(body)
        doomed = {item.id for item in items if self.dooms(number_of(item.id))}
        for event_id in doomed:
            self.tries[number_of(event_id)].append(time.monotonic())
        if self.chance.random() < self.fail:
            self.refused += 1
            return web.Response(status=503)
        worker = request.headers.get("x-worker", "")
        for item in items:
            if item.id in doomed:
                continue
            number = self.ledger.arrive(item.id, self._payload(item))
            if number is not None and self.keeps_order:
                self.firsts.append((number, worker))
            if self.traces is not None:
                self.traces.setdefault(number_of(item.id), []).append((time.monotonic(), worker))
        if doomed:
            return web.json_response({"failed": [{"id": event_id, "status": 503} for event_id in doomed]}, status=207)
        return web.Response(status=204)

    def _payload(self, item: Item) -> bytes:
        """As it was sent. A transform writes JSON of its own: the same values count as the same payload."""
        came = bytes(item.data)
        if not self.by_value:
            return came
        wanted = make_payload(item.id)
        return wanted if orjson.loads(came) == orjson.loads(wanted) else came


@asynccontextmanager
async def open_sink(ledger: Ledger, seed: int, *, by_value: bool = False) -> AsyncIterator[Sink]:
    """A sink on a free loopback port."""
    sink = Sink(ledger, random.Random(seed), by_value)
    sink.hold.set()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/hook", sink.take)
    async with serve_on_loopback(app) as port:
        sink.url = f"http://127.0.0.1:{port}/hook"
        try:
            yield sink
        finally:
            sink.hold.set()
