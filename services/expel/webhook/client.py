"""The HTTP client of one destination. Destinations share no connections, limits or waits.

It does what a webhook needs: POST to one URL over HTTP/1.1 on kept connections. It has no redirects, proxies, cookies, netrc
or decompression, so no environment variable and no response can switch them on.
"""

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from functools import cache
from types import TracebackType
from typing import Self, cast

from aiohappyeyeballs import AddrInfoType, start_connection
from yarl import URL

from services.core.net_guard import NetPolicy, refuse_address
from services.expel.webhook.resolver import RefusedAddress, Resolver, find_addresses
from services.expel.webhook.response import BadResponse, Response, ResponseReader

_KEEP_ALIVE = 4.0
"""Seconds. Many servers close an idle connection after 5 s; a request must not meet that close."""
_DNS_TTL = 30.0
_NEXT_ADDRESS = 0.25
"""Seconds until the next address of a name is tried in parallel (RFC 8305)."""


class Connection(asyncio.Protocol):
    """One connection: one request at a time. `is_open`: another request may be sent. Unexpected bytes close it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader: ResponseReader | None = None
        self._responded: asyncio.Future[Response] | None = None
        self.is_open = False
        self.idle_since = 0.0
        """Monotonic seconds."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    async def exchange(self, request: list[bytes], deadline: float) -> Response:
        """Send a request and read its response until `deadline` (loop time). The previous exchange must have ended.

        Raises TimeoutError, OSError, BadResponse. When the status of a failure arrived before the error, the response is
        returned without the rest of its body. Every error closes the connection.
        """
        reader = self._reader = ResponseReader()
        responded: asyncio.Future[Response] = self._loop.create_future()
        self._responded = responded
        timer = self._loop.call_at(deadline, self._fail, TimeoutError())
        self._transport.writelines(request)
        try:
            return await responded
        finally:
            timer.cancel()
            self._reader = self._responded = None
            self.idle_since = time.monotonic()
            if not reader.reusable or responded.cancelled() or self._transport.get_write_buffer_size():
                self.close()

    def data_received(self, data: bytes) -> None:
        if self._reader is None or self._responded is None or self._responded.done():
            self.close()
            return
        try:
            if self._reader.feed(data):
                self._finish(self._reader)
        except BadResponse as error:
            self._fail(error)

    def eof_received(self) -> None:
        self.is_open = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._reader is not None and self._reader.feed_eof():
            self._finish(self._reader)
        else:
            self._fail(
                exc or ConnectionResetError("the receiver closed the connection before the response was complete")
            )

    def _finish(self, reader: ResponseReader) -> None:
        if self._responded is not None and not self._responded.done():
            assert reader.response is not None
            self._responded.set_result(reader.response)

    def _fail(self, error: Exception) -> None:
        if self._reader is None or self._responded is None or self._responded.done():
            return
        self._reader.reusable = False
        response = self._reader.response
        if response is not None and not 200 <= response.status < 300:
            self._responded.set_result(response)
        else:
            self._responded.set_exception(error)

    def close(self) -> None:
        """Close at once; unwritten bytes are dropped."""
        self.is_open = False
        self._transport.abort()


class HttpClient:
    """Concurrent calls of `post` each have a connection of their own. Close the client, or use it as a context manager.

    timeout: seconds for one request, from the lookup of the name to the end of the response.
    """

    def __init__(
        self, url: str, *, policy: NetPolicy, resolver: Resolver, timeout: float, headers: Mapping[str, str]
    ) -> None:
        parsed = URL(url, encoded=True)  # exactly as written: a receiver may compare it
        assert parsed.raw_host is not None
        assert parsed.port is not None
        self._host, self._port = parsed.raw_host, parsed.port
        self._tls = _tls_context() if parsed.scheme == "https" else None
        self._policy, self._resolver, self._timeout = policy, resolver, timeout
        self._head = _make_head(parsed, headers)
        self._idle: deque[Connection] = deque()
        """Ordered by last use, the most recent last."""
        self._busy: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._addresses: list[AddrInfoType] = []
        self._found_at = float("-inf")

    async def post(self, headers: bytes, body: bytes) -> Response:
        """Send one request. headers: complete header lines of this request.

        Raises OSError (of which ssl.SSLError, TimeoutError, NameNotFound, RefusedAddress), BadResponse.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout
        connection = self._pop_idle()
        if connection is None:
            async with asyncio.timeout_at(deadline):
                connection = await self._connect()
        self._busy.add(connection)
        try:
            head = b"%b%bContent-Length: %d\r\n\r\n" % (self._head, headers, len(body))
            return await connection.exchange([head, body], deadline)
        finally:
            self._busy.discard(connection)
            if connection.is_open:
                self._keep(connection)

    def _pop_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and time.monotonic() - connection.idle_since < _KEEP_ALIVE:
                return connection
            connection.close()
        return None

    def _keep(self, connection: Connection) -> None:
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(_KEEP_ALIVE, self._sweep)

    def _sweep(self) -> None:
        """Close connections that were idle for too long."""
        oldest = time.monotonic() - _KEEP_ALIVE
        while self._idle and (self._idle[0].idle_since < oldest or not self._idle[0].is_open):
            self._idle.popleft().close()
        self._sweeper = asyncio.get_running_loop().call_later(_KEEP_ALIVE, self._sweep) if self._idle else None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        addresses = await self._find()
        sock = await start_connection(
            addresses, happy_eyeballs_delay=_NEXT_ADDRESS, loop=loop, socket_factory=self._open_socket
        )
        try:
            _, connection = await loop.create_connection(
                Connection, sock=sock, ssl=self._tls, server_hostname=self._host.rstrip(".") if self._tls else None
            )
        except BaseException:
            sock.close()
            raise
        return connection

    async def _find(self) -> list[AddrInfoType]:
        if time.monotonic() - self._found_at > _DNS_TTL:
            self._addresses = await find_addresses(self._resolver, self._host, self._port, self._policy)
            self._found_at = time.monotonic()
        return self._addresses

    def _open_socket(self, info: AddrInfoType) -> socket.socket:
        """The last check: this is the address of the connection, whether looked up, cached or numeric."""
        family, kind, proto, _, address = info
        if (reason := refuse_address(str(address[0]), int(address[1]), self._policy)) is not None:
            raise RefusedAddress(reason)
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def close(self) -> None:
        """Close all connections at once."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _make_head(url: URL, headers: Mapping[str, str]) -> bytes:
    """The first lines of every request's head."""
    given = {name.lower() for name in headers}
    usual = {"Accept": "*/*", "User-Agent": "penstock"}
    lines = {"Host": url.host_port_subcomponent, "Accept-Encoding": "identity"}
    lines |= {name: value for name, value in usual.items() if name.lower() not in given}
    fields = "".join([f"{name}: {value}\r\n" for name, value in {**lines, **headers}.items()])
    return f"POST {url.raw_path_qs} HTTP/1.1\r\n{fields}".encode()


@cache
def _tls_context() -> ssl.SSLContext:
    """Shared by all clients: loading the trusted certificates takes 0.1 s and about a megabyte."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
