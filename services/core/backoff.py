"""The waits of a loop that repeats an action until it succeeds."""

import asyncio

import backoff

from services.core.process.lifecycle import wait_for_stop


class Backoff:
    """Each failure doubles the upper bound of the wait, from `base` to `limit` seconds; the wait is random below it (full jitter,
    AWS Architecture Blog, "Exponential Backoff and Jitter"). Not thread-safe.
    """

    def __init__(self, base: float, limit: float) -> None:
        self._base, self._limit = base, limit
        self.failures = 0
        """Failures since the last success."""

    def fail(self) -> bool:
        """Count a failure. Returns True for the first of a series: only that one is logged."""
        self.failures += 1
        return self.failures == 1

    def reset(self) -> None:
        """Count a success."""
        self.failures = 0

    def delay(self) -> float:
        """Seconds until the next attempt; random at each call."""
        return float(backoff.full_jitter(min(self._limit, self._base * 2 ** min(self.failures, 10))))

    async def wait(self, stopping: asyncio.Event | None = None) -> None:
        """Wait until the next attempt, or until `stopping` is set."""
        wait = self.delay()
        if stopping is None:
            await asyncio.sleep(wait)
        else:
            await wait_for_stop(stopping, wait)
