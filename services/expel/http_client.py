"""One HTTP client per destination: connections, their number and their waits are never shared with another one.

It does what a webhook needs and no more: POST to one URL over HTTP/1.1 on kept connections. No redirects, proxies, cookies,
netrc, decompression: none of it can be switched on by an environment or an answer.
"""

import asyncio
import socket
import ssl
import time
from collections import deque
from collections.abc import Mapping
from functools import cache
from types import TracebackType
from typing import Self

from aiohappyeyeballs import AddrInfoType, start_connection
from yarl import URL

from services.core.net_guard import NetPolicy, refuse_address
from services.expel.dns import Lookups, RefusedAddress, find_addresses
from services.expel.http_answer import Answer
from services.expel.http_connection import Connection

_KEEP_ALIVE = 4.0
"""Seconds. Just below the 5 s after which many servers close an idle connection: a request must not meet that close."""
_DNS_TTL = 30.0
_NEXT_ADDRESS = 0.25
"""Seconds that an address may take before the name's next one is tried beside it (RFC 8305)."""


class HttpClient:
    """`post` may run several times at once; each run has a connection of its own. Close it, or use it as a context.

    timeout: seconds for one request, from the look-up of the name to the end of the answer.
    """

    def __init__(
        self, url: str, *, policy: NetPolicy, lookups: Lookups, timeout: float, headers: Mapping[str, str]
    ) -> None:
        parsed = URL(url, encoded=True)  # as it was written: a receiver may compare it
        assert parsed.raw_host is not None
        assert parsed.port is not None
        self._host, self._port = parsed.raw_host, parsed.port
        self._tls = _tls_context() if parsed.scheme == "https" else None
        self._policy, self._lookups, self._timeout = policy, lookups, timeout
        self._head = _make_head(parsed, headers)
        self._idle: deque[Connection] = deque()
        """The last used one is the last."""
        self._busy: set[Connection] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._addresses: list[AddrInfoType] = []
        self._found_at = float("-inf")

    async def post(self, headers: bytes, body: bytes) -> Answer:
        """One request. headers: whole lines of this request alone.

        Raises OSError (of which ssl.SSLError, TimeoutError, NameNotFound, RefusedAddress), BadAnswer.
        """
        deadline = asyncio.get_running_loop().time() + self._timeout
        connection = self._take_idle()
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

    def _take_idle(self) -> Connection | None:
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
        """Close what was idle for too long."""
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
            self._addresses = await find_addresses(self._lookups, self._host, self._port, self._policy)
            self._found_at = time.monotonic()
        return self._addresses

    def _open_socket(self, info: AddrInfoType) -> socket.socket:
        """The last gate: whatever was looked up, cached or written as a number, this is what is connected to."""
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
    """What the heads of all requests begin with."""
    given = {name.lower() for name in headers}
    usual = {"Accept": "*/*", "User-Agent": "penstock"}
    lines = {"Host": url.host_port_subcomponent, "Accept-Encoding": "identity"}
    lines |= {name: value for name, value in usual.items() if name.lower() not in given}
    fields = "".join([f"{name}: {value}\r\n" for name, value in {**lines, **headers}.items()])
    return f"POST {url.raw_path_qs} HTTP/1.1\r\n{fields}".encode()


@cache
def _tls_context() -> ssl.SSLContext:
    """One for all: reading the trusted certificates takes a tenth of a second, holding them about a megabyte."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
