"""The examples do what they say, on real data: many to many, SQL, Python, no transform, streams that feed streams."""

import asyncio
import gzip
import json
import os
import shutil
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from services.core.security.signing import SigningKey, verify
from tests.integration.fleet_process import DEADLINE, REPOSITORY, SECRET, Desk, until
from tests.support.ports import free_port
from tests.support.serving import serve_on_loopback

COUNT = 2000


class Hooks:
    """One receiver for all destinations: payloads by path and id."""

    def __init__(self) -> None:
        self.got: dict[str, dict[str, Any]] = defaultdict(dict)
        self.kinds: dict[str, set[str]] = defaultdict(set)

    async def take(self, request: web.Request) -> web.Response:
        body = await request.read()
        if request.path in ("/late", "/fast"):
            verify([SigningKey.parse(SECRET)], request.headers, body, now=float(request.headers["webhook-timestamp"]))
        self.kinds[request.path].add(request.content_type)
        lines = body.splitlines() if request.content_type == "application/x-ndjson" else []
        events = [json.loads(line) for line in lines] if lines else json.loads(body)
        for event in events:
            payload = event.get("data", event)
            self.got[request.path].setdefault(payload["id"], payload)
        return web.Response(status=204)


@pytest.mark.spark
async def test_many_to_many(tmp_path: Path) -> None:
    """Broken: what somebody copies from the examples loses events, or sends them to the wrong place."""
    desk, hooks = Desk(tmp_path), Hooks()
    shutil.copy(REPOSITORY / "examples" / "speed.py", tmp_path)
    text = (REPOSITORY / "examples" / "many.yaml").read_text()
    (tmp_path / "pipes.yaml").write_text(text.replace(":9000", f":{desk.hook_port}"))
    with gzip.open(REPOSITORY / "examples" / "flights.ndjson.gz") as packed:
        lines = packed.readlines()[:COUNT]
    (tmp_path / "flights.ndjson").write_bytes(b"".join(lines))
    flights = {event["id"]: event for event in map(json.loads, lines)}
    late = {key for key, event in flights.items() if (event["dep_delay"] or 0) >= 60}
    very_late = {key for key in late if flights[key]["dep_delay"] >= 180}
    flown = {key: event["distance"] * 60 / event["air_time"] for key, event in flights.items() if event["air_time"]}

    app = web.Application(client_max_size=10_000_000)
    app.router.add_post("/{path}", hooks.take)
    async with serve_on_loopback(app, desk.hook_port), desk.up() as fleet:
        url = f"http://127.0.0.1:{desk.ingest_port}"
        sent = await desk.run("send", "flights", "flights.ndjson", "--json", "--in-flight", "1", "--url", url)
        assert json.loads(sent.out)["accepted"] == COUNT
        expected = {
            "/late": late,
            "/archive": late,
            "/very-late": very_late,
            "/speed": set(flown),
            "/fast": set(flown),
        }
        for path, wanted in expected.items():
            await until(lambda path=path, wanted=wanted: set(hooks.got[path]) >= wanted, f"all of {path}")  # type: ignore[misc]
            assert set(hooks.got[path]) == wanted
        assert await fleet.interrupt() == 0
    assert all(abs(hooks.got["/fast"][key]["miles_an_hour"] - speed) < 0.06 for key, speed in flown.items())
    assert hooks.kinds["/archive"] == {"application/x-ndjson"}
    assert hooks.kinds["/speed"] == {"application/json"}
    assert hooks.kinds["/late"] == {"application/cloudevents-batch+json"}


async def test_orders_and_their_read_model(tmp_path: Path) -> None:
    """Broken: the example of a table does not work, or a duplicate, a killed projector or a killed table spoils a state."""
    desk, tables, port = Desk(tmp_path), free_port(), free_port()
    text = (REPOSITORY / "examples" / "orders.yaml").read_text()
    (tmp_path / "pipes.yaml").write_text(text.replace(":9100", f":{port}"))
    script = REPOSITORY / "examples" / "orders.py"
    assert len(script.read_text().splitlines()) + len(text.splitlines()) < 60, "docs/tables.md says so"
    running: list[asyncio.subprocess.Process] = []

    async def start(*mode: str) -> asyncio.subprocess.Process:
        urls = [f"http://127.0.0.1:{port}" for port in (desk.ingest_port, tables)]
        pipe = asyncio.subprocess.PIPE
        running.append(await asyncio.create_subprocess_exec(sys.executable, script, *urls, *mode, stdout=pipe))
        return running[-1]

    async def finish(process: asyncio.subprocess.Process) -> str:
        async with asyncio.timeout(DEADLINE):
            out, _ = await process.communicate()
        assert process.returncode == 0
        return out.decode().splitlines()[-1]

    try:
        async with desk.up("--tables", f"127.0.0.1:{tables}") as fleet:
            projector = await start("fold", str(port))
            assert await finish(await start("order", "o-1")) == "shipped 4 42.5"
            (tmp_path / "again").write_text(
                json.dumps({"id": "o-1/2", "order": "o-1", "version": 2, "type": "item-added", "price": 12.5})
            )
            projector.kill()
            await projector.wait()
            (table,) = [process for process in (await desk.state()).processes if process.service == "table"]
            assert table.pid is not None
            os.kill(table.pid, signal.SIGKILL)

            async def is_back() -> bool:
                processes = json.loads((await desk.run("status", "--json")).out)["processes"]
                (found,) = [process for process in processes if process["name"] == "table-1"]
                return bool(found["pid"] != table.pid and found["state"] == "ready")

            async with asyncio.timeout(DEADLINE):
                while not await is_back():
                    await asyncio.sleep(0.1)
            await desk.send(tmp_path / "again", stream="order-events")
            more = await start("order", "o-1")  # behind the duplicate, which waits for a projector as they do
            await start("fold", str(port))
            assert await finish(more) == "shipped 8 85.0"
            assert await fleet.interrupt() == 0
    finally:
        for process in running:
            if process.returncode is None:
                process.kill()
            await process.communicate()
