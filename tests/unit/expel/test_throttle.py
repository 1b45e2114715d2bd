"""The circuit breaker and the slow_start after it, in simulated time."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.expel.throttle import (
    FIRST_RATE,
    FIRST_WAIT_S,
    MAX_WAIT_S,
    MIN_ATTEMPTS,
    WINDOW_S,
    CircuitBreaker,
    SlowStart,
)


class Clock:
    """Monotonic seconds that stand still until told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def goes(breaker: CircuitBreaker, request: object) -> bool:
    """Whether the request may go; if so it does."""
    is_blocked = breaker.is_blocked
    if not is_blocked:
        breaker.begin(request)
    return not is_blocked


def opened(clock: Clock) -> CircuitBreaker:
    """A breaker that just opened."""
    breaker = CircuitBreaker(clock)
    results = [goes(breaker, n) and breaker.fail(n) for n in range(MIN_ATTEMPTS)]
    assert results == [False] * (MIN_ATTEMPTS - 1) + [True]
    return breaker


def test_opens_only_after_enough_attempts_and_a_large_share(clock: Clock) -> None:
    """If it fails, one bad answer parks a destination, or a dead one is hammered for ever."""
    opened(clock)
    breaker = CircuitBreaker(clock)
    for number in range(100):
        if number % 10 < 4:
            breaker.succeed(number)
        else:
            assert not breaker.fail(number)
    assert breaker.state == "closed"


def test_old_failures_are_forgotten(clock: Clock) -> None:
    """If it fails, a few failures a day add up until the breaker opens."""
    breaker = CircuitBreaker(clock)
    for number in range(5 * MIN_ATTEMPTS):
        assert not breaker.fail(number)
        clock.now += WINDOW_S / (MIN_ATTEMPTS - 2)
    assert breaker.state == "closed"


def test_one_probe_at_a_time_and_longer_waits(clock: Clock) -> None:
    """If it fails, a receiver that comes back is met by everything at once, or is never asked again."""
    breaker = opened(clock)
    waits = []
    for _ in range(10):
        assert not goes(breaker, "early")
        waits.append(breaker.open_until - clock.now)
        clock.now = breaker.open_until
        probe, *others = object(), object(), object()
        assert goes(breaker, probe)
        assert not any(goes(breaker, other) for other in others)
        assert not breaker.fail(probe)
    assert waits[:3] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert waits[-1] == MAX_WAIT_S
    clock.now = breaker.open_until
    assert goes(breaker, "last")
    assert breaker.succeed("last")
    assert breaker.state == "closed"


def test_requests_from_before_do_not_decide(clock: Clock) -> None:
    """If it fails, an old request that ends late closes the breaker, or counts as the probe's failure."""
    breaker = opened(clock)
    assert not breaker.succeed("old")
    assert breaker.state == "open"
    clock.now = until = breaker.open_until
    assert goes(breaker, "probe")
    assert not breaker.fail("old")
    assert breaker.open_until == until
    assert not goes(breaker, "second")
    assert breaker.succeed("probe")


def test_a_probe_without_a_verdict_is_made_again(clock: Clock) -> None:
    """If it fails, a probe that was cut off leaves the destination closed off for ever."""
    breaker = opened(clock)
    clock.now = breaker.open_until
    assert goes(breaker, "cut off")
    breaker.abandon("cut off")
    assert goes(breaker, "next")


def flow(slow_start: SlowStart, clock: Clock, seconds: float) -> Iterator[float]:
    """Send as much as the slow_start lets through, one event a request; gives the events of each second."""
    for _ in range(int(seconds)):
        end, count = clock.now + 1.0, 0
        while clock.now < end:
            wait = slow_start.wait()
            if wait:
                clock.now += min(wait, end - clock.now)
                continue
            slow_start.spend(1)
            slow_start.record_delivered(1)
            count += 1
            if slow_start.is_over:
                return
        yield count


def test_recovery_rises_to_twice_the_usual_rate_at_most(clock: Clock) -> None:
    """If it fails, a destination that recovered gets its whole backlog as a stampede."""
    slow_start = SlowStart(clock)
    for _ in range(600):
        clock.now += 1.0
        slow_start.record_delivered(200)
    assert slow_start.wait() == 0.0
    slow_start.start()
    rates = list(flow(slow_start, clock, 120))
    assert rates[0] <= 30
    assert rates[60] == pytest.approx(400, rel=0.05)
    assert max(rates) <= 1.1 * 400
    assert not slow_start.is_over


def test_a_young_process_learns_the_usual_rate_at_once(clock: Clock) -> None:
    """If it fails, an outage soon after a start leaves a destination throttled below its traffic, for as long as that lasts."""
    slow_start = SlowStart(clock)
    clock.now += 60
    for _ in range(80):
        slow_start.record_delivered(20)
        clock.now += 0.1
    slow_start.start()
    rates = list(flow(slow_start, clock, 120))
    assert max(rates) == pytest.approx(400, rel=0.1)


def test_limit_gives_way_to_what_comes_now(clock: Clock) -> None:
    """If this fails, a destination that was quiet before its outage is throttled for ever, and its lag ends in dead letters."""
    slow_start = SlowStart(clock)
    for _ in range(300):
        clock.now += 1
        slow_start.record_delivered(5)
    slow_start.start()
    rates = list(flow(slow_start, clock, 1200))
    assert max(rates[:120]) <= 2 * FIRST_RATE
    assert max(rates[-60:]) > 500


def test_a_drained_backlog_ends_the_ramp(clock: Clock) -> None:
    """If it fails, a destination stays limited for ever after one outage."""
    slow_start = SlowStart(clock)
    slow_start.start()
    for _ in range(60):
        clock.now += 1.0
        if not slow_start.wait():
            slow_start.spend(2)
            slow_start.record_delivered(2)
    assert slow_start.is_over


def test_without_history_it_still_rises(clock: Clock) -> None:
    """If it fails, a process that starts during an outage delivers ten events a second for ever."""
    slow_start = SlowStart(clock)
    slow_start.start()
    rates = list(flow(slow_start, clock, 60))
    assert rates[0] <= 2 * FIRST_RATE
    assert rates[-1] > 100 * FIRST_RATE


@given(st.lists(st.sampled_from(["send", "ok", "bad", "lost", "old", "later"]), max_size=200))
def test_never_more_than_one_probe(steps: list[str]) -> None:
    """If it fails, some order of answers lets two probes go at once or locks the breaker."""
    clock = Clock()
    breaker = opened(clock)
    probe: str | None = None
    for number, step in enumerate(steps):
        was_closed = breaker.state == "closed"
        request = f"request {number}"
        if step == "send" and goes(breaker, request):
            assert probe is None
            probe = None if was_closed else request
        elif step == "later":
            clock.now += 60
        elif step == "old":
            breaker.fail("from before")
        elif probe is not None and step in {"ok", "bad", "lost"}:
            {"ok": breaker.succeed, "bad": breaker.fail, "lost": breaker.abandon}[step](probe)
            probe = None
    if probe is not None:
        breaker.abandon(probe)
    clock.now += 2 * MAX_WAIT_S
    assert goes(breaker, "at last")
