"""The time by which events wait, and how to wait for it. Tests have one of their own, in which days pass in seconds."""

import asyncio
import time
from typing import Protocol

_LONGEST_SLEEP_S = 30.0
"""The event loop's timers stand still while the machine sleeps; looking again this often bounds what that costs."""


class Clock(Protocol):
    """Milliseconds since the epoch that never go backwards and never jump."""

    def now_ms(self) -> int:
        """Now."""

    async def sleep_until(self, at_ms: int) -> None:
        """Returns at that time or shortly after it, never before."""


class SteadyClock:
    """The wall clock as it was at the start, and the time since then, which nobody can set: a jump releases nothing early."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - _boot_ns()

    def now_ms(self) -> int:
        """As in Clock."""
        return (self._offset + _boot_ns()) // 1_000_000

    async def sleep_until(self, at_ms: int) -> None:
        """As in Clock."""
        while (left := at_ms - self.now_ms()) > 0:  # noqa: ASYNC110 - time is what it waits for
            await asyncio.sleep(min(left / 1000, _LONGEST_SLEEP_S))


_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def _boot_ns() -> int:
    """Time since the machine started, its sleep included where the system tells."""
    return time.clock_gettime_ns(_BOOT)
