"""Events that wait to be put into a request, and the cutting of requests out of them: whole slices, without order.

`keyed_pending` has the other kind, which keeps the order of each key.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from services.core.broker.record import Record, TopicPartition
from services.expel.delivery import Chunk, Delivery, Run


@dataclass(frozen=True, slots=True)
class CutLimits:
    """How large one request may be. overhead: body bytes per event beside its part."""

    max_events: int
    max_bytes: int
    overhead: int = 1


class Pending(Protocol):
    """Both kinds. Nothing here waits or fails; not thread-safe."""

    def add(self, chunk: Chunk) -> None:
        """Queue a chunk behind what is there."""

    def oldest(self) -> float | None:
        """When the longest waiting event that could go now was taken (monotonic s); None when none could."""

    def has_full(self) -> bool:
        """Whether what could go now fills a request."""

    def cut(self) -> Delivery:
        """The next request, filled as far as possible; only when `oldest` is not None."""

    def finish(self, records: Sequence[Record]) -> None:
        """These are settled (delivered or buried): later ones of their keys may go."""

    def drop(self, sources: Collection[TopicPartition]) -> tuple[int, float]:
        """Forget what waits of these partitions; returns how many events that were, and their weight."""


class FifoPending:
    """No order promised: requests are cut in arrival order and all may be under way at once."""

    def __init__(self, limits: CutLimits) -> None:
        self._limits = limits
        self._chunks: deque[Chunk] = deque()
        self._start = 0
        self._events = self._size = 0

    def add(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._events += len(chunk.parts)
        self._size += chunk.size

    def oldest(self) -> float | None:
        return self._chunks[0].taken_at if self._chunks else None

    def has_full(self) -> bool:
        limits = self._limits
        return self._events >= limits.max_events or self._size + self._events * limits.overhead >= limits.max_bytes

    def cut(self) -> Delivery:
        """Mostly one slice of one chunk; what a chunk's end leaves open is filled up from the next one."""
        limits = self._limits
        delivery, room = self._cut_slice(limits.max_events, limits.max_bytes)
        count = len(delivery.parts)
        while count < limits.max_events and self._chunks and not self._start:
            more, room = self._cut_slice(limits.max_events - count, room, first=False)
            if not more.parts:
                break
            delivery = Delivery(
                [*delivery.parts, *more.parts],
                [*delivery.ids, *more.ids],
                [*delivery.arrivals, *more.arrivals],
                [*delivery.records, *more.records],
                [*delivery.runs, *more.runs],
                delivery.size + more.size,
                delivery.weight + more.weight,
            )
            count = len(delivery.parts)
        return delivery

    def _cut_slice(self, max_events: int, room: int, *, first: bool = True) -> tuple[Delivery, int]:
        """From the first chunk only; and how many bytes of room are left. Empty when not even one fits."""
        chunk, start = self._chunks[0], self._start
        stop, size = self._fit(chunk, start, min(len(chunk.parts), start + max_events), room, first=first)
        delivery = Delivery(
            chunk.parts[start:stop],
            chunk.ids[start:stop],
            chunk.arrivals[start:stop],
            chunk.records[start:stop],
            [Run(chunk.source, chunk.offsets[start:stop], chunk.taken_ms)],
            size,
            chunk.weight_each * (stop - start),
        )
        if stop < len(chunk.parts):
            self._start = stop
        else:
            self._chunks.popleft()
            self._start = 0
        self._events -= stop - start
        self._size -= size
        return delivery, room - size - (stop - start) * self._limits.overhead

    def _fit(self, chunk: Chunk, start: int, stop: int, room: int, *, first: bool) -> tuple[int, int]:
        """How far the slice may go and its part bytes; a request's first event always fits."""
        size = sum(map(len, chunk.parts[start:stop]))
        while stop > start and size + (stop - start) * self._limits.overhead > room:
            if first and stop == start + 1:
                break
            stop -= 1
            size -= len(chunk.parts[stop])
        return stop, size

    def finish(self, records: Sequence[Record]) -> None:
        """Nothing waits for anything here."""

    def drop(self, sources: Collection[TopicPartition]) -> tuple[int, float]:
        if self._chunks and self._start:
            self._chunks[0] = _tail(self._chunks[0], self._start)
            self._start = 0
        gone = [chunk for chunk in self._chunks if chunk.source in sources]
        self._chunks = deque(chunk for chunk in self._chunks if chunk.source not in sources)
        self._events = sum(len(chunk.parts) for chunk in self._chunks)
        self._size = sum(chunk.size for chunk in self._chunks)
        return sum(len(chunk.parts) for chunk in gone), sum(chunk.weight_each * len(chunk.parts) for chunk in gone)


def _tail(chunk: Chunk, start: int) -> Chunk:
    parts = chunk.parts[start:]
    return Chunk(
        chunk.source,
        chunk.offsets[start:],
        chunk.records[start:],
        parts,
        chunk.ids[start:],
        chunk.arrivals[start:],
        chunk.taken_ms,
        chunk.taken_at,
        sum(map(len, parts)),
        chunk.weight_each,
    )
