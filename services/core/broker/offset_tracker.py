"""The offset that may be committed: the highest one with nothing unsettled at or below it."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from services.core.broker.record import Batch, TopicPartition


class _Span:
    """One polled batch: the length of its settled front, and the settled records behind the first open one."""

    __slots__ = ("_contiguous", "_front", "_later", "first", "last", "offsets")

    def __init__(self, offsets: Sequence[int]) -> None:
        self.offsets = offsets
        self.first, self.last = offsets[0], offsets[-1]
        self._contiguous = self.last - self.first + 1 == len(offsets)
        self._front = 0
        self._later: set[int] = set()

    @property
    def open(self) -> int:
        """The number of unsettled records."""
        return len(self.offsets) - self._front - len(self._later)

    def settle_next(self, found: list[int]) -> bool:
        """The usual case, quickly: `found` are exactly the next ones in order. False when not, with nothing done."""
        front = self._front
        if self._later or list(self.offsets[front : front + len(found)]) != found:
            return False
        self._front = front + len(found)
        return True

    def settle(self, found: list[int]) -> None:
        """`found`: ascending, within first and last. Amortised work per record is constant in any order of settling."""
        if self._front == len(self.offsets):
            return
        low = self.offsets[self._front]
        self._later.update(offset for offset in found if offset >= low and self._holds(offset))
        while self._front < len(self.offsets) and self.offsets[self._front] in self._later:
            self._later.discard(self.offsets[self._front])
            self._front += 1

    def _holds(self, offset: int) -> bool:
        return self._contiguous or self.offsets[bisect_left(self.offsets, offset)] == offset

    def front(self, committed: int) -> int:
        """The length of the settled front, without the records up to this offset."""
        return self._front - (bisect_right(self.offsets, committed) if committed >= self.first else 0)

    def low_water(self) -> int | None:
        """Offset of the last record of the settled front; None when its first record is open."""
        return self.offsets[self._front - 1] if self._front else None


class CommittableOffsets(dict[TopicPartition, int]):
    """The last offset that may be committed, by partition. Valid only until the partition is removed: one that left and came
    back may belong to another topic of the same name, where these offsets are other records.
    """

    __slots__ = ("removals",)

    def __init__(self, offsets: Mapping[TopicPartition, int], removals: int) -> None:
        super().__init__(offsets)
        self.removals = removals
        """The number of removals when these offsets were made."""


class OffsetTracker:
    """The batches in flight of each partition, their settled records, and the offset that may be committed. The cost is per
    batch, not per record, when batches are settled in order. Not thread-safe."""

    def __init__(self) -> None:
        self._spans: dict[TopicPartition, list[_Span]] = {}
        self._marks: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}
        self._held = 0
        self._whole: dict[TopicPartition, deque[tuple[_Span, int]]] = {}
        """The batches that are settled whole and not committed whole, and how many records of each are not committed."""
        self._fronts: dict[TopicPartition, int] = {}
        """Settled and not committed records at the beginning of the first batch that is not settled whole."""
        self._uncommitted = 0
        self._stopped: set[TopicPartition] = set()
        self._removals = 0
        self._removed: dict[TopicPartition, int] = {}
        """The number of the last removal of each partition."""

    def add(self, batch: Batch) -> None:
        """A polled batch is in flight now. Batches of a partition are added in offset order."""
        self._spans.setdefault(batch.source, []).append(_Span(batch.offsets))
        self._held += len(batch.offsets)

    def settle(self, source: TopicPartition, offsets: Iterable[int]) -> None:
        """These records are finished for good. Unknown or already settled ones (after `remove`) are ignored."""
        spans, todo = self._spans.get(source), sorted(offsets)
        if not spans or not todo:
            return
        if spans[0].settle_next(todo):
            self._advance(source, spans)
            return
        index = 0 if todo[0] <= spans[0].last else bisect_left(spans, todo[0], key=_last)
        done = 0
        while done < len(todo) and index < len(spans):
            span = spans[index]
            start, stop = bisect_left(todo, span.first, done), bisect_right(todo, span.last, done)
            if start < stop:
                span.settle(todo[start:stop])
            done, index = stop, index + 1
        self._advance(source, spans)

    def _advance(self, source: TopicPartition, spans: list[_Span]) -> None:
        whole = 0
        while whole < len(spans) and not spans[whole].open:
            self._marks[source] = spans[whole].last
            if source not in self._stopped:
                self._held -= len(spans[whole].offsets)
            count = spans[whole].front(self._committed.get(source, -1))
            self._whole.setdefault(source, deque()).append((spans[whole], count))
            self._uncommitted += count
            whole += 1
        del spans[:whole]
        if spans and (mark := spans[0].low_water()) is not None:
            self._marks[source] = mark
        self._count_front(source)

    def _count_front(self, source: TopicPartition) -> None:
        spans = self._spans.get(source)
        front = spans[0].front(self._committed.get(source, -1)) if spans else 0
        self._uncommitted += front - self._fronts.get(source, 0)
        self._fronts[source] = front

    def committable(self) -> CommittableOffsets:
        """Offsets that differ from those last passed to `record_commit`; empty when there is nothing new to commit."""
        moved = {source: mark for source, mark in self._marks.items() if self._committed.get(source) != mark}
        return CommittableOffsets(moved, self._removals)

    def still_owned(self, marks: CommittableOffsets) -> CommittableOffsets:
        """The offsets that may still be committed, after the caller has awaited something since `committable`."""
        owned = {source: mark for source, mark in marks.items() if self._removed.get(source, 0) <= marks.removals}
        return CommittableOffsets(owned, marks.removals)

    def record_commit(self, marks: CommittableOffsets, *, refused: Collection[TopicPartition] = ()) -> None:
        """These offsets are durable now, except the refused ones."""
        durable = {source: mark for source, mark in self.still_owned(marks).items() if source not in refused}
        self._committed.update(durable)
        for source, mark in durable.items():
            whole = self._whole.get(source)
            while whole and whole[0][0].first <= mark:
                span, count = whole.popleft()
                self._uncommitted -= count
                if (rest := span.front(mark)) > 0:
                    whole.appendleft((span, rest))
                    self._uncommitted += rest
                    break
            self._count_front(source)

    def stop(self, sources: Iterable[TopicPartition]) -> None:
        """No more is added of these until they are removed: their open records no longer count as held. Their settled records
        may still be committed."""
        for source in sources:
            if source not in self._stopped:
                self._held -= sum(len(span.offsets) for span in self._spans.get(source, ()))
                self._stopped.add(source)

    def remove(self, sources: Iterable[TopicPartition]) -> None:
        """These partitions belong to another member now: their records in flight are not ours to commit."""
        self._removals += 1
        for source in sources:
            self._removed[source] = self._removals
            self.stop((source,))
            self._stopped.discard(source)
            self._spans.pop(source, None)
            self._uncommitted -= self._fronts.pop(source, 0)
            self._uncommitted -= sum(count for _, count in self._whole.pop(source, ()))
            self._marks.pop(source, None)
            self._committed.pop(source, None)

    def sources(self) -> set[TopicPartition]:
        """The partitions with unsettled records."""
        return set(self._spans)

    def in_flight(self, source: TopicPartition | None = None) -> int:
        """Unsettled records of one partition, or of all."""
        chosen = self._spans.values() if source is None else [self._spans.get(source, [])]
        return sum(span.open for spans in chosen for span in spans)

    def held(self) -> int:
        """Records of batches that are not settled whole, without stopped partitions: about as many come again after a crash."""
        return self._held

    def uncommitted(self) -> int:
        """Settled records that may be committed and are not: as many come again after a crash, too."""
        return self._uncommitted


def _last(span: _Span) -> int:
    return span.last
