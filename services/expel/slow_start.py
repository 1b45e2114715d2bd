"""How fast a destination gets requests: a rate per second, and the slow start after an outage."""

import math
import time
from collections import deque
from collections.abc import Callable

from services.expel.circuit_breaker import MIN_ATTEMPTS, OPEN_SHARE

_BURST_SECONDS = 0.1
_ROUNDING = 1e-6
"""Of a token: a sum of floats may never reach a whole one."""


class TokenBucket:
    """At most `rate` events per second on average; at once at most the events of a tenth of a second, or one request.

    It may go into debt, so no request is split. `clock` is monotonic seconds. Not thread-safe.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.rate, self._capacity = rate, max(1.0, rate * _BURST_SECONDS)
        self._tokens, self._filled_at = self._capacity, clock()

    def wait(self) -> float:
        """Seconds until the next request may be sent; 0 for now."""
        self._fill()
        return 0.0 if self._tokens > 1.0 - _ROUNDING else (1.0 - self._tokens) / self.rate

    def spend(self, events: int) -> None:
        """A request with so many events is sent now; later ones pay its debt."""
        self._tokens -= events

    def set_rate(self, rate: float) -> None:
        """Change the rate; the debt stays."""
        self._fill()
        self.rate, self._capacity = rate, max(1.0, rate * _BURST_SECONDS)

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + (now - self._filled_at) * self.rate)
        self._filled_at = now


ROUND_S = 0.5
"""The shortest round of a slow start. Some receivers answer before they do the work: their fast answers prove little."""
LEAST_WINDOW = 0.25
"""Requests per round. When one fails although there are so few, and OPEN_SHARE of the last MIN_ATTEMPTS answers were failures,
the receiver has not recovered."""
_DOUBLE, _GROW = 2.0, 1.125
"""How the window grows after a good round: before the first sign of overload, and after it."""
_SLOWER, _NOISE_S = 2.0, 0.1
"""Answers that take so many times as long as the fastest one, and longer by so many seconds, are a sign of overload."""
LEAST_CAP = 10.0
"""Events per second."""
MAX_FACTOR = 2.0
"""The cap, in usual rates."""
AT_CAP_S = 120.0
"""After this time at the cap, the cap doubles."""
_UNLIMITED_S = 10.0
"""After this time without a limit that is reached, the slow start is over."""
_AVERAGE_S = 120.0
"""Time constant of the usual rate."""


class SlowStart:
    """Limits the requests after an outage by the receiver's answers, as TCP does (RFC 5681).

    The window is the number of requests in a round, and the most in flight. It begins with one request. A round is over when
    as many requests were answered, and takes at least ROUND_S. After a good round the window doubles. A failure or a 429 halves
    it, at most once per round, because the other requests of the round were sent before. After the first sign of overload (a
    failure, a 429, or answers that take much longer than at first), the window grows by an eighth per round.

    The cap is twice the usual rate of before. So the backlog of an outage takes about as long as the outage. What the answers do
    not show, such as a queue behind the receiver, grows no faster than before the outage. The usual rate is an average over some
    minutes of healthy delivery. While it is unknown (the process started during the outage) there is no cap. It may be too low
    for the events that arrive now: when a destination still has a backlog after minutes at its cap, the cap doubles. Otherwise
    its lag would grow until its events expire. The slow start is over when the destination stayed below its limits for a
    while, because then the backlog is gone. The time after a failure or a 429 counts only from the next good answer, because
    the lane may wait for its retries, or for the receiver's Retry-After.

    `begin(request)`, then one of `end` and `abandon`. `clock` is monotonic seconds. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usual: float | None = None
        self._counted, self._observed_s = 0, 0.0
        self._counting_since: float | None = None
        self._window: float | None = None
        """Requests per round; None without a slow start."""
        self._growth = _DOUBLE
        self._begun: dict[object, float] = {}
        """When each request in flight was sent, of those that were sent in this slow start."""
        self._next_at = self._halved_at = self._limited_at = 0.0
        self._is_failing = False
        """Whether the last answer was a failure or a 429."""
        self._last: deque[bool] = deque(maxlen=5 * MIN_ATTEMPTS)
        """Whether each of the last answers was good, also of earlier slow starts in the same outage."""
        self._answered, self._is_full = 0, False
        """Of this round: good answers, and whether a request had to wait for the window."""
        self._fastest = self._fastest_of_round = math.inf
        self._cap: TokenBucket | None = None
        self._raise_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether requests are not limited."""
        return self._window is None

    @property
    def takes_some(self) -> bool:
        """Whether the receiver fails now and then, and not always: when the breaker opens again, that is no longer the outage."""
        return len(self._last) >= MIN_ATTEMPTS and self._failed_share(len(self._last)) < OPEN_SHARE

    def _failed_share(self, count: int) -> float:
        """Of so many of the last answers."""
        newest = list(self._last)[-count:]
        return newest.count(False) / len(newest)

    @property
    def usual(self) -> float | None:
        """Events per second of healthy delivery; None while it is unknown."""
        return self._usual

    def record_delivered(self, events: int) -> None:
        """So many events were delivered. Outside of a slow start they count for the usual rate."""
        if self._window is not None:
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

    def stop(self) -> None:
        """Limit nothing. The time until the next delivery does not count for the usual rate."""
        self._window = None
        self._counted, self._counting_since = 0, None

    def start(self, *, least: bool = False) -> None:
        """The destination recovered. least: it asks for few requests (429)."""
        now = self._clock()
        self._window, self._growth = (LEAST_WINDOW, _GROW) if least else (1.0, _DOUBLE)
        self._begun.clear()
        self._limited_at, self._next_at = now, now + (ROUND_S / LEAST_WINDOW if least else 0.0)
        self._halved_at = -math.inf
        self._is_failing = least
        self._fastest = math.inf
        self._begin_round()
        self._cap = None if self._usual is None else TokenBucket(max(LEAST_CAP, MAX_FACTOR * self._usual), self._clock)
        self._raise_at = now + AT_CAP_S

    def wait(self) -> float:
        """Seconds until the next request may be sent, or until the next check while answers are missing; 0 for now."""
        if self._window is None:
            return 0.0
        now = self._clock()
        wait = ROUND_S if len(self._begun) >= max(1.0, self._window) else max(0.0, self._next_at - now)
        if wait:
            self._is_full = True
        elif self._cap is not None:
            wait = self._wait_for_cap(self._cap, now)
        if wait:
            self._limited_at = now + wait
        elif not self._is_failing and now - self._limited_at > _UNLIMITED_S:
            self.stop()
            self._last.clear()
        return wait

    def _wait_for_cap(self, cap: TokenBucket, now: float) -> float:
        wait = cap.wait()
        if wait and now >= self._raise_at:
            self._usual = cap.rate  # more events arrive now than usual
            cap.set_rate(MAX_FACTOR * cap.rate)
            self._raise_at = now + AT_CAP_S
            wait = cap.wait()
        return wait

    def begin(self, request: object, events: int) -> None:
        """A request with so many events is sent now."""
        if self._window is None:
            return
        now = self._clock()
        self._begun[request] = now
        self._next_at = max(now, self._next_at) + ROUND_S / self._window
        if self._cap is not None:
            self._cap.spend(events)

    def abandon(self, request: object) -> None:
        """The request says nothing about the receiver."""
        self._begun.pop(request, None)

    def end(self, request: object, *, good: bool) -> bool:
        """The receiver answered, or failed to. good: it accepted the events, or refused them finally.

        False: it has not recovered, because the request failed although the window was the smallest one, as most did before it.
        """
        begun = self._begun.pop(request, None)
        if self._window is None or begun is None:
            return True
        now = self._clock()
        if good and self._is_failing:
            self._limited_at = max(self._limited_at, now)
        self._is_failing = not good
        self._last.append(good)
        if good:
            self._count_answer(now - begun)
        elif begun > self._halved_at:
            if self._window == LEAST_WINDOW and self._failed_share(MIN_ATTEMPTS) >= OPEN_SHARE:
                return False
            self._window, self._growth = max(LEAST_WINDOW, self._window / 2), _GROW
            self._next_at, self._halved_at = now + ROUND_S / self._window, now
            self._begin_round()
        return True

    def _count_answer(self, took: float) -> None:
        assert self._window is not None
        self._answered += 1
        self._fastest_of_round = min(self._fastest_of_round, took)
        if self._answered >= self._window:
            self._fastest = min(self._fastest, self._fastest_of_round)
            if self._fastest_of_round > _SLOWER * self._fastest + _NOISE_S:
                self._growth = _GROW
            if self._is_full:
                self._window *= self._growth
            self._begin_round()

    def _begin_round(self) -> None:
        self._answered, self._is_full, self._fastest_of_round = 0, False, math.inf
