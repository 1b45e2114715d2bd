"""Noticing that this process stood still (frozen, swapped out, a blocked loop) so long that its group may have gone on.

On waking, what the fetcher holds and what the broker still sends it are read before the next heartbeat is answered: thousands
of records that another member may have had already.
"""

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn


class Standstill:
    """limit: seconds without a sign of life after which the membership is in doubt."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._alive_at = clock()
        self._happened = self._is_told = False

    async def watch(self) -> NoReturn:
        """Note that the loop runs, several times within the limit, until cancelled."""
        while True:
            await asyncio.sleep(self._limit / 5)
            self._note()

    def is_in_doubt(self) -> bool:
        """Whether it stood still since the membership was last certain."""
        self._note()
        return self._happened

    def settle(self) -> None:
        """The membership is certain again."""
        self._happened = self._is_told = False

    def is_news(self) -> bool:
        """Whether this is asked for the first time since it happened."""
        is_told, self._is_told = self._is_told, True
        return not is_told

    def _note(self) -> None:
        now = self._clock()
        self._happened |= now - self._alive_at > self._limit
        self._alive_at = now
