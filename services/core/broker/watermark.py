"""Which offset may be committed: the highest with nothing unsettled at or below it (the low-water mark)."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence

from services.core.broker.record import Batch, TopicPartition


class _Span:
    """One polled batch: how much of its front is settled, and what is settled behind the first open record."""

    __slots__ = ("_contiguous", "_front", "_later", "first", "last", "offsets")

    def __init__(self, offsets: Sequence[int]) -> None:
        self.offsets = offsets
        self.first, self.last = offsets[0], offsets[-1]
        self._contiguous = self.last - self.first + 1 == len(offsets)
        self._front = 0
        self._later: set[int] = set()

    @property
    def open(self) -> int:
        """How many records are unsettled."""
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

    def low_water(self) -> int | None:
        """Offset of the last record of the settled front; None when its first record is open."""
        return self.offsets[self._front - 1] if self._front else None


class Marks(dict[TopicPartition, int]):
    """The last offset that may be committed, by partition. Good only for partitions that nobody has forgotten since:
    one that left meanwhile and came back may be another topic of the same name, in which these offsets are other records.
    """

    __slots__ = ("forgets",)

    def __init__(self, offsets: Mapping[TopicPartition, int], forgets: int) -> None:
        super().__init__(offsets)
        self.forgets = forgets
        """How many times partitions had been forgotten when these were made."""


class LowWater:
    """Per partition: what was taken, what is settled, and how far a commit may go. Cost per batch, not per record,
    as long as batches are settled in order. Not thread-safe."""

    def __init__(self) -> None:
        self._spans: dict[TopicPartition, list[_Span]] = {}
        self._marks: dict[TopicPartition, int] = {}
        self._committed: dict[TopicPartition, int] = {}
        self._held = 0
        self._ended: set[TopicPartition] = set()
        self._forgets = 0
        self._forgotten: dict[TopicPartition, int] = {}
        """Which of the forgets was the last of each partition."""

    def take(self, batch: Batch) -> None:
        """A polled batch is in flight now. Batches of a partition are taken in offset order."""
        self._spans.setdefault(batch.source, []).append(_Span(batch.offsets))
        self._held += len(batch.offsets)

    def settle(self, source: TopicPartition, offsets: Iterable[int]) -> None:
        """These records are finished for good. Unknown or already settled ones (after `forget`) are ignored."""
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
            if source not in self._ended:
                self._held -= len(spans[whole].offsets)
            whole += 1
        del spans[:whole]
        if spans and (mark := spans[0].low_water()) is not None:
            self._marks[source] = mark

    def committable(self) -> Marks:
        """Marks that differ from those last passed to `committed`; empty when there is nothing new to commit."""
        moved = {source: mark for source, mark in self._marks.items() if self._committed.get(source) != mark}
        return Marks(moved, self._forgets)

    def still_owned(self, marks: Marks) -> Marks:
        """Those of the marks that may be committed now, after whatever was awaited since `committable`."""
        owned = {source: mark for source, mark in marks.items() if self._forgotten.get(source, 0) <= marks.forgets}
        return Marks(owned, marks.forgets)

    def committed(self, marks: Marks, *, refused: Collection[TopicPartition] = ()) -> None:
        """These marks are durable now, but the refused ones."""
        durable = self.still_owned(marks)
        self._committed.update({source: mark for source, mark in durable.items() if source not in refused})

    def end(self, sources: Iterable[TopicPartition]) -> None:
        """No more is taken of these until they are forgotten: what is open of them takes no room for others. What is settled
        of them still may be committed."""
        for source in sources:
            if source not in self._ended:
                self._held -= sum(len(span.offsets) for span in self._spans.get(source, ()))
                self._ended.add(source)

    def forget(self, sources: Iterable[TopicPartition]) -> None:
        """These partitions are another member's now; what is in flight of them is no longer ours to commit."""
        self._forgets += 1
        for source in sources:
            self._forgotten[source] = self._forgets
            self.end((source,))
            self._ended.discard(source)
            self._spans.pop(source, None)
            self._marks.pop(source, None)
            self._committed.pop(source, None)

    def sources(self) -> set[TopicPartition]:
        """The partitions of which something is unsettled."""
        return set(self._spans)

    def in_flight(self, source: TopicPartition | None = None) -> int:
        """Unsettled records of one partition, or of all."""
        chosen = self._spans.values() if source is None else [self._spans.get(source, [])]
        return sum(span.open for spans in chosen for span in spans)

    def held(self) -> int:
        """Records of batches that are not settled whole, but of what has ended: about what comes again after a crash."""
        return self._held


def _last(span: _Span) -> int:
    return span.last
