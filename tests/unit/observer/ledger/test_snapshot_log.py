"""Snapshots in their topic: what is stored comes back, a crash leaves the one before, and what is written is bounded."""

import random
import tracemalloc
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from services.core import metrics
from services.core.broker.contract import Appended, PartitionRange, Start
from services.core.broker.errors import RecordTooLarge
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record
from services.core.ledger.report import SNAPSHOTS
from services.observer import snapshot_log
from services.observer.alarms import Alarm
from services.observer.ledger.table import Table
from services.observer.planned import PlannedWindows, Window
from services.observer.snapshot import FollowerState, Part, make_parts
from services.observer.snapshot_log import Replaced, SnapshotLog
from services.observer.snapshot_v1 import restore_v1
from tests.support.memory_appender import MemoryAppender
from tests.unit.observer.ledger.history import FLOW, STEP_MS, History
from tests.unit.observer.ledger.snapshots import dump_v1, records_v1
from tests.unit.observer.ledger.stories import START_MS

HOUR_MS = 3_600_000
Parts = dict[str, bytes]


class FailingAppender(MemoryAppender):
    """fail_at: the number of the append that fails."""

    fail_at = -1

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        if self.appends == self.fail_at:
            self.errors.append(RecordTooLarge("refused"))
        return await super().append(topic, partition, records, timeout=timeout)


class Topic:
    """The topic of the snapshots in memory. As `contract.Reader`, as far as it is read."""

    def __init__(self, records: list[Record] | None = None, start: int = 0) -> None:
        self.appender, self.start, self.now = FailingAppender(), start, START_MS
        self.appender.create(SNAPSHOTS, 1)
        self.records = self.appender.topics[SNAPSHOTS][0]
        self.records += records or []

    async def describe(self, _topic: str) -> dict[int, PartitionRange]:
        return {0: PartitionRange(self.start, len(self.records))}

    async def offsets_at(self, _topic: str, start: Start) -> dict[int, int]:
        assert isinstance(start, datetime)
        return {0: max(self.start, len(self.records) - 30)}

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        found = self.records[offset : offset + min(max_records, 100)]
        return Batch(topic, partition, range(offset, offset + len(found)), found) if found else None

    def log(self, producer: Producer) -> SnapshotLog:
        return SnapshotLog(self, producer, lambda: self.now)  # type: ignore[arg-type]

    async def load(self) -> Parts | None:
        """As an observer that starts now."""
        found = await self.log(Producer(self.appender)).load(lambda: Table(FLOW))
        return None if found is None else parts_of(*found)

    def bytes_from(self, offset: int) -> int:
        return sum(len(record.value or b"") for record in self.records[offset:])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many records, and parts that are larger than one."""
    monkeypatch.setattr(snapshot_log, "RECORD_BYTES", 400)
    monkeypatch.setattr(snapshot_log, "PIECE_BYTES", 150)


@pytest.fixture
def topic() -> Topic:
    return Topic()


@pytest.fixture
async def producer(topic: Topic) -> AsyncIterator[Producer]:
    async with Producer(topic.appender) as opened:
        yield opened


class Ledger:
    """A table that lives through a history."""

    def __init__(self, seed: int) -> None:
        self.table, self.now = Table(FLOW), START_MS
        self._steps = History(seed).steps()

    def go_on(self, steps: int) -> bool:
        """False: the history is over."""
        for _ in range(steps):
            if (step := next(self._steps, None)) is None:
                return False
            self.now, reports = step
            for report in reports:
                self.table.apply(report, max(report.at_ms, self.now))
            self.table.liveness.listened(self.now - STEP_MS, self.now)
            self.table.tick(self.now + 1000)
        return True

    def state(self) -> FollowerState:
        window = Window("deploy", None, START_MS, self.now, "ci")
        return FollowerState(PlannedWindows((window,)), self.now, (Alarm("a", {"type": "x"}),), self.now)

    def parts(self) -> Parts:
        return parts_of(self.table, self.state())


def parts_of(table: Table, state: FollowerState) -> Parts:
    return dict(make_parts(table, state))


@pytest.mark.parametrize("seed", range(3))
async def test_whatever_was_stored_comes_back(seed: int, topic: Topic, producer: Producer) -> None:
    """Broken: after a restart of the observer a set differs from what it was: a false loss, or a loss that nobody sees."""
    rng, ledger, log = random.Random(seed), Ledger(seed), topic.log(producer)
    for steps in rng.sample((1, 7, 30, 90, 400), 5):
        ledger.go_on(steps)
        topic.now = ledger.now
        await log.store(ledger.parts().items)
        assert await topic.load() == ledger.parts()
        if rng.random() < 0.5:  # the next observer goes on with what it has read
            log = topic.log(producer)
            again = await log.load(lambda: Table(FLOW))
            assert again is not None
            ledger.table = again[0]


async def test_after_a_crash_at_any_record_the_state_is_the_old_or_the_new_one(
    topic: Topic, producer: Producer
) -> None:
    """Broken: an observer that is killed while it stores a snapshot begins again with half of it."""
    ledger, log = Ledger(3), topic.log(producer)
    states: list[tuple[int, Parts]] = []
    for _ in range(3):
        ledger.go_on(25)
        await log.store(ledger.parts().items)
        states.append((len(topic.records), ledger.parts()))
    assert len(topic.records) > 30
    for cut in range(len(topic.records) + 1):
        before = [parts for length, parts in states if length <= cut]
        assert await Topic(topic.records[:cut]).load() == (before[-1] if before else None), cut


async def test_a_snapshot_of_a_newer_version_is_passed_over(
    topic: Topic, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: after the way back the observer takes a later form for its own, or begins with nothing and says nothing."""
    ledger, counted = Ledger(2), metrics.NOT_UNDERSTOOD.labels("snapshot", "version")._value
    ledger.go_on(5)
    await topic.log(producer).store(ledger.parts().items)
    known, before = ledger.parts(), counted.get()
    ledger.go_on(5)
    with monkeypatch.context() as later:
        later.setattr(snapshot_log, "VERSION", snapshot_log.VERSION + 1)
        await topic.log(producer).store(ledger.parts().items)
    assert await topic.load() == known
    once = counted.get() - before
    assert once > 0
    head = {"penstock_snapshot": b"3", "kind": b"manifest", "name": b"n", "number": b"0", "of": b"1"}
    topic.records.append(Record(b"ledger", b"of another form", topic.now, tuple(head.items())))
    before = counted.get()
    assert await topic.load() == known
    assert counted.get() - before > once


async def test_only_what_changed_is_written(topic: Topic, producer: Producer) -> None:
    """Broken: the observer writes everything that waits, every five minutes."""
    ledger, log = Ledger(1), topic.log(producer)
    ledger.go_on(420)
    first = await log.store(ledger.parts().items)
    assert await log.store(ledger.parts().items) < 0.3 * first, "the manifest"
    ledger.go_on(1)
    assert await log.store(ledger.parts().items) < 0.7 * first
    again = topic.log(producer)
    await again.load(lambda: Table(FLOW))
    assert await again.store(ledger.parts().items) < 0.3 * first, "a restart writes nothing again"


async def test_parts_that_never_change_outlive_the_topics_retention(
    topic: Topic, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: retention removes what waits for days, or the topic is read from a week ago at each start."""
    monkeypatch.setattr(snapshot_log, "SPARE_BYTES", 20_000)
    monkeypatch.setattr(snapshot_log, "REWRITE_SHARE", 6)
    log, lasting = topic.log(producer), {f"part {n}": random.Random(n).randbytes(900) for n in range(100)}
    for hour in range(0, 80, 1):
        topic.now = START_MS + hour * HOUR_MS
        parts = {**lasting, "position": b"%d" % hour, "changing": random.Random(hour).randbytes(20_000)}
        written = await log.store(parts.items)
        assert written < 20_000 + 35_000 or hour == 0, "a share of the old ones at a time"
        kept = [record.timestamp > topic.now - 24 * HOUR_MS for record in topic.records]
        topic.start = kept.index(True)
        (oldest,) = {min(stored.offset for stored in log._stored.values())}
        assert topic.start <= oldest
        assert topic.bytes_from(oldest) < 3 * 120_000 + 60_000


async def test_after_a_failure_at_any_record_the_next_snapshot_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the broker is away in the middle of a part; all later snapshots name it, and no start can read any of them."""
    monkeypatch.setattr(snapshot_log, "REWRITE_SHARE", 1)
    ledger, failed = Ledger(2), 0
    ledger.go_on(30)

    def parts(offset: int, seed: int) -> Parts:
        alarm = Alarm("a", {"large": random.Random(seed).randbytes(2000).hex()})
        return parts_of(ledger.table, FollowerState(PlannedWindows(), offset, (alarm,)))

    for second in (parts(2, seed=1), parts(2, seed=2)):  # the large part is only written again; it is new
        for fail_at in range(60):
            topic = Topic()
            async with Producer(topic.appender) as producer:
                log = topic.log(producer)
                await log.store(parts(1, seed=1).items)
                topic.now += 7 * HOUR_MS
                topic.appender.fail_at = topic.appender.appends + fail_at
                try:
                    await log.store(second.items)
                except RecordTooLarge:
                    failed += 1
                await log.store(second.items)
                assert await topic.load() == second, fail_at
    assert failed > 20


async def test_a_damaged_snapshot_is_replaced_by_the_one_before(topic: Topic, producer: Producer) -> None:
    ledger, log = Ledger(2), topic.log(producer)
    ledger.go_on(60)
    await log.store(ledger.parts().items)
    before, at = ledger.parts(), len(topic.records)
    ledger.go_on(60)
    await log.store(ledger.parts().items)
    await log.store(ledger.parts().items)
    topic.records[at] = Record(b"x", b"no snapshot", 0)
    assert await topic.load() == before


async def test_a_start_holds_one_list_of_parts(
    topic: Topic, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a start needs memory for the lists of parts of all snapshots in the topic: tens of megabytes."""
    monkeypatch.setattr(snapshot_log, "RECORD_BYTES", 1 << 19)
    parts = {f"part {number}": msgspec.msgpack.encode(Part()) for number in range(2000)}
    log, lists = topic.log(producer), 0
    for _ in range(120):
        at = len(topic.records)
        await log.store(parts.items)
        lists += sum(len(record.value or b"") for record in topic.records[at:] if record.header("kind") == b"manifest")
    tracemalloc.start()
    try:
        assert await topic.load() is not None
        assert tracemalloc.get_traced_memory()[1] < lists / 2
    finally:
        tracemalloc.stop()


async def test_lists_of_two_observers_between_each_other(topic: Topic, producer: Producer) -> None:
    """Broken: records of another observer between those of a list of parts hide it, or mix both."""
    ledger, one, other = Ledger(2), topic.log(producer), topic.log(producer)
    lists: list[list[Record]] = []
    for log in (one, other):
        ledger.go_on(60)
        at = len(topic.records)
        await log.store(ledger.parts().items)
        lists.append([record for record in topic.records[at:] if record.header("kind") == b"manifest"])
        topic.records[:] = [record for record in topic.records if record.header("kind") != b"manifest"]
        if log is one:
            expected = ledger.parts()
    assert len(lists[0]) > 2
    assert len(lists[1]) > 2
    topic.records += [lists[1][0], lists[0][0], lists[1][1], *lists[0][1:], *lists[1][2:]]
    assert await topic.load() == expected, "the other one lost its first records, as ever, when this one was complete"


async def test_a_list_that_is_removed_while_it_is_chosen(
    topic: Topic, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a start fails, or begins without a snapshot, when retention removes the list of parts that it has just found."""
    ledger, log = Ledger(2), topic.log(producer)
    ledger.go_on(60)
    await log.store(ledger.parts().items)
    before = ledger.parts()
    ledger.go_on(60)
    await log.store(ledger.parts().items)
    find = SnapshotLog._find

    async def find_and_lose(self: SnapshotLog, start: int | None) -> list[snapshot_log._Candidate]:
        found = await find(self, start)
        topic.records[-1] = Record(b"x", b"gone", 0)
        return found

    monkeypatch.setattr(SnapshotLog, "_find", find_and_lose)
    assert await topic.load() == before


async def test_a_topic_that_was_created_again_gets_all_parts(topic: Topic, producer: Producer) -> None:
    """Broken: the snapshots name parts that are gone, and the next start knows nothing."""
    ledger, log = Ledger(2), topic.log(producer)
    ledger.go_on(100)
    await log.store(ledger.parts().items)
    topic.records.clear()
    await log.store(ledger.parts().items)
    assert await topic.load() == ledger.parts()


async def test_the_snapshots_of_a_speaker_that_was_frozen_do_not_count(topic: Topic, producer: Producer) -> None:
    """Broken: an observer that was replaced wakes up, stores its old state, and the next start begins with that."""
    ledger, log, other = Ledger(2), topic.log(producer), topic.log(producer)
    log.begin_term()
    ledger.go_on(50)
    old = ledger.parts()
    await log.store(old.items)
    await other.load(lambda: Table(FLOW))
    other.begin_term()
    ledger.go_on(50)
    await other.store(ledger.parts().items)
    length = len(topic.records)
    with pytest.raises(Replaced):
        await log.store(old.items)
    assert len(topic.records) == length
    log._last = length - 1  # it looked just before the other one stored
    await log.store(old.items)
    assert await topic.load() == ledger.parts()


def without_late_results(parts: Mapping[str, bytes]) -> dict[str, bytes]:
    """Version 0.1 does not know that results come late."""
    return {name: part for name, part in parts.items() if name.split()[0] not in ("awaited", "fed_ms")}


async def test_versions(topic: Topic, producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an update or a downgrade of the observer loses what waits; or an observer guesses what a newer one wrote."""
    ledger, log = Ledger(4), topic.log(producer)
    ledger.go_on(60)
    topic.records += records_v1(dump_v1(ledger.table, ledger.state()), "one")
    assert await topic.load() == without_late_results(ledger.parts()), "of before the update"
    await log.load(lambda: Table(FLOW))
    log.begin_term()
    ledger.go_on(10)
    await log.store(ledger.parts().items)
    assert await topic.load() == ledger.parts()
    ledger.go_on(10)
    topic.records += records_v1(dump_v1(ledger.table, ledger.state()), "two")
    assert await topic.load() == without_late_results(ledger.parts()), "of an observer that was downgraded"
    log = topic.log(producer)
    await log.load(lambda: Table(FLOW))
    before = without_late_results(ledger.parts())
    ledger.go_on(10)
    monkeypatch.setattr(snapshot_log, "VERSION", 3)
    monkeypatch.setattr(snapshot_log, "_VERSION", b"3")
    await log.store(ledger.parts().items)
    monkeypatch.undo()
    assert await topic.load() == before, "a newer one is left alone"


def test_a_snapshot_that_penstock_0_1_wrote_is_read() -> None:
    """Broken: the update from the last release loses the table. The file is its own, of the history with seed 5."""
    ledger, table = Ledger(5), Table(FLOW)
    ledger.go_on(521)
    state = restore_v1(Path(__file__).with_name("snapshot_v1.bin").read_bytes(), table)
    assert (state.offset, [alarm.id for alarm in state.untold]) == (7, ["loss-x"])
    assert [window.by for window in state.planned.all()] == ["ci"]
    for pipe in FLOW.pipes:
        minutes = ledger.table.minutes(pipe)
        assert table.minutes(pipe) == minutes
        for minute in minutes:
            assert table.row(pipe, minute, ledger.now) == ledger.table.row(pipe, minute, ledger.now)
