"""The waits of a loop that tries the same thing again until it works."""

import asyncio

import backoff

from services.core.lifecycle import wait_for_stop


class Backoff:
    """Each failure doubles the upper bound of the wait, from `base` to `limit` seconds; the wait is random below it (full jitter,
    AWS Architecture Blog, "Exponential Backoff and Jitter"). Not thread-safe.
    """

    def __init__(self, base: float, limit: float) -> None:
        self._base, self._limit = base, limit
        self.failures = 0
        """Since the last success."""

    def fail(self) -> bool:
        """Count a failure. True for the first of a series, which is the one to log."""
        self.failures += 1
        return self.failures == 1

    def reset(self) -> None:
        """It worked."""
        self.failures = 0

    def delay(self) -> float:
        """Seconds until the next attempt; another random number at each call."""
        return float(backoff.full_jitter(min(self._limit, self._base * 2 ** min(self.failures, 10))))

    async def wait(self, stopping: asyncio.Event | None = None) -> None:
        """Until the next attempt, or `stopping`."""
        wait = self.delay()
        if stopping is None:
            await asyncio.sleep(wait)
        else:
            await wait_for_stop(stopping, wait)
