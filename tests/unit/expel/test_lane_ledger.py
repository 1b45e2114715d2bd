"""What a lane tells: everything that it settles, before it is committed, and nothing else."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import structlog

from services.core.broker.contract import Features, Lag
from services.core.broker.errors import UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.broker.retry import AppendPolicy
from services.core.http.failure import Failure
from services.core.ledger.report import TELEMETRY, Report, decode_report, unpack_numbers
from services.core.pipe_file.topic_names import RETRY_IN
from services.core.undelivered.failed_attempts import FailedAttempt, parse_attempts
from services.core.undelivered.retry_state import RetryState, wrap
from services.expel.delivery import Delivery
from services.expel.dispatcher import Dispatcher
from services.expel.lane import Lane
from services.expel.metrics import LaneLedger, LaneMetrics
from services.expel.retry_policy import Outcome, RetryLimits
from services.expel.throttle import SendThrottle
from tests.support.memory_appender import MemoryAppender
from tests.unit.expel.fake_broker import FakeBroker
from tests.unit.expel.fake_sender import BUSY, WRONG, FakeSender, make_shape
from tests.unit.expel.receiver import wait_until

P0 = TopicPartition("s", 0)
QUICK = AppendPolicy(deadline=5.0, append_timeout=60.0)


def event(number: int) -> Record:
    headers = (("ce_id", b"e%d" % number), ("penstock_arrival", b"1"), ("penstock_origin", b"a:0:%d" % number))
    return Record(None, b"{}", 0, headers)


def open_ledger(producer: Producer, broker: FakeBroker) -> LaneLedger:
    opened: Any = broker
    held = ["late.retry", "late.parked"] if TopicPartition("late.parked", 0) in broker.stored else []
    return LaneLedger.open(producer, opened, "i", "late", "hook", ["s"], "late.retry", held)


@dataclass
class Desk:
    """A running lane; its telemetry goes to `telemetry`, everything else to `broker`."""

    broker: FakeBroker
    telemetry: MemoryAppender
    dispatchers: list[Dispatcher]

    def committed(self) -> int:
        return self.broker.committed.get(("late.hook", P0), -1)

    def reports(self) -> list[Report]:
        return [decode_report(record.value) for record in self.telemetry.records(TELEMETRY)]

    def told(self, outcome: str) -> set[int]:
        sets = [one for report in self.reports() for one in report.sets if one.outcome == outcome]
        return {number for one in sets for number in unpack_numbers(one.numbers)}


@asynccontextmanager
async def run_lane(
    answer: Failure | None = None,
    *,
    count: int = 30,
    blocked: bool = False,
    handed_over: Sequence[int] = (),
    recovers: bool = False,
) -> AsyncIterator[Desk]:
    """Drained at the end. answer: to events with even numbers, the others are taken. handed_over: by who died before. recovers:
    the answer is that to the first attempt only."""

    def decide(delivery: Delivery) -> Outcome:
        if answer is None or (recovers and delivery.attempts):
            return None
        numbers = [int(one[1:]) for one in delivery.ids]
        return {index: answer for index, number in enumerate(numbers) if number % 2 == 0}

    broker, telemetry = (
        FakeBroker({"s": 1, "late.dead": 1, "late.parked": 1, "late.retry": 1, RETRY_IN: 1}),
        MemoryAppender(),
    )
    telemetry.create(TELEMETRY, 1)
    telemetry.errors += [UnknownTopic(TELEMETRY)] * (10_000 * blocked)
    broker.stored[P0] += [event(number) for number in range(count)]
    now = int(time.time() * 1000)
    for number in handed_over:
        state = RetryState("late", "hook", 3, 1, now, now + 5000, "http_503", "busy", f"s:0:{number}", 0)
        broker.stored[TopicPartition(RETRY_IN, 0)].append(wrap(event(number), state, now))
    async with Producer(broker.appender, policy=QUICK) as producer, Producer(telemetry, policy=QUICK) as telling:
        meter = LaneMetrics("late", "hook", ledger=open_ledger(telling, broker))
        shape = make_shape(retry=RetryLimits(1 + recovers, 0.01, 0.02, uses_retry_topic=True), schedule=(1.0,))
        throttle = SendThrottle("late", "hook", sheds=True)
        dispatchers = list[Dispatcher]()

        def make_dispatcher() -> Dispatcher:
            dispatchers.append(Dispatcher(shape, FakeSender(decide), broker, producer, meter, throttle))  # type: ignore[arg-type]
            return dispatchers[-1]

        lane = Lane(broker, "late", "hook", ["s"], "earliest", meter, make_dispatcher, 0.01)  # type: ignore[arg-type]
        stopping = asyncio.Event()
        task = asyncio.create_task(lane.run(stopping, 5.0))
        try:
            yield Desk(broker, telemetry, dispatchers)
        finally:
            stopping.set()
            await task


async def test_nothing_is_committed_that_is_not_told() -> None:
    """Broken: a crash between commit and report leaves events that count as missing for ever."""
    async with run_lane(blocked=True) as desk:
        await wait_until(lambda: len(desk.telemetry.errors) < 9_990)
        assert desk.committed() == -1
        desk.telemetry.errors.clear()
        await wait_until(lambda: desk.committed() == 29)
        assert desk.told("delivered") == set(range(30))
    assert desk.reports()[-1].closed
    told = {lag.kind: lag.count for report in desk.reports() for lag in report.lags}
    assert told.keys() == {"lag_in", "lag_out", "e2e", "transit_time", "expel_time"}


async def test_a_commit_that_waited_for_its_report_is_not_made_on_a_topic_made_anew() -> None:
    """Broken: events of a stream that was deleted and made anew are never delivered, and nobody knows."""
    async with run_lane() as desk:
        await wait_until(lambda: desk.committed() == 29)
        desk.telemetry.gate.clear()
        desk.broker.stored[P0] += [event(number) for number in range(30, 50)]
        await wait_until(lambda: desk.telemetry.waiting == 1 and desk.dispatchers[0].in_flight == 0)
        desk.dispatchers[0].tracker.remove([P0])
        desk.dispatchers[0].disown([P0])
        desk.broker.stored[P0].clear()
        desk.broker.consumers[0].positions[P0] = 0
        desk.broker.committed.clear()
        desk.broker.commits.clear()
        desk.telemetry.gate.set()
        desk.broker.stored[P0].append(event(50))
        await wait_until(lambda: desk.committed() >= 0)
    assert desk.broker.commits == [{P0: 0}]


async def test_that_nothing_can_be_told_is_said_once() -> None:
    """Broken: while the telemetry topic is away the log grows by ten lines a second and destination."""
    with structlog.testing.capture_logs() as logs:
        async with run_lane(blocked=True) as desk:
            await wait_until(lambda: len(desk.telemetry.errors) < 9_980)
            said = [one["event"] for one in logs].count("commit_failed")
            desk.telemetry.errors.clear()
    assert said == 1


async def test_what_went_elsewhere_is_told_as_that() -> None:
    """Broken: what waits for another round, or is dead, counts as missing."""
    evens, odds = set(range(0, 30, 2)), set(range(1, 30, 2))
    async with run_lane(BUSY) as desk:
        await wait_until(lambda: desk.committed() == 29)
        assert (desk.told("retrying"), desk.told("delivered"), desk.told("dead")) == (evens, odds, set())
        spans = {one.due for report in desk.reports() for one in report.sets if one.outcome == "retrying"}
        now = time.time()
        assert all(due is not None and now - 60 < due[0] < due[1] < now + 60 for due in spans), "due in about a second"
    async with run_lane(WRONG) as desk:
        await wait_until(lambda: desk.committed() == 29)
        assert (desk.told("retrying"), desk.told("delivered"), desk.told("dead")) == (set(), odds, evens)
        since = [one.due for report in desk.reports() for one in report.sets if one.outcome == "dead"]
        assert all(due is not None and now - 60 < due[0] < now + 60 for due in since)


async def test_failed_attempts_before_a_delivery_are_told_with_it() -> None:
    """Broken: nobody knows when a receiver refused an event that it accepted later, or it is blamed for one that it accepted."""
    began = int(time.time() * 1000)
    async with run_lane(BUSY, recovers=True) as desk:
        await wait_until(lambda: desk.committed() == 29)
        assert desk.told("delivered") == set(range(30))
    found: dict[int, list[FailedAttempt]] = {}
    for report in desk.reports():
        assert report.failures is not None
        delivered = {n for one in report.sets if one.outcome == "delivered" for n in unpack_numbers(one.numbers)}
        for one in report.failures:
            assert delivered >= set(unpack_numbers(one.numbers))
            found |= dict.fromkeys(unpack_numbers(one.numbers), parse_attempts(one.failures))
    assert found.keys() == set(range(0, 30, 2))
    assert {attempt.reason for attempts in found.values() for attempt in attempts} == {"http_503"}
    assert all(began <= attempt.at_ms <= time.time() * 1000 for (attempt,) in found.values())


async def test_what_a_predecessor_handed_over_is_told() -> None:
    """Broken: expel dies after handing over and before it tells; what nobody tells counts as missing."""
    async with run_lane(handed_over=[3, 7]) as desk:
        await wait_until(lambda: desk.committed() == 29)
        assert (desk.told("retrying"), desk.told("delivered")) == ({3, 7}, set(range(30)) - {3, 7})
        assert all(one.due for report in desk.reports() for one in report.sets if one.outcome == "retrying")


async def test_what_is_parked_is_told_as_that() -> None:
    """Broken: the events of a paused destination count as missing."""
    async with run_lane(count=0) as desk:
        await wait_until(lambda: bool(desk.broker.consumers))
        desk.dispatchers[0].park("operator")
        desk.broker.stored[P0] += [event(number) for number in range(30)]
        await wait_until(lambda: desk.committed() == 29)
        assert (desk.told("parked"), desk.told("delivered")) == (set(range(30)), set())
        due, now = 4_000_000_000_000, int(time.time() * 1000)
        state = RetryState("late", "hook", 3, 1, now, due, "http_503", "busy", "s:0:30", 0)
        desk.broker.stored[P0].append(wrap(event(30), state, now))  # by a clock that is far ahead
        await wait_until(lambda: desk.committed() == 30)
        told = {one.due for report in desk.reports() for one in report.sets if one.outcome == "parked"}
        assert (due // 1000, due // 1000 + 1) in told, "not before it was due"
        assert all(span is not None and span[0] >= now // 1000 - 60 for span in told)


async def test_only_the_sources_hold_minutes_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a destination that is paused for a day keeps every minute of that day from becoming final, or a backlog of
    events with old event times looks older than it is."""
    now = 1_800_000_000.0
    monkeypatch.setattr("time.time", lambda: now)
    appender, broker = MemoryAppender(), FakeBroker({"s": 2, "late.parked": 1, "late.retry": 1})
    appender.create(TELEMETRY, 1)
    parked = {TopicPartition("late.parked", 0): Lag(9, 90_000_000), TopicPartition("late.retry", 0): Lag(3, 7_000_000)}
    async with Producer(appender) as producer:
        ledger = open_ledger(producer, broker)

        broker.stored[TopicPartition("late.retry", 0)] += [event(number) for number in range(3)]
        broker.stored[TopicPartition("late.parked", 0)] += [event(number) for number in range(9)]

        async def measure(waiting: int) -> int | None:
            await ledger.measure_ends()
            done = {TopicPartition("s", 1): Lag(0, 0)}
            await ledger.set_lags({P0: Lag(waiting, 800_000_000 if waiting else 0), **done, **parked})
            ledger.add("delivered", [event(waiting)])
            await ledger.report()
            return decode_report(appender.records(TELEMETRY)[-1].value).behind_ms

        broker.stored[P0] += [event(number) for number in range(10)]
        assert await measure(10) is None, "nobody knows since when these wait"
        now += 5
        broker.stored[P0] += [event(number) for number in range(10)]
        broker.stored[TopicPartition("s", 1)] += [event(1)]
        assert 5000 <= (await measure(10) or 0) < 6000, "what was there five seconds ago is done"
        now += 5
        assert (await measure(0) or 0) < 1000
        last = decode_report(appender.records(TELEMETRY)[-1].value)
        assert last.returned_ms is None, "what came back has waited since nobody knows when, and is told apart"
        parked[TopicPartition("late.retry", 0)] = Lag(0, 0)
        await measure(0)
        last = decode_report(appender.records(TELEMETRY)[-1].value)
        assert (last.returned_ms, last.held_ms) == (0, None), "what is parked is not done"
        parked[TopicPartition("late.parked", 0)] = Lag(0, 0)
        await measure(0)
        assert decode_report(appender.records(TELEMETRY)[-1].value).held_ms == 0
        await ledger.close()


async def test_where_ends_are_unknown_the_lag_says_since_when() -> None:
    """Broken: on Kinesis no minute becomes final, or one does before its events are delivered."""
    appender, broker = MemoryAppender(), FakeBroker({"s": 2})
    appender.create(TELEMETRY, 1)
    broker.features = Features(False, False, 1 << 20)
    opened: Any = broker
    async with Producer(appender) as producer:
        ledger = LaneLedger.open(producer, opened, "i", "late", "hook", ["s"], "late.retry")

        async def measure(*lags: Lag) -> int | None:
            await ledger.measure_ends()
            await ledger.set_lags({TopicPartition("s", number): lag for number, lag in enumerate(lags)})
            ledger.add("delivered", [event(1)])
            await ledger.report()
            return decode_report(appender.records(TELEMETRY)[-1].value).behind_ms

        now = int(time.time() * 1000)
        assert (await measure(Lag(0, 0), Lag(0, 0)) or 0) < 1000
        assert 60_000 <= (await measure(Lag(3, 1, now - 2_000), Lag(1, 1, now - 60_000)) or 0) < 70_000
        assert await measure(Lag(3, 1, now - 2_000), Lag(1, 1)) is None


async def test_a_member_without_partitions_does_not_call_the_backlog_done() -> None:
    """Broken: during a rebalance of a group that is minutes behind, all its waiting events are final as lost."""
    appender, broker = MemoryAppender(), FakeBroker({"s": 2, "late.retry": 1})
    appender.create(TELEMETRY, 1)
    broker.stored[P0] += [event(number) for number in range(10)]
    async with Producer(appender) as producer:
        ledger = open_ledger(producer, broker)
        await ledger.measure_ends()
        await ledger.set_lags({})
        ledger.add("delivered", [event(0)])
        await ledger.report()
        assert decode_report(appender.records(TELEMETRY)[-1].value).behind_ms is None, (
            "ten wait, nobody knows since when"
        )
        await ledger.close()
