"""The circuit breaker of a destination: no request is sent while most of the last ones failed."""

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

BreakerState = Literal["closed", "open", "half-open"]
WINDOW_S = 30.0
MIN_ATTEMPTS = 10
OPEN_SHARE = 0.7
FIRST_WAIT_S, MAX_WAIT_S = 2.0, 300.0
"""A short outage ends with a short wait: the next probe comes after about the time that the breaker has been open."""
_BUCKET_S = 3.0


class CircuitBreaker:
    """Closed: every request is sent. It opens when at least MIN_ATTEMPTS requests ended within WINDOW_S and OPEN_SHARE of them
    failed. Open: no request is sent, for a wait that doubles with each failed probe. Then half-open: one request is sent as a
    probe; its success closes the breaker, its failure opens it again. The slow start that follows belongs to the same outage:
    when it fails, the breaker opens for twice the last wait. Source of the rule: Convoy opens at 70 % of at least 10 requests
    (Standard Webhooks leaves it open).

    Called once per request, not per event: `begin(request)` unless `is_blocked`, then exactly one of `succeed`, `close`, `fail`,
    `abandon` with the same request. So a late response to an earlier request is not mistaken for the probe's.
    `clock` is monotonic seconds. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[list[float]] = deque()
        """[begin, attempts, failures] of each short interval of the window."""
        self._is_closed = True
        self._opened = 0
        """How often it opened in this outage."""
        self._open_until = 0.0
        self._probe: object = None

    @property
    def state(self) -> BreakerState:
        if self._is_closed:
            return "closed"
        return "open" if self._clock() < self._open_until else "half-open"

    @property
    def open_until(self) -> float:
        """Monotonic seconds when a probe may be sent; in the past when it is not open."""
        return self._open_until

    @property
    def is_blocked(self) -> bool:
        """Whether no request may be sent now: it is open, or waits for its probe."""
        return not self._is_closed and (self._probe is not None or self._clock() < self._open_until)

    def begin(self, request: object) -> None:
        """This request is sent; while half-open it is the probe."""
        if not self._is_closed:
            self._probe = request

    def succeed(self, request: object) -> bool:
        """The receiver answered: it accepted the events, or refused them finally. True when that closed the breaker."""
        if self._is_closed:
            self._count(failed=False)
        return self.close(request)

    def close(self, request: object) -> bool:
        """The receiver asked to slow down (429): it answers, and that is all. True when that closed the breaker."""
        was_probe = self._end(request)
        if was_probe:
            self._is_closed = True
            self._buckets.clear()
        return was_probe

    def fail(self, request: object, *, is_new: bool = True, has_recovered: bool = True) -> bool:
        """The request failed. True when that opened a closed breaker.

        is_new: a breaker that opens now has a new outage, not one whose slow start still runs. has_recovered: False opens it at
        once.
        """
        was_probe = self._end(request)
        if not self._is_closed:
            if was_probe:
                self._open()
            return False
        self._count(failed=True)
        attempts, failures = sum(bucket[1] for bucket in self._buckets), sum(bucket[2] for bucket in self._buckets)
        if has_recovered and (attempts < MIN_ATTEMPTS or failures < OPEN_SHARE * attempts):
            return False
        if is_new:
            self._opened = 0
        self._open()
        return True

    def forget(self) -> None:
        """The next outage is a new one, unless the breaker is open."""
        if self._is_closed:
            self._opened = 0

    def abandon(self, request: object) -> None:
        """The request says nothing about the receiver: it was cancelled."""
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
        self._is_closed = False
        self._buckets.clear()

    def _count(self, *, failed: bool) -> None:
        now = self._clock()
        while self._buckets and self._buckets[0][0] <= now - WINDOW_S:
            self._buckets.popleft()
        if not self._buckets or self._buckets[-1][0] <= now - _BUCKET_S:
            self._buckets.append([now, 0, 0])
        self._buckets[-1][1] += 1
        self._buckets[-1][2] += failed
