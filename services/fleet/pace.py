"""Spreading work evenly over time."""

import asyncio
import time


class Pace:
    """At most `rate` events a second; 0: no bound. The debt of a pause is not made up for: no burst after it."""

    def __init__(self, rate: float) -> None:
        self._rate, self._next = rate, 0.0

    async def wait(self, count: int) -> None:
        """Until so many more may go."""
        if self._rate:
            now = time.monotonic()
            self._next = max(self._next, now)
            await asyncio.sleep(self._next - now)
            self._next += count / self._rate
