"""The page's routes: its files, from memory, and the stream of views (server-sent events, WHATWG HTML 9.2).

Every message of the stream is the whole view, encoded once for all clients. A client that misses one misses nothing, and a slow
client delays no other.
"""

import asyncio
from collections.abc import Callable, Mapping

import msgspec
from aiohttp import web

from services.core.http.page_files import GUARDS, add_file
from services.core.process.lifecycle import wait_for_stop
from services.observer.view import View

MAX_CLIENTS = 64
INTERVAL_S = 2.0
WRITE_WITHIN_S = 10.0
"""A client that reads nothing for so long is disconnected; it connects again by itself."""


def add_page(
    app: web.Application, page: Mapping[str, bytes], view: Callable[[], View], *, interval: float = INTERVAL_S
) -> None:
    """Serve the page at /, its files beside it, and the views at /v1/stream, one every `interval` seconds.

    page: from `load_files`. view: must not block; called at most twice per interval, for all clients together.
    """
    for name, content in page.items():
        add_file(app, "/" if name == "index.html" else f"/{name}", name, content)
    stream = ViewStream(view, interval)
    app.router.add_get("/v1/stream", stream.serve)
    app.on_shutdown.append(stream.close)


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
            headers={**GUARDS, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
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
