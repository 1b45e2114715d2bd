"""Sets of origins by when they are due: each stands in the latest span only that it was put into."""

from collections.abc import ItemsView, Sequence, ValuesView
from itertools import chain

from pyroaring import BitMap

from services.core.ledger.due import Span
from services.observer.ledger.origins import Origins, Run

GRAIN_S = 1024


class Spans:
    """To put in what never was here costs the same however many spans there are; to find what is, the more the more are older,
    unless it is looked for in the right place first."""

    def __init__(self) -> None:
        self._by_due: dict[Span, Origins] = {}
        self._any = Origins()
        """All that stand here, and some that were taken since `prune`."""

    def __len__(self) -> int:
        return len(self._by_due)

    def items(self) -> ItemsView[Span, Origins]:
        """All, in the order in which they came; some may be empty. Only to be taken from."""
        return self._by_due.items()

    def values(self) -> ValuesView[Origins]:
        """As `items`."""
        return self._by_due.values()

    def put(self, due: Span, run: Run, numbers: BitMap) -> None:
        """They are due then, but for those that stand in a later span."""
        for span, there in self.find(run, numbers):
            if span > due:
                numbers = numbers - there
            elif span < due:
                self.take(span, run, there)
        if numbers:
            self._by_due.setdefault(due, Origins()).add(run, numbers)
            self._any.add(run, numbers)

    def find(self, run: Run, numbers: BitMap, first: Sequence[Span] = ()) -> list[tuple[Span, BitMap]]:
        """The spans in which some of these stand, and which these are. first: where they may be."""
        found: list[tuple[Span, BitMap]] = []
        left = numbers & self._any.numbers(run)
        if not left:
            return found
        for span in chain(first, self._by_due):
            origins = self._by_due.get(span)
            if origins is not None and origins.numbers(run).intersect(left):
                there = origins.numbers(run) & left
                found.append((span, there))
                left = left - there
                if not left:
                    break
        return found

    def take(self, span: Span, run: Run, numbers: BitMap) -> None:
        """Not these any more."""
        origins = self._by_due[span]
        origins.discard(run, numbers)
        if not origins:
            del self._by_due[span]

    def all(self) -> Origins:
        """All that stand here, in any span; not to be changed. It costs the more the more spans there are."""
        self.prune()
        return self._any

    def coarsen(self, before: int) -> None:
        """Put spans together that end before this (s), GRAIN_S wide at most: nothing that comes later tells them apart."""
        old: dict[int, list[Span]] = {}
        for span in self._by_due:
            if span[1] <= before:
                old.setdefault(span[0] // GRAIN_S, []).append(span)
        for spans in old.values():
            if len(spans) > 1:
                parts = [self._by_due.pop(span) for span in spans]
                for part in parts[1:]:
                    parts[0].update(part)
                self._by_due[min(first for first, _ in spans), max(last for _, last in spans)] = parts[0]

    def remove(self, gone: Sequence[Origins]) -> None:
        """None of these any more."""
        for origins in self._by_due.values():
            for one in gone:
                origins.remove(one)
        self.prune()

    def prune(self) -> None:
        """Forget what is empty."""
        self._by_due = {due: origins for due, origins in self._by_due.items() if origins}
        self._any = Origins()
        for origins in self._by_due.values():
            self._any.update(origins)
