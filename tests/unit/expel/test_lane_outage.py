"""A lane and a broker in trouble: commits that fail, records that are gone, topics that are not there yet."""

import asyncio

import backoff
import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from services.core.broker.errors import DataDamaged, NotOwner, OffsetOutOfRange, Unavailable, UnknownTopic
from services.core.broker.producer import Producer
from services.expel.dispatcher import Dispatcher
from services.expel.lane import Lane
from services.expel.metrics import LaneMetrics
from services.expel.throttle import SendThrottle
from tests.unit.expel.fake_broker import FakeBroker
from tests.unit.expel.fake_sender import FakeSender, make_record, make_shape
from tests.unit.expel.receiver import wait_until
from tests.unit.expel.running_lane import P0, P1, PATIENT, run_lane


async def test_refused_commits_are_counted_and_do_no_harm() -> None:
    """Broken: a commit after a lost lease ends the lane."""
    before = REGISTRY.get_sample_value("penstock_broker_commits_refused_total", {"group": "late.hook"}) or 0
    broker = FakeBroker({"s": 2, "late.dead": 1})
    broker.commit_error = NotOwner(frozenset({P0}))
    async with run_lane([make_record(0)], broker=broker) as running:
        await wait_until(lambda: running.metric("penstock_broker_commits_refused_total", group="late.hook") > before)
        broker.commit_error = None
        broker.stored[P0].append(make_record(1))
        await wait_until(lambda: running.committed() == 1)


async def test_failed_commits_are_tried_again() -> None:
    """Broken: one failed commit leaves everything to be delivered again after the next restart."""
    broker = FakeBroker({"s": 2, "late.dead": 1})
    broker.commit_error = Unavailable("down")
    async with run_lane([make_record(0)], broker=broker) as running:
        await wait_until(lambda: running.sender.taken == ["e0"])
        await asyncio.sleep(0.05)
        broker.commit_error = None
        await wait_until(lambda: running.committed() == 0)


async def test_a_gap_stops_its_partition_with_the_exact_count() -> None:
    """Broken: records that retention took are passed over silently, or the other partitions stop too."""
    labels = {"group": "late.hook", "topic": "s"}
    broker = FakeBroker({"s": 2, "late.dead": 1})
    broker.poll_errors = [OffsetOutOfRange("s", 1, wanted=5, start=47, end=60), DataDamaged("s", ((0, 3, 5),), "crc")]
    async with run_lane(broker=broker) as running:
        before = running.metric("penstock_broker_gap_records_total", **labels)
        await wait_until(lambda: running.metric("penstock_broker_gap_records_total", **labels) == before + 42 + 3)
        (consumer,) = broker.consumers
        assert consumer.paused == {P0, P1}
        assert running.metric("penstock_expel_lane_up", pipe="late", destination="hook") == 0
        consumer.resume([P0])
        broker.stored[P0].append(make_record(0))
        await wait_until(lambda: running.sender.taken == ["e0"])


async def test_polling_survives_an_outage() -> None:
    """Broken: a restarted broker needs a restarted expel."""
    broker = FakeBroker({"s": 2, "late.dead": 1})
    broker.poll_errors = [Unavailable("down")]
    async with run_lane([make_record(0)], broker=broker) as running:
        await wait_until(lambda: running.committed() == 0)
        assert len(broker.consumers) == 1


def _record_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The bounds that waits are drawn under; nothing waits."""
    bounds: list[float] = []

    def full_jitter(bound: float) -> float:
        bounds.append(bound)
        return 0.0

    monkeypatch.setattr(backoff, "full_jitter", full_jitter)
    return bounds


async def test_a_membership_that_was_reached_begins_the_back_off_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: after some broken memberships in a day, each further one costs seconds, and none of them is told."""
    bounds = _record_waits(monkeypatch)
    broker = FakeBroker({"s": 2, "late.dead": 1})
    broker.poll_errors = [UnknownTopic("no topic s") for _ in range(6)]
    with capture_logs() as logs:
        async with run_lane([make_record(0)], broker=broker) as running:
            await wait_until(lambda: running.committed() == 0)
    assert len(broker.consumers) == 7
    assert len(bounds) == 6
    assert max(bounds) < 0.5
    assert [entry["error"] for entry in logs if entry["event"] == "membership_failed"] == ["no topic s"] * 6


async def test_joins_that_fail_are_counted_told_now_and_then_and_further_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a lane that cannot join for an hour says so once; or floods the log; or asks as often as it can."""
    bounds = _record_waits(monkeypatch)
    broker, released, failures = FakeBroker({"s": 2, "late.dead": 1}), asyncio.Event(), 0

    async def refuse(topic: str) -> int:
        nonlocal failures
        if topic != "s" or released.is_set():
            return 2
        failures += 1
        if failures == 36:
            released.set()
        raise Unavailable("no answer")

    monkeypatch.setattr(broker, "partition_count", refuse)
    labels = {"group": "late.hook", "reason": "Unavailable"}
    before = REGISTRY.get_sample_value("penstock_broker_rejoins_total", labels) or 0
    with capture_logs() as logs:
        async with run_lane([make_record(0)], broker=broker) as running:
            await wait_until(lambda: running.committed() == 0)
            assert running.metric("penstock_broker_rejoins_total", **labels) - before == 36
    assert [entry["failures"] for entry in logs if entry["event"] == "membership_failed"] == [1, 2, 4, 8, 16, 32]
    assert bounds == sorted(bounds)
    assert bounds[-1] == 5.0


async def test_a_missing_topic_is_waited_for() -> None:
    """Broken: expel has to be started after everything else."""
    broker = FakeBroker({"late.dead": 1})
    async with Producer(broker.appender, policy=PATIENT) as producer:
        meter, sender = LaneMetrics("late", "hook"), FakeSender()
        lane = Lane(
            broker,  # type: ignore[arg-type]
            "late",
            "hook",
            ["s"],
            "earliest",
            meter,
            lambda: Dispatcher(make_shape(), sender, broker, producer, meter, SendThrottle("late", "hook")),  # type: ignore[arg-type]
            0.01,
        )
        stopping = asyncio.Event()
        task = asyncio.create_task(lane.run(stopping, 1.0))
        await wait_until(lambda: "no topic s" in (lane.waits_for or ""))
        broker.stored[P0] = [make_record(0)]
        await wait_until(lambda: sender.taken == ["e0"])
        assert lane.waits_for is None
        stopping.set()
        await task
