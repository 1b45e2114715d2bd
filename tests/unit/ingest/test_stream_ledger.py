"""What ingest tells: every number once, for its minute, and never further than is told."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.broker.errors import (
    BrokerClosed,
    BrokerError,
    OutcomeUnknown,
    Overloaded,
    RecordTooLarge,
    Unavailable,
    UnknownTopic,
)
from services.core.broker.producer import PartResult, Producer, SendResult
from services.core.ledger.report import TELEMETRY, OriginSet, decode_report, unpack_numbers
from services.core.ledger.reporter import Reporter
from services.core.pipe_file.topic_names import CONTROL
from services.ingest import problems
from services.ingest.answer import explain
from services.ingest.event_fields import Numbers, Origins
from services.ingest.metrics import StreamLedger
from tests.support.memory_appender import MemoryAppender
from tests.unit.ingest.service import running

M = 60_000
NOON = 29_000_000 * M
MINUTE = NOON // M

Told = dict[tuple[str, int, int | None], list[int]]


class Request(NamedTuple):
    """One that was numbered."""

    numbers: dict[int, Numbers]
    rows: dict[int, Sequence[int]]
    times: list[int]
    arrival: int


class Desk:
    """A ledger of incarnation `a`, and what it told."""

    def __init__(self) -> None:
        self.appender = MemoryAppender()
        self.appender.create(TELEMETRY, 1)
        self.reporter = Reporter(Producer(self.appender), "i", "ingest", "orders")
        self.ledger = StreamLedger(self.reporter)
        self._next: dict[int, int] = {}

    def begin(self, counts: dict[int, int], times: list[int] | None = None, arrival: int = NOON) -> Request:
        """A request with so many events per partition."""
        numbers: dict[int, Numbers] = {}
        rows: dict[int, Sequence[int]] = {}
        row = 0
        for partition, count in counts.items():
            first = self._next.get(partition, 0)
            numbers[partition] = Numbers("a", first, b"")
            rows[partition] = range(row, row + count)
            self._next[partition] = first + count
            row += count
        return Request(numbers, rows, times or [arrival] * row, arrival)

    def end(self, request: Request, *parts: PartResult) -> None:
        """It was answered so; without parts: nothing is known of it."""
        self.ledger.settle(*request, SendResult(parts) if parts else None)

    async def told(self) -> tuple[Told, dict[int, int]]:
        """Numbers by outcome, partition and minute, and offsets by partition, as they stand in the reports so far."""
        await self.ledger.report()
        found: defaultdict[tuple[str, int, int | None], set[int]] = defaultdict(set)
        reaches: dict[int, int] = {}
        for record in self.appender.records(TELEMETRY):
            report = decode_report(record.value)
            for one in (*report.sets, *report.in_doubt):
                found[one.outcome, one.partition, one.minute].update(unpack_numbers(one.numbers))
            reaches |= {reach.partition: int(reach.offset) for reach in report.reaches}
        return {key: sorted(numbers) for key, numbers in found.items()}, reaches


async def test_each_number_in_its_minute() -> None:
    """Broken: a minute's loss is computed from events of another minute."""
    desk = Desk()
    desk.end(desk.begin({0: 2, 1: 1}), PartResult(1, 1, 0, 0), PartResult(0, 2, 0, 1))
    desk.end(desk.begin({0: 3}, [NOON - 1, NOON, 5]), PartResult(0, 3, 2, 4))
    desk.end(desk.begin({0: 1}, [NOON - M]), PartResult(0, 1, 5, 5))
    told, reaches = await desk.told()
    assert told == {
        ("accepted", 0, MINUTE): [0, 1, 3, 4],
        ("accepted", 1, MINUTE): [0],
        ("accepted", 0, MINUTE - 1): [2, 5],
    }
    assert reaches == {0: 5, 1: 0}


async def test_refused_is_what_was_not_stored_and_unknown_what_may_be() -> None:
    """Broken: a gap in the numbers that nobody explains, which looks like a loss; or an event that may well be stored, and
    delivered, is on record as refused."""
    desk = Desk()
    failed = ((1, OutcomeUnknown("slow")), (2, RecordTooLarge("1 MB")), (3, Unavailable("away")))
    desk.end(desk.begin({0: 5}), PartResult(0, 5, 7, 8, failed))
    desk.end(desk.begin({0: 2}, [NOON - 1, NOON]))
    told, reaches = await desk.told()
    assert told == {
        ("accepted", 0, MINUTE): [0, 4],
        ("unknown", 0, MINUTE): [1, 6],
        ("refused", 0, MINUTE): [2, 3],
        ("unknown", 0, MINUTE - 1): [5],
    }
    reports = [decode_report(record.value) for record in desk.appender.records(TELEMETRY)]
    assert not [one for report in reports for one in report.sets if one.outcome == "unknown"], "older readers refuse it"
    assert reaches == {0: 6}, "records of others may lie between the first and the last of a shared append"


async def test_never_reaches_beyond_what_is_not_told() -> None:
    """Broken: ingest dies, and the observer looks for its last events behind the place where they are."""
    desk = Desk()
    slow, quick = desk.begin({0: 2, 1: 1}), desk.begin({0: 2})
    desk.end(quick, PartResult(0, 2, 2, 3))
    told, reaches = await desk.told()
    assert told == {("accepted", 0, MINUTE): [2, 3]}
    assert reaches == {}
    desk.end(slow, PartResult(0, 2, 0, 1), PartResult(1, 1, 0, 0))
    assert (await desk.told())[1] == {0: 3, 1: 0}


@given(st.data())
def test_any_order_of_answers_tells_every_number_once(data: st.DataObject) -> None:
    """Broken: joining the numbers of many requests leaves one out, or says one of a minute to which it does not belong."""
    desk = Desk()
    sizes = data.draw(
        st.lists(st.tuples(st.integers(1, 4), st.integers(-3, 1), st.booleans()), min_size=1, max_size=12)
    )
    requests = [(desk.begin({0: count}, [NOON + late * M] * count), late, fails) for count, late, fails in sizes]
    expected: dict[tuple[str, int, int | None], list[int]] = {}
    for request, late, fails in requests:
        first = request.numbers[0].first
        minute = MINUTE + late if -2 <= late <= 0 else MINUTE
        key = ("unknown" if fails else "accepted", 0, minute)
        expected.setdefault(key, []).extend(range(first, first + len(request.times)))

    async def answer() -> None:
        for index, (request, _, fails) in enumerate(data.draw(st.permutations(requests))):
            first, count = request.numbers[0].first, len(request.times)
            desk.end(request, *(() if fails else (PartResult(0, count, first, first + count - 1),)))
            if index % 3 == 0:
                await desk.told()
        told, _ = await desk.told()
        assert told == expected

    asyncio.run(answer())


def test_an_incarnation_ends_before_its_numbers_are_too_large() -> None:
    """Broken: the ledger cannot hold the numbers of a process that runs for years."""
    origins = Origins(limit=10)
    first, second, third = origins.reserve(0, 6), origins.reserve(1, 6), origins.reserve(0, 5)
    assert (first.first, second.first, third.first) == (0, 0, 0)
    assert first.incarnation == second.incarnation != third.incarnation
    assert third.prefix == f"{third.incarnation}:0:".encode()
    assert origins.reserve(0, 5).first == 5


async def test_a_request_is_told_as_it_was_answered() -> None:
    """Broken: what was acknowledged is not in the ledger, or what was refused is."""
    async with running() as service:
        service.appender.create(TELEMETRY, 1)
        intake = service.intakes["orders"]
        async with Producer(service.appender) as producer:
            reporter = Reporter(producer, "i", "ingest", "orders")
            intake.ledger = ledger = StreamLedger(reporter)
            body = b'[{"id":1,"customer":{"id":"x"}},{"id":2,"customer":{"id":"y"}},{"id":3},{"id":[]}]'
            assert (await service.post(body, "orders")).status == 207
            service.appender.errors += [OutcomeUnknown("slow")] * 50
            assert (await service.post(b'{"id":4}', "orders")).status == 503
            service.appender.errors.clear()
            await ledger.report()
        reports = [decode_report(record.value) for record in service.appender.records(TELEMETRY)]
        sets = [one for report in reports for one in (*report.sets, *report.in_doubt)]
        stored = {record.header("penstock_origin") for record in service.stored("orders")}
        accepted = {
            f"{one.incarnation}:{one.partition}:{number}".encode()
            for one in sets
            if one.outcome == "accepted"
            for number in unpack_numbers(one.numbers)
        }
        assert accepted == stored
        assert len(stored) == 3
        assert sum(len(unpack_numbers(one.numbers)) for one in sets if one.outcome == "unknown") == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Overloaded("full"), "refused"),
        (BrokerClosed("stopping"), "refused"),
        (UnknownTopic("orders"), "refused"),
        (BrokerError("not authorized"), "refused"),
        (OutcomeUnknown("slow"), "unknown"),
        (RuntimeError("a fault of ours"), "unknown"),
    ],
)
async def test_the_ledger_and_the_client_are_told_the_same(error: Exception, outcome: str) -> None:
    """Broken: the client is told that its event was not stored, and the ledger says that it may be; or the reverse."""
    kind, _ = explain(error)
    assert (kind is problems.OUTCOME_UNKNOWN) == (outcome == "unknown")
    desk = Desk()
    desk.end(desk.begin({0: 1}), PartResult(0, 1, -1, -1, ((0, error),)))
    assert (await desk.told())[0] == {(outcome, 0, MINUTE): [0]}


async def test_an_overloaded_request_is_refused_for_sure() -> None:
    """Broken: while the queue to the broker is full the ledger counts every event as perhaps stored, though none was queued."""
    async with running(max_pending=1000) as service:
        service.appender.create(TELEMETRY, 1)
        intake = service.intakes["plain"]
        async with Producer(service.appender) as producer:
            intake.ledger = ledger = StreamLedger(Reporter(producer, "i", "ingest", "plain"))
            service.appender.gate.clear()
            first = asyncio.create_task(service.post(b'{"n":"' + b"x" * 900 + b'"}'))
            while not service.appender.waiting:
                await asyncio.sleep(0.01)
            assert (await service.post(b'{"n":"' + b"y" * 900 + b'"}')).status == 503
            service.appender.gate.set()
            assert (await first).status == 200
            await ledger.report()
        reports = [decode_report(record.value) for record in service.appender.records(TELEMETRY)]
        sets = [one for report in reports for one in (*report.sets, *report.in_doubt)]
    # each in a set of its own; of two minutes when one ends in between
    assert sorted((one.outcome, len(unpack_numbers(one.numbers))) for one in sets) == [("accepted", 1), ("refused", 1)]


async def test_events_without_the_mark_of_their_keys_are_refused_for_sure() -> None:
    """Broken: nobody knows whether the mark was stored, and the ledger says so of the events, which were never sent."""
    async with running() as service:
        service.appender.create(TELEMETRY, 1)
        service.appender.create(CONTROL, 1)
        intake = service.intakes["orders"]
        async with Producer(service.appender) as producer:
            intake.ledger = ledger = StreamLedger(Reporter(producer, "i", "ingest", "orders"))
            service.appender.errors += [OutcomeUnknown("slow")] * 50
            reply = await service.post(b'{"id":1,"customer":{"id":"x"}}', "orders")
            assert (reply.status, reply.problem) == (503, "broker-unavailable")
            service.appender.errors.clear()
            await ledger.report()
        reports = [decode_report(record.value) for record in service.appender.records(TELEMETRY)]
        sets = [one for report in reports for one in (*report.sets, *report.in_doubt)]
    assert [(one.outcome, list(unpack_numbers(one.numbers))) for one in sets] == [("refused", [0])]
    assert service.stored("orders") == []


async def test_a_request_that_nobody_waits_for_is_told() -> None:
    """Broken: a cancelled request leaves a gap in the numbers, and nothing behind it is ever reached."""
    async with running() as service:
        service.appender.create(TELEMETRY, 1)
        intake = service.intakes["plain"]
        async with Producer(service.appender) as producer:
            reporter = Reporter(producer, "i", "ingest", "plain")
            intake.ledger = ledger = StreamLedger(reporter)
            service.appender.gate.clear()
            posting = asyncio.create_task(service.post(b"{}"))
            while not service.appender.waiting:
                await asyncio.sleep(0.01)
            posting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await posting
            service.appender.gate.set()
            sets: list[OriginSet] = []
            async with asyncio.timeout(600):
                while not sets:
                    await asyncio.sleep(0.01)
                    await ledger.report()
                    told = [decode_report(record.value) for record in service.appender.records(TELEMETRY)]
                    sets = [one for report in told for one in (*report.sets, *report.in_doubt)]
        assert [list(unpack_numbers(one.numbers)) for one in sets] == [[0]]
