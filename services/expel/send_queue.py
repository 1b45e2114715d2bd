"""The events that a lane has to send: their order, when the next request is due, and how many are in flight."""

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.core.broker.record import Record, TopicPartition
from services.expel.delivery import Delivery, group_runs

SEPARATOR = 1
"""Bytes of a body between two parts."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request. max_bytes: of its body: the parts, each with SEPARATOR bytes."""

    max_events: int
    max_bytes: int

    def are_reached(self, events: int, size: int) -> bool:
        """Whether so many events, with so many bytes of parts, fill a request."""
        return events >= self.max_events or size + events * SEPARATOR >= self.max_bytes


class SendQueue:
    """Events that wait for their first request, and requests that wait for their next attempt; retries are sent first.

    Times are monotonic seconds of `clock`. No method waits or fails. Not thread-safe.

    serial: one request at a time, including its retries. max_wait: seconds that an event waits for its request to fill up.
    on_due: called at the time given to `wake_at`. `closing`: only retries are sent.
    """

    def __init__(
        self,
        limits: RequestLimits,
        on_due: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        keyed: bool = False,
        serial: bool = False,
        max_wait: float = 0.0,
    ) -> None:
        self._new: NewEvents = KeyedEvents(limits) if keyed else UnorderedEvents(limits)
        self._retries: list[tuple[float, int, Delivery]] = []
        """A heap by due time. Waiting requests hold no slot and no connection."""
        self._sequence = 0
        self._on_due, self._clock = on_due, clock
        self._serial, self._max_wait = serial, max_wait
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.closing = False

    @property
    def retries(self) -> int:
        """The number of requests that wait for their next attempt."""
        return len(self._retries)

    @property
    def is_timed(self) -> bool:
        """Whether `on_due` will be called."""
        return self._timer is not None

    def add(self, polled: Delivery) -> None:
        """Events of one polled batch, for their first request."""
        self._new.add(polled)

    def retry(self, request: Delivery, wait: float = 0.0) -> None:
        """Send this request again, after `wait` seconds at the earliest."""
        self._sequence += 1
        heapq.heappush(self._retries, (self._clock() + wait, self._sequence, request))

    def finish(self, records: Sequence[Record]) -> None:
        """These are settled, or belong to another member: later events of their keys may be sent."""
        self._new.finish(records)

    def next_due(self, now: float, *, is_sending: bool) -> float | None:
        """When the next request may be sent; at or before `now` means at once. None: when another event arrives or is settled."""
        retry = self._retries[0][0] if self._retries else None
        is_busy = self._serial and (is_sending or self._retries)
        if self.closing or is_busy or (retry is not None and retry <= now):
            return retry
        oldest = self._new.oldest()
        if oldest is None:
            return retry
        full = now if self._new.has_full() else oldest + self._max_wait
        return full if retry is None else min(retry, full)

    def pop(self, now: float) -> Delivery:
        """The next request. Call it only when one is due by `next_due`."""
        if self._retries and self._retries[0][0] <= now:
            return heapq.heappop(self._retries)[2]
        return self._new.cut()

    def pop_all(self) -> Iterator[Delivery]:
        """All queued events, due or not, retries first. Later events of a key follow when its current ones are finished."""
        while self._retries:
            yield heapq.heappop(self._retries)[2]
        while self._new.oldest() is not None:
            yield self._new.cut()

    def drop(self, sources: Collection[TopicPartition]) -> tuple[tuple[int, float], list[Delivery]]:
        """Forget these partitions. Returns ((number of events that were never in a request, their weight), their retries)."""
        dropped, waiting = [], []
        for due, sequence, request in self._retries:
            kept, gone = request.split(sources)
            if kept is not None:
                waiting.append((due, sequence, kept))
            if gone is not None:
                dropped.append(gone)
        heapq.heapify(waiting)
        self._retries = waiting
        return self._new.drop(sources), dropped

    def wake_at(self, at: float) -> None:
        """Call `on_due` at this time, unless an earlier time is set."""
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - self._clock()), self._wake)

    def stop(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _wake(self) -> None:
        self._timer = None
        self._on_due()


class NewEvents(Protocol):
    """Events that wait for their first request. Requests are cut from them."""

    def add(self, polled: Delivery) -> None:
        """Queue the events of a polled batch."""

    def oldest(self) -> float | None:
        """When the oldest event that may be sent now was polled; None when no event may be sent."""

    def has_full(self) -> bool:
        """Whether the events that may be sent now fill a request."""

    def cut(self) -> Delivery:
        """The next request, as full as possible. Call it only when `oldest` is not None."""

    def finish(self, records: Sequence[Record]) -> None:
        """These are settled: later events of their keys may be sent."""

    def drop(self, sources: Collection[TopicPartition]) -> tuple[int, float]:
        """Forget the events of these partitions. Returns their number and weight."""


class UnorderedEvents:
    """No order is promised: requests are cut in the order of arrival, as slices, and all may be sent at once."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._polled: deque[Delivery] = deque()
        self._start = 0
        """How many events of the first batch are cut off already."""
        self._events = self._size = 0

    def add(self, polled: Delivery) -> None:
        self._polled.append(polled)
        self._events += len(polled.parts)
        self._size += polled.size

    def oldest(self) -> float | None:
        return self._polled[0].polled_at if self._polled else None

    def has_full(self) -> bool:
        return self._limits.are_reached(self._events, self._size)

    def cut(self) -> Delivery:
        """Usually one slice of one batch. The end of a batch is filled up from the next one."""
        limits = self._limits
        request, room = self._cut_slice(limits.max_events, limits.max_bytes)
        count = len(request.parts)
        while count < limits.max_events and self._polled and not self._start:
            more, room = self._cut_slice(limits.max_events - count, room, first=False)
            if not more.parts:
                break
            request = request.join(more)
            count = len(request.parts)
        return request

    def _cut_slice(self, max_events: int, room: int, *, first: bool = True) -> tuple[Delivery, int]:
        """A slice of the first batch, and how many bytes of room are left. Empty when not even one event fits."""
        polled, start = self._polled[0], self._start
        stop, size = self._fit(polled, start, min(len(polled.parts), start + max_events), room, first=first)
        request = polled.cut(start, stop, size)
        if stop < len(polled.parts):
            self._start = stop
        else:
            self._polled.popleft()
            self._start = 0
        self._events -= stop - start
        self._size -= size
        return request, room - size - (stop - start) * SEPARATOR

    def _fit(self, polled: Delivery, start: int, stop: int, room: int, *, first: bool) -> tuple[int, int]:
        """Where the slice ends, and the bytes of its parts. A request's first event always fits."""
        size = sum(map(len, polled.parts[start:stop]))
        while stop > start and size + (stop - start) * SEPARATOR > room:
            if first and stop == start + 1:
                break
            stop -= 1
            size -= len(polled.parts[stop])
        return stop, size

    def finish(self, records: Sequence[Record]) -> None:
        """No event waits for another one."""

    def drop(self, sources: Collection[TopicPartition]) -> tuple[int, float]:
        if self._polled and self._start:
            first, start = self._polled[0], self._start
            self._polled[0] = first.cut(start, len(first.parts), sum(map(len, first.parts[start:])))
            self._start = 0
        gone = [polled for polled in self._polled if polled.runs[0].source in sources]
        self._polled = deque(polled for polled in self._polled if polled.runs[0].source not in sources)
        self._events = sum(len(polled.parts) for polled in self._polled)
        self._size = sum(polled.size for polled in self._polled)
        return sum(len(polled.parts) for polled in gone), sum(polled.weight for polled in gone)


_Entry = tuple[Delivery, int]
"""A polled batch and an index in it."""


class _KeyQueue:
    """The waiting events of one key."""

    __slots__ = ("entries", "size")

    def __init__(self) -> None:
        self.entries: deque[_Entry] = deque()
        self.size = 0


class KeyedEvents:
    """Keeps the order of each key: while an event of a key is being sent, waits for its retry, or is being stored as a dead
    letter, later events of that key wait. Other keys continue.

    A request may carry several events of one key, in order. Events without a key have no order.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._queues: dict[bytes | None, _KeyQueue] = {}
        self._ready: deque[bytes | None] = deque()
        """Keys with waiting events and no unsettled request; the oldest first."""
        self._busy: dict[bytes, int] = {}
        """Unsettled events per key that have left their queue."""
        self._ready_events = self._ready_size = 0

    def add(self, polled: Delivery) -> None:
        for index, record in enumerate(polled.records):
            key, size = record.key, len(polled.parts[index])
            is_ready = key not in self._busy
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = _KeyQueue()
                if is_ready:
                    self._ready.append(key)
            queue.entries.append((polled, index))
            queue.size += size
            if is_ready:
                self._ready_events += 1
                self._ready_size += size

    def oldest(self) -> float | None:
        return self._queues[self._ready[0]].entries[0][0].polled_at if self._ready else None

    def has_full(self) -> bool:
        return self._limits.are_reached(self._ready_events, self._ready_size)

    def cut(self) -> Delivery:
        entries: list[_Entry] = []
        room = self._limits.max_bytes
        keys: list[bytes | None] = []
        is_full = False
        while self._ready and not is_full:
            key = self._ready.popleft()
            keys.append(key)
            queue = self._queues[key]
            while queue.entries:
                polled, index = queue.entries[0]
                size = len(polled.parts[index])
                room -= size + SEPARATOR
                is_full = len(entries) >= self._limits.max_events or (room < 0 and bool(entries))
                if is_full:
                    break
                entries.append(queue.entries.popleft())
                queue.size -= size
        request = _collect(entries)
        self._ready_events -= len(request)
        self._ready_size -= request.size
        self._mark_busy(keys, request.records)
        return request

    def _mark_busy(self, keys: list[bytes | None], records: Sequence[Record]) -> None:
        for record in records:
            if record.key is not None:
                self._busy[record.key] = self._busy.get(record.key, 0) + 1
        for key in reversed(keys):
            queue = self._queues[key]
            if not queue.entries:
                del self._queues[key]
            elif key is None or key not in self._busy:
                self._ready.appendleft(key)
            else:
                self._ready_events -= len(queue.entries)
                self._ready_size -= queue.size

    def finish(self, records: Sequence[Record]) -> None:
        for record in records:
            key = record.key
            if key is None or key not in self._busy:
                continue
            self._busy[key] -= 1
            if not self._busy[key]:
                del self._busy[key]
                if (queue := self._queues.get(key)) is not None:
                    self._ready.append(key)
                    self._ready_events += len(queue.entries)
                    self._ready_size += queue.size

    def drop(self, sources: Collection[TopicPartition]) -> tuple[int, float]:
        events, weight = 0, 0.0
        for key, queue in list(self._queues.items()):
            gone = [entry for entry in queue.entries if entry[0].runs[0].source in sources]
            events, weight = events + len(gone), weight + sum(polled.weight / len(polled) for polled, _ in gone)
            queue.entries = deque(entry for entry in queue.entries if entry[0].runs[0].source not in sources)
            queue.size -= sum(len(polled.parts[index]) for polled, index in gone)
            if not queue.entries:
                del self._queues[key]
        self._ready = deque(key for key in self._ready if key in self._queues)
        self._ready_events = sum(len(self._queues[key].entries) for key in self._ready)
        self._ready_size = sum(self._queues[key].size for key in self._ready)
        return events, weight


def _collect(entries: Sequence[_Entry]) -> Delivery:
    """A request of single events."""
    parts = [polled.parts[index] for polled, index in entries]
    return Delivery(
        parts,
        [polled.ids[index] for polled, index in entries],
        [polled.arrivals[index] for polled, index in entries],
        [polled.records[index] for polled, index in entries],
        group_runs(
            (polled.runs[0].source, polled.runs[0].offsets[index], polled.runs[0].polled_ms)
            for polled, index in entries
        ),
        sum(map(len, parts)),
        sum(polled.weight / len(polled) for polled, _ in entries),
        entries[0][0].polled_at if entries else 0.0,
    )


COMMIT_PARTS = 4
"""A commit does not wait for its interval once such a part of the lane's events is settled and not committed."""
WINDOW = 10
"""Records held above the committable offset, as a multiple of the lane's events. So many may be sent again after a crash."""
_EVENT_BYTES = 700
"""Approximate memory of an event's objects beside its bytes: a record, its headers, its entries in lists."""
_FIRST_SIZE = 4000.0
"""The assumed size of an event (bytes) before any was polled."""


class InFlightLimit:
    """Counts the events in flight, and how many more may be polled."""

    def __init__(self, max_events: int, max_bytes: int) -> None:
        self._max_events, self._max_bytes = max_events, max_bytes
        self.events = 0
        self._bytes = 0.0
        self._usual_size = _FIRST_SIZE

    def add(self, events: int, weight: float) -> None:
        """So many events of so many bytes were polled. Later ones are expected to have about the same size."""
        self.events += events
        self._bytes += weight
        self._usual_size = max(weight / events, 0.5 * self._usual_size)

    def release(self, events: int, weight: float) -> None:
        """They are settled, or belong to another member."""
        self.events -= events
        self._bytes -= weight

    def room(self, held: int, uncommitted: int) -> int:
        """How many more events may be polled; 0 until an eighth is free.

        held: records above the committable offsets. uncommitted: settled ones at or below these. They are sent again after a
        crash, like those in flight.
        """
        free = self._max_events - self.events - uncommitted
        if free < self._max_events // 8 or held > self._max_events * WINDOW:
            return 0
        left = self._max_bytes - self._bytes - self.events * _EVENT_BYTES
        return 0 if left <= 0 else min(free, 1 + int(left / (self._usual_size + _EVENT_BYTES)))
