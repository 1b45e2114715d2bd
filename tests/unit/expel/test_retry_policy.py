"""When and whether an event is tried again, and how fast a destination is served."""

from collections.abc import Callable

import backoff
import pytest

from services.core.broker.record import Record
from services.core.http.failure import MAX_HOLD, Failure, parse_retry_after
from services.expel.delivery import Delivery
from services.expel.retry_policy import Action, RetryDecision, RetryLimits, RetryPolicy, fail_by_status
from services.expel.slow_start import TokenBucket

LIMITS = RetryLimits(4, 0.2, 5.0)


def no_jitter(bound: float) -> float:
    return bound


def decide(
    failure: Failure, attempts: int, limits: RetryLimits, jitter: Callable[[float], float] = no_jitter
) -> RetryDecision:
    """For a request of one event."""
    request = Delivery([b""], [b"e"], [0], [Record(None, b"", 0)], [], attempts=attempts)
    return RetryPolicy(limits, jitter=jitter).decide(request, {0: failure}, 0)


def test_waits_grow_up_to_the_limit() -> None:
    """Broken: a receiver in trouble is called at a constant high rate, or nobody waits long enough."""
    limits = RetryLimits(None, 0.2, 5.0)
    assert [limits.max_wait_after(n) for n in (1, 2, 3, 5, 6, 100, 10**9)] == [0.2, 0.4, 0.8, 3.2, 5.0, 5.0, 5.0]


def test_full_jitter_spreads() -> None:
    """Broken: after an outage all lanes call at the same moments."""
    waits = set()
    for _ in range(50):
        found = decide(fail_by_status(503), 3, LIMITS, backoff.full_jitter)
        assert found.retry == [0]
        assert 0 <= found.wait <= 0.8
        waits.add(found.wait)
    assert len(waits) > 40


def test_actions() -> None:
    """Broken: an event that can succeed is a dead letter, one that cannot is tried for ever, or a 410 pauses nothing."""
    busy, wrong, gone = fail_by_status(503), fail_by_status(404), fail_by_status(410)
    assert decide(busy, 3, LIMITS) == RetryDecision([], [0], {}, {}, 0.8, reason="http_503")
    assert decide(busy, 4, LIMITS).dead_letter == {0: busy}
    assert decide(busy, 10**6, RetryLimits(None, 0.2, 5.0)).wait == 5.0
    assert decide(busy, 4, RetryLimits(4, 0.2, 5.0, uses_retry_topic=True)).retry_topic == {0: busy}
    assert decide(wrong, 1, LIMITS).dead_letter == {0: wrong}
    assert decide(gone, 1, LIMITS) == RetryDecision(pause=gone)
    assert RetryPolicy(LIMITS).choose(busy, 3) is Action.RETRY


def test_retry_after_is_the_least_wait() -> None:
    """Broken: a receiver's wish is undercut by our jitter, or shortens our own wait."""
    assert decide(fail_by_status(429, retry_after=7), 1, LIMITS).wait == 7
    assert decide(fail_by_status(429, retry_after=7200), 1, LIMITS).wait == MAX_HOLD
    assert decide(Failure("x", "", True, retry_after=0.0), 1, LIMITS).wait == 0.2


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None),
        ("", None),
        ("0", 0),
        (" 30 ", 30),
        ("86401", 86_400),
        ("9" * 5000, 86_400),
        ("-1", None),
        ("1.5", None),
        ("1e9", None),
        ("NaN", None),
        ("\u0665", None),
        ("Thu, 01 Jan 1970 00:16:50 GMT", 10),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 0),
        ("Fri, 31 Dec 9999 23:59:59 GMT", 86_400),
        ("Thu, 99 Foo 1970 00:00:00 GMT", None),
        ("x" * 100_000, None),
    ],
)
def test_retry_after_is_clamped(text: str | None, seconds: float | None) -> None:
    """Broken: a header from outside stops a lane for years or crashes it."""
    assert parse_retry_after(text, now=1000.0) == seconds


def test_rate_in_the_long_run() -> None:
    """Broken: a receiver gets more events a second than it allows."""
    now = 0.0
    bucket = TokenBucket(100, lambda: now)
    sent = 0
    while now < 10:
        if bucket.wait() == 0:
            bucket.spend(7)
            sent += 7
        else:
            now += bucket.wait()
    assert 990 <= sent <= 1000 + 10 + 7


def test_an_idle_lane_does_not_save_up() -> None:
    """Broken: after an idle hour a receiver gets an hour's worth at once."""
    now = 0.0
    bucket = TokenBucket(100, lambda: now)
    now = 3600.0
    taken = 0
    while bucket.wait() == 0:
        bucket.spend(1)
        taken += 1
    assert taken <= 10


def test_a_clock_that_stands_still_is_waited_for() -> None:
    """Broken: a wait of zero with nothing to take spins the event loop."""
    bucket = TokenBucket(1, lambda: 0.0)
    bucket.spend(5)
    assert bucket.wait() == 5.0
