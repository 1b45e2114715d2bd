"""A lane that hangs is found, whatever it hangs at; one that waits for something outside of the process is not."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

import aiohttp
import pytest
from structlog.testing import capture_logs

from services.core.broker.connect import open_broker
from services.core.broker.errors import Unavailable, UnknownTopic
from services.core.pipe_file.pipes import load_pipes
from services.core.process import progress
from services.core.process.progress import CHECK_EVERY_S, LIMIT_S, ProgressWatch, Step
from services.core.provision import ensure_topics
from services.expel.dispatcher import Dispatcher
from services.expel.retry_policy import RetryLimits
from services.expel.settings import ExpelSettings
from services.expel.webhook.sender import WebhookSender
from tests.support.ports import free_port
from tests.support.waiting_events import store
from tests.unit.expel.fake_broker import FakeBroker, FakeConsumer
from tests.unit.expel.fake_sender import BUSY, WRONG, make_record
from tests.unit.expel.receiver import wait_until
from tests.unit.expel.running_expel import running_expel
from tests.unit.expel.running_lane import DEAD, P0, Running, run_lane

CHECKS = 6
"""Of a lane that hangs, in these tests."""


@pytest.fixture(autouse=True)
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_is_stuck", lambda one: one.unchanged >= CHECKS)


def test_checks_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a step with a longer time limit, or one of many short steps of one kind, counts as stuck; or nothing ever does."""
    monkeypatch.undo()
    number, steps = iter(range(1000)), list[Step]()
    watch = ProgressWatch(lambda: [*steps, Step("other", next(number))])
    steps = [Step("short", 1), Step("long", 1, 2 * LIMIT_S)]
    found = []
    for _ in range(round(2 * LIMIT_S / CHECK_EVERY_S) + 1):
        watch.check()
        found.append(watch.why_not_alive())
    steps.pop(0)
    watch.check()
    assert watch.why_not_alive() == f"long (for {2 * LIMIT_S + CHECK_EVERY_S:.0f} s)"
    assert found.index(f"short (for {LIMIT_S:.0f} s)") == found.count(None) == round(LIMIT_S / CHECK_EVERY_S)
    steps.clear()
    watch.check()
    assert watch.why_not_alive() is None


async def hang(*_: object, **__: object) -> Never:
    await asyncio.Event().wait()
    raise AssertionError


async def look(running: Running, watch: ProgressWatch) -> str | None:
    """As many looks as a hung lane has, with some turns of a working one between them."""
    (consumer,) = running.broker.consumers
    for _ in range(CHECKS + 1):
        watch.check()
        polls = consumer.polls
        for _ in range(20):
            if consumer.polls > polls + 1:
                break
            await asyncio.sleep(0.002)
    return watch.why_not_alive()


async def test_a_lane_that_works_or_waits_is_alive() -> None:
    """Broken: an idle lane, or one whose receiver is down, throttled, paused or slow to answer, restarts the process for ever."""
    async with run_lane([make_record(0)], retry=RetryLimits(50, 600.0, 600.0)) as running:
        watch = ProgressWatch(running.lane.steps)
        await wait_until(lambda: running.committed() == 0)
        assert await look(running, watch) is None, "idle"
        running.sender.answer = lambda _delivery: BUSY
        running.broker.stored[P0] += [make_record(1)]
        await wait_until(lambda: running.sender.sent[-1:] == [["e1"]] and not running.sender.under_way)
        assert await look(running, watch) is None, "the next attempt is in ten minutes"
        await running.decide("paused")
        assert await look(running, watch) is None, "paused"
        running.broker.append_error = running.broker.commit_error = Unavailable("down")
        running.broker.stored[P0] += [make_record(2)]
        running.broker.poll_errors = [Unavailable("down")] * 100
        await wait_until(lambda: len(running.broker.poll_errors) < 100)
        assert await look(running, watch) is None, "the broker is down"
        running.broker.append_error = running.broker.commit_error = None
        running.broker.poll_errors = []
        await wait_until(lambda: running.committed() == 2)
    async with run_lane([make_record(n) for n in range(3)], rate=1, concurrency=1) as running:
        await wait_until(lambda: bool(running.sender.sent))
        assert await look(running, ProgressWatch(running.lane.steps)) is None, "one event a second"
    missed = 0.0

    async def answer_slowly(_delivery: object) -> None:
        nonlocal missed
        await asyncio.sleep(0.03)
        missed += 1

    async with run_lane([make_record(n) for n in range(2000)], answer_slowly, timeout=30.0, max_events=100) as running:
        watch = ProgressWatch(running.lane.steps)
        await wait_until(lambda: missed > 0)
        for _ in range(CHECKS + 1):
            seen = missed
            await wait_until(lambda seen=seen: missed > seen)  # type: ignore[misc]
            watch.check()
        assert watch.why_not_alive() is None, "each request takes its time"


def lose_timer(running: Running, _monkeypatch: pytest.MonkeyPatch) -> None:
    running.dispatchers[-1]._queue.wake_at = lambda at: None  # type: ignore[method-assign]


def hang_request(running: Running, _monkeypatch: pytest.MonkeyPatch) -> None:
    running.sender.answer = hang


def hang_poll(_running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeConsumer, "poll", hang)


def hang_commit(_running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeConsumer, "commit", hang)


def hang_append(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    running.sender.answer = lambda _delivery: WRONG
    monkeypatch.setattr("services.expel.side_topics.send_by_key", hang)


def forget_room(_running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(self: Dispatcher) -> int:
        self._is_waiting = True
        return await hang()

    monkeypatch.setattr(Dispatcher, "wait_for_room", wait)


@pytest.mark.parametrize(
    ("breakage", "reason"),
    [
        (lose_timer, "events are due and are not sent"),
        (hang_request, "no request has ended"),
        (hang_poll, "a poll has not ended"),
        (hang_commit, "a report or its commit has not ended"),
        (hang_append, "no write to a side topic has ended"),
        (forget_room, "the lane has room, and does not poll"),
    ],
)
async def test_a_lane_that_hangs_is_found(
    breakage: Callable[[Running, pytest.MonkeyPatch], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a lane that stands still is up, alive and ready until a person looks at it."""
    async with run_lane(
        [make_record(0)], broker=FakeBroker({"s": 1, DEAD.topic: 1}), drain=0.1, max_wait=0.1
    ) as running:
        await wait_until(lambda: running.committed() == 0)
        breakage(running, monkeypatch)
        running.broker.stored[P0] += [make_record(1)]
        watch = ProgressWatch(running.lane.steps)
        with capture_logs() as lines:
            found: str | None = None
            async with asyncio.timeout(600):
                while found is None or reason not in found:  # before it hangs, it may do some other steps
                    found = await look(running, watch)
        assert [line["what"] for line in lines if line["event"] == "no_progress"] == [f"late/hook: {reason}"]
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("owner", "name", "reason"),
    [
        (FakeBroker, "partition_count", "a join of its group has not ended"),
        (Dispatcher, "drain_partitions", "a leave of its group has not ended"),
    ],
)
async def test_a_join_or_a_leave_that_hangs_is_found(
    owner: type, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a lane that left its group, and hangs before it is back, is alive until a person looks at it."""
    released = asyncio.Event()

    async def wait(*_: object) -> None:
        await released.wait()

    async with run_lane([make_record(0)], broker=FakeBroker({"s": 1, DEAD.topic: 1})) as running:
        await wait_until(lambda: running.committed() == 0)
        watch = ProgressWatch(running.lane.steps)
        monkeypatch.setattr(owner, name, wait)
        running.broker.poll_errors = [UnknownTopic("it is gone for a moment")]
        try:
            async with asyncio.timeout(600):
                while watch.why_not_alive() is None:
                    await look(running, watch)
            assert str(watch.why_not_alive()).startswith(f"late/hook: {reason}")
        finally:
            monkeypatch.undo()
            released.set()
        await wait_until(lambda: len(running.broker.consumers) == 2)
        watch.check()
        assert watch.why_not_alive() is None


PIPES = """
version: 1
streams: {s: {}}
pipes:
  late: {sources: [s], destinations: [{name: hook, webhook: {url: "http://127.0.0.1:1/", batch: {max_wait: 10ms}}}]}
"""


async def test_the_service_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: nobody asks the watch, so nothing starts the process again."""
    monkeypatch.setattr(progress, "CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(progress, "_is_stuck", lambda one: one.unchanged >= 300)  # an idle poll of the log takes 100
    monkeypatch.setattr(WebhookSender, "send", hang)
    (tmp_path / "pipes.yaml").write_text(PIPES)
    url, management = f"log://{tmp_path}/log", f"127.0.0.1:{free_port()}"
    async with open_broker(url) as broker:
        await ensure_topics(broker.admin, await asyncio.to_thread(load_pipes, tmp_path / "pipes.yaml"))
        settings: Any = {
            "broker": url,
            "pipes": tmp_path / "pipes.yaml",
            "management": management,
            "allow_networks": "127.0.0.0/8",
            "drain": "1s",
        }
        async with running_expel(ExpelSettings(**settings)), aiohttp.ClientSession() as session:

            async def answer(wanted: int, reason: str) -> str:
                async with asyncio.timeout(600):
                    while True:
                        try:
                            async with session.get(f"http://{management}/healthz") as found:
                                text = await found.text()
                                if found.status == wanted and text.startswith(reason):
                                    return text
                        except aiohttp.ClientError:
                            pass
                        await asyncio.sleep(0.02)

            assert await answer(200, "ok") == "ok\n"
            await store(broker, "s", [make_record(0)])
            assert await answer(503, "late/hook: no request has ended")
