"""Sets of origins: bitmaps of sequence numbers by run of an ingest process and partition."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pyroaring import BitMap

from services.core.event import Origin


class Run(NamedTuple):
    """What one incarnation put into one partition: its sequence numbers are dense."""

    incarnation: str
    partition: int


class Origins:
    """A set of origins. `|`, `&` and `-` make new sets; `add` and `remove` change this one. Never holds an empty bitmap."""

    __slots__ = ("_by_run",)

    def __init__(self, by_run: Iterable[tuple[Run, BitMap]] = ()) -> None:
        self._by_run = {run: numbers for run, numbers in by_run if numbers}

    def add(self, run: Run, numbers: BitMap) -> None:
        """Union with these."""
        held = self._by_run.get(run)
        if held is not None:
            held |= numbers
        elif numbers:
            self._by_run[run] = numbers.copy()

    def update(self, other: "Origins") -> None:
        """Union with the other set."""
        for run, numbers in other.runs():
            self.add(run, numbers)

    def remove(self, other: "Origins") -> None:
        """Difference with the other set."""
        for run, numbers in other.runs():
            held = self._by_run.get(run)
            if held is not None:
                held -= numbers
                if not held:
                    del self._by_run[run]

    def discard(self, run: Run, numbers: BitMap) -> None:
        """Difference with these; fast where none of them is here."""
        held = self._by_run.get(run)
        if held is not None and held.intersect(numbers):
            held -= numbers
            if not held:
                del self._by_run[run]

    def remove_below(self, run: Run, number: int, but: BitMap) -> None:
        """Forget this run's numbers below `number`, but for those in `but`."""
        held = self._by_run.get(run)
        if held is not None and held.min() < number:
            kept = held & but
            held.remove_range(0, number)
            held |= kept
            if not held:
                del self._by_run[run]

    def forget(self, incarnation: str) -> None:
        """Forget all of an incarnation."""
        for run in [run for run in self._by_run if run.incarnation == incarnation]:
            del self._by_run[run]

    def numbers(self, run: Run) -> BitMap:
        """This run's numbers, not to be changed."""
        return self._by_run.get(run, _NONE)

    def runs(self) -> Iterator[tuple[Run, BitMap]]:
        """All runs with their numbers, not to be changed."""
        yield from self._by_run.items()

    def meets(self, other: "Origins") -> bool:
        """Whether any is in both."""
        small, large = (self, other) if len(self._by_run) < len(other._by_run) else (other, self)
        return any(
            run in large._by_run and numbers.intersect(large._by_run[run]) for run, numbers in small._by_run.items()
        )

    def first(self, limit: int) -> Iterator[Origin]:
        """At most so many of them, ordered by run and number."""
        for run, numbers in sorted(self._by_run.items()):
            for number in numbers:
                if limit <= 0:
                    return
                limit -= 1
                yield Origin(run.incarnation, run.partition, number)

    def __or__(self, other: "Origins") -> "Origins":
        small, large = (self, other) if len(self._by_run) < len(other._by_run) else (other, self)
        union = large.copy()
        for run, numbers in small._by_run.items():
            union.add(run, numbers)
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
        """One that may be changed apart."""
        return Origins((run, numbers.copy()) for run, numbers in self._by_run.items())


_NONE = BitMap()
