"""Serving an aiohttp application at an address, for as long as a context lasts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from services.core.address import parse_address

CLOSE_WITHIN_S = 1.0
"""What requests under way get when the context is left. These pages are asked again."""


@asynccontextmanager
async def serve_app(app: web.Application, address: str) -> AsyncIterator[str]:
    """Listen until the context is left; yields the bound "host:port". `address` "host:0" takes any free port.

    Raises OSError when the port is taken.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_WITHIN_S)
    await runner.setup()
    host, port = parse_address(address)
    try:
        await web.TCPSite(runner, host, port).start()
        bound = runner.addresses[0]
        yield f"{bound[0]}:{bound[1]}"
    finally:
        await runner.cleanup()
