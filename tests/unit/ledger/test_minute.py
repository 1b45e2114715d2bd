"""The minute that an event counts in."""

from hypothesis import given
from hypothesis import strategies as st

from services.core.ledger.minute import common_minute, group_by_minute, minute_of

M = 60_000
NOON = 29_000_000 * M
near = st.integers(-5 * M, 5 * M)


def test_by_event_time_while_it_is_near() -> None:
    """Broken: a minute that is final gets events, or events of a client with a slow clock all count as late."""
    minute = NOON // M
    assert minute_of(NOON, NOON) == minute
    assert minute_of(NOON - 1, NOON) == minute - 1
    assert minute_of(NOON - M, NOON + M) == minute - 1  # a minute behind its end, exactly
    assert minute_of(NOON - M, NOON + M + 1) == minute + 1  # later: that of the arrival
    assert minute_of(NOON, NOON - 1000) == minute  # a clock that is a second ahead
    assert minute_of(NOON, NOON - 1001) == minute - 1
    assert minute_of(0, NOON) == minute_of(NOON * 2, NOON) == minute


@given(st.lists(near, min_size=1, max_size=5), st.integers(0, 2 * M))
def test_a_common_minute_is_that_of_each(times: list[int], arrival: int) -> None:
    """Broken: a request's events are told as of one minute although some belong to another."""
    found = common_minute([NOON + time for time in times], NOON + arrival)
    minutes = {minute_of(NOON + time, NOON + arrival) for time in times}
    assert found is None or minutes == {found}
    if len({(NOON + time) // M for time in times}) == 1:
        assert found is not None
    grouped = group_by_minute([NOON + time for time in times], NOON + arrival)
    assert {index: minute for minute, indexes in grouped.items() for index in indexes} == {
        index: minute_of(NOON + time, NOON + arrival) for index, time in enumerate(times)
    }
