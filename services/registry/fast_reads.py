"""Answers reads by fingerprint, id and GUID without aiohttp's request objects: each such answer never changes.

A connection begins here. A request that is plainly one of these reads is answered at once, from memory. The first request that
is anything else goes to aiohttp, with everything behind it: only aiohttp then knows when an answer is complete, and answers must
keep their order. Whatever this module does not understand in full, aiohttp's strict parser judges.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from typing import cast

import orjson
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from services.core import metrics
from services.core.http.address import parse_address
from services.core.http.listening import CLOSE_WITHIN_S
from services.core.security.keys import ApiKey
from services.registry.catalog import Catalog, Schema
from services.registry.http import CONFLUENT, FOR_EVER, Access, covers_schema
from services.registry.problems import Refused
from services.registry.views import confluent_schema, schema_view

MAX_HEAD_BYTES = 4096
MAX_KNOWN = 16_384
MAX_KNOWN_BYTES = 32 << 20
_LINE = re.compile(rb"GET (/[A-Za-z0-9/-]{1,200}) HTTP/1\.1")
_HEADER = re.compile(rb"([A-Za-z0-9-]{1,64}):[ \t]*([\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?)?[ \t]*")
_OTHER = frozenset(
    {b"content-length", b"transfer-encoding", b"expect", b"upgrade", b"connection", b"if-none-match", b"range"}
)
"""A request with one of these is aiohttp's. `Connection: keep-alive` says nothing and is allowed."""
_ONCE = frozenset({b"host", b"authorization"})
_OK = b"HTTP/1.1 200 OK\r\nDate: "


class Reads:
    """The answers of one process, in memory by the bytes of their requests. `forget` after the catalogue was read again."""

    def __init__(self, catalog: Catalog, access: Access) -> None:
        self._catalog, self._access = catalog, access
        self._known: dict[bytes, tuple[bytes, float]] = {}
        """What follows the date, and the time at which the client's key expires."""
        self._bytes = 0
        self._ring = access.ring
        self._second, self._date = 0, b""
        self._answered = metrics.REGISTRY_REQUESTS.labels("200")

    def forget(self) -> None:
        """Build every answer again."""
        self._known.clear()
        self._bytes = 0

    def answer(self, request: bytes) -> bytes | None:
        """The whole answer to these bytes; None: they are for aiohttp."""
        if self._ring is not self._access.ring:
            self._ring = self._access.ring
            self.forget()
        now = time.time()
        found = self._known.get(request) or self._build(request)
        if found is None or now >= found[1]:
            return None
        second = int(now)
        if second != self._second:
            self._second, self._date = second, formatdate(second, usegmt=True).encode()
        self._answered.inc()
        return _OK + self._date + found[0]

    def _build(self, request: bytes) -> tuple[bytes, float] | None:
        head = read_head(request)
        if head is None:
            return None
        path, headers = head
        try:
            self._access.check_host(headers.get(b"host", b"").decode("ascii"))
            key = self._access.authenticate([headers[b"authorization"].decode()] if b"authorization" in headers else [])
        except Refused:
            return None
        answer = self._find(path, key)
        if answer is None:
            return None
        if len(self._known) >= MAX_KNOWN or self._bytes >= MAX_KNOWN_BYTES:
            self.forget()
        found = self._known[request] = (answer, float("inf") if key is None else key.until)
        self._bytes += len(request) + len(answer)
        return found

    def _find(self, path: bytes, key: ApiKey | None) -> bytes | None:
        catalog, schema = self._catalog, None
        kind, _, text = path.decode("ascii").rpartition("/")
        match kind:
            case "/v1/schemas":
                schema = catalog.by_fingerprint.get(text)
            case "/schemas/ids" if text.isdigit() and len(text) < 12:
                schema = catalog.by_id.get(int(text))
            case "/schemas/guids":
                schema = catalog.by_guid.get(text)
        if schema is None or not covers_schema(key, schema):
            return None
        return _own(schema) if kind == "/v1/schemas" else _confluent(schema, with_id=kind == "/schemas/guids")


def read_head(request: bytes) -> tuple[bytes, dict[bytes, bytes]] | None:
    """The path and the headers, in lower case, of a request that is one GET without a body; None for anything else."""
    if len(request) > MAX_HEAD_BYTES or not request.endswith(b"\r\n\r\n"):
        return None
    first, *lines = request[:-4].split(b"\r\n")
    found = _LINE.fullmatch(first)
    headers: dict[bytes, bytes] = {}
    for line in lines:
        header = _HEADER.fullmatch(line)
        if header is None:
            return None
        name, value = header[1].lower(), header[2] or b""
        if name in _OTHER and not (name == b"connection" and value.lower() == b"keep-alive"):
            return None
        if name in _ONCE and name in headers:
            return None
        headers[name] = value
    return None if found is None or b"host" not in headers else (found[1], headers)


def _own(schema: Schema) -> bytes:
    more = {**FOR_EVER, "ETag": f'"{schema.stored.fingerprint}"'}
    return _render("application/json", orjson.dumps(schema_view(schema)), more)


def _confluent(schema: Schema, *, with_id: bool) -> bytes:
    body = {**confluent_schema(schema), "guid": schema.guid, **({"id": schema.id} if with_id else {})}
    return _render(CONFLUENT, orjson.dumps(body), {})


def _render(media: str, body: bytes, more: dict[str, str]) -> bytes:
    """What follows the date."""
    headers = {"Content-Type": media, "Content-Length": str(len(body)), "X-Content-Type-Options": "nosniff", **more}
    lines = "".join(f"\r\n{name}: {value}" for name, value in headers.items())
    return lines.encode() + b"\r\n\r\n" + body


class Front(asyncio.Protocol):
    """One connection. inner: aiohttp's protocol, for everything that is no fast read."""

    def __init__(self, reads: Reads, inner: RequestHandler) -> None:
        self._reads, self._inner = reads, inner
        self._transport: asyncio.Transport | None = None
        self._is_inner = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by class
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if not self._is_inner and self._transport is not None:
            answer = self._reads.answer(data)
            if answer is not None:
                self._transport.write(answer)
                return
            self._is_inner = True
        self._inner.data_received(data)

    def eof_received(self) -> None:
        self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)
        self._transport = None

    def pause_writing(self) -> None:
        """The client does not read: it gets no further answer."""
        if not self._is_inner and self._transport is not None:
            self._transport.pause_reading()
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        if not self._is_inner and self._transport is not None:
            self._transport.resume_reading()
        self._inner.resume_writing()


@asynccontextmanager
async def serve_reads(app: web.Application, reads: Reads, address: str) -> AsyncIterator[str]:
    """As `core.http.listening.serve_app`, with the fast reads in front. Raises OSError."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_WITHIN_S)
    await runner.setup()
    make = runner.server
    assert make is not None
    host, port = parse_address(address)
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(lambda: Front(reads, make()), host, port, backlog=1024)
        try:
            bound = server.sockets[0].getsockname()
            yield f"{bound[0]}:{bound[1]}"
        finally:
            server.close()
    finally:
        await runner.cleanup()
