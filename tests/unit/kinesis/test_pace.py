"""How fast one shard is written to, in simulated time."""

from services.core.broker.kinesis.pace import BYTES_PER_SECOND, ENTRIES_PER_SECOND, WritePace
from tests.support.clock import Clock


def send(pace: WritePace, clock: Clock, size: int, seconds: float) -> int:
    """How many entries of this size leave within so many seconds, each as soon as it may."""
    end, sent = clock.now + seconds, 0
    while (wait := pace.reserve(size, end - clock.now)) <= end - clock.now:
        clock.now += wait
        sent += 1
    clock.now = end
    return sent


def test_no_more_than_a_shard_takes() -> None:
    """If it fails, we are throttled under steady load, or leave capacity unused."""
    clock = Clock()
    pace = WritePace("t", "0", clock)
    assert send(pace, clock, 100_000, 10.0) in range(100, 111)  # ten seconds, and a second's worth at once
    assert send(pace, clock, 100_000, 10.0) in range(99, 102)
    clock.now += 10
    assert send(pace, clock, 10, 10.0) <= 11 * ENTRIES_PER_SECOND


def test_an_entry_as_large_as_a_second_is_not_stuck() -> None:
    """If it fails, the largest record waits for ever."""
    clock = Clock()
    pace = WritePace("t", "0", clock)
    assert send(pace, clock, BYTES_PER_SECOND + 48_576, 10.0) in range(9, 12)


def test_throttling_slows_down_and_time_speeds_up_again() -> None:
    """If it fails, a throttled shard gets as many requests as before (a storm), or stays slow for ever."""
    clock = Clock()
    pace = WritePace("t", "0", clock)
    send(pace, clock, 100_000, 2.0)
    for _ in range(5):
        pace.throttle()
        clock.now += 1
    slow = send(pace, clock, 100_000, 1.0)
    assert slow <= 3
    clock.now += 60
    assert pace.share == 1.0 or pace.reserve(1, 0) == 0
    assert send(pace, clock, 100_000, 10.0) >= 95


def test_many_throttles_at_once_count_once() -> None:
    """If it fails, one full second stops a shard for a minute: every waiting request slows it down again."""
    clock = Clock()
    pace = WritePace("t", "0", clock)
    for _ in range(50):
        pace.throttle()
    assert pace.share >= 0.5


def test_what_cannot_leave_in_time_takes_nothing() -> None:
    """If it fails, appends that gave up use the capacity up for those behind them."""
    clock = Clock()
    pace = WritePace("t", "0", clock)
    assert pace.reserve(BYTES_PER_SECOND, 0) == 0
    for _ in range(10):
        assert pace.reserve(BYTES_PER_SECOND, 0.5) > 0.5
    clock.now += 1
    assert pace.reserve(BYTES_PER_SECOND, 0) < 0.01
