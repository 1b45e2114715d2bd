"""The loop around the policy, with a platform in memory and an observer over HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from structlog.testing import capture_logs

from services.autoscaler.groups import meter
from services.autoscaler.groups.drivers.contract import Away, Group, Member, SizeChanged
from services.autoscaler.groups.observer_client import ObserverClient, ObserverUnavailable, open_observer
from services.autoscaler.groups.policy import GroupRules
from services.autoscaler.groups.scaler import GroupScaler
from services.autoscaler.groups.topics import Topics
from services.core import metrics
from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.control.freezes import Freeze, write_freeze
from services.core.pipe_file.topic_names import CONTROL
from services.core.process.scrape import Sample
from services.core.times import format_time


class Platform:
    """Instances at made-up addresses; what they say is `cpu` (cores) and `lag`."""

    def __init__(self) -> None:
        self.size, self.cpu, self.lag, self.away, self.refuses = 2, 0.3, 0.0, False, False
        self.loses_answers, self.partitions = False, 4
        self.frozen: str | None = None
        self.silent = set[str]()
        self.replaced: list[str] = []
        self.orders: list[tuple[int, int]] = []
        self.clock = 0.0

    async def describe(self, group: str) -> Group:
        if self.away:
            raise Away("not here")
        return Group(self.size, tuple(Member(f"i{n}", f"h:{n}", False) for n in range(self.size)), self.frozen)

    async def replace(self, group: str, instance: str, failed: Collection[str] = ()) -> None:
        if self.refuses:
            raise SizeChanged("it moved")
        self.replaced.append(instance)

    async def resize(self, group: str, seen: int, size: int, failed: Collection[str] = ()) -> None:
        if self.refuses:
            raise SizeChanged("it moved")
        self.orders.append((seen, size))
        self.size = size
        if self.loses_answers:
            raise Away("no answer")

    async def scrape(self, addresses: list[str]) -> Sample:
        if addresses[0] in self.silent:
            return Sample(self.clock, unready={addresses[0]: "does not answer"})
        lags = {
            (
                f"penstock_broker_lag_{unit}",
                frozenset({("group", "p.d"), ("topic", "t"), ("partition", str(number))}),
            ): self.lag
            for unit in ("records", "seconds")
            for number in range(self.partitions)
        }
        values = {
            ("process_start_time_seconds", frozenset[tuple[str, str]]()): 1000.0,
            ("process_cpu_seconds_total", frozenset[tuple[str, str]]()): self.clock * self.cpu,
            **lags,
        }
        return Sample(self.clock, values)


class Observer:
    """As much of its API as the scaler asks."""

    def __init__(self) -> None:
        self.breaker, self.windows, self.status = "closed", list[dict[str, Any]](), 200
        self.health = "healthy"
        self.reports: list[dict[str, Any]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes([web.get("/v1/destinations", self.destinations), web.get("/v1/planned", self.planned)])
        app.add_routes([web.get("/v1/pipes", self.pipes)])
        app.add_routes([web.post("/v1/planned", self.announce), web.put("/v1/scaling/{group}", self.report)])
        return app

    async def report(self, request: web.Request) -> web.Response:
        self.reports.append(await request.json())
        return web.json_response({}, status=self.status)

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
    def __init__(self, observer: Observer, client: ObserverClient, broker: Broker) -> None:
        self.platform, self.observer, self.client, self.broker = Platform(), observer, client, broker
        self.topics = Topics()
        self.topics.attach(broker)

    def scaler(self, *, dry_run: bool = False, **rules: object) -> GroupScaler:
        given = {"max": 6, "cool_down": "10ms", "calm": "10ms", "warm_up": "1s", **rules}
        return GroupScaler(
            {"expel": GroupRules.model_validate(given)}, self.platform, self.client, self.topics, dry_run
        )

    async def run(self, scaler: GroupScaler, count: int) -> list[dict[str, Any]]:
        """So many looks; the decisions as they were logged."""
        with capture_logs() as said:
            for _ in range(count):
                self.platform.clock += 10.0
                await scaler.scale_all()
                await asyncio.sleep(0.03)  # longer than the cool-down and the window
        return [dict(line) for line in said if line["event"] == "group_decision"]


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Scene]:
    observer = Observer()
    async with (
        TestServer(observer.app()) as server,
        open_observer(f"127.0.0.1:{server.port}") as client,
        open_broker(f"log://{tmp_path}/log") as broker,
    ):
        scene = Scene(observer, client, broker)
        monkeypatch.setattr(meter, "scrape", scene.platform.scrape)
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
    async with asyncio.timeout(600):
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


async def freeze(scene: Scene, **change: Any) -> None:
    if CONTROL not in await scene.broker.admin.topics():
        await scene.broker.admin.create_topic(TopicSpec(CONTROL, 1))
    async with Producer(scene.broker.appender) as producer:
        new = {"state": "frozen", "by": "ann@desk", "at": round(time.time() * 1000), "reason": "we measure", **change}
        await write_freeze(producer, "expel", Freeze(**new))


async def test_a_frozen_group_keeps_its_size_until_it_is_unfrozen(scene: Scene) -> None:
    """Broken: what a person has frozen moves, or stays frozen; or nobody can see who froze it and why."""
    scene.platform.cpu, scaler = 0.9, scene.scaler()
    await freeze(scene)
    last = (await scene.run(scaler, 3))[-1]
    assert (last["action"], last["reason"], last["wanted"], scene.platform.orders) == ("hold", "frozen", 3, [])
    assert "by ann@desk" in last["frozen"]
    assert "because: we measure; otherwise out 2 -> 3" in last["words"]
    assert metrics.AUTOSCALER_GROUP_FROZEN.labels("expel")._value.get() == 1
    report = scene.observer.reports[-1]
    assert (report["size"], report["wanted"], "we measure" in report["frozen"]) == (2, 3, True)
    await freeze(scene, state="unfrozen")
    assert (await scene.run(scaler, 1))[-1]["action"] == "out"
    assert metrics.AUTOSCALER_GROUP_FROZEN.labels("expel")._value.get() == 0


async def test_a_freeze_ends_by_itself_and_is_reported(scene: Scene) -> None:
    """Broken: a freeze for two hours holds for ever, or its end surprises who asked for it."""
    scene.platform.cpu, scaler = 0.9, scene.scaler()
    await freeze(scene, until=round(time.time() * 1000) - 1)
    with capture_logs() as said:
        scene.platform.clock += 10.0
        await scaler.scale_all()
        scene.platform.clock += 10.0
        await scaler.scale_all()
    assert [line["by"] for line in said if line["event"] == "freeze_ended"] == ["ann@desk"]
    last = next(line for line in reversed(said) if line["event"] == "group_decision")
    assert (last["action"], "the freeze by ann@desk ended at 20" in last["words"]) == ("out", True)


async def test_a_freeze_on_the_platform_counts_and_unknown_freezes_hold(scene: Scene) -> None:
    """Broken: an annotation that a person set is ignored; or a restart during an outage of the broker lifts every freeze."""
    scene.platform.cpu, scene.platform.frozen = 0.9, "they debug"
    last = (await scene.run(scene.scaler(), 2))[-1]
    assert (last["reason"], last["frozen"]) == ("frozen", "frozen on its platform because: they debug")
    scene.platform.frozen, scene.topics = None, Topics()
    last = (await scene.run(scene.scaler(), 2))[-1]
    assert (last["reason"], "it is not known whether a person has frozen it" in last["words"]) == ("frozen", True)
    assert scene.platform.orders == []


async def test_a_failed_instance_is_replaced_named_and_counted(scene: Scene) -> None:
    """Broken: a hung instance stays, or nobody can see which one it is."""
    scene.platform.cpu, scene.platform.size, scaler = 0.64, 3, scene.scaler(failed_after="1100ms")
    await scene.run(scaler, 2)
    scene.platform.silent = {"h:1"}
    scene.platform.refuses = True
    async with asyncio.timeout(600):
        while (decision := (await scene.run(scaler, 1))[-1])["action"] != "replace":
            await asyncio.sleep(0.05)
    assert decision["words"].startswith("i1 (silent for 0 min) is replaced, 1 of at most 2 times")
    assert metrics.AUTOSCALER_GROUP_MEMBERS.labels("expel", "failed")._value.get() == 1
    assert scene.observer.reports[-1]["failed"] == ["i1 (silent for 0 min)"]
    assert (scene.platform.replaced, scene.observer.windows) == ([], []), "a refusal is no action"
    scene.platform.refuses = False
    await scene.run(scaler, 1)
    assert scene.platform.replaced == ["i1"]
    assert [window["by"] for window in scene.observer.windows] == ["autoscaler/groups/expel replace i1"]


async def test_a_hot_partition_is_named_with_its_key(scene: Scene) -> None:
    """Broken: a person at night knows that events wait, and not which customer's."""
    scene.platform.cpu, scene.platform.lag, scene.platform.partitions = 0.1, 500.0, 1
    await scene.broker.admin.create_topic(TopicSpec("t", 1))
    records = [Record(b"customer-7" if number % 5 else None, b"{}", 0) for number in range(100)]
    async with Producer(scene.broker.appender) as producer:
        (await producer.send_to("t", {0: records})).raise_first()
    last = (await scene.run(scene.scaler(), 3))[-1]
    assert (last["action"], last["reason"]) == ("hold", "hot_partition")
    assert "partition 0 of t (group p.d) has 100% of the lag" in last["words"]
    assert last["words"].endswith("; key 'customer-7' has 80% of the next 100 records")
    labels = ("expel", "p.d", "t", "0")
    assert metrics.AUTOSCALER_HOT_PARTITION.labels(*labels)._value.get() == 500.0
    scene.platform.lag = 0.0
    await scene.run(scene.scaler(), 1)


async def test_a_report_that_fails_is_logged_once_and_stops_nothing(scene: Scene) -> None:
    """Broken: an observer of an earlier version fills the log, or stops the autoscaler."""
    scene.observer.status, scaler = 404, scene.scaler()
    scene.platform.cpu = 0.9
    with capture_logs() as said:
        for _ in range(3):
            scene.platform.clock += 10.0
            await scaler.scale_all()
    assert sum(line["event"] == "not_reported" for line in said) == 1
    assert scene.platform.orders == [(2, 3)]
