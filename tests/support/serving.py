"""Serves an aiohttp application on loopback."""

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


@asynccontextmanager
async def serve_on_loopback(
    app: web.Application, port: int = 0, *, tls: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Listen until the context is left; yields the port. What is open then is cut off. port: 0: any free one."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, ssl_context=tls).start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
