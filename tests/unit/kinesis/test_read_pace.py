"""How fast a shard is read."""

import random

import pytest

from services.core.broker.kinesis.pace import READS_PER_SECOND, ReadPace, ReadPaces
from tests.support.clock import Clock
from tests.support.kinesis_limits import Bucket


def test_reads_of_all_groups_share_the_limit() -> None:
    """If it fails, two groups of one process throttle each other for ever."""
    clock = Clock()
    pace = ReadPace("t", 0, clock)
    waits = [round(pace.reserve(), 3) for _ in range(3)]
    assert waits == [0, 0.2, 0.4]
    paces = ReadPaces()
    assert paces.find("t", 1) is paces.find("t", 1)
    assert paces.find("t", 1) is not paces.find("t", 2)


def test_large_answers_are_paid_for() -> None:
    """If it fails, a reader that catches up takes more than the shard gives, and is throttled all the time."""
    clock = Clock()
    pace = ReadPace("t", 0, clock)
    pace.read(1_000_000)
    assert round(pace.reserve(), 3) == 0.5
    pace.throttle()
    clock.now += 0.5
    pace.read(1_000_000)
    assert pace.wait() == pytest.approx(0.5 * READS_PER_SECOND / pace.rate), "its share is smaller"
    for _ in range(20):
        pace.throttle()
    clock.now += pace.wait()
    pace.read(10_000_000)
    assert pace.wait() == 5, "one answer holds up all readers of the shard for a minute"


def test_a_throttle_slows_down_and_time_without_one_speeds_up() -> None:
    """If it fails, processes that share a shard storm it with reads that are refused, or crawl for ever after one throttle."""
    clock = Clock()
    pace = ReadPace("t", 0, clock)
    for _ in range(20):
        pace.throttle()
    assert pace.rate == 0.2
    clock.now += 20
    pace.read(0)
    assert pace.rate == READS_PER_SECOND


def test_a_process_that_comes_later_gets_its_share() -> None:
    """If it fails, an operator's look at a busy shard, or a second group, waits for minutes."""
    clock, dice = Clock(), random.Random(0)
    limit = Bucket(READS_PER_SECOND, clock)
    paces = [ReadPace("t", number, clock) for number in range(2)]
    for _ in range(10):
        paces[1].throttle()  # at its slowest, beside one at full speed
    due = [clock.now + pace.reserve() for pace in paces]
    given, end = [0, 0], clock.now + 300
    while clock.now < end:
        who = due.index(min(due))
        clock.now = max(clock.now, due[who])
        if limit.has(1):
            limit.owe(1)
            given[who] += 1
            paces[who].read(0)
        else:
            paces[who].throttle()
        due[who] = clock.now + paces[who].reserve() + dice.uniform(0, 0.003)  # without it rounding decides who wins
    assert min(given) > max(given) / 2
    assert sum(given) > 300 * 3, "most of the shard's capacity is used"


def test_a_pace_goes_on_in_another_process() -> None:
    """If this fails, each process that takes over a shard begins at full speed, and all readers of the shard are throttled."""
    clock = Clock()
    before = ReadPace("t", 0, clock)
    before.reserve()
    before.throttle()
    assert before.wait() == pytest.approx(1 / before.rate)
    after = ReadPace("t", 1, clock)
    after.go_on(before.rate, before.wait())
    assert (after.rate, after.wait()) == (before.rate, before.wait())
    fresh = ReadPace("t", 2, clock)
    fresh.go_on(5.0, 3600.0)
    assert fresh.wait() < 0.21, "the clock of the other process is far ahead"
    fresh.go_on(5.0, -3600.0)
    assert fresh.reserve() < 0.21
    after.go_on(5.0, 0.0)
    assert after.rate == before.rate, "a throttle of this process counts, too"
