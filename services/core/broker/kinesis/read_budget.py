"""One bound on the memory of what all readers of a connection hold ahead of poll: decoded, and what is being read with it."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

LIMIT_BYTES = 64 << 20


_IDLE_SECONDS = 1.0
_AGAIN_SECONDS = 1.0


class Polls:
    """Whether one consumer polls: one whose work has no room, for its destination is down, may not for hours."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, never set back."""
        self._clock = clock
        self._is_in_poll = False
        self._left = clock()

    @property
    def is_idle(self) -> bool:
        """It did not for a second."""
        return not self._is_in_poll and self._clock() - self._left >= _IDLE_SECONDS

    @contextmanager
    def poll(self) -> Iterator[None]:
        """It does."""
        self._is_in_poll = True
        try:
            yield
        finally:
            self._is_in_poll, self._left = False, self._clock()


class Holder(Protocol):
    """Who reads ahead of poll."""

    @property
    def is_idle(self) -> bool:
        """Nobody polls it now."""

    @property
    def size(self) -> int:
        """Bytes that it could give up."""

    def give_up(self) -> None:
        """Let go of what it holds, to be read again; tells the budget."""


@dataclass(eq=False, slots=True)
class _Waiter:
    holder: Holder
    size: int
    granted: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ReadBudget:
    """Who may read next: first come, first served. When there is no room, what the idle ones hold (paused, or not polled) is
    given up for those that are polled, so nobody waits for ever. An idle one waits until half of it is free: else it would read
    the same again and again. A read that finds nothing held goes on, whatever its size.

    used: bytes. It may pass the limit by what answers hold above what was expected of them.
    """

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self._limit = limit
        self._waiting: deque[_Waiter] = deque()
        self._holders: set[Holder] = set()
        self._is_waking = False
        self._again: asyncio.TimerHandle | None = None
        self.used = 0

    def join(self, holder: Holder) -> None:
        """It may be asked to give up what it holds."""
        self._holders.add(holder)

    def leave(self, holder: Holder) -> None:
        """It holds nothing any more."""
        self._holders.discard(holder)

    def change(self, size: int) -> None:
        """So much more is held, or less."""
        self.used += size
        if size < 0:
            self.wake()

    @asynccontextmanager
    async def reading(self, holder: Holder, size: int) -> AsyncIterator[None]:
        """Wait for room for what a read is expected to bring; it is kept free during the block."""
        waiter = _Waiter(holder, size)
        self._waiting.append(waiter)
        self.wake()
        try:
            await waiter.granted
            yield
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self.wake()
            else:
                self.change(-size)

    def wake(self) -> None:
        """Let those go on for whom there is room; called when there is more, or somebody is polled or paused."""
        if self._is_waking:  # what is given up for one of them is seen below
            return
        self._is_waking = True
        try:
            self._let_in()
        finally:
            self._is_waking = False
        if self._waiting and self._again is None:  # somebody may become idle
            self._again = asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._look_again)

    def _look_again(self) -> None:
        self._again = None
        self.wake()

    def _let_in(self) -> None:
        for waiter in list(self._waiting):
            is_idle = waiter.holder.is_idle
            if not is_idle:
                self._make_room(waiter.size)
            if self._has_room(waiter.size, self._limit // 2 if is_idle else self._limit):
                self._waiting.remove(waiter)
                self.change(waiter.size)
                if not waiter.granted.done():
                    waiter.granted.set_result(None)
            elif not is_idle:
                return

    def _has_room(self, size: int, limit: int) -> bool:
        return self.used + size <= limit or self.used == 0

    def _make_room(self, size: int) -> None:
        while not self._has_room(size, self._limit):
            idle = [holder for holder in self._holders if holder.size and holder.is_idle]
            if not idle:
                return
            max(idle, key=lambda holder: holder.size).give_up()
