"""After an outage a destination is not run over: the rate rises step by step, to at most twice what was usual before.

The usual rate is an average over some minutes of healthy delivery. While it is unknown (the process started during the
outage) the rate doubles without a known end. What was usual may be less than what comes now: where a destination has a
backlog still after minutes at its limit, the limit is doubled, or its lag would grow until its events die. The ramp is over
when the destination was served below its limit for a while, so the backlog is gone.
"""

import math
import time
from collections.abc import Callable

from services.expel.rate import TokenBucket

FIRST_RATE = 10.0
"""Events a second right after recovery, when nothing else is known."""
_FIRST_SHARE = 0.1
_MOST = 2.0
_STEP_S = 5.0
"""The allowed rate doubles so often."""
_LIMITED_S = 120.0
"""So long at the limit, and it is doubled."""
_CALM_S = 10.0
"""So long below the limit, and the ramp is over."""
_AVERAGE_S = 120.0
"""Time constant of the usual rate."""


class Ramp:
    """One destination's, in one process. `clock` is monotonic seconds. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usual: float | None = None
        self._counted, self._seen = 0, 0.0
        self._counting_since: float | None = None
        self._bucket: TokenBucket | None = None
        self._rate = self._raise_at = self._held_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing is held back."""
        return self._bucket is None

    @property
    def usual(self) -> float | None:
        """Events a second while all was well; None while it is unknown."""
        return self._usual

    def delivered(self, events: int) -> None:
        """So many events were delivered; outside of a ramp that is what is usual."""
        if self._bucket is not None:
            return
        now = self._clock()
        if (
            self._counting_since is None
        ):  # how long there was nothing before the first events says nothing of their rate
            self._counting_since = now
            return
        self._counted += events
        passed = now - self._counting_since
        if passed >= 1.0:
            self._seen += passed
            weight = max(1.0 - math.exp(-passed / _AVERAGE_S), passed / self._seen)  # at first the plain mean
            rate = self._counted / passed
            self._usual = rate if self._usual is None else self._usual + weight * (rate - self._usual)
            self._counted, self._counting_since = 0, now

    def begin(self) -> None:
        """The destination recovered."""
        rate = FIRST_RATE if self._usual is None else max(FIRST_RATE, _FIRST_SHARE * self._usual)
        self._bucket = TokenBucket(rate, self._clock)
        self._rate, self._held_at = rate, self._clock()
        self._raise_at = self._held_at + _STEP_S

    def wait(self) -> float:
        """Seconds until the next request may go; 0 when it may now."""
        if self._bucket is None:
            return 0.0
        now = self._clock()
        if now >= self._raise_at:
            self._raise(now)
            self._bucket.change(self._rate)
        wait = self._bucket.wait()
        if wait:
            self._held_at = now
        elif now - self._held_at > _CALM_S:
            self._bucket = None
            self._counted, self._counting_since = 0, now
        return wait

    def _raise(self, now: float) -> None:
        limit = math.inf if self._usual is None else max(FIRST_RATE, _MOST * self._usual)
        if self._rate >= limit:
            self._usual = limit  # what comes now is more than what was usual
            limit *= _MOST
        self._rate = min(limit, 2 * self._rate)
        is_at_limit = self._usual is not None and self._rate >= limit
        self._raise_at = now + (_LIMITED_S if is_at_limit else _STEP_S)

    def take(self, events: int) -> None:
        """A request with so many events goes now."""
        if self._bucket is not None:
            self._bucket.take(events)
