"""This process's metrics on a port, as a service shows them. The service's own port reads /proc, which a test's loop may not."""

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import REGISTRY
from prometheus_client.exposition import generate_latest

from services.core.http.listening import serve_app


@asynccontextmanager
async def serve_metrics(families: Collection[str]) -> AsyncIterator[str]:
    """Yields host:port of /readyz, /metrics with these families, and empty /lags."""

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(REGISTRY.restricted_registry(families)))

    async def empty(_request: web.Request) -> web.Response:
        return web.json_response({"ready": True} if _request.path == "/readyz" else {})

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics), web.get("/readyz", empty), web.get("/lags", empty)])
    async with serve_app(app, "127.0.0.1:0") as address:
        yield address
