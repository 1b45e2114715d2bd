"""What a process says on its management port, and what anything else at that address may do to who asks."""

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from services.core.process import scrape as scraping
from services.core.process.scrape import Sample, scrape


async def ask(metrics: web.Response, ready: int = 200) -> tuple[Sample, str]:
    """A sample of a process that answers so, and its address."""

    async def say_metrics(_request: web.Request) -> web.Response:
        return metrics

    async def say_ready(_request: web.Request) -> web.Response:
        return web.json_response({"ready": ready == 200, "reason": "later"}, status=ready)

    async def say_lags(_request: web.Request) -> web.Response:
        return web.json_response({})

    async def elsewhere(_request: web.Request) -> web.Response:
        return web.Response(text="# TYPE a gauge\na 7\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", say_metrics), web.get("/readyz", say_ready), web.get("/lags", say_lags)])
    app.add_routes([web.get("/elsewhere", elsewhere)])
    async with TestServer(app) as server:
        address = f"127.0.0.1:{server.port}"
        return await scrape([address]), address


async def test_figures_are_read_of_the_unready_too() -> None:
    """Broken: an instance that starts, or waits for its broker, has no figures."""
    sample, address = await ask(web.Response(text="# TYPE a gauge\na 7\n"), ready=503)
    assert (sample.total("a"), sample.unready) == (7.0, {address: "later"})


async def test_nobody_is_followed_elsewhere() -> None:
    """Broken: what answers at an instance's old address sends the autoscaler wherever it likes."""
    sample, address = await ask(web.Response(status=302, headers={"Location": "/elsewhere"}))
    assert (sample.values, sample.unready) == ({}, {address: "does not answer"})


async def test_an_answer_without_an_end_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: one process fills the memory of who asks it."""
    monkeypatch.setattr(scraping, "MAX_BODY", 1_000)
    sample, address = await ask(web.Response(text="# TYPE a gauge\na 7\n" + "# more\n" * 1_000))
    assert (sample.values, sample.unready) == ({}, {address: "does not answer"})
