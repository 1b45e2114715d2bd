"""One of many destinations is bad, in each way that a receiver can be: row 10 of the fault matrix."""

from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson
import psutil
import pytest
from aiohttp import web

from services.core.broker.contract import TopicSpec
from services.core.pipe_file.topic_names import RETRY_IN
from tests.faults.trial import RSS_LIMIT
from tests.integration.expel_process import Expel, hook, ids, open_expel
from tests.support.ports import free_port
from tests.support.serving import serve_on_loopback
from tests.unit.expel import receiver as bad
from tests.unit.expel.receiver import open_socket_server, wait_until

GOOD = [f"good-{n}" for n in range(49)]
EVENTS = 300

KINDS: dict[str, bad.Connection | None] = {
    "refuses": None,
    "hangs": bad.hang,
    "drips": bad.drip_head,
    "500": bad.answer_raw(b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n"),
    "resets": bad.reset,
    "answers endlessly": bad.answer_endlessly(500),
}


@asynccontextmanager
async def open_good() -> AsyncIterator[tuple[str, dict[str, set[str]]]]:
    """A receiver with a path for each good destination: its URL, and the events that each one has."""
    taken: dict[str, set[str]] = defaultdict(set)

    async def handle(request: web.Request) -> web.Response:
        taken[request.match_info["name"]].update(event["id"] for event in orjson.loads(await request.read()))
        return web.Response(status=204)

    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/{name}", handle)
    async with serve_on_loopback(app) as port:
        yield f"http://127.0.0.1:{port}", taken


async def unsettled(expel: Expel, name: str) -> int:
    return sum(lag.records for lag in (await expel.lag(name)).values())


@pytest.mark.parametrize("kind", KINDS)
async def test_one_bad_destination_of_fifty(tmp_path: Path, kind: str) -> None:
    """If it fails, one receiver's outage is felt by the others: their events or commits wait for it, or memory fills up."""
    serve = KINDS[kind]
    async with AsyncExitStack() as stack:
        url, taken = await stack.enter_async_context(open_good())
        expel = await stack.enter_async_context(open_expel(tmp_path, partitions=2))
        bad_url = f"http://127.0.0.1:{free_port()}/"
        if serve is not None:
            bad_url = await stack.enter_async_context(open_socket_server(serve))
        retry = {"attempts": 20, "base": "200ms", "max_wait": "60s"}
        expel.destinations += [hook("bad", bad_url, timeout="120s", retry=retry)]
        expel.destinations += [hook(name, f"{url}/{name}") for name in GOOD]
        await expel.start("--drain", "1s")
        assert expel.process is not None
        process = psutil.Process(expel.process.pid)
        await expel.send(ids(EVENTS))
        wanted, peak = set(ids(EVENTS)), 0

        def all_arrived() -> bool:
            nonlocal peak
            peak = max(peak, process.memory_info().rss)
            return all(taken[name] == wanted for name in GOOD)

        await wait_until(all_arrived)
        for name in GOOD:
            await expel.wait_no_lag(name)
        await expel.wait_metric(1, "penstock_expel_lane_events", destination="bad")
        if kind not in ("hangs", "drips"):
            await expel.wait_metric(1, "penstock_expel_attempts_total", destination="bad")
        # It is still bad: none of its events were delivered, given up or committed.
        assert await unsettled(expel, "bad") == EVENTS
        assert await expel.metric("penstock_expel_events_delivered_total", destination="bad") == 0
        assert await expel.metric("penstock_expel_events_dead_total") == 0
        assert await expel.get("/readyz") == 200
        assert max(peak, process.memory_info().rss) < RSS_LIMIT


LANE = 200
"""What a lane holds at most, of many more events."""


@pytest.mark.parametrize("kind", ["refuses", "hangs", "500"])
@pytest.mark.parametrize("hands_over", [False, True])
async def test_nine_of_ten_beside_a_full_lane(tmp_path: Path, kind: str, hands_over: bool) -> None:
    """If it fails, the other nine of ten wait for a dead one: for its full lane, or while its events go to the retrier."""
    serve, events = KINDS[kind], 10 * LANE
    async with AsyncExitStack() as stack:
        url, taken = await stack.enter_async_context(open_good())
        expel = await stack.enter_async_context(open_expel(tmp_path, partitions=2))
        expel.module = "tests.faults.shed_at_once"
        await expel.broker.admin.create_topic(TopicSpec(RETRY_IN, 1))
        bad_url = f"http://127.0.0.1:{free_port()}/"
        if serve is not None:
            bad_url = await stack.enter_async_context(open_socket_server(serve))
        retry = (
            {"attempts": 2, "base": "20ms", "max_wait": "50ms"} if hands_over else {"attempts": 20, "max_wait": "60s"}
        )
        schedule = ["1h"] if hands_over else []
        good = [f"good-{n}" for n in range(9)]
        expel.destinations += [hook("bad", bad_url, timeout="120s", retry=retry, schedule=schedule)]
        expel.destinations += [hook(name, f"{url}/{name}", schedule=["1h"]) for name in good]
        await expel.send(ids(events))
        await expel.start("--drain", "1s", "--lane-events", str(LANE))
        wanted = set(ids(events))
        await wait_until(lambda: all(taken[name] == wanted for name in good))
        for name in good:
            await expel.wait_no_lag(name)
            assert await expel.metric("penstock_expel_events_retried_total", destination=name) == 0
            assert await expel.metric("penstock_expel_events_handed_over_total", destination=name) == 0
        if hands_over and kind != "hangs":
            await expel.wait_metric(events, "penstock_expel_events_handed_over_total", destination="bad")
            await expel.wait_no_lag("bad")
            (held,) = (await expel.broker.reader.describe(RETRY_IN)).values()
            assert held.end >= events  # an append of unknown outcome is repeated
        else:
            await expel.wait_metric(LANE * 7 // 8, "penstock_expel_lane_events", destination="bad")
            assert await expel.metric("penstock_expel_lane_events", destination="bad") <= LANE
            assert await unsettled(expel, "bad") == events
        assert await expel.metric("penstock_expel_events_delivered_total", destination="bad") == 0
        assert await expel.metric("penstock_expel_events_dead_total") == 0
