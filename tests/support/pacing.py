"""How often a test looks for what it waits for. All of them share two cores with what they wait for."""

import asyncio
import time

_SHORTEST_S, _LONGEST_S = 0.05, 1.0
_SHARE = 9
"""A look that took 20 ms is followed by a pause of 180 ms: to look takes at most a tenth of the time."""


class Pace:
    """The pauses between the looks of one wait: `while not found(): await pace.rest()`."""

    def __init__(self) -> None:
        self._looked_from = time.monotonic()

    async def rest(self) -> None:
        """Between two looks, in a coroutine."""
        await asyncio.sleep(self._pause())
        self._looked_from = time.monotonic()

    def rest_blocking(self) -> None:
        """Between two looks, in a thread."""
        time.sleep(self._pause())
        self._looked_from = time.monotonic()

    def _pause(self) -> float:
        return min(max(_SHARE * (time.monotonic() - self._looked_from), _SHORTEST_S), _LONGEST_S)
