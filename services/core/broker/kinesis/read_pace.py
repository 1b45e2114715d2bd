"""How fast this process reads one shard: all its groups together, within the service's limits, slower after a throttle.

Source of the limits: "Quotas and limits", Kinesis Data Streams developer guide: a shard answers five GetRecords and gives
2 MB a second. Other processes read it too and none sees the others, so each finds its share: a throttle halves
the reads per second, and time gives them back evenly. Additive increase, multiplicative decrease: whatever the others began
with, shares become equal (Chiu and Jain, 1989).
"""

import asyncio
import time
from collections.abc import Callable, Collection

from services.core import metrics

READS_PER_SECOND = 5.0
BYTES_PER_SECOND = 2_000_000
_LOWEST = 0.2
_RECOVERY = 0.5
"""Reads per second, per second."""


class ReadPace:
    """One shard's. rate: reads per second that we allow ourselves."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """clock: seconds, never set back; None: time.monotonic."""
        self._clock = clock or time.monotonic
        self._next = self._at = self._clock()
        self.rate = READS_PER_SECOND

    async def turn(self) -> None:
        """Wait until the next read may be made. First come, first served."""
        await asyncio.sleep(self.reserve())

    def reserve(self) -> float:
        """Take the next turn; the seconds until then."""
        now = self._pass_time()
        at = max(now, self._next)
        self._next = at + 1 / self.rate
        return at - now

    def read(self, size: int) -> None:
        """A read gave so many bytes."""
        self._next = max(self._next, self._pass_time() + size / BYTES_PER_SECOND)

    def throttle(self) -> None:
        """The service refused a read."""
        now = self._pass_time()
        self.rate = max(_LOWEST, self.rate / 2)
        self._next = max(self._next, now + 1 / self.rate)

    def _pass_time(self) -> float:
        now = self._clock()
        self.rate = min(READS_PER_SECOND, self.rate + (now - self._at) * _RECOVERY)
        self._at = now
        return now


class MeteredReadPace(ReadPace):
    """A shard's read pace, its waits and throttles on /metrics."""

    def __init__(self, topic: str, shard: int) -> None:
        super().__init__()
        self._labels = (topic, str(shard))
        self._throttles = metrics.BROKER_READ_THROTTLES.labels(*self._labels)
        self._waits = metrics.BROKER_READ_WAIT.labels(*self._labels)
        metrics.BROKER_READ_PACE.labels(*self._labels).set_function(lambda: self.rate)

    def reserve(self) -> float:
        """As above."""
        wait = super().reserve()
        self._waits.inc(wait)
        return wait

    def throttle(self) -> None:
        """As above."""
        self._throttles.inc()
        super().throttle()

    def forget(self) -> None:
        """Off /metrics: the shard is no more."""
        for metric in (metrics.BROKER_READ_THROTTLES, metrics.BROKER_READ_WAIT, metrics.BROKER_READ_PACE):
            metric.remove(*self._labels)


class ReadPaces:
    """Those of a broker, by stream and shard."""

    def __init__(self) -> None:
        self._paces: dict[tuple[str, int], MeteredReadPace] = {}

    def of(self, topic: str, shard: int) -> ReadPace:
        """The one pace of this shard."""
        pace = self._paces.get((topic, shard))
        if pace is None:
            pace = self._paces[topic, shard] = MeteredReadPace(topic, shard)
        return pace

    def keep(self, topic: str, shards: Collection[int]) -> None:
        """Forget the others of this stream."""
        for key in [key for key in self._paces if key[0] == topic and key[1] not in shards]:
            self._paces.pop(key).forget()
