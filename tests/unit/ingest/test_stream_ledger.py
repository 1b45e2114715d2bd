"""What ingest tells: every number once, for its minute, and never further than is told."""

import asyncio

import pytest

from services.core.broker.errors import OutcomeUnknown
from services.core.broker.producer import PartResult, Producer, SendResult
from services.core.ledger.report import TELEMETRY, decode_report, unpack_numbers
from services.core.ledger.reporter import Reporter
from services.ingest.records import Numbers, Origins
from services.ingest.stream_ledger import Sending, StreamLedger
from tests.support.memory_driver import MemoryDriver
from tests.unit.ingest.service import running

M = 60_000
NOON = 29_000_000 * M
MINUTE = NOON // M


class Desk:
    """A ledger of incarnation `a`, and what it told."""

    def __init__(self) -> None:
        self.driver = MemoryDriver()
        self.driver.create(TELEMETRY, 1)
        self.reporter = Reporter(Producer(self.driver), "i", "ingest", "orders")
        self.ledger = StreamLedger(self.reporter)
        self._next: dict[int, int] = {}

    def begin(self, counts: dict[int, int], times: list[int] | None = None, arrival: int = NOON) -> Sending:
        """A request with so many events per partition."""
        numbers, rows, row = {}, {}, 0
        for partition, count in counts.items():
            first = self._next.get(partition, 0)
            numbers[partition] = Numbers("a", first, b"")
            rows[partition] = range(row, row + count)
            self._next[partition] = first + count
            row += count
        return self.ledger.begin(numbers, rows, times or [arrival] * row, arrival)

    def end(self, sending: Sending, *parts: PartResult) -> None:
        self.ledger.end(sending, SendResult(parts))

    def told(self) -> dict[tuple[str, int, int | None], list[int]]:
        """Numbers by outcome, partition and minute that wait to be told."""
        return {
            (one.outcome, one.partition, one.minute): sorted(unpack_numbers(one.numbers))
            for one in self.reporter.sets.pack()
        }

    def reaches(self) -> dict[int, int]:
        return {partition: offset for (_, partition), offset in self.reporter._reaches.items()}


def test_each_number_in_its_minute() -> None:
    """Broken: a minute's loss is computed from events of another minute."""
    desk = Desk()
    one = desk.begin({0: 2, 1: 1})
    desk.end(one, PartResult(1, 1, 0, 0), PartResult(0, 2, 0, 1))
    two = desk.begin({0: 3}, [NOON - 1, NOON, 5])
    desk.end(two, PartResult(0, 3, 2, 4))
    assert desk.told() == {
        ("accepted", 0, MINUTE): [0, 1, 3, 4],
        ("accepted", 1, MINUTE): [0],
        ("accepted", 0, MINUTE - 1): [2],
    }
    assert desk.reaches() == {0: 4, 1: 0}


def test_refused_is_what_was_numbered_and_not_stored() -> None:
    """Broken: a gap in the numbers that nobody explains, which looks like a loss."""
    desk = Desk()
    error = OutcomeUnknown("slow")
    desk.end(desk.begin({0: 3}), PartResult(0, 3, 7, 8, ((1, error),)))
    desk.ledger.end(desk.begin({0: 2}, [NOON - 1, NOON]), None)
    assert desk.told() == {
        ("accepted", 0, MINUTE): [0, 2],
        ("refused", 0, MINUTE): [1, 4],
        ("refused", 0, MINUTE - 1): [3],
    }
    assert desk.reaches() == {0: 6}, "records of others may lie between the first and the last of a shared append"


def test_never_reaches_beyond_what_is_not_told() -> None:
    """Broken: ingest dies, and the observer looks for its last events behind the place where they are."""
    desk = Desk()
    slow, quick = desk.begin({0: 2, 1: 1}), desk.begin({0: 2})
    desk.end(quick, PartResult(0, 2, 2, 3))
    assert desk.reaches() == {}
    desk.end(slow, PartResult(0, 2, 0, 1), PartResult(1, 1, 0, 0))
    assert desk.reaches() == {0: 3, 1: 0}
    assert not desk.ledger._under_way


def test_an_incarnation_ends_before_its_numbers_are_too_large() -> None:
    """Broken: the ledger cannot hold the numbers of a process that runs for years."""
    origins = Origins(limit=10)
    first, second, third = origins.take(0, 6), origins.take(1, 6), origins.take(0, 5)
    assert (first.first, second.first, third.first) == (0, 0, 0)
    assert first.incarnation == second.incarnation != third.incarnation
    assert third.prefix == f"{third.incarnation}:0:".encode()
    assert origins.take(0, 5).first == 5


async def test_a_request_is_told_as_it_was_answered() -> None:
    """Broken: what was acknowledged is not in the ledger, or what was refused is."""
    async with running() as service:
        service.driver.create(TELEMETRY, 1)
        intake = service.intakes["orders"]
        async with Producer(service.driver) as producer:
            reporter = Reporter(producer, "i", "ingest", "orders")
            intake.ledger = StreamLedger(reporter)
            body = b'[{"id":1,"customer":{"id":"x"}},{"id":2,"customer":{"id":"y"}},{"id":3},{"id":[]}]'
            assert (await service.post(body, "orders")).status == 207
            service.driver.errors += [OutcomeUnknown("slow")] * 50
            assert (await service.post(b'{"id":4}', "orders")).status == 503
            service.driver.errors.clear()
            await reporter.report()
        sets = [one for record in service.driver.records(TELEMETRY) for one in decode_report(record.value).sets]
        stored = {record.header("penstock_origin") for record in service.stored("orders")}
        accepted = {
            f"{one.incarnation}:{one.partition}:{number}".encode()
            for one in sets
            if one.outcome == "accepted"
            for number in unpack_numbers(one.numbers)
        }
        assert accepted == stored
        assert len(stored) == 3
        assert sum(len(unpack_numbers(one.numbers)) for one in sets if one.outcome == "refused") == 1


async def test_a_request_that_nobody_waits_for_is_refused() -> None:
    """Broken: a cancelled request stays under way for ever, and nothing behind it is ever reached."""
    async with running() as service:
        service.driver.create(TELEMETRY, 1)
        intake = service.intakes["plain"]
        async with Producer(service.driver) as producer:
            reporter = Reporter(producer, "i", "ingest", "plain")
            intake.ledger = ledger = StreamLedger(reporter)
            service.driver.gate.clear()
            posting = asyncio.create_task(service.post(b"{}"))
            while not service.driver.waiting:
                await asyncio.sleep(0.01)
            posting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await posting
            service.driver.gate.set()
            async with asyncio.timeout(30):
                while ledger._under_way:
                    await asyncio.sleep(0.01)
            assert sum(len(unpack_numbers(one.numbers)) for one in reporter.sets.pack()) == 1
