"""How fast this process reads one shard: all its groups together, within the service's limits, slower after a throttle.

Source of the limits: "Quotas and limits", Kinesis Data Streams developer guide: a shard answers five GetRecords and gives
2 MB a second. Other processes read it too and none sees the others, so each finds its share: a throttle
doubles the time between two reads, and every read that succeeds takes a part of it back.
"""

import asyncio
import time
from collections.abc import Callable

READS_PER_SECOND = 5
BYTES_PER_SECOND = 2_000_000
_SHORTEST = 1 / READS_PER_SECOND
_LONGEST = 5.0
_RECOVERY = 0.9


class ReadPace:
    """One shard's. throttles: how often the service refused. waited: seconds, by all readers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock()
        self.interval = _SHORTEST
        self.throttles = 0
        self.waited = 0.0

    async def turn(self) -> None:
        """Wait until the next read may be made. First come, first served."""
        now = self._clock()
        at = max(now, self._next)
        self._next = at + self.interval
        self.waited += at - now
        await asyncio.sleep(at - now)

    def read(self, size: int) -> None:
        """A read gave so many bytes."""
        self.interval = max(_SHORTEST, self.interval * _RECOVERY)
        self._next = max(self._next, self._clock() + size / BYTES_PER_SECOND)

    def throttle(self) -> None:
        """The service refused a read."""
        self.throttles += 1
        self.interval = min(_LONGEST, self.interval * 2)
        self._next = max(self._next, self._clock() + self.interval)


class ReadPaces:
    """Those of a broker, by stream and shard."""

    def __init__(self) -> None:
        self._paces: dict[tuple[str, int], ReadPace] = {}

    def of(self, stream: str, shard: int) -> ReadPace:
        """The one pace of this shard."""
        return self._paces.setdefault((stream, shard), ReadPace())
