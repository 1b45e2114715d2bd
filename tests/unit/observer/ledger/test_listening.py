"""The follower on a real embedded log: whom it hears, whose clock is wrong, and what it has read up on."""

import asyncio

import msgspec
import pytest
from structlog.testing import capture_logs

from services.core.broker import reading
from services.core.broker.contract import Broker
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record
from services.core.event import ARRIVAL, ORIGIN
from services.core.ledger.report import TELEMETRY, LagSet, Report
from services.observer import recovery
from tests.unit.observer.ledger.following import DEADLINE_S, FINAL_MS, OPS, Observer, alive, losing, report
from tests.unit.observer.ledger.stories import MINUTE, START_MS, beat, tell

pytestmark = pytest.mark.usefixtures("quick")


async def test_a_reporter_whose_clock_is_ahead_hides_nobody_elses_lags(broker: Broker) -> None:
    """Broken: one machine with a wrong clock empties the page: everything else is an hour old beside it."""
    lag = LagSet("e2e", MINUTE, 1, 30, {500: 1})
    fine = msgspec.structs.replace(beat("expel", "late", "ops", at_ms=START_MS), lags=(lag,))
    wrong = msgspec.structs.replace(fine, instance="two", at_ms=START_MS + 10 * 3_600_000)
    async with Producer(broker.appender) as producer:
        observer = Observer(broker, producer)
        await report(broker, fine, wrong, fine)
        async with observer.running():
            await observer.caught_up()
            assert observer.follower.lags.minutes() == [MINUTE]


async def test_what_is_read_again_speaks_for_nobody(broker: Broker) -> None:
    """Broken: an expel whose clock is ahead dies while the observer is away: what it said last is taken for new, and what it
    left undone is lost to the table."""
    hour = 3_600_000
    async with Producer(broker.appender) as producer:
        first, second = Observer(broker, producer), Observer(broker, producer)
        await report(broker, *losing(2))
        async with first.running():
            await first.caught_up()
            await report(broker, *alive(START_MS))
            await first.until(lambda: bool(first.follower.table.liveness.alive(OPS, first.now)))
        ahead = beat("expel", "late", "ops", at_ms=START_MS + hour)
        await report(broker, ahead, *alive(START_MS)[:2])
        second.now = START_MS + hour
        async with second.running():
            await second.caught_up()
            assert second.row().why_open == "ingest of flights has not reported since the minute ended"
            assert second.follower.table.liveness.done_up_to(OPS, second.now) == START_MS
            assert second.follower.table.liveness.alive(OPS, second.now), "it may speak any moment"
            await report(broker, *alive(second.now)[:2])
            told = "expel to ops has not reported since the minute ended"
            await second.until(lambda: second.row().why_open == told)
            await second.listen_for(40_000)
            await report(broker, *alive(second.now)[:2])
            await second.until(lambda: second.row().why_open == "expel to ops is silent")
            assert second.final == []


async def test_a_topic_that_never_ends_is_followed(broker: Broker) -> None:
    """Broken: where reports come faster than pages are asked for, the observer catches up for ever, or everybody is silent."""
    async with Producer(broker.appender) as producer:
        observer, read = Observer(broker, producer), broker.reader.read

        async def one_more(topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
            if topic == TELEMETRY:
                observer.now += 100
                await report(broker, *alive(observer.now))
            return await read(topic, partition, offset, max_records=max_records)

        observer.follower._reader.read = one_more  # type: ignore[method-assign]
        await report(broker, *losing(0))
        async with observer.running():
            await observer.caught_up()
            until = observer.now + 100_000
            while observer.now < until:
                await asyncio.sleep(0.01)
                assert not observer.follower.catching_up
                assert observer.follower.table.liveness.alive(OPS, observer.now)


async def test_a_clock_that_is_wrong_is_told_once(broker: Broker) -> None:
    """Broken: nobody knows why a machine's lags are wrong, or the log is full of it."""
    async with Producer(broker.appender) as producer:
        observer = Observer(broker, producer, FINAL_MS)
        late = tell("expel", "late", "delivered", [1], destination="ops", instance="late", at_ms=FINAL_MS - 60_000)
        ahead = tell("transform", "late", "passed", [1], instance="ahead", at_ms=FINAL_MS + 60_000)
        with capture_logs() as logs:
            async with observer.running():
                await observer.caught_up()
                await report(broker, *alive(FINAL_MS), *[late, ahead] * 2, tell("ingest", "flights", "accepted", [1]))
                await observer.until(lambda: len(observer.follower.table.origin_sets.reported_sets) == 2)
                await observer.listen_for(10_000)
        told = [(one["instance"], one["seconds"]) for one in logs if one["event"] == "clock_skewed"]
        assert told == [("late", -60), ("ahead", 60), ("one", -210)]


async def test_no_minute_is_final_before_it_is_read_up_on(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an incarnation that never reported is found in parts; after the first its minutes are final without the rest."""
    monkeypatch.setattr(recovery, "_REPORT_NUMBERS", 1)
    monkeypatch.setattr(reading, "READ_RECORDS", 1)
    headers = ((ARRIVAL, b"%d" % START_MS),)
    events = [Record(None, b"{}", START_MS, (*headers, (ORIGIN, b"b:0:%d" % number))) for number in range(3)]
    await broker.appender.append("flights", 0, events, timeout=600)
    async with Producer(broker.appender) as producer:
        observer, halfway, go_on = Observer(broker, producer), asyncio.Event(), asyncio.Event()
        observer.now, apply = FINAL_MS, observer.follower.table.apply

        def stop_behind_first(told: Report, received_ms: int) -> None:
            apply(told, received_ms)
            if told.instance.startswith(recovery.UNKNOWN) and told.sets:
                halfway.set()

        async def hang(topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
            if topic == "flights" and offset == 2:
                await go_on.wait()
            return await read(topic, partition, offset, max_records=max_records)

        read = broker.reader.read
        observer.follower._recovery_reader.read = hang  # type: ignore[method-assign]
        monkeypatch.setattr(observer.follower.table, "apply", stop_behind_first)
        await report(broker, tell("expel", "late", "delivered", range(3), destination="ops", incarnation="b"))
        async with observer.running():
            await observer.caught_up()
            await asyncio.wait_for(halfway.wait(), DEADLINE_S)
            await report(broker, *alive(observer.now))
            await observer.listen_for(20_000)
            assert observer.final == []
            go_on.set()
            await report(broker, *alive(observer.now))
            await observer.until(lambda: [row.accepted for row in observer.final] == [3])
