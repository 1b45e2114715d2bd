"""A destination's rate limit: a token bucket that may go into debt, so that a request is never split to fit."""

import time
from collections.abc import Callable

_BURST_SECONDS = 0.1
_ROUNDING = 1e-6
"""Of a token: sums of floats may never reach the whole one."""


class TokenBucket:
    """At most `rate` events a second in the long run; at once at most a tenth of a second's worth, or one request.

    `clock` is monotonic seconds. Not thread-safe.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate, self._capacity = rate, _capacity(rate)
        self._tokens, self._filled = self._capacity, clock()

    def wait(self) -> float:
        """Seconds until the next request may go; 0 when it may now."""
        self._fill()
        return 0.0 if self._tokens > 1.0 - _ROUNDING else (1.0 - self._tokens) / self._rate

    def take(self, events: int) -> None:
        """A request with so many events goes now; later ones pay its debt."""
        self._tokens -= events

    def change(self, rate: float) -> None:
        """Another rate from now on; what is owed stays owed."""
        self._fill()
        self._rate, self._capacity = rate, _capacity(rate)

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + (now - self._filled) * self._rate)
        self._filled = now


def _capacity(rate: float) -> float:
    return max(1.0, rate * _BURST_SECONDS)
