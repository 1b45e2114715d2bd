"""A clock in which days pass in seconds: it stands still until it is told to jump."""

import asyncio
import heapq
from itertools import count


class FakeClock:
    """`services.global_retrier.clock.Clock` by hand."""

    def __init__(self) -> None:
        self._now = 1_800_000_000_000
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._number = count()

    def now_ms(self) -> int:
        return self._now

    async def sleep_until(self, at_ms: int) -> None:
        if at_ms <= self._now:
            return
        waker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (at_ms, next(self._number), waker))
        await waker

    def jump(self, to_ms: int) -> None:
        """It is that time now; who waited for it or for an earlier one goes on."""
        self._now = max(self._now, to_ms)
        while self._sleepers and self._sleepers[0][0] <= self._now:
            waker = heapq.heappop(self._sleepers)[2]
            if not waker.done():
                waker.set_result(None)

    def next_wake(self) -> int | None:
        """When the first sleeper wants to be woken."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None
