"""A small HTTP/1.1 server for requests without a body: it parses heads strictly, bounds connections, and drains.

aiohttp's server alone takes as much CPU for an answer as this one takes with the read (bench/README.md). So this is our own. It
refuses every body, which leaves nothing for two parsers to disagree about.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple

import structlog
from prometheus_client import Counter

from services.core import metrics
from services.core.http.problem_type import CONTENT_TYPE, problem_json
from services.table import problems
from services.table.problems import Refused

log = structlog.get_logger()

MAX_HEAD_BYTES = 16_384
MAX_AHEAD_BYTES = 65_536
JOINED_BYTES = 65_536
"""Answers to requests that came together are written together, up to this size."""
MAX_KEPT_BYTES = 2048
"""Longer headers are parsed with each request."""
IDLE_S = 75.0
HEAD_S = 10.0
WRITE_S = 30.0
"""How long a client may leave its answer unread."""
SWEEP_S = 0.5
_LINE = re.compile(rb"([A-Z]{1,20}) (/[!-~]*) HTTP/1\.1")
_TOKEN = bytes(code for code in range(33, 127) if chr(code) not in '"(),/:;<=>?@[\\]{}')
JSON = b"application/json"
_INVALID = "The bytes are not a valid HTTP/1.1 request."


class Request(NamedTuple):
    """path and query: as they came, percent-encoded. headers: names in lower case; of a name that is repeated, the first."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    connection: "Connection"


class Answer(NamedTuple):
    """One answer. more: further headers, as whole lines."""

    status: int
    body: bytes
    media: bytes = JSON
    more: bytes = b""
    ends: bool = False


Handler = Callable[[Request], "Answer | Coroutine[Any, Any, Answer | None]"]
"""Answers at once, or by a coroutine; that may write the whole answer itself, and give None: the connection ends then."""
_STATUS = {status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in HTTPStatus}


class HttpServer:
    """All connections of this process. handle may raise Refused."""

    def __init__(self, handle: Handler, *, max_connections: int) -> None:
        self.handle = handle
        self.date = b""
        self.draining = False
        self._max = max_connections
        self._connections: set[Connection] = set()

    @asynccontextmanager
    async def listen(self, host: str, port: int) -> AsyncIterator[str]:
        """Accept until the context is left; yields the bound "host:port". Then open requests end at once: clients repeat them."""
        loop = asyncio.get_running_loop()
        self._set_date()
        server = await loop.create_server(lambda: Connection(self), host, port, backlog=1024)
        async with asyncio.TaskGroup() as group:
            sweeper = group.create_task(self._sweep(), name="sweep")
            try:
                bound = server.sockets[0].getsockname()
                yield f"{bound[0]}:{bound[1]}"
            finally:
                self.draining = True
                server.close()
                sweeper.cancel()
                for connection in list(self._connections):
                    connection.cut("stopping")

    def add(self, connection: "Connection") -> bool:
        """Whether there is room for the connection."""
        if len(self._connections) >= self._max:
            return False
        self._connections.add(connection)
        return True

    def remove(self, connection: "Connection") -> None:
        self._connections.discard(connection)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._set_date()
            now = loop.time()
            for connection in [one for one in self._connections if one.deadline < now]:
                connection.expire()
            await asyncio.sleep(SWEEP_S)

    def _set_date(self) -> None:
        self.date = b"Date: %b\r\n" % formatdate(time.time(), usegmt=True).encode()


class Connection(asyncio.Protocol):
    """One client. Requests are answered in order; while one waits, no more than MAX_AHEAD_BYTES are read."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._block: bytes | None = None
        self._headers: Mapping[str, str] = {}
        self._answers: list[bytes] = []
        self._size = self._oks = 0
        self._in_head = self._closes = False
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._drained: asyncio.Future[None] | None = None
        self.deadline = self._loop.time() + IDLE_S

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        if not self._server.add(self):
            metrics.TABLE_CUT.labels("too_many_connections").inc()
            self._transport.abort()  # type: ignore[union-attr]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._server.remove(self)
        if self._task is not None:
            self._task.cancel()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        if self._task is None and self._drained is None:
            self._go_on()
        elif len(self._buffer) > MAX_AHEAD_BYTES and self._transport is not None:
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._drained = self._loop.create_future()
        self.deadline = self._loop.time() + WRITE_S

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)
        if self._task is None and self._transport is not None:
            self._go_on()

    def expire(self) -> None:
        """The deadline has passed."""
        if self._drained is not None:
            self.cut("slow_client")
        elif self._task is None:
            self.cut("idle" if not self._buffer else "slow_head")
        else:
            self.deadline = self._loop.time() + IDLE_S

    def cut(self, reason: str) -> None:
        """End the connection now."""
        if self._transport is not None:
            if reason not in ("idle", "stopping"):
                metrics.TABLE_CUT.labels(reason).inc()
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether the client is still there."""
        return self._transport is not None and not self._server.draining

    async def write(self, data: bytes) -> None:
        """Write a part of an answer; returns when the client has taken most of what was written. Raises ConnectionError."""
        if self._transport is None:
            raise ConnectionResetError
        self._transport.write(data)
        if self._drained is not None:
            await self._drained
        self.deadline = self._loop.time() + IDLE_S

    def start_stream(self, media: bytes, more: bytes = b"") -> bytes:
        """The head of an answer whose end is that of the connection. more: further headers, as whole lines."""
        return b"%b%bContent-Type: %b\r\nCache-Control: no-store\r\nConnection: close\r\n%b\r\n" % (
            _STATUS[200],
            self._server.date,
            media,
            more,
        )

    # Private.

    def _go_on(self) -> None:
        """Answer what was read, until a request waits."""
        buffer, at = self._buffer, 0
        while self._task is None and self._drained is None and self._is_writable():
            end = buffer.find(b"\r\n\r\n", at)
            if end < 0 or end - at > MAX_HEAD_BYTES:
                if len(buffer) - at > MAX_HEAD_BYTES:
                    detail = (
                        f"The head of the request has more than {MAX_HEAD_BYTES} bytes. Send fewer or shorter headers."
                    )
                    self._send(refuse(Refused(problems.HEAD_TOO_LARGE, detail, ends=True)))
                    break
                if at == len(buffer):
                    self.deadline = self._loop.time() + IDLE_S
                elif not self._in_head:  # from its first byte on: further ones do not prolong it
                    self.deadline = self._loop.time() + HEAD_S
                self._in_head = at < len(buffer)
                break
            self._in_head = False
            self._answer(buffer[at:end])
            at = end + 4
        self._buffer = buffer[at:] if self._is_writable() else b""
        self._write_answers()
        if self._transport is not None and self._is_writable() and len(self._buffer) <= MAX_AHEAD_BYTES:
            self._transport.resume_reading()

    def _is_writable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def _answer(self, head: bytes) -> None:
        try:
            found = self._server.handle(self._parse(head))
        except Refused as refused:
            found = refuse(refused)
        except Exception as error:
            found = _fault(error)
        if isinstance(found, Answer):
            self._send(found)
        else:
            self._task = self._loop.create_task(self._wait(found))

    def _parse(self, head: bytes) -> Request:
        """Raises Refused, as `parse_headers`. Most clients send the same headers with each request: they are parsed once."""
        line, _, block = head.partition(b"\r\n")
        match = _LINE.fullmatch(line)
        if match is None:
            raise _bad(_INVALID)
        if block == self._block:
            headers = self._headers
        else:
            headers = parse_headers(block)
            self._closes = _asks_to_close(headers.get("connection"))
            if len(block) <= MAX_KEPT_BYTES:
                self._block, self._headers = block, headers
        method, target = match.groups()
        path, _, query = target.decode().partition("?")
        return Request(method.decode(), path, query, headers, self)

    async def _wait(self, work: Coroutine[Any, Any, Answer | None]) -> None:
        answer: Answer | None = None
        try:
            answer = await work
        except Refused as refused:
            answer = refuse(refused)
        except ConnectionError:
            pass
        except Exception as error:
            answer = _fault(error)
        self._task = None
        if answer is not None:
            self._send(answer)
            self._go_on()
        elif self._transport is not None:
            self._transport.close()

    def _send(self, answer: Answer) -> None:
        transport = self._transport
        if answer.status != 200:
            _count(answer.status).inc()
        else:
            self._oks += 1
        if transport is None:
            return
        ends = answer.ends or self._closes
        more = answer.more + b"Connection: close\r\n" if ends else answer.more
        self._answers.append(
            b"%b%bContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n%b"
            % (_STATUS[answer.status], self._server.date, answer.media, len(answer.body), more, answer.body)
        )
        self._size += len(self._answers[-1])
        if ends or self._size > JOINED_BYTES:
            self._write_answers()
        if ends:
            transport.close()

    def _write_answers(self) -> None:
        """Each write is a call of the system that may wake the client: the dearest part of a short answer."""
        if self._oks:
            _count(200).inc(self._oks)
        if self._answers and self._transport is not None:
            self._transport.write(b"".join(self._answers))
        self._answers.clear()
        self._size = self._oks = 0


def _asks_to_close(connection: str | None) -> bool:
    """connection: the header."""
    return connection is not None and "close" in [one.strip().lower() for one in connection.split(",")]


@lru_cache
def _count(status: int) -> Counter:
    """To look a child up costs as much as to parse a head."""
    return metrics.TABLE_REQUESTS.labels(str(status))


def parse_headers(block: bytes) -> Mapping[str, str]:
    """The lines behind the first one. Raises Refused; after that the connection ends, because nobody knows where the next request
    begins."""
    lines = block.split(b"\r\n") if block else []
    count = max(0, len(lines) - 1)
    if block.count(b"\r") != count or block.count(b"\n") != count:
        raise _bad(_INVALID)
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name.translate(None, _TOKEN) or b"\0" in value:
            raise _bad("A header is malformed.")
        lower = name.decode().lower()
        if lower in headers:
            if lower in ("host", "content-length", "transfer-encoding", "authorization", "connection"):
                raise _bad(f"The header {lower} is repeated.")
            continue
        headers[lower] = value.strip(b" \t").decode("latin-1")
    if "host" not in headers:
        raise _bad("The header Host is missing.")
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        raise _bad("The request has a body. This server takes none.")
    return headers


def refuse(refused: Refused) -> Answer:
    """The problem+json answer."""
    more = b"" if refused.retry_after is None else b"Retry-After: %d\r\n" % refused.retry_after
    if refused.allow is not None:
        more += b"Allow: %b\r\n" % refused.allow.encode()
    if refused.kind.status == HTTPStatus.UNAUTHORIZED:
        more += b"WWW-Authenticate: Bearer\r\n"
    body = problem_json(refused.kind, refused.detail)
    return Answer(refused.kind.status, body, CONTENT_TYPE.encode(), more, refused.ends)


def _bad(detail: str) -> Refused:
    return Refused(problems.BAD_REQUEST, detail, ends=True)


def _fault(error: Exception) -> Answer:
    log.exception("request_failed", kind=type(error).__name__, exc_info=error)
    return refuse(Refused(problems.INTERNAL, "The reason is in the log of the table service.", ends=True))
