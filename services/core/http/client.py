"""The HTTP client of one destination. Destinations share no connections, limits or waits.

It does what a webhook needs: POST to one URL over HTTP/1.1 on kept connections. It has no redirects, proxies, cookies, netrc
or decompression, so no environment variable and no response can switch them on.

The parser (RFC 9112) is strict about the end of a response and lenient elsewhere. When the end is in doubt, the connection is
not used again.
"""

import asyncio
import re
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache
from types import TracebackType
from typing import NamedTuple, Self, cast

from aiohappyeyeballs import AddrInfoType, start_connection
from yarl import URL

from services.core.http.net_guard import NetPolicy, refuse_address
from services.core.http.resolver import RefusedAddress, Resolver, find_addresses

_KEEP_ALIVE = 4.0
"""Seconds. Many servers close an idle connection after 5 s; no request must be sent at that moment."""
_DNS_TTL = 30.0
_NEXT_ADDRESS = 0.25
"""Seconds until the next address of a name is tried in parallel (RFC 8305)."""
MAX_HEAD = 16_384
MAX_RESPONSE = 4096
_TIMER_LATE_S, _READ_FIRST_S = 0.5, 0.1
"""A timer that is late by the first was held up by more than other work. The second is the time to read what has come."""
_MAX_INTERIM = 8
"""1xx responses before the final one."""
_MAX_CHUNK_LINE = 1024

_HEAD_END = re.compile(rb"\r?\n\r?\n")
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [^\r\n]*)?")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r?\n")
_TRAILER = re.compile(rb"(?:[^\r\n]+\r?\n)*\r?\n")
_EOL = re.compile(rb"\r?\n")
_WANTED = frozenset({b"connection", b"content-length", b"retry-after", b"transfer-encoding"})


class BadResponse(ValueError):
    """These bytes are not an HTTP response. The message has the reason, and none of the bytes."""


class Response(NamedTuple):
    """body: its first bytes as received, not decompressed. whole: the body is complete."""

    status: int
    retry_after: str | None = None
    body: bytes = b""
    whole: bool = True


class ResponseReader:
    """Parses one response as it arrives. Holds at most MAX_HEAD bytes and the bytes of one `feed`.

    response: None before the head is complete, without its body before `feed` returned True.
    reusable: once the response is complete, whether another request may follow on the same connection. max_body: the most bytes
    of the body that are kept.
    """

    def __init__(self, max_body: int = MAX_RESPONSE) -> None:
        self._max_body = max_body
        self.response: Response | None = None
        self.reusable = False
        self._buffer = bytearray()
        self._interim = 0
        self._is_chunked = False
        self._length: int | None = None
        """Of a body that is not chunked. None: the body ends with the connection."""
        self._chunks = bytearray()

    def feed(self, data: bytes) -> bool:
        """Whether the response is complete, or as much of it as is ever read. Raises BadResponse."""
        self._buffer += data
        while self.response is None:
            end = _HEAD_END.search(self._buffer)
            if (len(self._buffer) if end is None else end.start()) > MAX_HEAD:
                raise BadResponse(f"its head has more than {MAX_HEAD} bytes")
            if end is None:
                return False
            head = bytes(self._buffer[: end.start()])
            del self._buffer[: end.end()]
            self._read_head(head)
        return self._read_chunks() if self._is_chunked else self._read_plain()

    def feed_eof(self) -> bool:
        """The connection was closed. Whether that completes the response."""
        is_end = self.response is not None and self._length is None and not self._is_chunked
        return is_end and self._end(self._buffer, whole=True)

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.split(b"\n")
        status_line = _STATUS.fullmatch(first.rstrip(b"\r"))
        if status_line is None:
            raise BadResponse("it has no status line of HTTP/1")
        status = int(status_line[2])
        if status < 200:
            self._interim += 1
            if status == 101 or self._interim > _MAX_INTERIM:
                raise BadResponse(f"the status {status} is no answer to a POST")
            return
        fields = _read_fields(lines)
        connection = fields.get(b"connection", b"").lower()
        self.reusable = b"close" not in connection and (status_line[1] == b"1" or b"keep-alive" in connection)
        self._find_end(status, fields)
        retry_after = fields.get(b"retry-after")
        self.response = Response(status, None if retry_after is None else retry_after.decode("latin-1"), whole=False)

    def _find_end(self, status: int, fields: dict[bytes, bytes]) -> None:
        """RFC 9112, 6.3."""
        coding, length = fields.get(b"transfer-encoding"), fields.get(b"content-length")
        if status in (204, 304):
            self._length = 0
        elif coding is not None:
            self._is_chunked = coding.lower() == b"chunked"
            self.reusable &= length is None
        elif length is not None:
            if not length.isdigit():
                raise BadResponse("its Content-Length is not a number")
            self._length = int(length[:19])

    def _read_plain(self) -> bool:
        if self._length is not None and len(self._buffer) >= self._length <= self._max_body:
            body = self._buffer[: self._length]
            del self._buffer[: self._length]
            return self._end(body, whole=True)
        return len(self._buffer) > self._max_body and self._end(self._buffer, whole=False)

    def _read_chunks(self) -> bool:
        buffer, body = self._buffer, self._chunks
        while (line := _CHUNK.match(buffer)) is not None:
            size, start = int(line[1], 16), line.end()
            if not size:
                return self._read_trailer(start)
            piece = buffer[start : start + size]
            if len(body) + len(piece) > self._max_body:
                return self._end(body + piece, whole=False)
            end = _EOL.match(buffer, start + size)
            if end is None:
                if len(buffer) > start + size + 1:
                    raise BadResponse("a chunk is longer than it says")
                return False
            body += piece
            del buffer[: end.end()]
        if b"\n" in buffer or len(buffer) > _MAX_CHUNK_LINE:
            raise BadResponse("a chunk has no size")
        return False

    def _read_trailer(self, start: int) -> bool:
        end = _TRAILER.match(self._buffer, start)
        if end is None:
            if len(self._buffer) > MAX_HEAD:
                raise BadResponse(f"its trailer has more than {MAX_HEAD} bytes")
            return False
        del self._buffer[: end.end()]
        return self._end(self._chunks, whole=True)

    def _end(self, body: bytearray, *, whole: bool) -> bool:
        assert self.response is not None
        has_end = self._is_chunked or self._length is not None
        self.reusable &= whole and has_end and not self._buffer
        self.response = self.response._replace(
            body=bytes(body[: self._max_body]), whole=whole and len(body) <= self._max_body
        )
        return True


def _read_fields(lines: list[bytes]) -> dict[bytes, bytes]:
    """The headers that are used. Two different values of a length header leave the end of the response in doubt: BadResponse."""
    fields: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or name != name.strip():
            raise BadResponse("a line of its head is not a header")
        name = name.lower()
        if name in _WANTED:
            value = value.strip()
            if fields.setdefault(name, value) != value and name in (b"content-length", b"transfer-encoding"):
                raise BadResponse(f"it has several {name.decode()}")
    return fields


class Connection(asyncio.Protocol):
    """One connection: one request at a time. `is_open`: another request may be sent. Unexpected bytes close it.

    tls: the context with which it was opened. max_body: the most bytes of a response's body that are kept.
    """

    def __init__(self, tls: ssl.SSLContext | None = None, max_body: int = MAX_RESPONSE) -> None:
        self.tls, self._max_body = tls, max_body
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
        reader = self._reader = ResponseReader(self._max_body)
        responded: asyncio.Future[Response] = self._loop.create_future()
        self._responded = responded
        self._timer = self._loop.call_at(deadline, self._time_out, deadline)
        self._transport.writelines(request)
        try:
            return await responded
        finally:
            self._timer.cancel()
            self._reader = self._responded = None
            self.idle_since = time.monotonic()
            if not reader.reusable or responded.cancelled() or self._transport.get_write_buffer_size():
                self.close()

    def _time_out(self, deadline: float) -> None:
        """The request failed; unless the process stood still (frozen, swapped out): an answer that came meanwhile is read first.

        The loop runs timers before it reads, so the receiver would get these events again.
        """
        if self._loop.time() - deadline > _TIMER_LATE_S:
            self._timer = self._loop.call_later(_READ_FIRST_S, self._fail, TimeoutError())
        else:
            self._fail(TimeoutError())

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

    timeout: seconds for one request, from the lookup of the name to the end of the response. tls: the context for new
    connections; when it is another one, kept connections are closed. None: the system's authorities. max_body: the most bytes
    of a response's body that are kept.
    """

    def __init__(
        self,
        url: str,
        *,
        policy: NetPolicy,
        resolver: Resolver,
        timeout: float,
        headers: Mapping[str, str],
        tls: Callable[[], ssl.SSLContext] | None = None,
        max_body: int = MAX_RESPONSE,
    ) -> None:
        parsed = URL(url, encoded=True)  # exactly as written: a receiver may compare it
        assert parsed.raw_host is not None
        assert parsed.port is not None
        self._host, self._port = parsed.raw_host, parsed.port
        self._find_tls = (tls or _tls_context) if parsed.scheme == "https" else _no_tls
        self._find_tls()  # the first call loads the system's authorities
        self._max_body = max_body
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
        oldest, tls = time.monotonic() - _KEEP_ALIVE, self._find_tls()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since > oldest and connection.tls is tls:
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
        tls = self._find_tls()
        try:
            _, connection = await loop.create_connection(
                lambda: Connection(tls, self._max_body),
                sock=sock,
                ssl=tls,
                server_hostname=self._host.rstrip(".") if tls else None,
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


def _no_tls() -> None:
    """For a URL with http://."""


@cache
def _tls_context() -> ssl.SSLContext:
    """Shared by all clients: loading the trusted certificates takes 0.1 s and about a megabyte."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context
