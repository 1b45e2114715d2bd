"""Spreads work evenly over time."""

import asyncio
import time


class Pace:
    """At most `rate` events per second; 0: no limit. A pause is not made up for: no burst follows it."""

    def __init__(self, rate: float) -> None:
        self._rate, self._next = rate, 0.0

    async def wait(self, count: int) -> None:
        """Wait until `count` more events may be sent: until the last of them is due. The very first event is due at once."""
        if self._rate:
            now = time.monotonic()
            due = max(self._next, now) + (count - 1) / self._rate
            self._next = due + 1 / self._rate
            await asyncio.sleep(due - now)
