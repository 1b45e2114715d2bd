"""The follower on a real embedded log: restarts, snapshots, recovery, and each final row told once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.ledger.report import SNAPSHOTS, TELEMETRY, LagSet, Report
from services.observer.ledger import snapshot
from services.observer.ledger.follow import Follower
from services.observer.ledger.planned import Window
from services.observer.ledger.row import Row
from services.observer.ledger.table import Ages
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, PLAIN, START_MS, accept, beat, tell

DEADLINE_S = 60.0
FINAL_MS = START_MS + MINUTE_MS + Ages().final


class Observer:
    """A follower with a clock of the test's own. final: what it told."""

    def __init__(self, broker: Broker, producer: Producer) -> None:
        self.now = START_MS
        self.final: list[Row] = []
        self._producer = producer
        self.follower = Follower(PLAIN, broker.admin, producer, self.final.extend, now_ms=lambda: self.now)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Observer"]:
        stopping = asyncio.Event()
        task = asyncio.create_task(self.follower.run(stopping))
        try:
            yield self
        finally:
            stopping.set()
            await task

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.02)

    def row(self) -> Row:
        return self.follower.table.row("late", MINUTE, self.now)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with LogBroker.open(str(tmp_path / "log")) as opened:
        for topic in ("flights", "late.out", TELEMETRY, SNAPSHOTS):
            await opened.admin.create_topic(TopicSpec(topic, 1))
        yield opened


async def report(broker: Broker, *reports: Report) -> None:
    records = [Record(b"k", one.encode(), one.at_ms) for one in reports]
    await broker.driver.append(TELEMETRY, 0, records, timeout=30)


def losing(missing: int) -> list[Report]:
    """A minute of ten events of which so many are not delivered."""
    return [
        accept(range(10)),
        tell("transform", "late", "passed", range(10)),
        tell("expel", "late", "delivered", range(10 - missing), destination="ops"),
    ]


def alive(at_ms: int) -> list[Report]:
    return [
        beat("ingest", "flights", at_ms=at_ms),
        beat("transform", "late", at_ms=at_ms),
        beat("expel", "late", "ops", at_ms=at_ms),
    ]


async def test_a_restart_knows_what_was_and_tells_no_minute_twice(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: after a restart of the observer an old loss is an alarm again, or its minutes are unknown."""
    monkeypatch.setattr(snapshot, "PART_BYTES", 64)  # so that a snapshot has several parts
    async with Producer(broker.driver) as producer:
        await report(broker, *losing(2), *alive(FINAL_MS))
        await broker.driver.append(TELEMETRY, 0, [Record(b"k", b"no report", START_MS)], timeout=30)
        first = Observer(broker, producer)
        first.now = FINAL_MS
        async with first.running():
            await first.until(lambda: len(first.final) == 1)
            assert (first.final[0].missing, first.final[0].accepted) == (2, 10)
            await first.follower.announce(Window("deploy", None, START_MS, FINAL_MS, "ci"))
        second = Observer(broker, producer)
        second.now = FINAL_MS + 1000
        async with second.running():
            await second.until(lambda: not second.follower.catching_up)
            assert second.row().missing == 2
            await report(broker, tell("expel", "late", "delivered", [8], destination="ops", at_ms=second.now))
            await second.until(lambda: second.row().late == 1)
            assert [window.kind for window in second.follower.planned.all()] == ["deploy"]
        assert second.final == []


async def test_a_snapshot_is_all_that_is_needed(broker: Broker) -> None:
    """Broken: once the reports are gone by retention, a restart forgets what waits for another attempt."""
    async with Producer(broker.driver) as producer:
        await report(broker, *losing(2), tell("expel", "late", "parked", [9], destination="ops"), *alive(FINAL_MS))
        first = Observer(broker, producer)
        first.now = FINAL_MS
        async with first.running():
            await first.until(lambda: len(first.final) == 1)
        await broker.admin.delete_topic(TELEMETRY)
        await broker.admin.create_topic(TopicSpec(TELEMETRY, 1))
        second = Observer(broker, producer)
        second.now = FINAL_MS + 1000
        async with second.running():
            await second.until(lambda: not second.follower.catching_up)
            assert second.row() == first.row()
            assert second.row().waiting == 1


async def test_what_a_dead_ingest_did_not_tell_is_told_for_it_durably(broker: Broker) -> None:
    """Broken: after a kill -9 of ingest its minutes stay open for ever."""
    async with Producer(broker.driver) as producer:
        silent = losing(0)
        await report(broker, *silent, *alive(FINAL_MS)[1:])
        observer = Observer(broker, producer)
        observer.now = FINAL_MS
        async with observer.running():
            await observer.until(lambda: len(observer.final) == 1)
        end = (await broker.admin.describe(TELEMETRY))[0].end
        assert end > len(silent) + 2, "what it said in ingest's name stands in the topic"


async def test_lags_are_merged_and_a_report_that_comes_twice_counts_once(broker: Broker) -> None:
    """Broken: percentiles of a minute are those of one instance, or of a repeated second."""
    async with Producer(broker.driver) as producer:
        lag = LagSet("e2e", MINUTE, 3, 30, {100: 2, 200: 1})
        one = Report(node="expel", instance="one", pipe="late", destination="ops", at_ms=START_MS, lags=(lag,))
        two = Report(node="expel", instance="two", pipe="late", destination="ops", at_ms=START_MS, lags=(lag,))
        await report(broker, one, one, two)
        observer = Observer(broker, producer)
        async with observer.running():
            await observer.until(lambda: not observer.follower.catching_up)
        ((_, histogram),) = observer.follower.lags.kinds(MINUTE).items()
        assert (histogram.count, histogram.total_ms) == (6, 60)
