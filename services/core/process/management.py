"""The management port of every service: /healthz (alive), /readyz (ready for work), /metrics (Prometheus), /lags.

/lags has the full lag histograms, which `penstock status` merges over processes: Prometheus' buckets are too coarse for a P99.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import orjson
from aiohttp import web
from prometheus_client import REGISTRY
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from services.core.http.listening import serve_app
from services.core.metrics import CLOCK, LAG_FAMILIES, SERVICE_ALIVE, SERVICE_READY
from services.core.process.disk import measure_disks
from services.core.security.kafka import measure_certificates

WhyNotReady = Callable[[], str | None]
"""Returns None when ready, else the reason, for a person."""
Note = Callable[[], str | None]
"""Returns what else a person should know, e.g. what is paused; None: nothing."""


@asynccontextmanager
async def serve_management(
    address: str,
    why_not_ready: WhyNotReady,
    more: Sequence[web.RouteDef] = (),
    *,
    note: Note = lambda: None,
    why_not_alive: WhyNotReady = lambda: None,
) -> AsyncIterator[str]:
    """Serve until the context is left; yields the bound "host:port". Port 0: any free port. more: routes. Raises OSError.

    note: for /readyz, where it changes no status. why_not_alive: the reason why only a new process helps; None: none.
    """

    async def healthz(_request: web.Request) -> web.Response:
        reason = why_not_alive()
        return web.Response(status=200 if reason is None else 503, text=f"{reason or 'ok'}\n")

    async def readyz(_request: web.Request) -> web.Response:
        reason = why_not_ready()
        found = note()
        answer = {"ready": reason is None, "reason": reason, "pid": os.getpid()}
        body = orjson.dumps(answer if found is None else {**answer, "note": found})
        return web.Response(status=200 if reason is None else 503, body=body, content_type="application/json")

    async def metrics(_request: web.Request) -> web.Response:
        await asyncio.gather(measure_disks(), measure_certificates())
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def lags(_request: web.Request) -> web.Response:
        body = orjson.dumps({family.name: family.dump() for family in LAG_FAMILIES})
        return web.Response(body=body, content_type="application/json")

    SERVICE_READY.set_function(lambda: why_not_ready() is None)
    SERVICE_ALIVE.set_function(lambda: why_not_alive() is None)
    CLOCK.set_function(time.time)
    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz)])
    app.add_routes([web.get("/metrics", metrics), web.get("/lags", lags), *more])
    async with serve_app(app, address) as bound:
        yield bound
