"""How fast a lane with an open breaker puts its events away, in simulated time."""

import math
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from services.expel.throttle import MIN_SHED_RATE, SHED_AFTER_S, TURN_S, LoadShedder
from tests.support.clock import Clock


def put_away(shedder: LoadShedder, clock: Clock, seconds: float, arriving: float, lane: float = math.inf) -> float:
    """Put away what comes at this rate, turn by turn, of which a lane holds so many; returns what is left."""
    left, end = 0.0, clock.now + seconds
    while clock.now < end:
        assert shedder.wait() == 0
        taken = min(left, shedder.limit(), lane)
        left -= taken
        shedder.end_turn(int(taken), is_more=left > 0)
        passed = shedder.wait()
        assert 0 < passed <= TURN_S * 1.001
        clock.now += passed + 1e-6
        left += arriving * passed
    return left


def started(clock: Clock, usual: float | None) -> LoadShedder:
    """A shedder at its first turn in an outage."""
    shedder = LoadShedder(clock)
    shedder.start(usual)
    clock.now += shedder.wait()
    return shedder


def test_a_short_outage_costs_no_round_of_the_retry_topic() -> None:
    """If it fails, events wait for minutes after an outage of seconds, because each turn uses up a round of their schedule."""
    clock = Clock()
    shedder = LoadShedder(clock)
    shedder.start(None)
    assert shedder.wait() == SHED_AFTER_S
    clock.now += SHED_AFTER_S
    shedder.end_turn(0, is_more=False)
    shedder.start(None, is_new=False)
    assert shedder.wait() <= TURN_S
    shedder.start(None)
    assert shedder.wait() == SHED_AFTER_S


@given(st.sampled_from([None, 3.0, 800.0, 20_000.0]))
def test_what_usually_comes_is_put_away_as_it_comes(usual: float | None) -> None:
    """If it fails, a dead destination's lane falls behind although nothing unusual comes."""
    clock = Clock()
    shedder = started(clock, usual)
    rate = max(MIN_SHED_RATE, usual or 0.0)
    assert put_away(shedder, clock, 60, rate) <= rate * TURN_S


def test_a_burst_does_not_take_the_machine() -> None:
    """If it fails, the backlog of a dead destination is put away as fast as the machine can, and the others pay for it."""
    clock = Clock()
    shedder = started(clock, 500.0)
    assert put_away(shedder, clock, 5, 10_000) >= 5 * (10_000 - 1.25 * 500)


def test_a_backlog_that_stays_is_put_away_faster_and_faster() -> None:
    """If it fails, what comes for days is left in its stream until the stream's retention takes it."""
    clock = Clock()
    shedder = started(clock, None)
    left = list(accumulate(range(8), lambda _, __: put_away(shedder, clock, 60, 20_000), initial=0.0))
    assert left[-1] <= 20_000 * TURN_S
    shedder.start(None)
    assert shedder.limit() == MIN_SHED_RATE * TURN_S


def test_a_small_lane_takes_more_turns() -> None:
    """If it fails, a lane of large events puts fewer away than come, for ever, and its stream's retention takes the rest."""
    clock = Clock()
    shedder = started(clock, 400.0)
    assert put_away(shedder, clock, 60, 400.0, lane=30) <= 400.0 * TURN_S
