"""How a lane runs, and how much it may hold."""

from dataclasses import dataclass

from services.expel.disposition import RetryLimits
from services.expel.pending import CutLimits

_WINDOW = 10
"""Records held above the low-water mark, as a multiple of the lane's events: how many may come again after a crash."""
_EVENT_BYTES = 700
"""About what the objects of one event take beside their bytes: a record, its headers, its places in lists."""
_FIRST_SIZE = 4000.0
"""Bytes that an event is taken for before any was seen."""


@dataclass(frozen=True, slots=True)
class LaneShape:
    """How a lane runs. max_events, max_bytes bound what is taken and not settled.

    Bytes are those of a record's key, value and headers and of its part of a body. concurrency: requests under way at once.
    max_wait: seconds that an event waits for its request to fill up. rate: events a second. keyed: later events of a key wait
    for earlier ones. schedule: seconds before each round of the global retrier; empty: no rounds. serial: one delivery at a
    time, its retries included. version: of the pipe's definition. siblings: the destinations, this one too, for which
    something may wait in its retry and parked topics; None: another lane tells of events for any others.
    """

    pipe: str
    destination: str
    cut: CutLimits
    retry: RetryLimits
    concurrency: int
    max_wait: float
    max_events: int
    max_bytes: int
    rate: int | None = None
    keyed: bool = False
    schedule: tuple[float, ...] = ()
    serial: bool = False
    version: str = ""
    siblings: frozenset[str] | None = None

    @property
    def reach(self) -> int:
        """How many records of a partition may be handed over above what is committed."""
        return self.max_events * _WINDOW if self.retry.hands_over else 0


class LaneBounds:
    """Counts what is taken and not settled, and says how much more may be."""

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self._max_events, self._max_bytes = max_events, max_bytes
        self.events = 0
        self._bytes = 0.0
        self._usual_size = _FIRST_SIZE

    def add(self, events: int, weight: float) -> None:
        """So many events of so many bytes in all were taken; later ones are expected to be about as large."""
        self.events += events
        self._bytes += weight
        self._usual_size = max(weight / events, 0.5 * self._usual_size)

    def release(self, events: int, weight: float) -> None:
        """They are settled, or another member's."""
        self.events -= events
        self._bytes -= weight

    def room(self, held: int) -> int:
        """How many more events may be taken; 0 until a fair part is free. held: records above the low-water mark."""
        free = self._max_events - self.events
        if free < self._max_events // 8 or held > self._max_events * _WINDOW:
            return 0
        left = self._max_bytes - self._bytes - self.events * _EVENT_BYTES
        return 0 if left <= 0 else min(free, 1 + int(left / (self._usual_size + _EVENT_BYTES)))
