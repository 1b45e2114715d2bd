"""Sets of origins: bitmaps of sequence numbers by run of an ingest process and partition."""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

import zstandard
from pyroaring import BitMap

from services.core.event import Origin


class SequenceKey(NamedTuple):
    """An incarnation and a partition: its sequence numbers in the partition are dense."""

    incarnation: str
    partition: int


def clip(numbers: BitMap, first: int, end: int) -> BitMap:
    """Those from `first` to before `end`. The cost does not grow with the others."""
    return numbers & span(first, end)


def span(first: int, end: int) -> BitMap:
    """All numbers from `first` to before `end`."""
    found = BitMap()
    found.add_range(first, end)
    return found


class Origins:
    """A set of origins. `|`, `&` and `-` make new sets; `add` and `remove` change this one. Never holds an empty bitmap."""

    __slots__ = ("_by_run",)

    def __init__(self, by_run: Iterable[tuple[SequenceKey, BitMap]] = ()) -> None:
        self._by_run = {run: numbers for run, numbers in by_run if numbers}

    def add(self, run: SequenceKey, numbers: BitMap) -> None:
        """Union with these."""
        held = self._by_run.get(run)
        if held is not None:
            held |= numbers
        elif numbers:
            self._by_run[run] = numbers.copy()

    def update(self, other: "Origins") -> None:
        for run, numbers in other.runs():
            self.add(run, numbers)

    def remove(self, other: "Origins") -> None:
        for run, numbers in other.runs():
            self.discard(run, numbers)

    def discard(self, run: SequenceKey, numbers: BitMap) -> None:
        held = self._by_run.get(run)
        if held is not None and held.intersect(numbers):
            held -= numbers
            if not held:
                del self._by_run[run]

    def remove_range(self, run: SequenceKey, first: int, end: int, but: BitMap) -> None:
        """Drop this run's numbers from `first` to before `end`, except those in `but`."""
        held = self._by_run.get(run)
        if held is not None and held.range_cardinality(first, end):
            held -= clip(held, first, end) - but
            if not held:
                del self._by_run[run]

    def forget(self, incarnation: str) -> None:
        """Drop all numbers of an incarnation."""
        for run in [run for run in self._by_run if run.incarnation == incarnation]:
            del self._by_run[run]

    def numbers(self, run: SequenceKey) -> BitMap:
        """This run's numbers, not to be changed."""
        return self._by_run.get(run, _NONE)

    def runs(self) -> Iterator[tuple[SequenceKey, BitMap]]:
        """All runs with their numbers, not to be changed."""
        yield from self._by_run.items()

    def meets(self, other: "Origins") -> bool:
        """Whether any origin is in both."""
        small, large = (self, other) if len(self._by_run) < len(other._by_run) else (other, self)
        return any(
            run in large._by_run and numbers.intersect(large._by_run[run]) for run, numbers in small._by_run.items()
        )

    def first(self, limit: int) -> Iterator[Origin]:
        """At most `limit` of them, ordered by run and number."""
        for run, numbers in sorted(self._by_run.items()):
            for number in numbers:
                if limit <= 0:
                    return
                limit -= 1
                yield Origin(run.incarnation, run.partition, number)

    def __or__(self, other: "Origins") -> "Origins":
        union = self.copy()
        union.update(other)
        return union

    def __and__(self, other: "Origins") -> "Origins":
        small, large = (self, other) if len(self._by_run) < len(other._by_run) else (other, self)
        return Origins(
            (run, numbers & large._by_run[run]) for run, numbers in small._by_run.items() if run in large._by_run
        )

    def __sub__(self, other: "Origins") -> "Origins":
        return Origins((run, numbers - other._by_run.get(run, _NONE)) for run, numbers in self._by_run.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origins) and self._by_run == other._by_run

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __len__(self) -> int:
        return sum(map(len, self._by_run.values()))

    def __bool__(self) -> bool:
        return bool(self._by_run)

    def copy(self) -> "Origins":
        return Origins((run, numbers.copy()) for run, numbers in self._by_run.items())


_NONE = BitMap()


class PackedRun(NamedTuple):
    """The numbers of one run, compressed. lowest, highest: of the numbers. data: the numbers minus the lowest."""

    incarnation: str
    partition: int
    lowest: int
    highest: int
    data: bytes

    @classmethod
    def of(cls, run: SequenceKey, numbers: BitMap) -> "PackedRun":
        """Takes a bit for each number from the lowest to the highest, at most. numbers: not empty."""
        shifted = numbers.shift(-numbers.min())
        shifted.run_optimize()
        data = _COMPRESSOR.compress(shifted.serialize())
        return cls(
            *run, numbers.min(), numbers.max(), bytes(memoryview(data))
        )  # the compressor's bytes take more memory

    @property
    def run(self) -> SequenceKey:
        return SequenceKey(self.incarnation, self.partition)

    def unpack(self) -> BitMap:
        """Raises ValueError."""
        try:
            data = _DECOMPRESSOR.decompress(self.data, max_output_size=_MOST_BYTES)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        return BitMap.deserialize(data).shift(self.lowest)


class PackedRuns:
    """Packed numbers of one run by minute, found by number."""

    def __init__(self) -> None:
        self._packed: list[tuple[PackedRun, int]] = []
        self._reach: list[int] = []
        """The highest number of all up to this one: bounds the search where they overlap. Empty when it is to be made again."""

    def __bool__(self) -> bool:
        return bool(self._packed)

    def add(self, packed: PackedRun, minute: int) -> None:
        insort(self._packed, (packed, minute), key=_lowest)
        self._reach = []

    def remove(self, packed: PackedRun, minute: int) -> None:
        index = bisect_left(self._packed, packed.lowest, key=_lowest)
        while self._packed[index][1] != minute or self._packed[index][0] is not packed:
            index += 1
        del self._packed[index]
        self._reach = []

    @property
    def lowest(self) -> int:
        """The lowest number of all. Raises IndexError without any."""
        return self._packed[0][0].lowest

    @property
    def highest(self) -> int:
        """The highest number of all. Raises IndexError without any."""
        self._make_reach()
        return self._reach[-1]

    def meeting(self, numbers: BitMap) -> Iterator[tuple[PackedRun, int]]:
        """Those with one of `numbers` between their bounds, and their minutes."""
        self._make_reach()
        index = bisect_right(self._packed, numbers.max(), key=_lowest) - 1 if numbers else -1
        while index >= 0 and self._reach[index] >= numbers.min():
            packed, minute = self._packed[index]
            if numbers.range_cardinality(packed.lowest, packed.highest + 1):
                yield packed, minute
            index -= 1

    def _make_reach(self) -> None:
        if not self._reach:
            self._reach = list(accumulate((packed.highest for packed, _ in self._packed), max))


def _lowest(item: tuple[PackedRun, int]) -> int:
    return item[0].lowest


class PackedOrigins:
    """An immutable set of origins in few bytes, for sets that are rarely read: `unpack` makes a new set."""

    __slots__ = ("runs",)

    def __init__(self, runs: Iterable[PackedRun]) -> None:
        self.runs = tuple(runs)

    @classmethod
    def of(cls, origins: Origins) -> "PackedOrigins":
        return cls(PackedRun.of(run, numbers) for run, numbers in sorted(origins.runs()))

    def unpack(self) -> Origins:
        return Origins((run.run, run.unpack()) for run in self.runs)


_COMPRESSOR = zstandard.ZstdCompressor(level=3)
_DECOMPRESSOR = zstandard.ZstdDecompressor()
_MOST_BYTES = 1 << 30
"""More than 32-bit numbers can take."""
