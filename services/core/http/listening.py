"""Serves an aiohttp application until a context is left."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from services.core.http.address import parse_address

CLOSE_WITHIN_S = 1.0
"""The time limit for open requests when the context is left. Their clients repeat them."""


@asynccontextmanager
async def serve_app(app: web.Application, address: str) -> AsyncIterator[str]:
    """Listen until the context is left; yields the bound "host:port". Port 0: any free port. Raises OSError."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_WITHIN_S)
    await runner.setup()
    host, port = parse_address(address)
    try:
        await web.TCPSite(runner, host, port).start()
        bound = runner.addresses[0]
        yield f"{bound[0]}:{bound[1]}"
    finally:
        await runner.cleanup()
