"""The bad records of a query in the plan, over all orders of its crashes. Without Spark."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from spark.batch_report import BatchReport
from spark.brokers.contract import TooMuch
from spark.jobs.dead_letters import _collect
from spark.jobs.open_batches import REJECTED_FILE, read_up_to
from spark.jobs.replay import BadRecords
from spark.records import OffsetRange, Offsets, cut_evenly

PLACE, OTHER = ("s", 0), ("s", 1)
"""A batch that ends at n in the one ends at n // 3 in the other."""


class Crash(Exception):
    """The process ends here."""


class Disk:
    """A checkpoint's folder: batch n ends at `ends[n]`, those before `oldest` are removed. former: of the second query of 0.1."""

    def __init__(self, former: int | None = None) -> None:
        self.ends: list[int] = []
        self.oldest = 0
        self.notes: dict[str, Any] = {}
        self.former = former

    def newest(self, folder: str) -> int | None:
        return len(self.ends) - 1 if self.ends else None

    def has_batch(self, folder: str, batch: int) -> bool:
        return batch >= self.oldest

    def offsets(self, batch: int | None, parse: object) -> Offsets:
        if batch is None or batch < 0:
            return {}
        assert batch >= self.oldest, "the file of this batch is gone"
        return {PLACE: self.ends[batch], OTHER: self.ends[batch] // 3}

    def committed_offsets(self, parse: object) -> Offsets:
        return {} if self.former is None else {PLACE: self.former, OTHER: self.former // 3}

    def beside(self, name: str) -> "Disk":
        return self

    def read_note(self, name: str, kind: object) -> Any:
        return self.notes.get(name)

    def write_note(self, name: str, value: object) -> None:
        self.notes[name] = value


Bad = tuple[int, int]
"""A bad record: its partition and offset."""


class Plan:
    """A query that finds these records bad. `crash`: called before and after dead letters are written."""

    def __init__(self, disk: Disk, bad: set[Bad]) -> None:
        self.disk, self.bad = disk, bad
        self.too_large = 1 << 30
        """So many bad records are more than Spark collects."""
        self.held = 0
        """The most at once."""
        self.written: Counter[tuple[Bad, str, int]] = Counter()
        """By record, name and batch."""
        self.crash: Callable[[], None] = lambda: None
        self.query: Any = SimpleNamespace(
            pipe="p",
            writer="w",
            checkpoint=disk,
            session=None,
            ledger=False,
            prepared=SimpleNamespace(transform=SimpleNamespace(max_events=7), columns={}),
            watchdog=SimpleNamespace(watching=lambda *_: nullcontext()),
            broker=SimpleNamespace(parse_offsets=None, split_ranges=cut_evenly, read_ranges=lambda _, part: part),
            ranges_between=self._between,
            report=lambda _: None,
        )

    def _between(self, begin: Offsets, end: Offsets) -> list[OffsetRange]:
        ranges = [OffsetRange(*place, begin.get(place, 0), until) for place, until in end.items()]
        return [part for part in ranges if part.start < part.end]

    def reject(self, prepared: object, ranges: list[OffsetRange]) -> list[Bad]:
        places = [(part.partition, offset) for part in ranges for offset in range(part.start, part.end)]
        found = [place for place in places if place in self.bad]
        if len(found) >= self.too_large:
            raise TooMuch("so many bytes") if len(found) % 2 else RuntimeError("larger than spark.driver.maxResultSize")
        self.held = max(self.held, len(found))
        return found

    def write(
        self, query: object, found: list[Bad], name: str, batch: int, report: BatchReport, *, counted: bool
    ) -> dict[Any, Any]:
        self.crash()
        self.written.update((place, name, batch) for place in found)
        self.crash()
        return {}

    @property
    def offsets(self) -> set[int]:
        """Of the bad records of PLACE that were written."""
        return {offset for (partition, offset), _, _ in self.written if not partition}


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    made = Plan(Disk(), set())
    monkeypatch.setattr("spark.jobs.replay.reject_bad_records", made.reject)
    monkeypatch.setattr("spark.jobs.dead_letters.write_dead_letters", made.write)
    return made


@pytest.mark.parametrize("seed", range(30))
def test_each_bad_record_is_written_under_one_name(plan: Plan, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a crash loses a dead letter of a query in the plan, or a log gets it twice, under two names; or batches
    without bad records are read again. Or a batch with many, or large, bad records takes all memory, or is never done."""
    dice, disk, total = random.Random(seed), plan.disk, 0
    largest = dice.choice([7, 12, 1000])
    monkeypatch.setattr("spark.jobs.dead_letters.PIECE", largest)
    monkeypatch.setattr("spark.jobs.replay.PIECE", largest)
    plan.bad = {(dice.randrange(2), dice.randrange(400)) for _ in range(dice.choice([20, 500]))}
    plan.too_large = dice.choice([3, 1 << 30])

    def crash() -> None:
        if dice.random() < 0.1:
            raise Crash

    plan.crash = crash
    running: BadRecords | None = None
    while total < 400 or running is None:
        try:
            if running is None:
                running = BadRecords(plan.query)
                continue
            for _ in range(dice.randint(1, 3)):  # Spark may be batches ahead of us
                disk.ends.append(total := total + dice.randint(1, 30))
            newest = len(disk.ends) - 1
            before = disk.ends[-2] if newest else 0
            added = {(0, n) for n in range(before, total)} | {(1, n) for n in range(before // 3, total // 3)}
            running.settle(newest, bad=bool(plan.bad & added))
            if dice.random() < 0.5:
                running.save()
        except Crash:
            running = None
    names = Counter(place for place, _, _ in plan.written)
    assert names.keys() == {(part, n) for part, n in plan.bad if n < (total // 3 if part else total)}
    assert set(names.values()) == {1}
    assert plan.held <= min(largest, plan.too_large)
    running.save()
    assert read_up_to(disk, REJECTED_FILE) == {PLACE: total, OTHER: total // 3}  # type: ignore[arg-type]
    plan.written.clear()
    running.settle(len(disk.ends) - 1, bad=True)
    assert not plan.written


def test_rejected_records_of_too_many_bytes_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, some thousand large bad records take the memory of the driver."""
    table = pa.table({name: pa.array([b"x" * 500]) for name in ("key", "value")})
    frame: Any = SimpleNamespace(toArrow=lambda: table)
    assert _collect(frame) is table
    monkeypatch.setattr("spark.jobs.dead_letters.PIECE_BYTES", 1000)
    with pytest.raises(TooMuch):
        _collect(frame)


@pytest.mark.parametrize("former", [None, 12, 40, 55])
def test_a_checkpoint_of_earlier_versions(plan: Plan, former: int | None) -> None:
    """If this fails, an upgrade loses bad records that the former second query had not read, or writes again what it wrote."""
    plan.disk.ends, plan.disk.oldest, plan.disk.former = [10, 20, 30, 40], 3, former
    bad = {5, 15, 25, 35, 45, 52, 60}
    plan.bad = {(0, offset) for offset in bad}
    found = BadRecords(plan.query)
    assert plan.offsets == {offset for offset in bad if (former or 0) <= offset < 40}
    plan.disk.ends += [50, 70]
    found.settle(5, bad=True)
    assert plan.offsets == {offset for offset in bad if (former or 0) <= offset}
    assert all(times == 1 for times in plan.written.values())
