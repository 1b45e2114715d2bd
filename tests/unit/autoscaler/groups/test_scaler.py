"""The loop around the policy, with a platform in memory and an observer over HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs

from services.autoscaler.groups import scaler
from services.autoscaler.groups.drivers.contract import Away, Group, Member, SizeChanged
from services.autoscaler.groups.observer import ObserverClient, ObserverUnavailable, open_observer
from services.autoscaler.groups.policy import GroupRules
from services.autoscaler.groups.scaler import GroupScaler
from services.core.scrape import Sample
from services.core.times import format_time


class Platform:
    """Instances at made-up addresses; what they say is `cpu` (cores) and `lag`."""

    def __init__(self) -> None:
        self.size, self.cpu, self.lag, self.away, self.refuses = 2, 0.3, 0.0, False, False
        self.loses_answers = False
        self.orders: list[tuple[int, int]] = []
        self.clock = 0.0

    async def describe(self, group: str) -> Group:
        if self.away:
            raise Away("not here")
        return Group(self.size, tuple(Member(f"i{n}", f"h:{n}", False) for n in range(self.size)))

    async def resize(self, group: str, seen: int, size: int) -> None:
        if self.refuses:
            raise SizeChanged("it moved")
        self.orders.append((seen, size))
        self.size = size
        if self.loses_answers:
            raise Away("no answer")

    async def scrape(self, _addresses: list[str]) -> Sample:
        lag = ("penstock_broker_lag_seconds", frozenset({("group", "p.d"), ("topic", "t"), ("partition", "0")}))
        values = {
            ("process_start_time_seconds", frozenset[tuple[str, str]]()): 1000.0,
            ("process_cpu_seconds_total", frozenset[tuple[str, str]]()): self.clock * self.cpu,
            lag: self.lag,
        }
        return Sample(self.clock, values)


class Observer:
    """As much of its API as the scaler asks."""

    def __init__(self) -> None:
        self.breaker, self.windows, self.status = "closed", list[dict[str, Any]](), 200
        self.health = "healthy"

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/v1/destinations", self.destinations), web.get("/v1/planned", self.planned)])
        app.add_routes([web.get("/v1/pipes", self.pipes)])
        app.add_routes([web.post("/v1/planned", self.announce)])
        return app

    async def destinations(self, _request: web.Request) -> web.Response:
        lane = {"pipe": "p", "destination": "d", "state": "active", "breaker": self.breaker, "letters": 0}
        return web.json_response({"destinations": [lane]}, status=self.status)

    async def pipes(self, _request: web.Request) -> web.Response:
        found = {
            "pipe": "p",
            "health": self.health,
            "reasons": ["3 of 9 events are missing in 1 minute"],
            "planned": None,
        }
        return web.json_response({"pipes": [found]})

    async def planned(self, _request: web.Request) -> web.Response:
        return web.json_response({"planned": self.windows})

    async def announce(self, request: web.Request) -> web.Response:
        said = await request.json()
        self.add(said["kind"], said["by"], 0, said["seconds"])
        return web.json_response(self.windows[-1], status=201)

    def add(self, kind: str, by: str, begins: float, ends: float) -> None:
        now = time.time()
        times = {"from": format_time(round((now + begins) * 1000)), "until": format_time(round((now + ends) * 1000))}
        self.windows.append({"kind": kind, "pipe": None, "by": by, **times})


class Scene:
    def __init__(self, observer: Observer, client: ObserverClient) -> None:
        self.platform, self.observer, self.client = Platform(), observer, client

    def scaler(self, *, dry_run: bool = False, **rules: object) -> GroupScaler:
        given = {"max": 6, "cool_down": "10ms", "calm": "10ms", "warm_up": "1s", **rules}
        return GroupScaler({"expel": GroupRules.model_validate(given)}, self.platform, self.client, dry_run)

    async def run(self, scaler: GroupScaler, count: int) -> list[dict[str, Any]]:
        """So many looks; the decisions as they were logged."""
        with capture_logs() as said:
            for _ in range(count):
                self.platform.clock += 10.0
                await scaler.scale_all()
                await asyncio.sleep(0.03)  # longer than the cool-down and the window
        return [dict(line) for line in said if line["event"] == "group_decision"]


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    observer = Observer()
    async with TestServer(observer.app()) as server, open_observer(f"127.0.0.1:{server.port}") as client:
        scene = Scene(observer, client)
        monkeypatch.setattr(scaler, "scrape", scene.platform.scrape)
        yield scene


async def test_every_decision_is_told_with_reason_and_figures(scene: Scene) -> None:
    """Broken: nobody can say afterwards why a group changed its size, or why it did not."""
    scene.platform.cpu = 0.9
    first, second = await scene.run(scene.scaler(), 2)
    assert (first["action"], first["reason"]) == ("hold", "no_figures")
    assert (second["action"], second["reason"], second["size"], second["wanted"]) == ("out", "cpu", 2, 3)
    assert second["instances"] == {"i0": 0.9, "i1": 0.9}
    assert scene.platform.orders == [(2, 3)]
    [window] = scene.observer.windows
    assert (window["kind"], window["by"]) == ("scaling", "autoscaler/groups/expel out 2 -> 3")


async def test_dry_run_only_tells(scene: Scene) -> None:
    """Broken: trying the autoscaler out changes the fleet, or raises a window in which alarms are quiet."""
    scene.platform.cpu = 0.9
    decisions = await scene.run(scene.scaler(dry_run=True), 3)
    assert [one["action"] for one in decisions[1:]] == ["out", "out"]
    assert all(one["dry_run"] for one in decisions)
    assert (scene.platform.orders, scene.observer.windows) == ([], [])


async def test_shrinks_when_calm_but_not_in_a_deploy(scene: Scene) -> None:
    """Broken: what the observer was told is about to happen does not count."""
    scene.platform.cpu = 0.1
    scene.observer.add("deploy", "ci", -60, 60)
    scaler = scene.scaler()
    decisions = await scene.run(scaler, 4)
    assert (decisions[-1]["action"], decisions[-1]["reason"]) == ("hold", "under_way")
    scene.observer.windows.clear()
    scene.observer.add("deploy", "ci", -60, -30)
    scene.observer.add("scaling", "autoscaler/groups/ingest out 1 -> 2", -5, 30)
    assert (await scene.run(scaler, 1))[-1]["action"] == "in"
    assert scene.platform.orders == [(2, 1)]


async def test_does_not_shrink_while_a_pipe_is_unstable(scene: Scene) -> None:
    """Broken: a group loses instances while events are missing, and who looks for them has one place fewer to look at."""
    scene.platform.cpu, scene.observer.health = 0.1, "unstable"
    scaler = scene.scaler()
    last = (await scene.run(scaler, 4))[-1]
    assert (last["reason"], "events are missing" in last["words"]) == ("under_way", True)
    scene.observer.health = "degraded"
    assert (await scene.run(scaler, 1))[-1]["action"] == "in"


async def test_without_the_observer_it_grows_and_does_not_shrink(scene: Scene) -> None:
    """Broken: while health is not known, instances are taken away; or an overload is not met."""
    scene.observer.status = 503
    scene.platform.cpu, scene.platform.lag = 0.1, 500.0
    decisions = await scene.run(scene.scaler(), 4)
    assert {one["reason"] for one in decisions[2:]} <= {"under_way", "not_calm"}
    scene.platform.cpu = 0.9
    assert (await scene.run(scene.scaler(), 2))[-1]["action"] == "out"
    with pytest.raises(ObserverUnavailable):
        await scene.client.read()


async def test_lag_behind_an_open_breaker_does_not_count(scene: Scene) -> None:
    """Broken: a dead webhook is answered with machines."""
    scene.platform.cpu, scene.platform.lag = 0.5, 500.0
    scene.observer.breaker = "open"
    assert [one["action"] for one in await scene.run(scene.scaler(), 3)] == ["hold"] * 3
    scene.observer.breaker = "closed"
    assert (await scene.run(scene.scaler(), 2))[-1]["reason"] == "lag"


async def test_a_new_autoscaler_knows_the_last_action(scene: Scene) -> None:
    """Broken: a restart right after a step in is a chance for a step out, and the group flaps."""
    scene.observer.add("scaling", "autoscaler/groups/expel out 1 -> 3", -500, -400)
    scene.observer.add("scaling", "autoscaler/groups/expel in 3 -> 2", -30, 30)
    scene.observer.add("scaling", "autoscaler/groups/expel-2 out 3 -> 4", -5, 30)
    scene.platform.cpu = 0.9
    decisions = await scene.run(scene.scaler(cool_down="60s"), 3)
    assert (decisions[-1]["action"], decisions[-1]["reason"]) == ("hold", "cool_down")
    assert (await scene.run(scene.scaler(cool_down="10s"), 3))[1]["action"] == "out"


async def test_another_autoscaler_counts(scene: Scene) -> None:
    """Broken: two that run at once undo each other's actions without a cool-down."""
    scene.platform.cpu = 0.9
    scaler = scene.scaler(cool_down="1h")
    await scene.run(scaler, 1)
    scene.observer.add("scaling", "autoscaler/groups/expel in 3 -> 2", 0, 30)
    assert [one["reason"] for one in await scene.run(scaler, 2)] == ["cool_down"] * 2


async def test_a_clock_that_is_set_back_stops_nobody(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the group keeps its size for as long as the wall clock was wrong."""
    scene.platform.cpu = 0.9
    scaler = scene.scaler(cool_down="20ms")
    scene.observer.add("scaling", "autoscaler/groups/expel in 3 -> 2", 0, 30)
    await scene.run(scaler, 1)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() - 7200.0)
    assert [one["action"] for one in await scene.run(scaler, 4)].count("out") >= 2


async def test_a_lost_answer_counts_as_an_action(scene: Scene) -> None:
    """Broken: the platform obeyed, its answer was lost, and the opposite is ordered at once."""
    scene.platform.cpu, scene.platform.loses_answers = 0.9, True
    scaler = scene.scaler(cool_down="1h")
    assert (await scene.run(scaler, 2))[-1]["action"] == "out"
    scene.platform.cpu = 0.1
    assert (await scene.run(scaler, 4))[-1]["reason"] == "cool_down"
    assert scene.platform.orders == [(2, 3)]
    assert [window["by"] for window in scene.observer.windows] == ["autoscaler/groups/expel out 2 -> 3"]


async def test_an_order_that_was_not_taken_is_no_action(scene: Scene) -> None:
    """Broken: after a refusal the group waits for a cool-down of something that did not happen, or alarms keep quiet for it."""
    scene.platform.cpu, scene.platform.refuses = 0.9, True
    scaler = scene.scaler(cool_down="1h")
    await scene.run(scaler, 12)
    assert scene.observer.windows == []
    scene.platform.refuses = False
    assert (await scene.run(scaler, 1))[-1]["action"] == "out"
    assert scene.platform.orders == [(2, 3)]


async def test_the_stop_waits_for_no_platform(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a platform that hangs holds up the stop of the whole fleet for its drain time."""
    began, never = asyncio.Event(), asyncio.Event()

    async def hang(_group: str) -> Group:
        began.set()
        await never.wait()
        raise AssertionError

    monkeypatch.setattr(scene.platform, "describe", hang)
    stopping = asyncio.Event()
    running = asyncio.ensure_future(scene.scaler().run(stopping, 1.0))
    await began.wait()
    stopping.set()
    async with asyncio.timeout(30):
        await running


async def test_a_platform_that_is_away_begins_the_window_anew(scene: Scene) -> None:
    """Broken: a group shrinks on what was known before an outage, or the outage ends the autoscaler."""
    scene.platform.cpu = 0.1
    scaler = scene.scaler(calm="60s")
    await scene.run(scaler, 2)
    before = scaler._states["expel"]
    scene.platform.away = True
    assert await scene.run(scaler, 1) == []
    assert (before.since is not None, scaler._states["expel"].since) == (True, None)
