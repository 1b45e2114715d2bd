"""When an alarm is due, what it says, and how a pipe's health follows from the table."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from services.autoscaler.groups.observer_client import OURS
from services.core.security.signing import SigningKey, SigningKeys, verify
from services.observer import alarms, health
from services.observer.alarms import AlarmQueue, AlarmWebhook, find_alarms, has_doubled, loss_alarm
from services.observer.ledger.finality import Finding
from services.observer.ledger.flow import Step
from services.observer.ledger.settlement import Row, StepRow
from services.observer.ledger.table import Ages, Table
from services.observer.planned import MAX_WINDOWS, PlannedWindows, TooManyWindows, Window
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, PLAIN, START_MS, accept, beat, hear, tell

NOW = START_MS + MINUTE_MS + Ages().final
KEY = SigningKey(b"k" * 32)


def lossy(missing: int, minute: int = MINUTE) -> Finding:
    step = StepRow("expel", "ops", 100, {"delivered": 100 - missing}, missing, None)
    return Finding(Row("late", minute, 100, (step,), missing, 0, None, lost=missing), "ops")


def test_an_alarm_is_due_above_the_threshold_and_outside_of_planned_windows() -> None:
    """Broken: people are woken for a deploy, or not woken for a loss."""
    planned = PlannedWindows()
    rows = [lossy(1), lossy(2, MINUTE + 1), lossy(50, MINUTE + 2)]
    assert [one.row.minute for one in find_alarms(rows, planned, 0.01, NOW)] == [MINUTE + 1, MINUTE + 2]
    planned.announce(Window("deploy", "other", START_MS, NOW, "ci"), NOW)
    assert len(find_alarms(rows, planned, 0.01, NOW)) == 2
    planned.announce(Window("deploy", None, START_MS + MINUTE_MS, START_MS + 2 * MINUTE_MS, "ci"), NOW)
    assert [one.row.minute for one in find_alarms(rows, planned, 0.01, NOW)] == [MINUTE + 2]


def test_announced_windows_are_bounded() -> None:
    """Broken: whoever announces in a loop fills the observer's memory."""
    planned = PlannedWindows()
    for _ in range(MAX_WINDOWS):
        planned.announce(Window("pause", "late", NOW, NOW + 1, "me"), NOW)
    with pytest.raises(TooManyWindows):
        planned.announce(Window("pause", "late", NOW, NOW + 1, "me"), NOW)


def test_the_autoscaler_excuses_no_loss_and_fills_no_list() -> None:
    """Broken: a fleet that scales raises no alarm of what it loses, or leaves an operator no room to announce a deploy."""
    planned = PlannedWindows()
    for number in range(3 * MAX_WINDOWS):
        for by in (f"{OURS}expel out {number} -> {number + 1}", f"{OURS}ingest in 3 -> 2", "autoscaler: shards of a"):
            planned.announce(Window("scaling", None, START_MS, NOW + number, by), NOW)
    planned.announce(Window("scaling", None, START_MS, NOW, "autoscaler: shards of b"), NOW)
    assert sorted(window.by for window in planned.all()) == [
        "autoscaler/groups/expel out 599 -> 600",
        "autoscaler/groups/ingest in 3 -> 2",
        "autoscaler: shards of a",
        "autoscaler: shards of b",
    ]
    assert find_alarms([lossy(50)], planned, 0.01, NOW)
    planned.announce(Window("scaling", None, START_MS, NOW, "a person"), NOW)
    assert not find_alarms([lossy(50)], planned, 0.01, NOW)


@asynccontextmanager
async def receiver(statuses: list[int], got: list[tuple[dict[str, str], bytes]]) -> AsyncIterator[str]:
    async def take(request: web.Request) -> web.Response:
        got.append(({name.lower(): value for name, value in request.headers.items()}, await request.read()))
        return web.Response(status=statuses.pop(0) if statuses else 204)

    app = web.Application()
    app.router.add_post("/alarm", take)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/alarm"
    finally:
        await runner.cleanup()


async def test_an_alarm_is_signed_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an alarm is lost because the receiver was restarting, or anybody may raise one."""
    monkeypatch.setattr(alarms, "_MAX_WAIT_S", 0.01)
    got: list[tuple[dict[str, str], bytes]] = []
    async with receiver([503, 500], got) as url, asyncio.timeout(600):
        assert await AlarmWebhook(url, SigningKeys([KEY])).send(loss_alarm(lossy(7)))
    assert len(got) == 3
    head, body = got[-1]
    stamp = float(head["webhook-timestamp"])
    assert {verify([KEY], one, sent, now=stamp) for one, sent in got} == {f"loss-late-{MINUTE}-ops-3"}
    assert b'"missing":7' in body


async def test_an_alarm_that_nobody_takes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the observer tells one alarm for ever and no other."""
    monkeypatch.setattr(alarms, "_MAX_WAIT_S", 0.01)
    got: list[tuple[dict[str, str], bytes]] = []
    async with receiver([500] * alarms.ATTEMPTS, got) as url, asyncio.timeout(600):
        assert not await AlarmWebhook(url, SigningKeys()).send(loss_alarm(lossy(7)))
    assert len(got) == alarms.ATTEMPTS


def alive(table: Table, at_ms: int = NOW, *, behind_ms: int = 0) -> None:
    for step in PLAIN.steps("late"):
        hear(table, beat(step.node, step.pipe, step.destination, at_ms=at_ms, behind_ms=behind_ms))


def test_health_names_its_reasons() -> None:
    """Broken: an autoscaler or deployer takes a lossy or silent pipe for a healthy one."""
    table, planned = Table(PLAIN), PlannedWindows()
    assert health.find_health(table, planned, "late", NOW, 0.01).state == "degraded", "nothing was heard yet"
    alive(table)
    assert health.find_health(table, planned, "late", NOW, 0.01) == health.Health("healthy", (), None)
    alive(table, NOW + 1, behind_ms=40_000)
    assert "transform is behind by 40 s" in health.find_health(table, planned, "late", NOW + 1, 0.01).reasons
    alive(table, NOW + 2)
    for instance, breaker in (("one", "closed"), ("two", "open")):
        said = beat("expel", "late", "ops", at_ms=NOW + 2)
        hear(table, msgspec.structs.replace(said, instance=instance, breaker=breaker))
    assert health.find_health(table, planned, "late", NOW + 2, 0.01).reasons == ("the breaker of ops is open",)
    hear(table, msgspec.structs.replace(said, instance="two", closed=True))
    hear(table, accept(range(10)))
    hear(table, tell("transform", "late", "passed", range(10)))
    hear(table, tell("expel", "late", "delivered", range(8), destination="ops"))
    table.tick(NOW + 2)
    found = health.find_health(table, planned, "late", NOW + 2, 0.01)
    assert found == health.Health("unstable", ("2 of 10 events are missing in 1 minute",), None)
    planned.announce(Window("scaling", None, NOW, NOW + 100_000, f"{OURS}expel in 3 -> 2"), NOW)
    found = health.find_health(table, planned, "late", NOW + 2, 0.01)
    assert (found.state, found.planned) == ("unstable", "scaling"), "scaling is no excuse for loss"
    silent = NOW + 60_000
    assert health.find_health(table, planned, "late", silent, 0.5).state == "degraded", "but for silence"
    planned.announce(Window("deploy", "late", NOW, NOW + 10, "ci"), NOW)
    assert health.find_health(table, planned, "late", NOW + 2, 0.01).state == "degraded"
    assert "expel to ops is silent" in health.find_health(table, PlannedWindows(), "late", silent, 0.5).reasons
    assert table.liveness.alive(Step("expel", "late", "ops"), silent) == []
    goodbye = msgspec.structs.replace(beat("transform", "late", at_ms=silent), closed=True)
    hear(table, goodbye)
    assert "transform was stopped" in health.find_health(table, PlannedWindows(), "late", silent, 0.5).reasons


def test_what_gets_worse_is_another_alarm() -> None:
    """Broken: a minute with a small loss later loses nearly all, and its receiver passes over the alarm as one that it has."""
    assert loss_alarm(lossy(7)).id == loss_alarm(lossy(7)).id != loss_alarm(lossy(60)).id
    told = [has_doubled(count, count + 1) for count in range(1, 64)]
    assert sum(told) == 6, "events that are found lost one by one are no alarm each"


async def test_an_alarm_that_is_not_taken_waits_behind_the_others() -> None:
    """Broken: a receiver that was away for a minute never hears of the loss."""
    untold = AlarmQueue()
    first, second = loss_alarm(lossy(1)), loss_alarm(lossy(60))
    assert untold.add(first)
    assert untold.add(second)
    untold.put_last(first)
    assert await untold.first() == second
    untold.remove(second)
    assert await untold.first() == first
