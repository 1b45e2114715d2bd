"""A lane whose predecessor died between handing events over and committing: they are not tried, and live once."""

import asyncio
import time
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from services.core.broker.errors import Unavailable
from services.core.broker.record import Record, TopicPartition
from services.core.undelivered.retry_state import RetryState, wrap
from services.expel.retry_policy import RetryLimits
from tests.unit.expel.fake_broker import FakeBroker
from tests.unit.expel.fake_sender import make_record
from tests.unit.expel.receiver import wait_until
from tests.unit.expel.running_lane import P0, names, run_lane

RETRY_IN, BACK = TopicPartition("penstock.retry-in", 0), TopicPartition("late.retry", 0)
WITH_RETRY_TOPIC = {
    "retry": RetryLimits(3, 0.001, 0.002, uses_retry_topic=True),
    "schedule": (5.0, 300.0),
    "topics": ("s", "late.retry"),
}


@pytest.fixture
def broker() -> FakeBroker:
    return FakeBroker({"s": 1, "late.dead": 1, "late.retry": 1, "penstock.retry-in": 1})


def waiting(number: int, ago_s: float = 1.0, **changes: object) -> Record:
    """An event of the stream with the retrier, as it was written so long ago."""
    now = int((time.time() - ago_s) * 1000)
    state = RetryState("late", "hook", 3, 1, now, now + 5000, "http_503", "busy", f"s:0:{number}", 0)
    return wrap(make_record(number), replace(state, **changes), now)  # type: ignore[arg-type]


def inherited() -> float:
    labels = {"pipe": "late", "destination": "hook"}
    return REGISTRY.get_sample_value("penstock_expel_events_inherited_total", labels) or 0.0


async def test_what_was_handed_over_is_passed_over(broker: FakeBroker) -> None:
    """If it fails, an expel that dies gives events a second life: two schedules, and counts that start anew."""
    broker.stored[RETRY_IN] += [
        waiting(1, ago_s=600.0),
        waiting(2),
        waiting(3, destination="other"),
        waiting(4, pipe="early"),
        Record(None, b"no retry record", int(time.time() * 1000)),
        waiting(6, rounds=2),
        waiting(9),
    ]
    before = inherited()
    async with run_lane([make_record(n) for n in range(10)], broker=broker, **WITH_RETRY_TOPIC) as running:  # type: ignore[arg-type]
        await wait_until(lambda: running.committed() == 9)
        assert running.sender.taken == names([0, 1, 3, 4, 5, 6, 7, 8])
    assert inherited() - before == 2
    assert len(broker.stored[RETRY_IN]) == 7


async def test_a_round_that_was_over_is_passed_over_and_a_redriven_dead_letter_is_not(broker: FakeBroker) -> None:
    """If it fails, an event's second round is made twice after a crash, or a letter that is redriven right after one is lost."""
    broker.stored[RETRY_IN] += [
        waiting(1, ago_s=5, rounds=1),
        waiting(2, ago_s=5, rounds=1),
        waiting(1, ago_s=1, rounds=2),
    ]
    broker.stored[BACK] += [
        waiting(1, ago_s=3, rounds=1),
        waiting(2, ago_s=3, rounds=1),
        waiting(2, ago_s=0.5, rounds=0),
    ]
    async with run_lane(broker=broker, **WITH_RETRY_TOPIC) as running:  # type: ignore[arg-type]
        await wait_until(lambda: running.committed(BACK) == 2)
        assert running.sender.taken == names([2, 2])


async def test_a_topic_that_was_made_anew_has_other_events(broker: FakeBroker) -> None:
    """If it fails, the first events of a topic that was deleted and made again during an outage are lost."""
    broker.stored[RETRY_IN] += [waiting(0), waiting(1)]
    broker.stored[P0] += [make_record(1, key=b"new"), make_record(1), make_record(7), make_record(8)]
    async with run_lane(broker=broker, **WITH_RETRY_TOPIC) as running:  # type: ignore[arg-type]
        await wait_until(lambda: running.committed() == 3)
        assert running.sender.taken == names([1, 7, 8])


async def test_a_rewind_further_back_is_delivered_again(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, an operator who rewinds a group does not get what lies far behind its commit."""
    shape = {**WITH_RETRY_TOPIC, "max_events": 10}
    broker.stored[RETRY_IN] += [waiting(5), waiting(450)]
    async with run_lane([make_record(n) for n in range(500)], broker=broker, **shape) as running:  # type: ignore[arg-type]
        await wait_until(lambda: running.committed() == 499)
        assert running.sender.taken == names([n for n in range(500) if n != 5])


async def test_a_partition_that_leaves_during_the_look_is_not_taken(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, two instances deliver the same partition after a rebalance."""
    looking, looked = asyncio.Event(), asyncio.Event()
    describe = broker.admin.describe

    async def slowly(topic: str) -> object:
        looking.set()
        await looked.wait()
        return await describe(topic)

    monkeypatch.setattr(broker.admin, "describe", slowly)
    async with run_lane([make_record(0)], broker=broker, **WITH_RETRY_TOPIC) as running:  # type: ignore[arg-type]
        await looking.wait()
        leaving = asyncio.create_task(broker.consumers[0].revoke(P0))
        await asyncio.sleep(0)
        looked.set()
        await leaving
        broker.stored[BACK].append(waiting(1))
        await wait_until(lambda: running.committed(BACK) == 0)
        assert running.sender.taken == names([1])


async def test_a_tail_that_cannot_be_read_delays_nothing(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a lane stands still because of a topic that it does not need for delivering."""

    async def refuse(*_args: object) -> object:
        raise Unavailable("no leader")

    monkeypatch.setattr(broker.admin, "offsets_at", refuse)
    broker.stored[RETRY_IN].append(waiting(0))
    async with run_lane([make_record(0)], broker=broker, **WITH_RETRY_TOPIC) as running:  # type: ignore[arg-type]
        await wait_until(lambda: running.sender.taken == ["e0"])
