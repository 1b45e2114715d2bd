"""Reports: durable when `report` returns, kept when it raises, small while nothing can be written."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
import pytest
from pyroaring import BitMap

from services.core.broker.errors import Unavailable, UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.retry import AppendPolicy
from services.core.lag import LagHistogram
from services.core.ledger.accumulator import SetKey
from services.core.ledger.report import (
    MAX_REPORT_BYTES,
    TELEMETRY,
    LagSet,
    OriginSet,
    Reach,
    Report,
    decode_report,
    pack_numbers,
    unpack_numbers,
)
from services.core.ledger.reporter import HEARTBEAT_S, LAGS_EVERY_S, Reporter, cut
from tests.support.memory_appender import MemoryAppender
from tests.unit.ledger.test_accumulator import make_record

QUICK = AppendPolicy(deadline=5.0, append_timeout=60.0)
KEY = SetKey("accepted", "a", 0, 7)


@dataclass
class Desk:
    """A reporter, the topic that it writes to, and its clock (seconds)."""

    appender: MemoryAppender
    reporter: Reporter
    lag: LagHistogram
    seconds: list[float]

    def wait(self, seconds: float) -> None:
        self.seconds[0] += seconds

    def reports(self) -> list[Report]:
        return [decode_report(record.value) for record in self.appender.records(TELEMETRY)]

    def told(self) -> dict[SetKey, set[int]]:
        """The union of all sets."""
        found: dict[SetKey, set[int]] = {}
        for report in self.reports():
            for one in report.sets:
                key = SetKey(one.outcome, one.incarnation, one.partition, one.minute, one.due)
                found.setdefault(key, set()).update(unpack_numbers(one.numbers))
        return found


@asynccontextmanager
async def open_desk(*, has_backlog: bool = True) -> AsyncIterator[Desk]:
    appender, lag, now = MemoryAppender(), LagHistogram(), [600_000.0]
    appender.create(TELEMETRY, 1)
    async with Producer(appender, policy=QUICK) as producer:
        reporter = Reporter(
            producer, "i", "expel", "p", "d", lags={"e2e": lag}, has_backlog=has_backlog, clock=lambda: now[0]
        )
        yield Desk(appender, reporter, lag, now)


async def test_says_everything_once() -> None:
    """Broken: the observer misses events that were settled, or reads the same sets every second for ever."""
    async with open_desk() as desk:
        desk.reporter.settled.add("delivered", [make_record(b"a:0:%d" % number) for number in range(5)])
        desk.reporter.sets.add_range(KEY, 10, 3)
        desk.reporter.reached("a", 0, 12)
        desk.lag.observe([3, 3, 500])
        desk.wait(LAGS_EVERY_S)
        await desk.reporter.report()
        await desk.reporter.report()
        (report,) = desk.reports()
        assert desk.told() == {SetKey("delivered", "a", 0): set(range(5)), KEY: {10, 11, 12}}
        assert (report.node, report.instance, report.pipe, report.destination) == ("expel", "i", "p", "d")
        assert report.reaches == (Reach("a", 0, 12),)
        assert [(lag.kind, lag.minute, lag.count, lag.total_ms) for lag in report.lags] == [("e2e", 10_000, 3, 506)]
        assert sum(report.lags[0].buckets.values()) == 3


async def test_heartbeats_and_a_goodbye() -> None:
    """Broken: an idle node looks like a dead one, and its minutes never become final; or a drained one is waited for."""
    async with open_desk() as desk:
        await desk.reporter.report()
        desk.wait(HEARTBEAT_S - 1)
        await desk.reporter.report()
        assert len(desk.reports()) == 1
        desk.wait(1)
        await desk.reporter.report()
        await desk.reporter.report(closed=True)
        assert [report.closed for report in desk.reports()] == [False, False, True]


async def test_what_was_not_stored_is_told_with_the_next() -> None:
    """Broken: a broker that is away for a moment makes the observer cry of losses that never were."""
    async with open_desk() as desk:
        desk.appender.errors += [UnknownTopic(TELEMETRY) for _ in range(2)]  # which the producer does not try again
        desk.lag.observe([1])
        desk.wait(LAGS_EVERY_S)
        for number in range(2):
            desk.reporter.sets.add(KEY, [number])
            desk.reporter.settled.add("dead", [make_record(b"b:1:%d" % number)])
            desk.reporter.reached("a", 0, number)
            with pytest.raises(Unavailable):
                await desk.reporter.report()
        desk.reporter.sets.add(KEY, [2])
        await desk.reporter.report()
        assert desk.told() == {KEY: {0, 1, 2}, SetKey("dead", "b", 1): {0, 1}}
        (report,) = desk.reports()
        assert report.reaches == (Reach("a", 0, 1),)
        assert [lag.count for lag in report.lags] == [1]


async def test_nothing_is_lost_when_a_report_is_cancelled() -> None:
    """Broken: a revoke that is cut off takes a second's sets with it."""
    async with open_desk() as desk:
        desk.appender.gate.clear()
        desk.reporter.sets.add(KEY, [1])
        telling = asyncio.create_task(desk.reporter.report())
        while not desk.appender.waiting:
            await asyncio.sleep(0)
        telling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await telling
        desk.appender.gate.set()
        await desk.reporter.report()
        assert desk.told() == {KEY: {1}}


async def test_two_at_once_both_return_with_everything_durable() -> None:
    """Broken: a commit goes ahead of the report of what it commits, because another report was under way."""
    async with open_desk() as desk:
        desk.appender.gate.clear()
        desk.reporter.sets.add(KEY, [1])
        first = asyncio.create_task(desk.reporter.report())
        while not desk.appender.waiting:
            await asyncio.sleep(0)
        desk.reporter.sets.add(KEY, [2])
        second = asyncio.create_task(desk.reporter.report())
        desk.appender.gate.set()
        await first
        await second
        assert desk.told() == {KEY: {1, 2}}


async def test_memory_stays_small_while_nothing_can_be_told() -> None:
    """Broken: an hour without the telemetry topic takes a node's memory, event by event."""
    async with open_desk() as desk:
        for second in range(0, 3600, 60):
            desk.wait(60)
            desk.lag.observe([second])
            desk.reporter.sets.add_range(SetKey("accepted", "a", 0, second // 60), second * 10, 600)
            desk.appender.errors.append(UnknownTopic(TELEMETRY))
            with pytest.raises(Unavailable):
                await desk.reporter.report()
        assert len(desk.reporter._lags) <= 100
        await desk.reporter.report()
        (report,) = desk.reports()
        assert len(report.encode()) < 50_000
        assert sum(len(numbers) for numbers in desk.told().values()) == 36_000
        desk.wait(LAGS_EVERY_S)
        await desk.reporter.report()
        assert sum(lag.count for told in desk.reports() for lag in told.lags) == 60


async def test_behind_grows_older_and_is_not_believed_for_ever() -> None:
    """Broken: a minute becomes final on the word of a node that last looked minutes ago."""
    async with open_desk() as desk:
        desk.reporter.record_behind(5000)
        desk.wait(HEARTBEAT_S)
        await desk.reporter.report()
        desk.reporter.record_behind(0)
        desk.wait(HEARTBEAT_S)
        await desk.reporter.report()
        desk.wait(60)
        await desk.reporter.report()
        assert [report.behind_ms for report in desk.reports()] == [15_000, 0, None]
    async with open_desk(has_backlog=False) as desk:
        desk.wait(3600)
        await desk.reporter.report()
        assert [report.behind_ms for report in desk.reports()] == [0]


def test_cut_in_two_says_the_same() -> None:
    """Broken: what a report says after hours without a broker is refused by its reader, or a part of it twice or never."""
    sparse = BitMap(range(0, 3_000_000, 3))
    sets = tuple(
        OriginSet("delivered", f"i{n}", n, None, pack_numbers(sparse if not n else BitMap([n]))) for n in range(9)
    )
    doubt = (OriginSet("unknown", "i", 9, 1, pack_numbers(BitMap([9]))),)
    lags = tuple(LagSet("e2e", minute, 2000, 9, dict.fromkeys(range(2000), 1)) for minute in range(300))
    whole = Report(
        node="expel",
        instance="i",
        pipe="p",
        at_ms=1,
        sets=sets,
        lags=lags,
        reaches=(Reach("a", 0, 1),),
        closed=True,
        in_doubt=doubt,
    )
    parts = list(cut(whole))
    assert len(parts) > 2
    assert all(len(part.encode()) <= MAX_REPORT_BYTES for part in parts)
    assert [part.closed for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [part.reaches for part in parts if part.reaches] == [whole.reaches]
    assert tuple(lag for part in parts for lag in part.lags) == lags
    assert tuple(one for part in parts for one in part.in_doubt) == doubt
    united: dict[int, BitMap] = {}
    for part in parts:
        for one in part.sets:
            united.setdefault(one.partition, BitMap()).update(unpack_numbers(one.numbers))
    assert united == {one.partition: unpack_numbers(one.numbers) for one in sets}
    assert list(cut(msgspec.structs.replace(whole, sets=(), lags=(), in_doubt=()))) == [
        msgspec.structs.replace(whole, sets=(), lags=(), in_doubt=())
    ]


async def test_a_clock_that_is_set_back_silences_nobody() -> None:
    """Broken: after a clock was set back by an hour its idle reporters are silent, and measure no lag, for an hour."""
    async with open_desk() as desk:
        await desk.reporter.report()
        desk.wait(-3600)
        desk.lag.observe([3])
        await desk.reporter.report()
        assert [len(report.lags) for report in desk.reports()] == [0, 1]
