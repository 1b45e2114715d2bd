"""How fast we write to one shard: the service's limits as a token bucket, slower for a while after the service throttled us.

Source of the limits: "Quotas and limits", Kinesis Data Streams developer guide: a shard takes 1 MB and 1,000 records a
second. Several processes write to one shard and none sees the others, so each finds its share: a throttle takes
a part of it away at once, and time gives it back evenly (additive increase, multiplicative decrease).
"""

import asyncio
import time
from collections.abc import Callable

from services.core import metrics
from services.core.broker.errors import Throttled

BYTES_PER_SECOND = 1_000_000
ENTRIES_PER_SECOND = 1_000
_FALL = 0.6
_LOWEST = 0.05
_RECOVERY = 0.05
"""Of the whole capacity, per second."""

_QUIET_SECONDS = 0.2
"""Throttles this soon after another are of the same crowd, and do not slow down again."""


class Pace:
    """One shard's. share: the part of its capacity that we allow ourselves, 1 when nobody throttles us."""

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        """clock: seconds, never set back; None: time.monotonic."""
        self._clock = clock or time.monotonic
        self._at = self._fell = self._clock()
        self._spare = 1.0  # seconds of capacity that may be used at once
        self.share = 1.0
        self._fell -= _QUIET_SECONDS

    def reserve(self, size: int, patience: float) -> float:
        """Seconds after which an entry of so many bytes may leave. Above `patience` nothing was reserved."""
        self._pass_time()
        cost = max(size / BYTES_PER_SECOND, 1 / ENTRIES_PER_SECOND)
        wait = max(0.0, (min(cost, 1.0) - self._spare) / self.share)
        if wait <= patience:
            self._spare -= cost
        return wait

    def seconds_per_byte(self, lanes: int) -> float:
        """How fast each of so many lanes gets on when all want more than the shard takes."""
        return lanes / (BYTES_PER_SECOND * self.share)

    def throttle(self) -> None:
        """The service refused an entry for this shard."""
        self._pass_time()
        if self._at - self._fell >= _QUIET_SECONDS:
            self._fell = self._at
            self.share = max(_LOWEST, self.share * _FALL)
            self._spare = min(self._spare, 0.0)

    def used(self) -> float:
        """How much of the last second's capacity is taken: 0 idle, 1 or more: entries wait."""
        self._pass_time()
        return 1.0 - self._spare

    def _pass_time(self) -> None:
        now = self._clock()
        passed, self._at = now - self._at, now
        self._spare = min(1.0, self._spare + passed * self.share)
        self.share = min(1.0, self.share + passed * _RECOVERY)


class MeteredPace:
    """A shard's pace, its waits and throttles on /metrics."""

    def __init__(self, topic: str, shard: str) -> None:
        self._pace = Pace()
        self._waiting = 0
        self._labels = (topic, shard)
        self._throttles = metrics.BROKER_THROTTLES.labels(*self._labels)
        self._waits = metrics.BROKER_PACE_WAIT.labels(*self._labels)
        metrics.BROKER_CAPACITY_USED.labels(*self._labels).set_function(self._pace.used)
        metrics.BROKER_PACE.labels(*self._labels).set_function(lambda: self._pace.share)

    async def turn(self, size: int, patience: float) -> float:
        """Wait until an entry of so many bytes may leave. Raises Throttled at once when that takes above `patience`.

        Gives the seconds per byte at which more of its lane may follow.
        """
        wait = self._pace.reserve(size, patience)
        if wait > patience:
            raise Throttled(f"the shard has no room for {wait:.1f} s", retry_after=wait)
        self._waiting += 1
        try:
            if wait > 0:
                self._waits.inc(wait)
                await asyncio.sleep(wait)
            return self._pace.seconds_per_byte(self._waiting)
        finally:
            self._waiting -= 1

    def throttle(self, size: int) -> float:
        """The service refused an entry of so many bytes for this shard; the seconds after which it may leave again."""
        self._throttles.inc()
        self._pace.throttle()
        return self._pace.reserve(size, patience=-1)

    def forget(self) -> None:
        """Off /metrics: the shard is closed."""
        for metric in (
            metrics.BROKER_THROTTLES,
            metrics.BROKER_PACE_WAIT,
            metrics.BROKER_CAPACITY_USED,
            metrics.BROKER_PACE,
        ):
            metric.remove(*self._labels)
