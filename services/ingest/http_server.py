"""The listening server: accepts and bounds connections, checks their deadlines, and drains."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import structlog
from aiohttp.http import RawRequestMessage

from services.core import metrics
from services.ingest import problems
from services.ingest.answer import Answer, http_date, refuse
from services.ingest.connection import ClientGone, Connection, Phase
from services.ingest.http_framing import check_head
from services.ingest.problems import SEND_AGAIN, Refused

log = structlog.get_logger()

SWEEP_S = 0.5
BACKLOG = 1024
RETRY_AFTER_S = 1.0
FLOOD = 1.25

Handler = Callable[[RawRequestMessage, Connection], Awaitable[Answer]]
"""Answers one request. May raise Refused."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """In seconds, each from the first byte of what it bounds."""

    head: float
    body: float
    idle: float


class HttpServer:
    """All connections of this process. max_in_flight: bytes held at once, from arrival until the client has the answer."""

    def __init__(self, handle: Handler, *, timeouts: Timeouts, max_connections: int, max_in_flight: int) -> None:
        self._handle = handle
        self._max_connections, self._max_in_flight = max_connections, max_in_flight
        self._connections: dict[Connection, None] = {}
        """In the order in which they came: a history of the simulation ends them in the same order each time."""
        self._empty = asyncio.Event()
        self._draining = False
        self._in_flight = 0
        self.timeouts = timeouts
        self.active = 0
        """Connections that handle a request now. They count themselves."""
        self.date = http_date(time.time())

    @asynccontextmanager
    async def listen(self, host: str, port: int, *, reuse_port: bool) -> AsyncIterator[tuple[str, int]]:
        """Accept until the context is left; yields the bound address. Then it accepts no more and waits for open requests.

        Cancelling that wait ends every connection at once. Raises OSError when the address is not available.
        """
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: Connection(self, loop), host, port, backlog=BACKLOG, reuse_port=reuse_port or None
        )
        async with asyncio.TaskGroup() as group:
            sweeper = group.create_task(self._sweep(), name="sweep")
            try:
                yield server.sockets[0].getsockname()[:2]
            finally:
                server.close()
                try:
                    await self._drain()
                finally:
                    sweeper.cancel()
                    for connection in list(self._connections):
                        connection.abort()

    async def _drain(self) -> None:
        self._draining = True
        for connection in list(self._connections):
            connection.drain()
        if self._connections:
            await self._empty.wait()

    async def _sweep(self) -> None:
        """Twice a second: set the date and the metrics, and end connections whose deadline has passed."""
        loop = asyncio.get_running_loop()
        while True:
            self.date = http_date(time.time())
            metrics.INGEST_IN_FLIGHT.set(self.active)
            now = loop.time()
            for connection in [one for one in self._connections if one.deadline < now]:
                connection.expire()
            metrics.INGEST_HELD.set(self._in_flight)
            await asyncio.sleep(SWEEP_S)

    async def respond(self, message: RawRequestMessage, connection: Connection) -> Answer:
        """The answer to a request, also after an error of any kind. Raises ClientGone when nobody waits for it."""
        try:
            check_head(message)
            return await self._handle(message, connection)
        except Refused as refused:
            return refuse(refused)
        except (ClientGone, ConnectionError):
            raise
        except Exception as error:
            log.exception("request_failed", method=message.method, kind=type(error).__name__, exc_info=error)
            return refuse(Refused(problems.INTERNAL, f"This is a fault of ingest. {SEND_AGAIN}"), close=True)

    # Called by connections.

    def add(self, connection: Connection) -> Answer | None:
        """Add a new connection. Returns an answer when it cannot stay."""
        self._connections[connection] = None
        if len(self._connections) > self._max_connections:
            if len(self._connections) > 2 * self._max_connections:
                connection.abort()
            return refuse(
                Refused(
                    problems.OVERLOADED,
                    f"This process has too many connections. {SEND_AGAIN}",
                    retry_after=RETRY_AFTER_S,
                )
            )
        if self._draining:
            connection.drain()
        return None

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection without a request."""
        self._connections.pop(connection, None)
        if self._draining and not self._connections:
            self._empty.set()

    @property
    def is_flooded(self) -> bool:
        """Whether new bytes are dropped unread. With fewer bytes, requests are parsed and refused, and connections stay."""
        return self._in_flight > FLOOD * self._max_in_flight

    def hold(self, size: int) -> bool:
        """Count bytes as held; a negative size counts them as released. Whether the held bytes are within the bound."""
        self._in_flight += size
        return self._in_flight <= self._max_in_flight

    def make_room(self) -> bool:
        """Whether the held bytes are within the bound. Cuts off clients that do not receive their answers, the largest first."""
        if self._in_flight <= self._max_in_flight:
            return True
        unread = [one for one in self._connections if one.phase is Phase.ANSWERING]
        for connection in sorted(unread, key=lambda one: one.held, reverse=True):
            connection.cut_off()
            if self._in_flight <= self._max_in_flight:
                return True
        return False

    def check_room(self) -> None:
        """Raises Refused when the held bytes are over the bound."""
        if not self.make_room():
            raise self.overloaded()

    def overloaded(self) -> Refused:
        """The refusal for held bytes over the bound."""
        return Refused(
            problems.OVERLOADED,
            f"This process holds the bytes of too many requests. {SEND_AGAIN}",
            retry_after=RETRY_AFTER_S,
        )
