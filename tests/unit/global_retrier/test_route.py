"""Where events wait, as arithmetic: never early, hardly late, in few hops, whatever is due when."""

import random

from hypothesis import given
from hypothesis import strategies as st

from services.core.pipe_file.topic_names import DELAYS_S, delay_topic
from services.global_retrier.delay_queue import DELAY_BY_TOPIC, choose_delay, find_wake

WEEK = 7 * 86_400_000


@given(left=st.integers(-WEEK, WEEK))
def test_the_longest_delay_that_fits(left: int) -> None:
    """Broken: an event waits longer than it has left, or hops where it could rest."""
    topic = choose_delay(left)
    fitting = [seconds for seconds in DELAYS_S if seconds * 1000 <= left]
    if left <= 0:
        assert topic is None
    else:
        assert topic == delay_topic(max(fitting, default=DELAYS_S[0]))


@given(
    delay=st.sampled_from(sorted(DELAY_BY_TOPIC.values())),
    written=st.integers(-WEEK, WEEK),
    due=st.integers(-WEEK, WEEK),
    now=st.integers(-WEEK, WEEK),
)
def test_nobody_is_held_back_too_long(delay: int, written: int, due: int, now: int) -> None:
    """Broken: a record stamped by a clock that was ahead, or due sooner than its topic's delay, comes out far too late."""
    wake = find_wake(delay, written, due, now)
    assert wake <= due
    assert wake <= max(now, written) + delay
    assert wake <= now + delay


@given(wait=st.integers(0, WEEK), seed=st.integers(0, 2**32))
def test_from_hand_over_to_release(wait: int, seed: int) -> None:
    """Broken: an event leaves before it is due, more than a second late, or is written on again and again."""
    chance = random.Random(seed)
    now, due, hops = 1_000, 1_000 + wait, 0
    while (topic := choose_delay(due - now)) is not None:
        written = now
        now = max(now, find_wake(DELAY_BY_TOPIC[topic], written, due, now)) + chance.randrange(50)
        hops += 1
    assert due <= now <= due + 50
    assert hops <= 3 * len(DELAYS_S) + wait // (DELAYS_S[-1] * 1000)
