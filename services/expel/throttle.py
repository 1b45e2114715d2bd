"""Decides whether a request may be sent now: rate limit, circuit breaker, slow start after an outage, and the load shedder, which
limits how fast a lane with an open breaker moves its events to the retry topic.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import structlog

from services.core import metrics
from services.core.pipes import lane_name
from services.expel.delivery import Delivery
from services.expel.retry_policy import Failure, Outcome

log = structlog.get_logger()

BreakerState = Literal["closed", "open", "half-open"]
_STATES = {"closed": 0, "half-open": 1, "open": 2}
_TOO_MANY = "http_429"
_MIN_BLOCKED_WAIT_S = 1.0


class SendThrottle:
    """The throttle of one destination in one process; it outlives memberships. `clock` is monotonic seconds. Not thread-safe.

    sheds: while the breaker is open, events go to the retry topic without an attempt (`shedder`).
    """

    def __init__(
        self,
        pipe: str,
        destination: str,
        rate: float | None = None,
        *,
        sheds: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = TokenBucket(rate, clock) if rate else None
        self._lane = lane_name(pipe, destination)
        self._breaker, self._slow_start, self.shedder = CircuitBreaker(clock), SlowStart(clock), LoadShedder(clock)
        self._sheds, self._clock = sheds, clock
        self._gauge = metrics.EXPEL_BREAKER.labels(pipe, destination)

    @property
    def is_blocked(self) -> bool:
        """Whether no request may be sent because the last ones failed."""
        return self._breaker.is_blocked

    @property
    def state(self) -> BreakerState:
        """The breaker's state now."""
        return self._breaker.state

    def blocked_for(self) -> float:
        """The least seconds until the next probe; 0 when one may be sent or is open."""
        return max(0.0, self._breaker.open_until - self._clock())

    def wait(self) -> float:
        """Seconds until the next request may be sent, or until events may be shed; 0 for now."""
        if self._breaker.is_blocked:
            if self._sheds:
                return self.shedder.wait()
            return max(_MIN_BLOCKED_WAIT_S, self.blocked_for())
        wait = self._slow_start.wait()
        return wait if self._bucket is None else max(wait, self._bucket.wait())

    def begin(self, request: Delivery) -> None:
        """This request is sent now. Not while `is_blocked`. `end` or `abandon` must follow."""
        self._breaker.begin(request)
        self._slow_start.spend(len(request.parts))
        if self._bucket is not None:
            self._bucket.spend(len(request.parts))

    def abandon(self, request: Delivery) -> None:
        """The request was cancelled in this process."""
        self._breaker.abandon(request)

    def end(self, request: Delivery, outcome: Outcome) -> None:
        """The outcome of a request. A receiver that refuses events finally, or answers 429, is healthy."""
        if isinstance(outcome, Failure) and (outcome.ours or outcome.reason == _TOO_MANY):
            self._breaker.abandon(request)
        elif isinstance(outcome, Failure) and outcome.recoverable:
            if self._breaker.fail(request):
                self.shedder.start(self._slow_start.usual)
                log.warning("breaker_open", lane=self._lane, reason=outcome.reason, detail=outcome.detail)
        else:
            if outcome is None:
                self._slow_start.record_delivered(len(request.parts))
            if self._breaker.succeed(request):
                self._slow_start.start()
                log.info("breaker_closed", lane=self._lane)

    def start_slowly(self) -> None:
        """A backlog follows: the rate rises step by step, as after an outage."""
        self._slow_start.start()

    def update_gauge(self) -> None:
        """Set the breaker's metric."""
        self._gauge.set(_STATES[self.state])


WINDOW_S = 30.0
MIN_ATTEMPTS = 10
OPEN_SHARE = 0.7
FIRST_WAIT_S, MAX_WAIT_S = 5.0, 300.0
_BUCKET_S = 3.0


class CircuitBreaker:
    """Closed: every request is sent. It opens when at least MIN_ATTEMPTS requests ended within WINDOW_S and OPEN_SHARE of them
    failed. Open: no request is sent, for a wait that doubles with each failed probe. Then half-open: one request is sent as a
    probe; its success closes the breaker, its failure opens it again. Source of the rule: Convoy opens at 70 % of at least 10
    requests (Standard Webhooks leaves it open).

    Called once per request, not per event: `begin(request)` unless `is_blocked`, then exactly one of `succeed`, `fail`, `abandon`
    with the same request. So a late response to an earlier request is not mistaken for the probe's.
    `clock` is monotonic seconds. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[list[float]] = deque()
        """[begin, attempts, failures] of each short interval of the window."""
        self._opened = 0
        """How often it opened since it was closed."""
        self._open_until = 0.0
        self._probe: object = None

    @property
    def state(self) -> BreakerState:
        """The state now."""
        if not self._opened:
            return "closed"
        return "open" if self._clock() < self._open_until else "half-open"

    @property
    def open_until(self) -> float:
        """Monotonic seconds when a probe may be sent; in the past when it is not open."""
        return self._open_until

    @property
    def is_blocked(self) -> bool:
        """Whether no request may be sent now: it is open, or waits for its probe."""
        return bool(self._opened) and (self._probe is not None or self._clock() < self._open_until)

    def begin(self, request: object) -> None:
        """This request is sent; while half-open it is the probe."""
        if self._opened:
            self._probe = request

    def succeed(self, request: object) -> bool:
        """The receiver answered: it accepted the events, or refused them finally. True when that closed the breaker."""
        was_probe = self._end(request)
        if not self._opened:
            self._count(failed=False)
            return False
        if was_probe:
            self._opened = 0
            self._buckets.clear()
        return was_probe

    def fail(self, request: object) -> bool:
        """The request failed. True when that opened a closed breaker."""
        was_probe = self._end(request)
        if self._opened:
            if was_probe:
                self._open()
            return False
        self._count(failed=True)
        attempts, failures = sum(bucket[1] for bucket in self._buckets), sum(bucket[2] for bucket in self._buckets)
        if attempts < MIN_ATTEMPTS or failures < OPEN_SHARE * attempts:
            return False
        self._open()
        return True

    def abandon(self, request: object) -> None:
        """The request says nothing about the receiver: it was cancelled, or the receiver asked to slow down (429)."""
        self._end(request)

    def _end(self, request: object) -> bool:
        """Whether it was the probe."""
        if self._probe is not request:
            return False
        self._probe = None
        return True

    def _open(self) -> None:
        self._open_until = self._clock() + min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(self._opened, 16))
        self._opened += 1
        self._buckets.clear()

    def _count(self, *, failed: bool) -> None:
        now = self._clock()
        while self._buckets and self._buckets[0][0] <= now - WINDOW_S:
            self._buckets.popleft()
        if not self._buckets or self._buckets[-1][0] <= now - _BUCKET_S:
            self._buckets.append([now, 0, 0])
        self._buckets[-1][1] += 1
        self._buckets[-1][2] += failed


FIRST_RATE = 10.0
"""Events per second right after the recovery, when the usual rate is unknown."""
_FIRST_SHARE = 0.1
_MAX_FACTOR = 2.0
_STEP_S = 5.0
"""The allowed rate doubles this often."""
_AT_LIMIT_S = 120.0
"""After this time at the limit, the limit doubles."""
_BELOW_LIMIT_S = 10.0
"""After this time below the limit, the slow start is over."""
_AVERAGE_S = 120.0
"""Time constant of the usual rate."""


class SlowStart:
    """Limits the rate after an outage: it rises step by step, to at most twice the usual rate of before.

    The usual rate is an average over some minutes of healthy delivery. While it is unknown (the process started during the
    outage) the rate doubles without limit. The usual rate may be too low for the events that arrive now: when a destination
    still has a backlog after minutes at its limit, the limit doubles. Otherwise its lag would grow until its events expire. The
    slow start is over when the destination stayed below its limit for a while, because then the backlog is gone.
    `clock` is monotonic seconds. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usual: float | None = None
        self._counted, self._observed_s = 0, 0.0
        self._counting_since: float | None = None
        self._bucket: TokenBucket | None = None
        self._rate = self._raise_at = self._limited_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the rate is not limited."""
        return self._bucket is None

    @property
    def usual(self) -> float | None:
        """Events per second of healthy delivery; None while it is unknown."""
        return self._usual

    def record_delivered(self, events: int) -> None:
        """So many events were delivered. Outside of a slow start they count for the usual rate."""
        if self._bucket is not None:
            return
        now = self._clock()
        if self._counting_since is None:  # the idle time before the first events says nothing about their rate
            self._counting_since = now
            return
        self._counted += events
        passed = now - self._counting_since
        if passed >= 1.0:
            self._observed_s += passed
            weight = max(1.0 - math.exp(-passed / _AVERAGE_S), passed / self._observed_s)  # at first the plain mean
            rate = self._counted / passed
            self._usual = rate if self._usual is None else self._usual + weight * (rate - self._usual)
            self._counted, self._counting_since = 0, now

    def start(self) -> None:
        """The destination recovered."""
        rate = FIRST_RATE if self._usual is None else max(FIRST_RATE, _FIRST_SHARE * self._usual)
        self._bucket = TokenBucket(rate, self._clock)
        self._rate, self._limited_at = rate, self._clock()
        self._raise_at = self._limited_at + _STEP_S

    def wait(self) -> float:
        """Seconds until the next request may be sent; 0 for now."""
        if self._bucket is None:
            return 0.0
        now = self._clock()
        if now >= self._raise_at:
            self._raise(now)
            self._bucket.set_rate(self._rate)
        wait = self._bucket.wait()
        if wait:
            self._limited_at = now
        elif now - self._limited_at > _BELOW_LIMIT_S:
            self._bucket = None
            self._counted, self._counting_since = 0, now
        return wait

    def _raise(self, now: float) -> None:
        limit = math.inf if self._usual is None else max(FIRST_RATE, _MAX_FACTOR * self._usual)
        if self._rate >= limit:
            self._usual = limit  # more events arrive now than usual
            limit *= _MAX_FACTOR
        self._rate = min(limit, 2 * self._rate)
        is_at_limit = self._usual is not None and self._rate >= limit
        self._raise_at = now + (_AT_LIMIT_S if is_at_limit else _STEP_S)

    def spend(self, events: int) -> None:
        """A request with so many events is sent now."""
        if self._bucket is not None:
            self._bucket.spend(events)


TURN_S = 0.5
MIN_SHED_RATE = 500.0
"""Events per second, when fewer are usual or the usual rate is unknown."""
_SHED_FACTOR = 1.25
_DOUBLE_S = 30.0
"""After this time with more events than may be shed, the rate doubles: events must not expire in their stream."""


class LoadShedder:
    """How fast a lane with an open breaker moves its events to the retry topic: in turns, slightly faster than they arrive.

    Other events wait in their stream, which costs nothing. If a lane moved its backlog as fast as possible, the retrier and the
    broker would work for the failed destination and slow down the others. A turn moves the events since the last one in few
    large appends. `clock` is monotonic seconds. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate = MIN_SHED_RATE
        self._next_turn = self._kept_up_at = 0.0

    def start(self, usual: float | None) -> None:
        """The breaker opened. usual: events per second before that, when known."""
        self._rate = max(MIN_SHED_RATE, _SHED_FACTOR * (usual or 0.0))
        self._kept_up_at = self._clock()

    def wait(self) -> float:
        """Seconds until the next turn."""
        return max(0.0, self._next_turn - self._clock())

    def limit(self) -> int:
        """How many events a turn may shed. Its last request may exceed it."""
        return int(self._rate * TURN_S)

    def end_turn(self, shed: int, *, is_more: bool) -> None:
        """A turn shed so many events. is_more: more are waiting, here or in the stream because the lane was full."""
        now = self._clock()
        self._next_turn = now + (min(TURN_S, shed / self._rate) if is_more else TURN_S)
        if not is_more:
            self._kept_up_at = now
        elif now - self._kept_up_at >= _DOUBLE_S:
            self._rate *= 2
            self._kept_up_at = now


_BURST_SECONDS = 0.1
_ROUNDING = 1e-6
"""Of a token: a sum of floats may never reach a whole one."""


class TokenBucket:
    """At most `rate` events per second on average; at once at most the events of a tenth of a second, or one request.

    It may go into debt, so no request is split. `clock` is monotonic seconds. Not thread-safe.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate, self._capacity = rate, max(1.0, rate * _BURST_SECONDS)
        self._tokens, self._filled_at = self._capacity, clock()

    def wait(self) -> float:
        """Seconds until the next request may be sent; 0 for now."""
        self._fill()
        return 0.0 if self._tokens > 1.0 - _ROUNDING else (1.0 - self._tokens) / self._rate

    def spend(self, events: int) -> None:
        """A request with so many events is sent now; later ones pay its debt."""
        self._tokens -= events

    def set_rate(self, rate: float) -> None:
        """Change the rate; the debt stays."""
        self._fill()
        self._rate, self._capacity = rate, max(1.0, rate * _BURST_SECONDS)

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + (now - self._filled_at) * self._rate)
        self._filled_at = now
