"""How fast we write to one shard: the service's limits as a token bucket, slower for a while after the service throttled us.

Source of the limits: "Quotas and limits", Kinesis Data Streams developer guide: a shard takes 1 MB and 1,000 records a
second. Several processes write to one shard and none sees the others, so each finds its share: a throttle takes
a part of it away at once, and time gives it back evenly (additive increase, multiplicative decrease).
"""

import time
from collections.abc import Callable

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

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at = self._fell = clock()
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
