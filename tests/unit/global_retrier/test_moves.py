"""The retrier as a whole, on the embedded log, with days that pass in seconds."""

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import structlog

from services.core import consuming, metrics
from services.core.broker.contract import MAX_POLL_BYTES, Appended, Appender
from services.core.broker.errors import Unavailable
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.consuming import Membership
from services.core.pipe_file.topic_names import DELAYS_S, RETRIER_GROUP, RETRY_IN, delay_topic
from services.core.pipe_file.webhook import SCHEDULE
from services.core.undelivered.dead_letter import PREFIX, event_time
from services.core.undelivered.retry_state import RetryState, unwrap
from services.global_retrier.delay_queue import GATHER_MS, MAX_BYTES
from services.global_retrier.metrics import RetrierLedger, RetrierMetrics
from services.global_retrier.mover import Mover
from services.global_retrier.retrier import RetrierProcessor
from tests.contract.traffic import ignore_revoke
from tests.support.memory_appender import MemoryAppender
from tests.unit.expel.fake_broker import FakeBroker
from tests.unit.global_retrier.fake_clock import FakeClock
from tests.unit.global_retrier.river import make_record, make_state, open_river

DAY = 86_400_000
LATEST = DELAYS_S[0] * 1000 + GATHER_MS
"""How late an event may be by design, ms."""


@pytest.mark.long
async def test_a_schedule_of_75_hours(tmp_path: Path) -> None:
    """Broken: an event of a destination that is down for days is tried too early, late, too often, or with a wrong count."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    count = 2
    async with open_river(tmp_path) as river, river.running():
        began = river.clock.now_ms()

        def find_due(rounds: int, now: int) -> int:
            return now + int(SCHEDULE[rounds - 1] * 1000 * chance.uniform(0.8, 1.2))

        tried = {number: [began] for number in range(count)}
        await river.hand_over(*(make_state(find_due(1, began), number) for number in range(count)))
        given_up: list[RetryState] = []

        async def try_again() -> None:
            for record in await river.out():
                event, state = unwrap(record)
                assert (event.timestamp, event.value) == (1_700_000_000_000, b'{"n":1}')
                assert state.due <= record.timestamp <= state.due + LATEST
                number = state.position()[1]
                assert state.attempts == 4 * len(tried[number])
                assert state.rounds == len(tried[number])
                tried[number].append(record.timestamp)
                rounds = state.rounds + 1
                if rounds > len(SCHEDULE):
                    given_up.append(state)
                else:
                    due = find_due(rounds, record.timestamp)
                    await river.hand_over(make_state(due, number, attempts=4 * rounds, rounds=rounds))

        await river.drive(lambda: len(given_up) == count, try_again)
        for times in tried.values():
            assert len(times) == 10
            assert 0.8 * 75 <= (times[-1] - began) / 3_600_000 <= 1.2 * 76
        assert await river.dead() == []


async def test_no_head_blocks_another(tmp_path: Path) -> None:
    """Broken: an event that is due in seconds waits behind one that is due tomorrow; or one pipe's behind another's."""
    async with open_river(tmp_path) as river, river.running():
        now = river.clock.now_ms()
        waits = [DAY, 3 * DAY, 17, 5000, 900_000, 70_000, 2 * DAY, 999, 3_600_000, 4000]
        await river.hand_over(
            *(make_state(now + wait, n, pipe=("late", "early")[n % 2]) for n, wait in enumerate(waits))
        )
        late: list[int] = []
        order: list[int] = []

        async def look() -> None:
            for pipe in ("late", "early"):
                for record in await river.out(pipe):
                    state = unwrap(record)[1]
                    late.append(record.timestamp - state.due)
                    order.append(state.due - now)

        await river.drive(lambda: len(order) == len(waits), look)
        assert min(late) >= 0
        assert max(late) <= LATEST
        assert order == sorted(order)


async def test_what_it_cannot_move_goes_to_dead_letters(tmp_path: Path) -> None:
    """Broken: one foreign record stops everybody's retries, or events of a deleted pipe vanish without a trace."""
    async with open_river(tmp_path) as river, river.running():
        now = river.clock.now_ms()
        before = metrics.RETRIER_DEAD.labels("unknown_pipe")._value.get()
        foreign = Record(b"k", b"who?", now, (("x", b"y"),))
        await river.put(
            [foreign, make_record(make_state(now - 1, 5, pipe="gone"), now), make_record(make_state(now), now)]
        )
        letters: list[Record] = []

        async def look() -> None:
            letters.extend(await river.dead())

        await river.drive(lambda: len(letters) == 2, look)
        assert len(await river.out()) == 1
        by_reason = {letter.header(PREFIX + "reason"): letter for letter in letters}
        bad, gone = by_reason[b"bad_retry_record"], by_reason[b"unknown_pipe"]
        assert (bad.value, bad.header("x"), bad.header(PREFIX + "source")) == (
            b"who?",
            b"y",
            f"{RETRY_IN}:0:0".encode(),
        )
        assert (event_time(gone), gone.header("ce_id")) == (1_700_000_000_000, b"flights:0:5")
        assert gone.header("penstock_retry_due") is None
        expected = {
            "pipe": b"gone",
            "destination": b"ops",
            "attempts": b"4",
            "source": b"flights:0:5",
            "node": b"retrier",
        }
        assert {name: gone.header(PREFIX + name) for name in expected} == expected
        assert metrics.RETRIER_DEAD.labels("unknown_pipe")._value.get() == before + 1


class Faulty:
    """An appender that is away while `away`."""

    def __init__(self, appender: Appender) -> None:
        self._appender = appender
        self.away = False
        self.refused = 0

    async def partition_count(self, topic: str) -> int:
        return await self._appender.partition_count(topic)

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        if self.away:
            self.refused += 1
            raise Unavailable("away")
        return await self._appender.append(topic, partition, records, timeout=timeout)


async def test_a_broker_that_is_away_for_a_while(tmp_path: Path) -> None:
    """Broken: what could not be written on is committed, and lost; or the retrier stays stopped when the broker is back."""
    faulty: list[Faulty] = []

    def wrap_appender(appender: Appender) -> Appender:
        faulty.append(Faulty(appender))
        return faulty[0]

    async with open_river(tmp_path, wrap_appender) as river, river.running():
        faulty[0].away = True
        now = river.clock.now_ms()
        await river.hand_over(*(make_state(now + 1000 * n, n) for n in range(50)))
        async with river.patience():
            while faulty[0].refused < 10:
                await river.pause()
        assert sum(lag.records for lag in (await river.broker.admin.group_lag(RETRIER_GROUP, RETRY_IN)).values()) == 50
        faulty[0].away = False
        found: list[int] = []

        async def look() -> None:
            found.extend(unwrap(record)[1].position()[1] for record in await river.out())

        await river.drive(lambda: len(found) >= 50, look)
        assert found == list(range(50))


async def test_a_missing_range_stops_one_topic_only(tmp_path: Path) -> None:
    """Broken: a gap in one delay is passed over silently, or stops all retries."""
    async with open_river(tmp_path) as river:
        async with river.running():
            await river.hand_over(make_state(river.clock.now_ms() + 70_000))
            await river.rest()
        await river.broker.admin.set_committed(RETRIER_GROUP, delay_topic(64), {0: 500})
        async with river.running() as processor:
            for number in range(1, 13):  # for longer than the gap takes to be met again
                found: list[Record] = []
                await river.hand_over(make_state(river.clock.now_ms() + 5000, number))
                async with river.patience():
                    while not found:
                        found += await river.out()
                        river.clock.jump(river.clock.next_wake() or 0)
                        await river.pause()
                assert unwrap(found[0])[1].position()[1] == number
            assert metrics.RETRIER_UP._value.get() == 0
            assert TopicPartition(delay_topic(64), 0) not in processor.queues


async def test_large_events_are_left_where_they_are(tmp_path: Path) -> None:
    """Broken: events of a megabyte are read ahead by the hundred, and the retrier is ended for its memory."""
    async with open_river(tmp_path) as river, river.running() as processor:
        now = river.clock.now_ms()
        for number in range(30):
            record = make_record(make_state(now + 70_000, number), now, b"x" * 800_000)
            await river.put([record])
        await river.drive(lambda: not processor.queues[TopicPartition(RETRY_IN, 0)])
        line = processor.queues[TopicPartition(delay_topic(64), 0)]
        assert line.is_full
        assert len(line) * 800_000 <= MAX_BYTES + MAX_POLL_BYTES
        found: list[Record] = []

        async def look() -> None:
            found.extend(await river.out())

        await river.drive(lambda: len(found) == 30, look)


async def test_a_restart_keeps_what_waits(tmp_path: Path) -> None:
    """Broken: a redeploy releases early, forgets, restarts counts, or moves everything twice."""
    async with open_river(tmp_path) as river:
        now = river.clock.now_ms()
        found: list[Record] = []

        async def look() -> None:
            found.extend(await river.out())

        await river.put(
            [
                make_record(make_state(now + 1000 * seconds, seconds, attempts=7, rounds=2), now)
                for seconds in range(100)
            ]
        )
        for wanted in (10, 35, 60, 100):
            async with river.running():
                await river.drive(lambda wanted=wanted: len(found) >= wanted, look)  # type: ignore[misc]
        states = [unwrap(record)[1] for record in found]
        assert [state.position()[1] for state in states] == list(range(100))
        assert {(state.attempts, state.rounds) for state in states} == {(7, 2)}
        assert all(0 <= record.timestamp - state.due <= LATEST for record, state in zip(found, states, strict=True))
        ends = [(await river.broker.reader.describe(delay_topic(seconds)))[0].end for seconds in DELAYS_S]
        assert sum(ends) <= 100 * 3 * 4


class StoppedLedger(RetrierLedger):
    """Its reports are written when `go_on` is set."""

    def __init__(self) -> None:
        super().__init__(None)
        self.is_reporting, self.go_on = asyncio.Event(), asyncio.Event()

    async def report(self) -> None:
        self.is_reporting.set()
        await self.go_on.wait()


async def test_a_commit_that_waited_for_its_report_is_not_made_on_a_topic_made_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Broken: a commit of one topic carries the offset of another that was created anew meanwhile: its events are lost. Or a
    telemetry topic that is away holds up every rebalance."""
    monkeypatch.setattr(consuming, "COMMIT_WAIT_S", 0.05)
    kept, anew = TopicPartition(delay_topic(1), 0), TopicPartition(delay_topic(4), 0)
    broker = FakeBroker({kept.topic: 1, anew.topic: 1})
    ledger = StoppedLedger()
    async with Producer(broker.appender) as producer:
        clock, meter = FakeClock(), RetrierMetrics()
        mover = Mover(producer, broker.admin, meter, clock, ledger)  # type: ignore[arg-type]
        processor = RetrierProcessor(broker, mover, meter, clock)  # type: ignore[arg-type]
        membership, tracker = Membership(RETRIER_GROUP, processor, 600.0, lambda _is_up: None), processor.tracker
        async with broker.consumer(
            RETRIER_GROUP, [kept.topic, anew.topic], start="earliest", on_revoke=ignore_revoke
        ) as member:
            for source in (kept, anew):
                tracker.add(Batch(*source, range(3), [Record(None, b"", 0)] * 3))
                tracker.settle(source, range(3))
            membership._consumer = member
            committing = asyncio.create_task(membership.commit())
            await ledger.is_reporting.wait()
            await membership.revoke(frozenset({anew}))
            ledger.go_on.set()
            await committing
    assert broker.commits == [{kept: 2}]


async def test_a_report_that_hangs_does_not_hold_up_the_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: while the telemetry topic is away, a member that stops keeps its partitions long after its drain time."""
    monkeypatch.setattr(consuming, "REVOKE_WAIT_S", 0.05)
    source, stopping = TopicPartition(delay_topic(1), 0), asyncio.Event()
    broker, ledger = FakeBroker({source.topic: 1}), StoppedLedger()
    with structlog.testing.capture_logs() as logs:
        async with Producer(broker.appender) as producer, asyncio.timeout(600):
            clock, meter = FakeClock(), RetrierMetrics()
            mover = Mover(producer, broker.admin, meter, clock, ledger)  # type: ignore[arg-type]
            processor = RetrierProcessor(broker, mover, meter, clock)  # type: ignore[arg-type]
            membership = Membership(RETRIER_GROUP, processor, 600.0, lambda _is_up: None)
            stopping.set()
            async with broker.consumer(
                RETRIER_GROUP, [source.topic], start="earliest", on_revoke=membership.revoke
            ) as member:
                assert await membership.run(member, stopping, 0.05)
    assert [one["error"] for one in logs if one["event"] == "commit_failed"] == ["no result within 0.05 s"]


async def test_a_move_whose_revocation_was_cut_off_settles_nothing() -> None:
    """Broken: the broker cuts a revocation off, the topic is made anew and comes back, and the old move settles new events."""
    source = TopicPartition(delay_topic(1), 0)
    broker = FakeBroker({source.topic: 1, "late.retry": 1})
    appender = MemoryAppender()
    appender.create("late.retry", 1)
    appender.gate.clear()
    clock, meter = FakeClock(), RetrierMetrics()
    records = [make_record(make_state(clock.now_ms(), n), clock.now_ms() - DAY) for n in range(3)]
    batch = Batch(*source, range(3), records)
    async with Producer(appender) as producer:
        mover = Mover(producer, broker.admin, meter, clock)  # type: ignore[arg-type]
        processor = RetrierProcessor(broker, mover, meter, clock)  # type: ignore[arg-type]
        membership, stopping = Membership(RETRIER_GROUP, processor, 600.0, lambda _is_up: None), asyncio.Event()
        async with broker.consumer(RETRIER_GROUP, [source.topic], start="earliest", on_revoke=ignore_revoke) as member:
            running = asyncio.create_task(membership.run(member, stopping, 0.05))
            while processor._group is None:
                await asyncio.sleep(0)
            processor.tracker.add(batch)
            processor.accept(batch)
            moving = set(processor._tasks.values())
            while not appender.waiting:
                await asyncio.sleep(0.01)
            revoking = asyncio.create_task(membership.revoke(frozenset({source})))
            await asyncio.sleep(0.01)
            revoking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await revoking
            processor.tracker.add(Batch(*source, range(3), [Record(None, b"new", 0)] * 3))
            appender.gate.set()
            while len(appender.records("late.retry")) < 3:
                await asyncio.sleep(0.01)
            await asyncio.wait(moving, timeout=0.5)
            assert processor.tracker.committable() == {}
            assert broker.commits == []
            stopping.set()
            await running
