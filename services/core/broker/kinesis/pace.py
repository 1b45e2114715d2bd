"""How fast this process writes to a shard and reads from it: the service's limits, lowered after a throttle.

A shard accepts 1 MB and 1,000 entries a second, answers five GetRecords a second, and returns 2 MB a second ("Quotas
and limits", Kinesis Data Streams developer guide). Several processes use a shard without knowing of each other. So
each finds its share: a throttle takes away a part at once, and time returns it evenly. With this additive increase
and multiplicative decrease all shares become equal (Chiu and Jain, 1989).
"""

import asyncio
import time
from collections.abc import Callable, Collection

from services.core import metrics
from services.core.broker.errors import Throttled

BYTES_PER_SECOND = 1_000_000
ENTRIES_PER_SECOND = 1_000
_FALL = 0.6
_LOWEST = 0.05
_RECOVERY = 0.05
"""Of the whole capacity, per second."""

_QUIET_SECONDS = 0.2
"""Throttles within this time of another count once."""


class WritePace:
    """One shard's token bucket, with metrics. share: the part of its capacity that this process uses, 1 without throttles."""

    def __init__(self, topic: str, shard: str, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, never set back."""
        self._clock = clock
        self._at = clock()
        self._fell = self._at - _QUIET_SECONDS
        self._spare = 1.0  # seconds of capacity that may be used at once
        self.share = 1.0
        self._waiting = 0
        self._labels = (topic, shard)
        self._throttles = metrics.BROKER_THROTTLES.labels(*self._labels)
        self._waits = metrics.BROKER_PACE_WAIT.labels(*self._labels)
        metrics.BROKER_CAPACITY_USED.labels(*self._labels).set_function(self.used)
        metrics.BROKER_PACE.labels(*self._labels).set_function(lambda: self.share)

    async def acquire(self, size: int, patience: float) -> float:
        """Wait until an entry of this size may leave. Raises Throttled at once when that takes longer than `patience`.

        Returns the seconds per byte at which more of its partition may follow, when all that wait now go on.
        """
        wait = self.reserve(size, patience)
        if wait > patience:
            raise Throttled(f"the shard has no room for {wait:.1f} s", retry_after=wait)
        self._waiting += 1
        try:
            if wait > 0:
                self._waits.inc(wait)
                await asyncio.sleep(wait)
            return self._waiting / (BYTES_PER_SECOND * self.share)
        finally:
            self._waiting -= 1

    def reserve(self, size: int, patience: float) -> float:
        """Seconds until an entry of this size may leave. Above `patience` nothing is reserved."""
        self._pass_time()
        cost = max(size / BYTES_PER_SECOND, 1 / ENTRIES_PER_SECOND)
        wait = max(0.0, (min(cost, 1.0) - self._spare) / self.share)
        if wait <= patience:
            self._spare -= cost
        return wait

    def throttle(self) -> None:
        """The service refused an entry for this shard."""
        self._throttles.inc()
        self._pass_time()
        if self._at - self._fell >= _QUIET_SECONDS:
            self._fell = self._at
            self.share = max(_LOWEST, self.share * _FALL)
            self._spare = min(self._spare, 0.0)

    def used(self) -> float:
        """The used part of the last second's capacity: 0 when idle, 1 or more when entries wait."""
        self._pass_time()
        return 1.0 - self._spare

    def _pass_time(self) -> None:
        now = self._clock()
        passed, self._at = now - self._at, now
        self._spare = min(1.0, self._spare + passed * self.share)
        self.share = min(1.0, self.share + passed * _RECOVERY)

    def forget(self) -> None:
        """Remove the metrics of a closed shard."""
        for metric in (
            metrics.BROKER_THROTTLES,
            metrics.BROKER_PACE_WAIT,
            metrics.BROKER_CAPACITY_USED,
            metrics.BROKER_PACE,
        ):
            metric.remove(*self._labels)


READS_PER_SECOND = 5.0
READ_BYTES_PER_SECOND = 2_000_000
_LOWEST_READS = 0.2
_LONGEST_WAIT_S = 5.0
"""After one answer, which has 10 MB at most. A process with a small part of the reads would else hold up its other readers of the
shard for minutes."""


class ReadPace:
    """One shard's, for all groups of this process, with metrics. rate: reads per second. refused: so many reads were."""

    def __init__(self, topic: str, shard: int, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, never set back."""
        self._clock = clock
        self._next = self._at = clock()
        self.rate = READS_PER_SECOND
        self.refused = 0
        self._labels = (topic, str(shard))
        self._throttles = metrics.BROKER_READ_THROTTLES.labels(*self._labels)
        self._waits = metrics.BROKER_READ_WAIT.labels(*self._labels)
        metrics.BROKER_READ_PACE.labels(*self._labels).set_function(lambda: self.rate)

    async def acquire(self) -> None:
        """Wait until the next read may be made. First come, first served."""
        await asyncio.sleep(self.reserve())

    def reserve(self) -> float:
        """Reserve the next read. Returns the seconds until then."""
        now = self._pass_time()
        at = max(now, self._next)
        self._next = at + 1 / self.rate
        self._waits.inc(at - now)
        return at - now

    def read(self, size: int) -> None:
        """A read returned this many bytes. Who has a part of the reads has the same part of the bytes."""
        now = self._pass_time()
        wait = size / READ_BYTES_PER_SECOND * READS_PER_SECOND / self.rate
        self._next = max(self._next, now + min(wait, _LONGEST_WAIT_S))

    def throttle(self) -> None:
        """The service refused a read."""
        self._throttles.inc()
        self.refused += 1
        now = self._pass_time()
        self.rate = max(_LOWEST_READS, self.rate / 2)
        self._next = max(self._next, now + 1 / self.rate)

    def wait(self) -> float:
        """Seconds until the next read may be made. Reserves nothing."""
        return max(0.0, self._next - self._pass_time())

    def go_on(self, rate: float, wait: float) -> None:
        """Go on with the pace of a process that read this shard before: its rate, and its `wait`."""
        now = self._pass_time()
        self.rate = min(self.rate, max(_LOWEST_READS, rate))
        self._next = max(self._next, now + min(wait, 1 / self.rate))

    def _pass_time(self) -> float:
        now = self._clock()
        self.rate = min(READS_PER_SECOND, self.rate + (now - self._at) * _RECOVERY * READS_PER_SECOND)
        self._at = now
        return now

    def forget(self) -> None:
        """Remove the metrics of a shard that is gone."""
        for metric in (metrics.BROKER_READ_THROTTLES, metrics.BROKER_READ_WAIT, metrics.BROKER_READ_PACE):
            metric.remove(*self._labels)


class ReadPaces:
    """The read pace of each shard."""

    def __init__(self) -> None:
        self._paces: dict[tuple[str, int], ReadPace] = {}

    def find(self, topic: str, shard: int) -> ReadPace:
        pace = self._paces.get((topic, shard))
        if pace is None:
            pace = self._paces[topic, shard] = ReadPace(topic, shard)
        return pace

    def keep(self, topic: str, shards: Collection[int]) -> None:
        """Forget the other shards of this stream."""
        for key in [key for key in self._paces if key[0] == topic and key[1] not in shards]:
            self._paces.pop(key).forget()
