"""The origins that one step reported with one outcome, in few bytes.

Events that wait for days were reported by several steps: passed by the transform, handed over by expel, released by the
retrier, delivered to other destinations. Below the floor of a run (`OriginSets.floors`) each of these sets is a part of the
kept events, and most are nearly all of them. So a set may be held as the exceptions there.
"""

from collections.abc import Iterator

from pyroaring import BitMap

from services.observer.ledger.origins import Origins, SequenceKey, clip, span


class ReportedOrigins:
    """A set of origins. In some ranges of numbers it holds only the kept events that are not in the set.

    So it can be asked about unfolded or kept events alone: in such a range every other number would seem to be in the set, too.
    """

    __slots__ = ("_absent", "_listed", "_ranges")

    def __init__(self) -> None:
        self._listed = Origins()
        """In the set; outside of the ranges."""
        self._ranges = Origins()
        """Ranges of numbers in which all kept events are in the set, but those in `_absent`."""
        self._absent = Origins()

    def __bool__(self) -> bool:
        return bool(self._listed) or bool(self._ranges)

    def __and__(self, other: Origins) -> Origins:
        """A new set. other: only unfolded or kept events."""
        return Origins((run, self.among(run, numbers)) for run, numbers in other.runs())

    def among(self, run: SequenceKey, numbers: BitMap) -> BitMap:
        """Those of `numbers` that are in the set, in a new bitmap. numbers: only unfolded or kept events."""
        found = self._listed.numbers(run) & numbers
        ranges = self._ranges.numbers(run)
        if ranges.intersect(numbers):
            found |= (numbers & ranges) - self._absent.numbers(run)
        return found

    def listed(self) -> Iterator[tuple[SequenceKey, BitMap]]:
        """By run, the numbers in the set that are in no range; not to be changed."""
        return self._listed.runs()

    def bounds(self) -> Iterator[tuple[SequenceKey, BitMap]]:
        """By run, numbers among which all of the set are; not to be changed."""
        yield from self._listed.runs()
        yield from self._ranges.runs()

    def add(self, run: SequenceKey, numbers: BitMap) -> None:
        ranges = self._ranges.numbers(run)
        if ranges.intersect(numbers):
            self._absent.discard(run, numbers)
            numbers = numbers - ranges
        self._listed.add(run, numbers)

    def update(self, other: Origins) -> None:
        for run, numbers in other.runs():
            self.add(run, numbers)

    def discard(self, run: SequenceKey, numbers: BitMap) -> None:
        """Take these out of the set. numbers: only unfolded or kept events."""
        self._listed.discard(run, numbers)
        ranges = self._ranges.numbers(run)
        if ranges.intersect(numbers):
            self._absent.add(run, numbers & ranges)

    def remove(self, origins: Origins) -> None:
        """Take these out of the set. They are not kept any more."""
        self._listed.remove(origins)
        self._absent.remove(origins)

    def remove_from(self, origins: Origins) -> None:
        """Take the set out of `origins`, which are unfolded or kept events."""
        if self._ranges.meets(origins):
            origins.remove(self & origins)
        else:
            origins.remove(self._listed)

    def remove_range(self, run: SequenceKey, first: int, end: int, but: BitMap) -> None:
        """Take out this run's numbers from `first` to before `end`, except those in `but`, which are kept."""
        self._listed.remove_range(run, first, end, but)
        self._absent.remove_range(run, first, end, but)

    def forget(self, incarnation: str) -> None:
        """Drop all numbers of an incarnation."""
        for origins in (self._listed, self._ranges, self._absent):
            origins.forget(incarnation)

    def is_long(self, run: SequenceKey, first: int, end: int, kept: int) -> bool:
        """Whether `pack` would make it shorter in this range, in which there are so many kept events; roughly."""
        return any(
            2 * origins.numbers(run).range_cardinality(first, end) > kept for origins in (self._listed, self._absent)
        )

    def pack(self, run: SequenceKey, first: int, end: int, kept: BitMap) -> None:
        """Hold this range in the shorter way. The set stays the same. kept: all kept events of the range, which is below the
        floor."""
        mine = self.among(run, kept)
        inside, empty = span(first, end), BitMap()
        for origins in (self._listed, self._ranges, self._absent):
            origins.remove_range(run, first, end, empty)
        if 2 * len(mine) > len(kept):
            self._ranges.add(run, inside)
            self._absent.add(run, kept - mine)
        else:
            self._listed.add(run, mine)

    def drop_ranges(self, run: SequenceKey, end: int) -> None:
        """Drop all ranges before `end`: no event there is kept."""
        for origins in (self._ranges, self._absent):
            origins.remove_range(run, 0, end, BitMap())

    def clip(self, run: SequenceKey, first: int, end: int, kept: BitMap) -> BitMap:
        """The numbers in the set from `first` to before `end`. kept: all kept events of this range."""
        found = clip(self._listed.numbers(run), first, end)
        if self._ranges.numbers(run).range_cardinality(first, end):
            found |= self.among(run, kept)
        return found
