"""The bad records of a query in the plan, over all orders of its crashes. Without Spark."""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from spark.jobs.open_batches import REJECTED_FILE, read_up_to
from spark.jobs.replay import BadRecords
from spark.records import OffsetRange, Offsets
from spark.reports import BatchReport

PLACE = ("s", 0)


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
        return {PLACE: self.ends[batch]}

    def committed_offsets(self, parse: object) -> Offsets:
        return {} if self.former is None else {PLACE: self.former}

    def beside(self, name: str) -> "Disk":
        return self

    def read_note(self, name: str, kind: object) -> Any:
        return self.notes.get(name)

    def write_note(self, name: str, value: object) -> None:
        self.notes[name] = value


class Plan:
    """A query that finds each offset in `bad` bad. `crash`: called before and after dead letters are written."""

    def __init__(self, disk: Disk, bad: set[int]) -> None:
        self.disk, self.bad = disk, bad
        self.written: Counter[tuple[int, int]] = Counter()
        """By offset and batch."""
        self.crash: Callable[[], None] = lambda: None
        self.query: Any = SimpleNamespace(
            pipe="p",
            writer="w",
            checkpoint=disk,
            session=None,
            ledger=False,
            prepared=SimpleNamespace(transform=SimpleNamespace(max_events=7), columns={}),
            watchdog=SimpleNamespace(watching=lambda *_: nullcontext()),
            broker=SimpleNamespace(
                parse_offsets=None, split_ranges=lambda ranges, _: [ranges], read_ranges=lambda _, part: part
            ),
            ranges_between=self._between,
            report=lambda _: None,
        )

    def _between(self, begin: Offsets, end: Offsets) -> list[OffsetRange]:
        start = begin.get(PLACE, 0)
        return [OffsetRange(*PLACE, start, end[PLACE])] if start < end[PLACE] else []

    def reject(self, prepared: object, ranges: list[OffsetRange]) -> list[int]:
        return [offset for part in ranges for offset in range(part.start, part.end) if offset in self.bad]

    def write(self, query: object, found: list[int], name: str, batch: int, report: BatchReport) -> None:
        self.crash()
        self.written.update((offset, batch) for offset in found)
        self.crash()


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    made = Plan(Disk(), set())
    monkeypatch.setattr("spark.jobs.replay.reject_bad_records", made.reject)
    monkeypatch.setattr("spark.jobs.replay.write_dead_letters", made.write)
    return made


@pytest.mark.parametrize("seed", range(30))
def test_each_bad_record_is_written_under_one_name(plan: Plan, seed: int) -> None:
    """If this fails, a crash loses a dead letter of a query in the plan, or a log gets it twice, under two names; or batches
    without bad records are read again."""
    dice, disk, total = random.Random(seed), plan.disk, 0
    plan.bad = {dice.randrange(400) for _ in range(20)}

    def crash() -> None:
        if dice.random() < 0.3:
            raise Crash

    plan.crash = crash
    running: BadRecords | None = None
    reads = 0
    while total < 400 or running is None:
        try:
            if running is None:
                running = BadRecords(plan.query)
                continue
            for _ in range(dice.randint(1, 3)):  # Spark may be batches ahead of us
                disk.ends.append(total := total + dice.randint(1, 20))
            newest = len(disk.ends) - 1
            before = disk.ends[-2] if newest else 0
            bad = bool(plan.bad & set(range(before, total)))
            reads += bad
            running.settle(newest, bad=bad)
            if dice.random() < 0.5:
                running.save()
        except Crash:
            running = None
    names = Counter(offset for offset, _ in plan.written)
    assert names.keys() == {offset for offset in plan.bad if offset < total}
    assert set(names.values()) == {1}
    running.save()
    assert read_up_to(disk, REJECTED_FILE) == {PLACE: total}  # type: ignore[arg-type]
    plan.written.clear()
    running.settle(len(disk.ends) - 1, bad=True)
    assert not plan.written


@pytest.mark.parametrize("former", [None, 12, 40, 55])
def test_a_checkpoint_of_earlier_versions(plan: Plan, former: int | None) -> None:
    """If this fails, an upgrade loses bad records that the former second query had not read, or writes again what it wrote."""
    plan.disk.ends, plan.disk.oldest, plan.disk.former = [10, 20, 30, 40], 3, former
    plan.bad = {5, 15, 25, 35, 45, 52, 60}
    found = BadRecords(plan.query)
    assert {offset for offset, _ in plan.written} == {offset for offset in plan.bad if (former or 0) <= offset < 40}
    plan.disk.ends += [50, 70]
    found.settle(5, bad=True)
    assert {offset for offset, _ in plan.written} == {offset for offset in plan.bad if (former or 0) <= offset}
    assert all(times == 1 for times in plan.written.values())
