"""The circuit breaker and the slow start after it, in simulated time."""

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from services.expel.circuit_breaker import FIRST_WAIT_S, MAX_WAIT_S, MIN_ATTEMPTS, WINDOW_S, CircuitBreaker
from services.expel.retry_policy import Outcome, fail_by_status
from services.expel.slow_start import AT_CAP_S, LEAST_CAP, MAX_FACTOR, ROUND_S, SlowStart
from services.expel.throttle import FailureNotice, SendThrottle
from tests.support.clock import Clock


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


class Request(NamedTuple):
    """As much of a delivery as a throttle looks at."""

    number: int
    parts: Sequence[bytes]


class Bucket:
    """A receiver that refuses what is more than its capacity (events per second), and answers at once. It accepts the events of
    half a second, and at least one request, in a burst."""

    def __init__(self, capacity: float, latency: float, refusal: str) -> None:
        self.capacity, self.latency, self.refusal = capacity, latency, refusal
        self.room = self.depth = max(100.0, 0.5 * capacity)
        self.at = 0.0

    def answer(self, now: float, events: int) -> tuple[float, Outcome]:
        """When it answers a request that comes now, and the outcome."""
        self.room, self.at = min(self.depth, self.room + (now - self.at) * self.capacity), now
        if self.room < events:
            return now + self.latency, fail_by_status(int(self.refusal))
        self.room -= events
        return now + self.latency, None


class Backlog:
    """A receiver that does one request after the other, and refuses those that would wait for more than two seconds."""

    def __init__(self, capacity: float, latency: float) -> None:
        self.capacity, self.latency = capacity, latency
        self.free_at = 0.0

    def answer(self, now: float, events: int) -> tuple[float, Outcome]:
        """When it answers a request that comes now, and the outcome."""
        if self.free_at > now + 2.0:
            return now + self.latency, fail_by_status(503)
        self.free_at = max(now, self.free_at) + events / self.capacity
        return self.free_at + self.latency, None


class Refusing:
    """A receiver that accepts no event, and says so at once."""

    def __init__(self, refuse: Callable[[int], Outcome]) -> None:
        self.refuse = refuse

    def answer(self, now: float, events: int) -> tuple[float, Outcome]:
        """When it answers a request that comes now, and the outcome."""
        return now + 0.005, self.refuse(events)


SLOTS = 8


class Recovery:
    """A lane with a backlog after an outage, in simulated time: at most SLOTS requests of 100 events at once."""

    def __init__(self, clock: Clock, throttle: SendThrottle, receiver: Bucket | Backlog | Refusing) -> None:
        self.clock, self.throttle, self.receiver = clock, throttle, receiver
        self.waiting: list[tuple[float, int, Request, Outcome]] = []
        self.sent = self.delivered = self.refused = 0

    def run(self, seconds: float, backlog: int) -> float:
        """Send this backlog, for at most so long. Returns how long it took."""
        begun = self.clock.now
        while self.delivered < backlog and self.clock.now < begun + seconds:
            on_its_way = sum(len(request.parts) for _, _, request, _ in self.waiting)
            left = backlog - self.delivered - on_its_way
            wait = math.inf
            if left > 0 and len(self.waiting) < SLOTS:
                wait = self.throttle.wait()
                if not wait and not self.throttle.is_blocked:
                    self._send(min(100, left))
                    continue
            answered = self.waiting[0][0] if self.waiting else math.inf
            self.clock.now = min(answered, self.clock.now + max(wait, 1e-6), begun + seconds)
            while self.waiting and self.waiting[0][0] <= self.clock.now:
                self._end()
        return self.clock.now - begun

    def _send(self, events: int) -> None:
        self.sent += 1
        request = Request(self.sent, (b"",) * events)
        self.throttle.begin(request)  # type: ignore[arg-type]
        at, outcome = self.receiver.answer(self.clock.now, events)
        heapq.heappush(self.waiting, (at, self.sent, request, outcome))

    def _end(self) -> None:
        _, _, request, outcome = heapq.heappop(self.waiting)
        self.throttle.end(request, outcome)  # type: ignore[arg-type]
        if outcome is None:
            self.delivered += len(request.parts)
        else:
            self.refused += len(request.parts)


def recovered(clock: Clock, usual: float | None = None) -> SendThrottle:
    """The throttle of a lane whose breaker opened and has just closed. usual: events per second before that, about; exactly when
    it is even."""
    throttle, number = SendThrottle("p", "d", clock=clock), 0

    def send(events: int, outcome: Outcome) -> None:
        nonlocal number
        number += 1
        request = Request(number, (b"",) * events)
        throttle.begin(request)  # type: ignore[arg-type]
        throttle.end(request, outcome)  # type: ignore[arg-type]

    for _ in range(400 if usual else 0):
        clock.now += 0.5
        send(round((usual or 0) / 2), None)
    clock.now += WINDOW_S
    for _ in range(MIN_ATTEMPTS):
        send(1, fail_by_status(503))
    assert throttle.is_blocked
    clock.now += throttle.blocked_for()
    send(1, None)
    assert throttle.state == "closed"
    return throttle


RECEIVERS = st.one_of(
    st.builds(Bucket, st.floats(100, 2_000), st.floats(0.01, 3.0), st.sampled_from(["429", "503"])),
    st.builds(Backlog, st.floats(100, 2_000), st.floats(0.01, 1.0)),
)


@settings(max_examples=300)
@given(RECEIVERS, st.sampled_from([None, 0.2, 1.0, 5.0]))
def test_a_weak_receiver_is_not_run_over(receiver: Bucket | Backlog, share: float | None) -> None:
    """If it fails, a receiver that recovers gets more than it can take, again and again; or much less than it could take.

    share: its usual load, as a part of its capacity. After an outage it may take less than before.
    """
    clock = Clock()
    receiver.at = receiver.free_at = clock.now  # type: ignore[union-attr]
    throttle = recovered(clock, None if share is None else share * receiver.capacity)
    recovery = Recovery(clock, throttle, receiver)
    seconds = recovery.run(60, 10_000_000)
    assert recovery.refused <= 0.2 * recovery.delivered + 10 * 100
    possible = receiver.capacity if share is None else min(1.0, MAX_FACTOR * share) * receiver.capacity
    of_latency = SLOTS * 100 / receiver.latency
    assert recovery.delivered >= 0.4 * min(possible, of_latency) * (seconds - 10 - 10 * receiver.latency)


@given(st.floats(5, 120), st.integers(1, 500).map(lambda half: 2 * half), st.floats(0.01, 0.5))
def test_a_backlog_takes_about_as_long_as_its_outage(outage: float, usual: int, latency: float) -> None:
    """If it fails, events wait for minutes after an outage of seconds, although the receiver could take them at once."""
    clock = Clock()
    throttle = recovered(clock, usual)
    recovery = Recovery(clock, throttle, Bucket(1_000_000, latency, "503"))
    backlog = round(usual * outage)
    took = recovery.run(10 * outage, backlog)
    of_latency = SLOTS * 100 / latency
    assert took <= max(outage / MAX_FACTOR, backlog / of_latency) + 12 * max(0.5, latency)
    assert recovery.refused == 0


def test_it_begins_with_one_request_and_doubles_with_the_answers(clock: Clock) -> None:
    """If it fails, a destination that recovered gets its whole backlog as a stampede, or its answers do not count."""
    slow_start, sizes = SlowStart(clock), []
    slow_start.start()
    for number in range(5):
        requests = list[tuple[int, int]]()
        while (len(requests) < 100 and (wait := slow_start.wait()) < ROUND_S) or not requests:
            clock.now += wait
            requests.append((number, len(requests)))
            slow_start.begin(requests[-1], 1)
        sizes.append(len(requests))
        for _ in range(10):  # without answers nothing more is sent
            clock.now += 1.0
            assert slow_start.wait()
        for request in requests:
            slow_start.end(request, good=True)
    assert sizes == [1, 2, 4, 8, 16]


def test_failures_of_one_round_halve_the_window_once(clock: Clock) -> None:
    """If it fails, one hiccup with many requests in flight brings a destination down to a crawl, or opens its breaker."""
    slow_start, gaps = SlowStart(clock), []
    slow_start.start()
    for number in range(1 + 1 + 2 + 4 + 8):  # the first one waits for nothing, so it does not fill its round
        while wait := slow_start.wait():
            clock.now += wait
        slow_start.begin(number, 1)
        slow_start.end(number, good=True)
    for number in range(100, 108):
        while wait := slow_start.wait():
            clock.now += wait
        slow_start.begin(number, 1)
    assert all(slow_start.end(number, good=False) for number in range(100, 108))
    for number in range(200, 203):
        gaps.append(slow_start.wait())
        clock.now += gaps[-1]
        slow_start.begin(number, 1)
    assert gaps == pytest.approx([ROUND_S / 8] * 3)  # half of the 16 requests that the next round would have had


def test_a_receiver_that_takes_only_the_probe_is_left_alone_for_longer_and_longer(clock: Clock) -> None:
    """If it fails, a receiver that still hangs is asked by all requests until their time limit, and its breaker stays closed."""
    throttle, waits = recovered(clock), []
    for _ in range(6):
        for _ in range(3):
            assert throttle.state == "closed"
            clock.now += throttle.wait()
            request = Request(0, (b"",))
            throttle.begin(request)  # type: ignore[arg-type]
            assert throttle.wait() > 0
            clock.now += 30.0
            throttle.end(request, fail_by_status(504))  # type: ignore[arg-type]
        waits.append(throttle.blocked_for())
        clock.now += waits[-1]
        probe = Request(1, (b"",))
        throttle.begin(probe)  # type: ignore[arg-type]
        throttle.end(probe, None)  # type: ignore[arg-type]
    assert waits == [FIRST_WAIT_S * 2**n for n in range(1, 7)]
    throttle.start_slowly()
    while throttle.state == "closed":
        clock.now += throttle.wait()
        request = Request(0, (b"",))
        throttle.begin(request)  # type: ignore[arg-type]
        throttle.end(request, fail_by_status(503))  # type: ignore[arg-type]
    assert throttle.blocked_for() <= FIRST_WAIT_S


@pytest.mark.parametrize("seed", range(5))
def test_a_receiver_that_fails_now_and_then_is_not_left_alone_for_minutes(clock: Clock, seed: int) -> None:
    """If it fails, a receiver that is back and answers 503 to 40 % gets a request in five minutes, and its events expire."""
    draw, throttle, waits, open_s = random.Random(seed), recovered(clock, 200.0), [0.0], 0
    refusing = Refusing(lambda _: fail_by_status(503) if draw.random() < 0.4 else None)
    recovery = Recovery(clock, throttle, refusing)
    for _ in range(1200):
        recovery.run(1.0, 10_000_000)
        waits.append(throttle.blocked_for())
        open_s += throttle.state != "closed"
    assert max(waits) < 60
    assert open_s < 0.2 * 1200
    refusing.refuse = lambda _: fail_by_status(503)
    recovery.run(1200, 10_000_000)
    assert throttle.state != "closed"
    assert throttle.blocked_for() > 60, "one that is down again is left alone"


def test_an_outage_is_no_part_of_the_usual_rate(clock: Clock) -> None:
    """If it fails, a backlog is sent the slower the longer the outage was."""
    throttle = recovered(clock, 1000.0)
    clock.now += 3600
    assert throttle._slow_start.usual == pytest.approx(1000, rel=0.02)
    throttle = recovered(clock, None)
    assert throttle._slow_start.usual is None


def test_the_cap_gives_way_to_what_comes_now(clock: Clock) -> None:
    """If this fails, a destination that was quiet before its outage is throttled for ever, and its lag ends in dead letters."""
    throttle = recovered(clock, 4.0)
    recovery = Recovery(clock, throttle, Bucket(1_000_000, 1.0, "503"))
    recovery.run(AT_CAP_S - 1, 10_000_000)
    assert recovery.delivered <= 1.2 * LEAST_CAP * AT_CAP_S + 100
    before = recovery.delivered
    recovery.run(10 * AT_CAP_S, 10_000_000)
    assert recovery.delivered - before > 200 * AT_CAP_S


def test_a_drained_backlog_ends_the_slow_start(clock: Clock) -> None:
    """If it fails, a destination stays limited for ever after one outage."""
    slow_start = SlowStart(clock)
    slow_start.start()
    for number in range(30):
        clock.now += 2.0
        if not slow_start.wait():
            slow_start.begin(number, 2)
            slow_start.end(number, good=True)
    assert slow_start.is_over


@pytest.mark.parametrize("status", [429, 503])
def test_a_wait_that_the_receiver_asked_for_does_not_end_the_slow_start(clock: Clock, status: int) -> None:
    """If it fails, a receiver that asks for 20 seconds of rest gets its whole backlog at once after them."""
    throttle = recovered(clock, 100.0)
    clock.now += throttle.wait()
    first, second, third = (Request(number, (b"",) * 100) for number in range(3))
    throttle.begin(first)  # type: ignore[arg-type]
    throttle.end(first, fail_by_status(status, retry_after=20.0))  # type: ignore[arg-type]
    clock.now += 20.0
    assert throttle.wait() == 0
    throttle.begin(second)  # type: ignore[arg-type]
    assert throttle.wait() > 0
    clock.now += 20.0
    throttle.end(second, None)  # type: ignore[arg-type]
    assert throttle.wait() == 0
    throttle.begin(third)  # type: ignore[arg-type]
    assert throttle.wait() > 0
    throttle.end(third, None)  # type: ignore[arg-type]
    clock.now += 20.0
    assert throttle.wait() == 0  # nothing failed, and nothing waited
    throttle.begin(first)  # type: ignore[arg-type]
    assert throttle.wait() == 0


def test_a_429_to_the_probe_is_followed_by_few_requests(clock: Clock) -> None:
    """If it fails, a receiver that is back and asks for less gets hundreds of requests per second, and no pause."""
    throttle = SendThrottle("p", "d", clock=clock)
    for _ in range(MIN_ATTEMPTS):
        request = Request(0, (b"",))
        throttle.begin(request)  # type: ignore[arg-type]
        throttle.end(request, fail_by_status(503))  # type: ignore[arg-type]
    clock.now += throttle.blocked_for()
    recovery = Recovery(clock, throttle, Refusing(lambda _: fail_by_status(429)))
    recovery.run(20, 1_000_000)
    assert 8 <= recovery.sent <= 11
    recovery.receiver = Bucket(100_000, 0.1, "429")
    recovery.run(40, 1_000_000)
    assert recovery.delivered > 20_000


REFUSED = fail_by_status(400)


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (None, ("accepts events again", None)),
        ({0: REFUSED}, ("accepts events again", None)),
        (REFUSED, ("refuses events for good: they are dead letters", "http_400")),
        ({0: fail_by_status(503), 1: REFUSED}, ("refuses events for good: they are dead letters", "http_400")),
        (fail_by_status(410), ("wants no more events", "http_410")),
        (fail_by_status(429), ("asks for fewer requests", "http_429")),
    ],
)
def test_the_log_says_what_a_probe_proved(clock: Clock, outcome: Outcome, said: tuple[str, str | None]) -> None:
    """If it fails, the log says of a receiver that answers 400 to everything that it accepts events."""
    throttle = SendThrottle("p", "d", clock=clock)
    for _ in range(MIN_ATTEMPTS):
        throttle.begin(request := Request(0, (b"",)))  # type: ignore[arg-type]
        throttle.end(request, fail_by_status(503))  # type: ignore[arg-type]
    clock.now += throttle.blocked_for()
    throttle.begin(request := Request(1, (b"", b"")))  # type: ignore[arg-type]
    with capture_logs() as logs:
        throttle.end(request, outcome)  # type: ignore[arg-type]
    (found,) = logs
    assert (throttle.state, found["event"], found.get("reason")) == ("closed", "breaker_closed", said[1])
    assert said[0] in found["hint"]


def test_a_destination_that_begins_to_fail_is_named_and_when_it_recovers(clock: Clock) -> None:
    """Broken: with few events nothing says that a receiver fails; or one that fails now and then fills the log."""
    throttle = SendThrottle("p", "d", clock=clock)

    def send(outcome: Outcome, wait: float = 0.0) -> list[tuple[str, str | None]]:
        clock.now += wait
        with capture_logs() as logs:
            throttle.begin(request := Request(0, (b"", b"")))  # type: ignore[arg-type]
            throttle.end(request, outcome)  # type: ignore[arg-type]
            throttle.update_gauge()
        return [(log["event"], log.get("reason")) for log in logs]

    assert send(None) == []
    assert send(fail_by_status(503)) == [("destination_fails", "http_503")]
    assert send(fail_by_status(503), 1) == []
    assert send(None, 0.5) == [], "it may fail again at once"
    clock.now += FailureNotice.QUIET_S
    with capture_logs() as logs:
        throttle.update_gauge()
    assert [log["event"] for log in logs] == ["destination_recovered"]
    assert send(fail_by_status(503), 1) == [], "it was named less than a minute ago"
    assert send(None, FailureNotice.QUIET_S) == [], "and its recovery is no news either"
    assert send({1: fail_by_status(404)}, FailureNotice.AGAIN_S) == [("destination_fails", "http_404")]
    assert send(replace(fail_by_status(503), ours=True), FailureNotice.AGAIN_S) == []


@pytest.mark.parametrize("status", [429, 503])
def test_a_207_that_refuses_every_event_for_now_is_a_failure(clock: Clock, status: int) -> None:
    """If it fails, a receiver that refuses event by event is run over after its outage, and its breaker stays closed."""
    throttle, refused = recovered(clock), fail_by_status(status)
    recovery = Recovery(clock, throttle, Refusing(lambda events: dict.fromkeys(range(events), refused)))
    recovery.run(20, 1_000_000)
    assert recovery.sent <= 11
    assert throttle.state == ("closed" if status == 429 else "open")


def test_a_207_that_accepts_one_event_is_no_failure(clock: Clock) -> None:
    """If it fails, a few events that a receiver cannot take now stop all others."""
    throttle, refused = recovered(clock), fail_by_status(503)
    for refused_events in (
        dict.fromkeys(range(9), refused),
        {**dict.fromkeys(range(9), refused), 9: fail_by_status(400)},
    ):
        for number in range(5 * MIN_ATTEMPTS):
            clock.now += throttle.wait()
            request = Request(number, (b"",) * 10)
            throttle.begin(request)  # type: ignore[arg-type]
            throttle.end(request, refused_events)  # type: ignore[arg-type]
            assert throttle.state == "closed"


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
