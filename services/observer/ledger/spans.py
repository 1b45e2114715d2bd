"""Sets of origins by the span of time in which they are due."""

from collections.abc import ItemsView, Sequence, ValuesView
from itertools import chain

from pyroaring import BitMap

from services.core.ledger.report import Span
from services.observer.ledger.origins import Origins, SequenceKey
from services.observer.ledger.reported_origins import ReportedOrigins

GRAIN_S = 1024
_FEW = 64
"""So many spans are searched one by one: an index of them would take as much memory as they do."""


class Spans:
    """Origins by the span in which they are due; each is in one span at most.

    The cost of `put` does not grow with more than _FEW spans when the origins are new. The cost of `find` grows with the number
    of spans that are older than the right one, unless that is among `first`.
    """

    def __init__(self) -> None:
        self._by_due: dict[Span, Origins] = {}
        self._any: Origins | None = None
        """All of these origins, and some that were removed since the last `prune`; None with few spans."""

    def __len__(self) -> int:
        return len(self._by_due)

    def items(self) -> ItemsView[Span, Origins]:
        """All, in order of arrival; some may be empty. Origins may be removed from them, not added."""
        return self._by_due.items()

    def values(self) -> ValuesView[Origins]:
        """As `items`."""
        return self._by_due.values()

    def put(self, due: Span, run: SequenceKey, numbers: BitMap) -> None:
        """Put these into this span, and remove them from earlier ones. Those in a later span stay there."""
        for span, there in self.find(run, numbers):
            if span > due:
                numbers = numbers - there
            elif span < due:
                self.discard(span, run, there)
        if numbers:
            self._by_due.setdefault(due, Origins()).add(run, numbers)
            if self._any is not None:
                self._any.add(run, numbers)
            elif len(self._by_due) > _FEW:
                self._any = self._union()

    def find(self, run: SequenceKey, numbers: BitMap, first: Sequence[Span] = ()) -> list[tuple[Span, BitMap]]:
        """By span that has any of these, those numbers. first: spans to search first."""
        found: list[tuple[Span, BitMap]] = []
        left = numbers if self._any is None else numbers & self._any.numbers(run)
        if not left:
            return found
        for due in chain(first, self._by_due):
            origins = self._by_due.get(due)
            if origins is not None and origins.numbers(run).intersect(left):
                there = origins.numbers(run) & left
                found.append((due, there))
                left = left - there
                if not left:
                    break
        return found

    def discard(self, span: Span, run: SequenceKey, numbers: BitMap) -> None:
        origins = self._by_due[span]
        origins.discard(run, numbers)
        if not origins:
            del self._by_due[span]

    def all(self) -> Origins:
        """The origins of all spans; not to be changed. The cost grows with the origins."""
        self.prune()
        return self._union() if self._any is None else self._any

    def coarsen(self, before: int) -> None:
        """Join spans that end before this (s) into spans GRAIN_S wide: no later report distinguishes them."""
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

    def remove(self, gone: Sequence[ReportedOrigins]) -> None:
        for origins in self._by_due.values():
            for one in gone:
                one.remove_from(origins)
        self.prune()

    def prune(self) -> None:
        self._by_due = {due: origins for due, origins in self._by_due.items() if origins}
        self._any = self._union() if len(self._by_due) > _FEW else None

    def _union(self) -> Origins:
        found = Origins()
        for origins in self._by_due.values():
            found.update(origins)
        return found
