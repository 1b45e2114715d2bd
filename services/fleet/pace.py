"""Spreads work evenly over time."""

import asyncio
import time


class Pace:
    """At most `rate` events per second; 0: no limit. A pause is not made up for: no burst follows it."""

    def __init__(self, rate: float) -> None:
        self._rate, self._next = rate, 0.0

    async def wait(self, count: int) -> None:
        """Wait until `count` more events may be sent."""
        if self._rate:
            now = time.monotonic()
            self._next = max(self._next, now)
            await asyncio.sleep(self._next - now)
            self._next += count / self._rate
