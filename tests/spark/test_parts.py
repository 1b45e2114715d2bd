"""A batch that is too much for one go, without Spark: which events are found, and that the rest is done once, in order."""

import random
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from spark.brokers.contract import TooMuch
from spark.jobs.attempts import (
    ATTEMPT_FILE,
    MAX_ENDED,
    TRIED_FILE,
    Attempts,
    PartName,
    PartRunner,
    forget_parts,
    hand_over_attempt,
)
from spark.jobs.culprits import FailureStreak, Part, PartRange, TransformBroken, within
from spark.jobs.replay import reject_process_killers
from spark.records import RecordOffset, offset_text

BATCH = 7


class Ended(ConnectionError):
    """The process is gone; what it would have raised."""


class Folder:
    """A checkpoint that holds one planned batch, and notes."""

    path = "checkpoints/pipe"

    def __init__(self) -> None:
        self.notes: dict[str, bytes] = {}
        self.done = False
        self.committed = BATCH

    def newest(self, folder: str) -> int:
        return self.committed if folder == "offsets" or self.done else BATCH - 1

    def read_note(self, name: str, kind: Any) -> Any:
        return msgspec.json.decode(self.notes[name], type=kind) if name in self.notes else None

    def write_note(self, name: str, value: object) -> None:
        self.notes[name] = msgspec.json.encode(value)


class Work:
    """Stores what it is given, unless that holds a killer, or too many. Outlives processes, as a broker does."""

    def __init__(self, count: int, killers: set[int] = frozenset(), most: int = 1 << 30, seed: int = 0) -> None:  # type: ignore[assignment]
        self.all = sorted(RecordOffset("s", n % 3, offset_text(n)) for n in range(count))
        self.killers, self.most, self.dice = killers, most, random.Random(seed)
        self.stored: list[int] = []
        self.last_epoch = -1
        self.dead: dict[int, str] = {}
        self.processes, self.away = 0, False
        self.whole: list[int] | None = None

    def list_records(self, part: Part) -> Sequence[RecordOffset]:
        bounds = {(topic, partition): (first, last) for topic, partition, first, last in part}
        return [
            place
            for place in self.all
            if not part
            or ((key := (place.topic, place.partition)) in bounds and bounds[key][0] <= place.offset <= bounds[key][1])
        ]

    def is_stored(self, name: PartName | None) -> bool:
        return self.whole is not None if name is None else self.last_epoch >= name.epoch

    def compute(self, part: Part, name: PartName | None) -> bool:
        if self.away:
            raise RuntimeError("the broker is away")
        numbers = [int(place.offset) for place in self.list_records(part)]
        if self.killers & set(numbers):
            raise Ended
        if len(numbers) > self.most:
            raise TooMuch("too many")
        if not self.is_stored(name):
            self.stored += numbers
            self.whole = numbers if name is None else None
            self.last_epoch = self.last_epoch if name is None else name.epoch
        if self.dice.random() < 0.1:  # killed by anybody, when it is stored and not noted
            raise Ended
        return bool(numbers)

    def passes(self, record: RecordOffset) -> bool:
        if int(record.offset) in self.killers:
            raise Ended
        return True

    def reject(self, record: RecordOffset, reason: str) -> None:
        self.dead[int(record.offset)] = reason

    def run(self, folder: Folder, *, most: int = 200) -> Attempts:
        """Processes, one after the other, until one ends the batch."""
        while self.processes < most:
            self.processes += 1
            attempts = Attempts("v")
            attempts.open(folder)  # type: ignore[arg-type]
            attempts.check()
            try:
                PartRunner(attempts, self, lambda: None).run(BATCH)
            except Ended:
                continue
            return attempts
        raise AssertionError("the batch is never done")


def attempt_of(folder: Folder) -> Any:
    return msgspec.json.decode(folder.notes[ATTEMPT_FILE])


@pytest.mark.parametrize("seed", range(60))
def test_killers_are_found_and_the_rest_is_done_once(seed: int) -> None:
    """If this fails, a batch that ends the process ends it for ever, or takes events with it, or writes some twice."""
    dice = random.Random(seed)
    count = dice.choice([2, 17, 300])
    killers = set(dice.sample(range(count), dice.randrange(min(3, count))))
    work = Work(count, killers, most=dice.choice([1, 50, 1000]), seed=seed)
    work.run(Folder())
    assert set(work.dead) == killers
    assert sorted(work.stored) == sorted(set(range(count)) - killers)
    for partition in range(3):
        mine = [number for number in work.stored if number % 3 == partition]
        assert mine == sorted(mine), "the order within a partition"


def test_one_killer_in_a_large_batch_costs_few_processes() -> None:
    """If this fails, other pipes are stopped again and again while one looks for its poison."""
    work = Work(20_000, {11_111})
    work.dice = random.Random()
    work.dice.random = lambda: 1.0  # type: ignore[method-assign]
    work.run(Folder())
    assert work.dead == {11_111: "it ended the process 2 times: it takes all memory, or never ends"}
    assert work.processes <= 2 * MAX_ENDED + 4


def test_a_transform_that_ends_the_process_on_everything_rejects_nothing() -> None:
    """If this fails, a broken transform moves a whole stream into the dead letters, a process an event; or it ends the
    process, and the other pipes with it, for ever."""
    work, folder = Work(40, set(range(40))), Folder()
    with pytest.raises(TransformBroken, match="and so does another event"):
        work.run(folder)
    assert not work.dead
    assert not work.stored
    processes = work.processes
    attempts = Attempts("v")
    attempts.open(folder)  # type: ignore[arg-type]  # the operator starts the service again: it is tried again
    attempts.check()
    with pytest.raises(TransformBroken):
        work.run(folder)
    assert work.processes <= processes + 3


def test_a_transform_that_is_too_much_on_everything_rejects_nothing() -> None:
    """If this fails, a pipe on Kafka whose events all have too many rows repeats the same search for ever, without a reason."""
    work = Work(40)
    work.most, work.dice.random = 0, lambda: 1.0  # type: ignore[method-assign]

    def passes(_record: RecordOffset) -> bool:
        raise TooMuch("too many")

    work.passes = passes  # type: ignore[method-assign,assignment]
    attempts = Attempts("v")
    attempts.open(Folder())  # type: ignore[arg-type]
    with pytest.raises(TransformBroken, match="too"):
        PartRunner(attempts, work, lambda: None).run(BATCH)
    assert not work.dead


def test_a_mended_transform_goes_on_with_what_is_left() -> None:
    """If this fails, what an earlier definition of the pipe did is held against the present one, or what it stored is stored
    again."""
    work, folder = Work(40, {30}), Folder()
    work.dice.random = lambda: 1.0  # type: ignore[method-assign]
    for _ in range(4):
        attempts = Attempts("v")
        attempts.open(folder)  # type: ignore[arg-type]
        with pytest.raises(Ended):
            PartRunner(attempts, work, lambda: None).run(BATCH)
    assert work.stored
    work.killers = set()
    mended = Attempts("w")
    mended.open(folder)  # type: ignore[arg-type]
    assert mended.ended == 0
    PartRunner(mended, work, lambda: None).run(BATCH)
    assert sorted(work.stored) == list(range(40))
    assert not work.dead


def test_what_was_only_tried_is_not_done() -> None:
    """If this fails, a pipe that changes from the streaming plan to a plan for each batch (another transform, an earlier version)
    takes the parts that were tried for stored, and their events are lost without a word."""
    folder, tried = Folder(), Work(40)
    folder.done = False
    tried.dice.random = lambda: 1.0  # type: ignore[method-assign]
    for _ in range(MAX_ENDED + 1):  # killed, by whomever
        attempts = Attempts("v", tries=True)
        attempts.open(folder)  # type: ignore[arg-type]
        attempts.record_working()
    attempts.record_failure(RuntimeError("stopped in order"))
    PartRunner(attempts, tried, lambda: None).run(BATCH)
    assert attempts.current is not None
    assert not attempts.current.parts, "no part is left to be tried"
    assert folder.notes.keys() == {TRIED_FILE}, "an earlier version reads the other one"

    for left_by_an_earlier_version in (False, True):
        if left_by_an_earlier_version:
            folder.notes[ATTEMPT_FILE] = folder.notes[TRIED_FILE]
        forget_parts(folder)  # type: ignore[arg-type]
        work = Work(40)
        work.dice.random = lambda: 1.0  # type: ignore[method-assign]
        mended = Attempts("w")
        mended.open(folder)  # type: ignore[arg-type]
        PartRunner(mended, work, lambda: None).run(BATCH)
        assert sorted(work.stored) == list(range(40)), left_by_an_earlier_version


def test_a_batch_of_a_streaming_plan_is_cut() -> None:
    """If this fails, a batch on Kafka that is too much as a whole, and none of whose events is, stops its pipe for ever."""
    folder, work = Folder(), Work(40)
    work.dice.random = lambda: 1.0  # type: ignore[method-assign]
    for _ in range(MAX_ENDED + 1):
        assert not hand_over_attempt(folder, "v"), "the first end may have had any cause"  # type: ignore[arg-type]
        plan = Attempts("v", tries=True)
        plan.open(folder)  # type: ignore[arg-type]
        plan.record_working()
        if plan.ended + 1 == MAX_ENDED:
            break
    assert not hand_over_attempt(folder, "mended")  # type: ignore[arg-type]
    work.most = 10

    def stop_behind(number: int) -> None:
        work.away = len(work.stored) > number

    for turn in range(2):
        assert hand_over_attempt(folder, "v")  # type: ignore[arg-type]
        attempts = Attempts("v")
        attempts.open(folder)  # type: ignore[arg-type]
        assert attempts.current is not None
        assert attempts.current.ended >= MAX_ENDED or turn, "it is not tried as a whole again"
        runner = PartRunner(attempts, work, partial(stop_behind, 5 if turn == 0 else 40))
        if turn == 0:
            with pytest.raises(RuntimeError):
                runner.run(BATCH)
            work.away = False
        else:
            runner.run(BATCH)
    assert sorted(work.stored) == list(range(40))
    folder.done = True
    assert not hand_over_attempt(folder, "v")  # type: ignore[arg-type]


def test_another_process_went_on() -> None:
    """If this fails, a process whose pipe another one ran meanwhile goes on with the parts that it knew: it stores parts under
    numbers that the log knows, and their events are lost."""
    folder, work = Folder(), Work(40)
    work.dice.random = lambda: 1.0  # type: ignore[method-assign]
    first, other = Attempts("v"), Attempts("v")
    for attempts in (first, other):
        attempts.open(folder)  # type: ignore[arg-type]
    work.most = 10
    with pytest.raises(RuntimeError):
        PartRunner(first, work, lambda: setattr(work, "away", bool(work.stored))).run(BATCH)
    work.away = False
    other.open(folder)  # type: ignore[arg-type]
    assert other.current == first.current
    work.most = 2
    with pytest.raises(RuntimeError):
        PartRunner(other, work, lambda: setattr(work, "away", len(work.stored) > 5)).run(BATCH)
    work.away, work.most = False, 1000
    first.open(folder)  # type: ignore[arg-type]
    PartRunner(first, work, lambda: None).run(BATCH)
    assert sorted(work.stored) == list(range(40))


def test_what_fails_in_order_ends_no_process() -> None:
    """If this fails, a broker that is away for an hour counts as a batch that ends the process, and events are rejected."""
    folder = Folder()
    attempts = Attempts("v")
    attempts.open(folder)  # type: ignore[arg-type]
    work = Work(10)
    work.away = True
    for _ in range(5):
        with pytest.raises(RuntimeError):
            PartRunner(attempts, work, lambda: None).run(BATCH)
    again = Attempts("v")
    again.open(folder)  # type: ignore[arg-type]
    assert again.ended == attempt_of(folder)["ended"] == 1


def test_an_end_that_is_excused_does_not_count() -> None:
    """If this fails, a cluster whose master ends the application a few times makes innocent events suspects."""
    folder, work = Folder(), Work(10)

    def opened() -> Attempts:
        attempts = Attempts("v")
        attempts.open(folder)  # type: ignore[arg-type]
        return attempts

    for attempts in (opened(), opened()):  # the first is the end that nobody excused
        attempts.excuse()
        assert attempt_of(folder)["ended"] <= 1
    folder.notes.clear()
    fresh = Attempts("v")
    folder.done = True
    fresh.open(folder)  # type: ignore[arg-type]
    folder.done = False  # a batch has begun
    for attempts in (fresh, *(Attempts("v") for _ in range(5))):
        attempts.open(folder)  # type: ignore[arg-type]
        assert attempts.ended == 0
        attempts.excuse()
    PartRunner(attempts, work, lambda: None).run(BATCH)
    assert sorted(work.stored) == list(range(10))
    folder.done = True
    warming = opened()
    warming.record_warm_up(folder, begins=True)  # type: ignore[arg-type]
    warming.excuse()
    assert opened().ended == 0, "the run before the first batch counts"


def test_a_run_before_the_first_batch_that_ends_the_process() -> None:
    """If this fails, an event that ends the process does so before its batch is begun, again and again; or no pipe is warm."""
    folder = Folder()
    folder.done = True

    def opened() -> Attempts:
        attempts = Attempts("v")
        attempts.open(folder)  # type: ignore[arg-type]
        return attempts

    first = opened()
    assert first.current is None
    first.record_warm_up(folder, begins=True)  # type: ignore[arg-type]
    second = opened()
    assert second.current is not None, "it is left out"
    second.record_done(BATCH)
    third = opened()
    assert third.current is None
    third.record_warm_up(folder, begins=True)  # type: ignore[arg-type]
    third.record_warm_up(folder, begins=False)  # type: ignore[arg-type]
    assert opened().current is None


def test_condition_of_a_part() -> None:
    """If this fails, a part takes records of its neighbours."""
    assert within(()) == "true"
    place = offset_text(5)
    condition = f"(topic = 's' AND partition = 1 AND offset BETWEEN '{place}' AND '{place}')"
    assert within((PartRange("s", 1, place, place),)) == condition


def test_a_real_time_query_that_ends_the_process() -> None:
    """If this fails, an event that takes all memory of a real-time query ends the process again and again: such a query plans no
    batch, so nothing says that one was begun."""
    folder, work = Folder(), Work(40, {30})
    folder.done = True
    work.dice.random = lambda: 1.0  # type: ignore[method-assign]

    def start() -> Attempts:
        attempts = Attempts("v", real_time=True)
        attempts.open(folder)  # type: ignore[arg-type]
        attempts.check()
        return attempts

    for ended in range(MAX_ENDED):
        attempts = start()
        assert attempts.ended == ended
        attempts.record_working()  # and the process ends
    for _processes in range(10):
        attempts = start()
        try:
            PartRunner(attempts, work, lambda: None).run(BATCH + 1)
        except Ended:
            continue
        break
    assert set(work.dead) == {30}
    attempts.record_working()
    attempts.record_failure(RuntimeError("stopped in order"))
    assert start().why_not_retried is None, "nothing ended this process"
    attempts.record_done(BATCH + 1)
    folder.committed = BATCH + 1
    assert start().current is None, "it is past that batch"


def test_a_second_culprit_of_a_real_time_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, an event that arrives after the search and ends the process, too, stops its pipe until a person comes."""
    folder, work = Folder(), Work(40, {30})
    folder.done = True
    work.dice.random = lambda: 1.0  # type: ignore[method-assign]
    skipped: list[RecordOffset] = []

    def reject(record: RecordOffset, reason: str) -> None:
        skipped.append(record)
        work.killers.discard(int(record.offset))

    monkeypatch.setattr(work, "reject", reject)
    monkeypatch.setattr(work, "is_stored", lambda _name: False)  # trials store nothing
    monkeypatch.setattr("spark.jobs.replay.TrialParts", lambda _query, _streak: work)
    monkeypatch.setattr("spark.jobs.replay.read_skipped", lambda _query: list(skipped))

    def start() -> None:
        attempts = Attempts("v", real_time=True)
        attempts.open(folder)  # type: ignore[arg-type]
        attempts.check()
        query: Any = SimpleNamespace(attempts=attempts, real_time=True, check_not_stopping=lambda: None)
        with suppress(Ended):
            reject_process_killers(query, FailureStreak(folder))  # type: ignore[arg-type]
            attempts.record_working()

    for culprit in (30, 31):
        work.killers = {culprit}
        for _processes in range(12):
            start()  # with the query itself, whose culprit ends the process again
            if not work.killers:
                break
        assert skipped[-1].offset == offset_text(culprit)
    assert len(skipped) == 2
