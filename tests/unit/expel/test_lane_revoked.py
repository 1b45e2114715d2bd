"""A lane that loses partitions, or stops: what it finishes, what it commits, what it leaves to the next owner."""

import asyncio
import time
from collections.abc import Collection

import pytest
from structlog.testing import capture_logs

from services.core import consuming
from services.core.broker.errors import Unavailable
from services.core.broker.record import TopicPartition
from services.expel import circuit_breaker
from services.expel import dispatcher as dispatcher_module
from services.expel.delivery import Delivery
from services.expel.retry_policy import Outcome, RetryLimits
from services.expel.send_queue import RequestLimits
from tests.unit.expel.fake_broker import FakeBroker
from tests.unit.expel.fake_sender import BUSY, WRONG, make_record
from tests.unit.expel.receiver import wait_until
from tests.unit.expel.running_lane import P0, P1, hold, names, run_lane


async def test_revoked_partition_is_drained_and_committed_first() -> None:
    """Broken: the next owner delivers again what this one had just delivered; or waits for ever."""
    released = asyncio.Event()
    broker = FakeBroker({"s": 2, "late.dead": 1})
    broker.stored[P1] += [make_record(n) for n in range(100, 200)]
    async with run_lane(
        [make_record(n) for n in range(100)], hold(released), broker=broker, request=RequestLimits(5, 1000)
    ) as running:
        await wait_until(lambda: running.sender.under_way == 2)
        (dispatcher,) = running.dispatchers
        leaving = asyncio.create_task(dispatcher.drain_partitions(frozenset({P0}), 30.0))
        await asyncio.sleep(0.02)
        assert not leaving.done()
        released.set()
        await leaving
        # What was under way, and nothing more of it; the lane may have committed it meanwhile.
        assert dispatcher.tracker.committable().get(P0, running.committed(P0)) == 9
        dispatcher.tracker.remove([P0])
        await wait_until(lambda: running.committed(P1) == 99)
        assert len(running.sender.taken) == 110


async def test_revocation_commits_before_it_returns() -> None:
    """Broken: at every rebalance the next owner delivers again what was settled since the last commit."""
    async with run_lane([make_record(n) for n in range(10)], commit_interval=600) as running:
        await wait_until(lambda: len(running.sender.taken) == 10)
        assert running.committed() == -1
        await running.broker.consumers[0].revoke(P0)
        assert running.committed() == 9


async def test_revocation_repeats_a_commit_that_fails() -> None:
    """Broken: a coordinator or a leader that is being replaced at a rebalance makes the next owner deliver everything again that
    was not committed."""
    async with run_lane([make_record(n) for n in range(10)], commit_interval=600) as running:
        await wait_until(lambda: len(running.sender.taken) == 10)
        running.broker.commit_error = Unavailable("the coordinator moves")
        with capture_logs() as logs:
            revoking = asyncio.create_task(running.broker.consumers[0].revoke(P0))
            await wait_until(lambda: any(line["event"] == "commit_failed" for line in logs))
        running.broker.commit_error = None
        await revoking
        assert running.committed() == 9


async def test_failed_events_of_a_revoked_partition_are_left_to_the_next_owner() -> None:
    """Broken: two members deliver the same events, one of them for ever, and its keys stay blocked."""
    released = asyncio.Event()

    async def answer(_delivery: Delivery) -> Outcome:
        if released.is_set():
            return None
        await released.wait()
        return BUSY

    records = [make_record(n, key=b"a") for n in range(5)]
    async with run_lane(records, answer, keyed=True, drain=0.5) as running:
        await wait_until(lambda: running.sender.under_way == 1)
        (dispatcher,) = running.dispatchers
        await dispatcher.drain_partitions(frozenset({P0}), 0.01)
        dispatcher.tracker.remove([P0])
        released.set()
        await wait_until(lambda: dispatcher.in_flight == 0)
        await asyncio.sleep(0.05)
        assert len(running.sender.sent) == 1
        running.broker.stored[P1].append(make_record(9, key=b"a"))
        await wait_until(lambda: running.sender.taken == ["e9"])


async def test_what_a_poll_returns_while_its_partition_is_revoked_is_not_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Broken: it is settled under the next ownership, whose commit then skips what lies before it: events are lost."""
    draining, drained, preparing, prepared = (asyncio.Event() for _ in range(4))

    async def drain_partitions(*_: object) -> None:
        draining.set()
        await drained.wait()

    async def prepare(_self: object, polled: Collection[TopicPartition], *_: object) -> None:
        if P0 in polled:
            preparing.set()
            await prepared.wait()

    monkeypatch.setattr(dispatcher_module.Dispatcher, "drain_partitions", drain_partitions)
    monkeypatch.setattr(dispatcher_module.Dispatcher, "prepare", prepare)
    async with run_lane([], hold(asyncio.Event()), drain=0.05) as running:
        await wait_until(lambda: bool(running.broker.consumers))
        (consumer,), (dispatcher,) = running.broker.consumers, running.dispatchers
        revoking = asyncio.ensure_future(consumer.on_revoke(frozenset({P0})))
        await draining.wait()
        running.broker.stored[P0].append(make_record(0))
        await preparing.wait()
        drained.set()
        await revoking
        polls = consumer.polls
        prepared.set()
        await wait_until(lambda: consumer.polls > polls)
        assert dispatcher.in_flight == 0


async def test_revocation_does_not_wait_for_a_hanging_receiver() -> None:
    """Broken: one hanging receiver makes every rebalance of its group take the rebalance time-out."""
    async with run_lane([make_record(n) for n in range(20)], hold(asyncio.Event()), drain=0.05) as running:
        await wait_until(lambda: running.sender.under_way == 2)
        async with asyncio.timeout(600):
            await running.dispatchers[0].drain_partitions(frozenset({P0}), 0.05)


@pytest.mark.parametrize("outcome", [None, WRONG])
async def test_a_topic_made_anew_is_not_settled_by_what_was_under_way_before(outcome: Outcome) -> None:
    """Broken: a topic is deleted and made again within one request, and the new events at its offsets are lost."""
    first, second = asyncio.Event(), asyncio.Event()

    async def answer(delivery: Delivery) -> Outcome:
        is_old = delivery.ids[0].startswith(b"e0")
        await (first if is_old else second).wait()
        return outcome if is_old else None

    async with run_lane([make_record(0)], answer, commit_interval=600) as running:
        await wait_until(lambda: running.sender.under_way == 1)
        (consumer,), (dispatcher,) = running.broker.consumers, running.dispatchers
        dispatcher.tracker.remove([P0])
        dispatcher.disown([P0])
        running.broker.stored[P0][:] = [make_record(1)]
        consumer.positions[P0] = 0
        await wait_until(lambda: running.sender.under_way == 2)
        first.set()
        await wait_until(lambda: dispatcher.in_flight == 1)
        assert dispatcher.tracker.committable() == {}
        second.set()
        await wait_until(lambda: dispatcher.tracker.committable() == {P0: 0})


async def test_dead_letters_of_a_topic_made_anew_settle_nothing() -> None:
    """Broken: a dead letter that waited for the broker settles the event that has its offset now."""
    second = asyncio.Event()

    async def answer(delivery: Delivery) -> Outcome:
        if delivery.ids[0] == b"e0":
            return WRONG
        await second.wait()
        return None

    broker = FakeBroker({"s": 2, "late.dead": 1})
    broker.append_error = Unavailable("down")
    async with run_lane([make_record(0)], answer, broker=broker, commit_interval=600) as running:
        await wait_until(lambda: running.sender.sent != [] and running.sender.under_way == 0)
        (consumer,), (dispatcher,) = broker.consumers, running.dispatchers
        dispatcher.tracker.remove([P0])
        dispatcher.disown([P0])
        broker.stored[P0][:] = [make_record(1)]
        consumer.positions[P0] = 0
        await wait_until(lambda: running.sender.under_way == 1)
        broker.append_error = None
        await wait_until(lambda: dispatcher.in_flight == 1)
        assert len(running.dead_letters()) == 1
        assert dispatcher.tracker.committable() == {}
        second.set()
        await wait_until(lambda: dispatcher.tracker.committable() == {P0: 0})


@pytest.mark.parametrize("is_lost", [True, False])
async def test_a_process_that_was_frozen_sends_nothing_before_its_group_can_answer(
    monkeypatch: pytest.MonkeyPatch, is_lost: bool
) -> None:
    """Broken: a process that wakes up, or whose machine does, delivers its whole queue again, which another member has delivered
    meanwhile.
    """
    real, asleep = time.clock_gettime, 0.0
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + asleep * (clock == time.CLOCK_BOOTTIME))
    monkeypatch.setattr(dispatcher_module, "ASK_GROUP_S", 600.0 if is_lost else 0.05)
    released = asyncio.Event()
    records = [make_record(n) for n in range(100)]
    async with run_lane(records, hold(released), request=RequestLimits(5, 1000)) as running:
        await wait_until(lambda: running.sender.under_way == 2)
        (dispatcher,) = running.dispatchers
        asleep = 60.0  # time.monotonic() stands still while the machine is suspended
        released.set()
        if is_lost:
            await wait_until(lambda: running.sender.under_way == 0)
            await running.broker.consumers[0].revoke(P0)
            assert len(running.sender.taken) == 10
            assert dispatcher.in_flight == 0
        else:
            await wait_until(lambda: len(running.sender.taken) == 100)


@pytest.mark.parametrize(("released", "is_drained"), [(True, True), (False, False)])
async def test_a_drain_says_whether_its_time_was_enough(released: bool, is_drained: bool) -> None:
    """Broken: a deployment takes a process that was cut off for one that had finished."""
    event = asyncio.Event()
    async with run_lane([make_record(0)], hold(event), drain=0.05) as running:
        await wait_until(lambda: running.sender.under_way == 1)
        if released:
            event.set()
    assert running.lane.is_drained is is_drained


async def test_drain_finishes_retries_but_starts_nothing_new() -> None:
    """Broken: a stop leaves a gap at the front, so that everything behind it is delivered again."""
    attempts: list[int] = []

    def answer(delivery: Delivery) -> Outcome:
        if delivery.ids[0] != b"e0":
            return None
        attempts.append(1)
        return BUSY if len(attempts) < 3 else None

    retry = RetryLimits(10, 0.2, 0.2)
    async with run_lane([make_record(n) for n in range(30)], answer, retry=retry) as running:
        await wait_until(lambda: len(running.sender.taken) == 20)
    assert running.committed() == 29


def test_waits_are_shorter_than_the_backends_allow() -> None:
    """Broken: the backend gives up on a drain before expel does, and commits are lost."""
    assert consuming.REVOKE_WAIT_S + consuming.COMMIT_WAIT_S < 30


async def test_a_lane_full_of_retries_goes_on_after_a_revoke(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a rebalance during a receiver's outage leaves the lane asleep until restart, its membership alive."""
    monkeypatch.setattr(circuit_breaker, "FIRST_WAIT_S", 0.1)
    is_busy = True

    def answer(_delivery: Delivery) -> Outcome:
        return BUSY if is_busy else None

    records = [make_record(n) for n in range(200)]
    retry = RetryLimits(20, 30.0, 30.0)
    async with run_lane(records, answer, retry=retry, drain=0.1, max_events=100) as running:
        await wait_until(lambda: running.dispatchers != [] and running.dispatchers[0].room() == 0)
        await wait_until(lambda: len(running.sender.sent) == 10 and running.sender.under_way == 0)
        is_busy = False
        running.broker.stored[P1] += [make_record(n) for n in range(1000, 1010)]
        (consumer,) = running.broker.consumers
        await consumer.revoke(P0)
        await wait_until(lambda: set(names(range(1000, 1010))) <= set(running.sender.taken))
