"""The service's wall clock, by the Date of its answers. Times of arrival are told by it; this machine's may be off, or be set."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from services.core.broker.errors import Throttled, Unavailable

_ASK_AGAIN_SECONDS = 0.25
"""An account may ask twenty times a second in all, and a fleet begins with many groups."""

_PATIENCE_SECONDS = 10.0
_HOSTS_APART_SECONDS = 0.1
"""Of the service's own machines: one dates answers, another one records."""


class ServiceClock:
    """Never ahead of the service's, and at most a second and an answer's way behind it."""

    def __init__(self, clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME)) -> None:
        """clock: seconds, never set, going on during a suspend."""
        self._clock = clock
        self._ahead_ms: int | None = None

    def saw(self, answer: Mapping[str, Any]) -> int | None:
        """An answer of the SDK's came just now: its Date in ms, a whole second. None: it has none."""
        date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        if date is None:
            return None
        millis = int(parsedate_to_datetime(date).timestamp() * 1000)
        self._ahead_ms = millis - int(self._clock() * 1000)
        return millis

    def now_ms(self) -> int:
        """This machine's wall clock until an answer came."""
        return time.time_ns() // 1_000_000 if self._ahead_ms is None else int(self._clock() * 1000) + self._ahead_ms

    async def next_second(self, ask: Callable[[], Awaitable[Mapping[str, Any]]]) -> int:
        """The beginning (ms) of a second that begins during this call: what was stored before the call arrived earlier, what is
        stored after it arrived then or later. Asks for answers until one is of another second than the first. Raises Unavailable.
        """
        deadline, first = self._clock() + _PATIENCE_SECONDS, None
        while self._clock() < deadline:
            try:
                date = self.saw(await ask())
            except Throttled:
                date = first
            if first is not None and date is not None and date > first:
                await asyncio.sleep(_HOSTS_APART_SECONDS)
                return date
            first = date if first is None else first
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
        raise Unavailable("Kinesis' answers tell no time. Try: an endpoint, or a proxy, that keeps their Date header")
