"""Waiting events in key order: while an event of a key is under way (or waits for its retry, or for its place among the dead
letters), later ones of that key wait here; other keys go on.
"""

from collections import deque
from collections.abc import Collection, Sequence

from services.core.broker.record import Record, TopicPartition
from services.expel.delivery import Chunk, Delivery, group_runs
from services.expel.pending import CutLimits

_Entry = tuple[Chunk, int]
"""A chunk and an index in it."""


class _Queue:
    """What waits of one key."""

    __slots__ = ("entries", "size")

    def __init__(self) -> None:
        self.entries: deque[_Entry] = deque()
        self.size = 0


class KeyedPending:
    """Order by key. Each key has a queue; a key whose events are under way is `busy` and its queue waits.

    A request may carry several events of one key, in order. Events without a key have no order.
    """

    def __init__(self, limits: CutLimits) -> None:
        self._limits = limits
        self._queues: dict[bytes | None, _Queue] = {}
        self._turn: deque[bytes | None] = deque()
        """Keys that have waiting events and are not busy; the longest waiting first."""
        self._busy: dict[bytes, int] = {}
        """Unsettled events per key that are out of their queue."""
        self._ready_events = self._ready_size = 0

    def add(self, chunk: Chunk) -> None:
        for index, record in enumerate(chunk.records):
            key, size = record.key, len(chunk.parts[index])
            ready = key not in self._busy
            queue = self._queues.get(key)
            if queue is None:
                queue = self._queues[key] = _Queue()
                if ready:
                    self._turn.append(key)
            queue.entries.append((chunk, index))
            queue.size += size
            if ready:
                self._ready_events += 1
                self._ready_size += size

    def oldest(self) -> float | None:
        return self._queues[self._turn[0]].entries[0][0].taken_at if self._turn else None

    def has_full(self) -> bool:
        events, limits = self._ready_events, self._limits
        return events >= limits.max_events or self._ready_size + events * limits.overhead >= limits.max_bytes

    def cut(self) -> Delivery:
        entries: list[_Entry] = []
        room = self._limits.max_bytes
        keys: list[bytes | None] = []
        full = False
        while self._turn and not full:
            key = self._turn.popleft()
            keys.append(key)
            queue = self._queues[key]
            while queue.entries:
                chunk, index = queue.entries[0]
                size = len(chunk.parts[index])
                room -= size + self._limits.overhead
                full = len(entries) >= self._limits.max_events or (room < 0 and bool(entries))
                if full:
                    break
                entries.append(queue.entries.popleft())
                queue.size -= size
        delivery = _collect(entries)
        self._ready_events -= len(delivery)
        self._ready_size -= delivery.size
        self._mark_busy(keys, delivery.records)
        return delivery

    def _mark_busy(self, keys: list[bytes | None], records: Sequence[Record]) -> None:
        for record in records:
            if record.key is not None:
                self._busy[record.key] = self._busy.get(record.key, 0) + 1
        for key in reversed(keys):
            queue = self._queues[key]
            if not queue.entries:
                del self._queues[key]
            elif key is None or key not in self._busy:
                self._turn.appendleft(key)
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
                    self._turn.append(key)
                    self._ready_events += len(queue.entries)
                    self._ready_size += queue.size

    def drop(self, sources: Collection[TopicPartition]) -> tuple[int, float]:
        events, weight = 0, 0.0
        for key, queue in list(self._queues.items()):
            gone = [entry for entry in queue.entries if entry[0].source in sources]
            events, weight = events + len(gone), weight + sum(chunk.weight_each for chunk, _ in gone)
            queue.entries = deque(entry for entry in queue.entries if entry[0].source not in sources)
            queue.size -= sum(len(chunk.parts[index]) for chunk, index in gone)
            if not queue.entries:
                del self._queues[key]
        self._turn = deque(key for key in self._turn if key in self._queues)
        self._ready_events = sum(len(self._queues[key].entries) for key in self._turn)
        self._ready_size = sum(self._queues[key].size for key in self._turn)
        return events, weight


def _collect(entries: Sequence[_Entry]) -> Delivery:
    """A delivery of single events."""
    parts = [chunk.parts[index] for chunk, index in entries]
    return Delivery(
        parts,
        [chunk.ids[index] for chunk, index in entries],
        [chunk.arrivals[index] for chunk, index in entries],
        [chunk.records[index] for chunk, index in entries],
        group_runs((chunk.source, chunk.offsets[index], chunk.taken_ms) for chunk, index in entries),
        sum(map(len, parts)),
        sum(chunk.weight_each for chunk, _ in entries),
    )
