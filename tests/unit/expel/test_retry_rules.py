"""When and whether an event is tried again, and how fast a destination is served."""

import pytest

from services.expel.disposition import MAX_HOLD, Again, Bury, Disable, RetryLimits, decide
from services.expel.outcome import Failure, fail_by_status
from services.expel.rate import TokenBucket
from services.expel.retry_after import parse_retry_after

LIMITS = RetryLimits(4, 0.2, 5.0)


def no_jitter(bound: float) -> float:
    return bound


def test_waits_grow_up_to_the_limit() -> None:
    """Broken: a receiver in trouble is called at a constant high rate, or nobody waits long enough."""
    limits = RetryLimits(None, 0.2, 5.0)
    assert [limits.bound(n) for n in (1, 2, 3, 5, 6, 100, 10**9)] == [0.2, 0.4, 0.8, 3.2, 5.0, 5.0, 5.0]


def test_full_jitter_spreads() -> None:
    """Broken: after an outage all lanes call at the same moments."""
    waits = set()
    for _ in range(50):
        found = decide(fail_by_status(503), 3, LIMITS)
        assert isinstance(found, Again)
        assert 0 <= found.wait <= 0.8
        waits.add(found.wait)
    assert len(waits) > 40


def test_dispositions() -> None:
    """Broken: what can succeed is buried, what cannot is tried for ever, or a 410 is not heard."""
    busy, wrong, gone = fail_by_status(503), fail_by_status(404), fail_by_status(410)
    assert decide(busy, 3, LIMITS, no_jitter) == Again(0.8)
    assert decide(busy, 4, LIMITS, no_jitter) == Bury(busy)
    assert decide(busy, 10**6, RetryLimits(None, 0.2, 5.0), no_jitter) == Again(5.0)
    assert decide(wrong, 1, LIMITS, no_jitter) == Bury(wrong)
    assert decide(gone, 1, LIMITS, no_jitter) == Disable(gone)


def test_retry_after_is_the_least_wait() -> None:
    """Broken: a receiver's wish is undercut by our jitter, or shortens our own wait."""
    assert decide(fail_by_status(429, retry_after=7), 1, LIMITS, no_jitter) == Again(7)
    assert decide(fail_by_status(429, retry_after=7200), 1, LIMITS, no_jitter) == Again(MAX_HOLD)
    assert decide(Failure("x", "", True, retry_after=0.0), 1, LIMITS, no_jitter) == Again(0.2)


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
            bucket.take(7)
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
        bucket.take(1)
        taken += 1
    assert taken <= 10


def test_a_clock_that_stands_still_is_waited_for() -> None:
    """Broken: a wait of zero with nothing to take spins the event loop."""
    bucket = TokenBucket(1, lambda: 0.0)
    bucket.take(5)
    assert bucket.wait() == 5.0
