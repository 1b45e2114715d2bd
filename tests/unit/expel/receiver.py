"""Receivers for tests: one that answers as it is told and notes everything, and some that behave badly on the socket level."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import orjson
from aiohttp import web
from standardwebhooks.webhooks import Webhook

from tests.support.serving import serve_on_loopback

DEADLINE = 600.0
"""Seconds that a condition may take before a test fails: generous, a busy machine is no defect."""


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came."""

    at: float
    headers: dict[str, str]
    body: bytes

    @property
    def message_id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def events(self) -> list[dict[str, object]]:
        """The events of a CloudEvents batch."""
        found: list[dict[str, object]] = orjson.loads(self.body)
        return found

    @property
    def ids(self) -> list[str]:
        return [str(event["id"]) for event in self.events]


Answer = Callable[[Received], web.Response | Awaitable[web.Response]]


def accept(_received: Received) -> web.Response:
    """204."""
    return web.Response(status=204)


@dataclass
class Receiver:
    """`answer` may be changed at any time. `accepted`: ids of requests that were answered with 2xx, in order of answers."""

    answer: Answer = accept
    secret: str | None = None
    requests: list[Received] = field(default_factory=list)
    accepted: list[str] = field(default_factory=list)
    connections: set[object] = field(default_factory=set)
    under_way: int = 0
    most_under_way: int = 0
    url: str = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.connections.add(request.transport)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            received = Received(
                time.monotonic(), {k.lower(): v for k, v in request.headers.items()}, await request.read()
            )
            if self.secret is not None:
                Webhook(self.secret).verify(received.body, received.headers, json_parse=False)
            self.requests.append(received)
            answer = self.answer(received)
            response = answer if isinstance(answer, web.Response) else await answer
            if response.status in (200, 204) and "cloudevents" in received.headers["content-type"]:
                failed = orjson.loads(response.body) if isinstance(response.body, bytes) and response.body else {}
                refused = {item.get("id") for item in failed.get("failed", ())}
                self.accepted += [event_id for event_id in received.ids if event_id not in refused]
            return response
        finally:
            self.under_way -= 1

    async def wait_for(self, condition: Callable[["Receiver"], bool]) -> None:
        """Until the condition holds; fails after DEADLINE."""
        await wait_until(lambda: condition(self))

    async def wait_for_ids(self, ids: Sequence[str]) -> None:
        """Until all of these were accepted at least once."""
        await self.wait_for(lambda receiver: set(ids) <= set(receiver.accepted))


async def wait_until(condition: Callable[[], bool]) -> None:
    """Poll a condition; fails after DEADLINE."""
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def open_receiver(answer: Answer = accept, secret: str | None = None) -> AsyncIterator[Receiver]:
    """A receiver on a free loopback port."""
    receiver = Receiver(answer, secret)
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/hook", receiver.handle)
    async with serve_on_loopback(app) as port:
        receiver.url = f"http://127.0.0.1:{port}/hook"
        yield receiver


Connection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def open_socket_server(serve: Connection) -> AsyncIterator[str]:
    """A server that does what it likes with each connection; yields its URL."""
    tasks: set[asyncio.Task[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            return
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(run, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/hook"
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks))


async def hang(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
    """Reads and never answers."""
    while await reader.read(65536):
        pass


async def reset(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Resets at once."""
    writer.transport.abort()


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A 200 whose body comes byte by byte and never ends."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.05)


async def drip_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A header that comes byte by byte and never ends."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.05)


def answer_endlessly(status: int) -> Connection:
    """A body without end, as fast as it is taken."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 %d X\r\nTransfer-Encoding: chunked\r\n\r\n" % status)
        while True:
            writer.write(b"10000\r\n" + b"y" * 0x10000 + b"\r\n")
            await writer.drain()

    return serve


def answer_raw(data: bytes) -> Connection:
    """Exactly these bytes to each request on the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if b"content-length" in line)
            await reader.readexactly(length)
            writer.write(data)
            await writer.drain()

    return serve
