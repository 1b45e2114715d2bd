"""The page's routes: its files, from memory, and the stream of views (server-sent events, WHATWG HTML 9.2).

Every message of the stream is the whole view, encoded once for all clients. A client that misses one misses nothing, and a slow
client delays no other.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from importlib.resources import files

import msgspec
from aiohttp import hdrs, web

from services.core.lifecycle import wait_for_stop
from services.observer.view import View

MAX_CLIENTS = 64
INTERVAL_S = 2.0
WRITE_WITHIN_S = 10.0
"""A client that reads nothing for so long is disconnected; it connects again by itself."""
_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
_GUARDS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def load_files() -> dict[str, bytes]:
    """The page's files by name. Blocking."""
    return {file.name: file.read_bytes() for file in files("services.observer.page").joinpath("static").iterdir()}


def add_page(
    app: web.Application, page: Mapping[str, bytes], view: Callable[[], View], *, interval: float = INTERVAL_S
) -> None:
    """Serve the page at /, its files beside it, and the views at /v1/stream, one every `interval` seconds.

    page: from `load_files`. view: must not block; called at most twice per interval, for all clients together.
    """
    for name, content in page.items():
        _add_file(app, name, content)
    stream = ViewStream(view, interval)
    app.router.add_get("/v1/stream", stream.serve)
    app.on_shutdown.append(stream.close)


def _add_file(app: web.Application, name: str, content: bytes) -> None:
    etag = hashlib.sha256(content).hexdigest()[:16]
    kind = _TYPES[name.rpartition(".")[2]]

    async def serve(request: web.Request) -> web.Response:
        known = request.if_none_match
        if known is not None and any(tag.value == etag for tag in known):
            return web.Response(status=304, headers={**_GUARDS, hdrs.ETAG: f'"{etag}"'})
        headers = {**_GUARDS, hdrs.ETAG: f'"{etag}"'}
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=headers)

    app.router.add_get("/" if name == "index.html" else f"/{name}", serve)


class ViewStream:
    """All clients of one page."""

    def __init__(self, view: Callable[[], View], interval: float) -> None:
        self._view, self._interval = view, interval
        self._message = b""
        self._made_at = float("-inf")
        self._closing = asyncio.Event()
        self.clients = 0

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serve one client until it leaves or the service stops. 503 when there are MAX_CLIENTS."""
        if self.clients >= MAX_CLIENTS:
            raise web.HTTPServiceUnavailable(text=f"there are {MAX_CLIENTS} clients already. Try: again later\n")
        response = web.StreamResponse(
            headers={**_GUARDS, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        self.clients += 1
        try:
            await response.prepare(request)
            while not self._closing.is_set():
                async with asyncio.timeout(WRITE_WITHIN_S):
                    await response.write(self._current())
                await wait_for_stop(self._closing, self._interval)
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()  # a graceful end would wait until the client reads
        finally:
            self.clients -= 1
        return response

    async def close(self, _app: web.Application) -> None:
        self._closing.set()

    def _current(self) -> bytes:
        now = asyncio.get_running_loop().time()
        if now - self._made_at >= self._interval / 2:
            self._made_at = now
            self._message = b"event: view\ndata: " + msgspec.json.encode(self._view()) + b"\n\n"
        return self._message
