"""A destination's circuit breaker: whether requests may go, by how the last ones ended.

Closed: all go. It opens when at least `MIN_ATTEMPTS` requests ended within `WINDOW_S` and `OPEN_SHARE` of them failed. Open: none
goes, for a wait that doubles with each failed probe. Then half-open: one request goes as a probe; its success closes the breaker,
its failure opens it again. Source of the rule: Convoy opens at 70 % of at least 10 requests (Standard Webhooks leaves it open).
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Literal

WINDOW_S = 30.0
MIN_ATTEMPTS = 10
OPEN_SHARE = 0.7
FIRST_WAIT_S, MAX_WAIT_S = 5.0, 300.0
_BUCKET_S = 3.0

State = Literal["closed", "open", "half-open"]


class Breaker:
    """Fed once per request, not per event. `clock` is monotonic seconds. Not thread-safe.

    `take(request)` before each request, unless `is_shut`; then exactly one of `succeeded`, `failed`, `unknown` with the same
    request after it: late answers to requests from before the outage are told from the probe's.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[list[float]] = deque()
        self._opened = 0
        self._open_until = 0.0
        self._probe: object = None

    @property
    def state(self) -> State:
        """Where it stands now."""
        if not self._opened:
            return "closed"
        return "open" if self._clock() < self._open_until else "half-open"

    @property
    def open_until(self) -> float:
        """Monotonic seconds when a probe may go; in the past when it is not open."""
        return self._open_until

    @property
    def is_shut(self) -> bool:
        """Whether no request may go now: it is open, or its probe is under way."""
        return bool(self._opened) and (self._probe is not None or self._clock() < self._open_until)

    def take(self, request: object) -> None:
        """This request goes; while half-open it is the probe."""
        if self._opened:
            self._probe = request

    def succeeded(self, request: object) -> bool:
        """The receiver is up: it took the events, or refused them for good. True when that closed the breaker."""
        was_probe = self._ended(request)
        if not self._opened:
            self._count(failed=False)
            return False
        if was_probe:
            self._opened = 0
            self._buckets.clear()
        return was_probe

    def failed(self, request: object) -> bool:
        """The receiver is in trouble. True when that opened a closed breaker."""
        was_probe = self._ended(request)
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

    def unknown(self, request: object) -> None:
        """The request ended without a word about the receiver: given up here, or asked to slow down (429)."""
        self._ended(request)

    def _ended(self, request: object) -> bool:
        """Whether that was the probe."""
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
