"""The attempts of an event at one destination, ordered by their reported times, in any order of the reports.

Until it is delivered, an event may be handed over to the global retrier and released, parked and read again after a resume,
dead and redriven, each many times. Only the newest of these counts. The time in a report orders them.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pyroaring import BitMap

from services.core.ledger.report import OriginSet, Outcome, Span, is_back, since_span, spans_around
from services.observer.ledger.flow import Step
from services.observer.ledger.origins import Origins, SequenceKey
from services.observer.ledger.reported_origins import ReportedOrigins
from services.observer.ledger.spans import Spans

COARSE_AFTER_S = 600
"""Reports arrive within this time. Older spans need not be distinguished any more."""


class Ordered(NamedTuple):
    """numbers: for which this outcome is the newest. no_more: outcomes that are not the newest any more, and their numbers."""

    numbers: BitMap
    no_more: list[tuple[Outcome, BitMap]]


class RetryTracker:
    """By step of expel. handed_over: to the retrier. released: of these, the ones that the retrier gave back. held: parked or
    redriven, in a topic that expel itself reads. dead: among the dead letters. An event is in one of handed_over, held and
    dead. lost: by step of expel and of the retrier, the events that `find_lost` found last.

    Grows with origins that wait for another attempt or are dead, packed, and with the seconds in which they were due.
    """

    def __init__(self) -> None:
        self.handed_over: dict[Step, Spans] = {}
        self.released: dict[Step, Spans] = {}
        self.held: dict[Step, Spans] = {}
        self.dead: dict[Step, Spans] = {}
        self.lost: dict[Step, Origins] = {}
        self.held_at: dict[Step, tuple[int, Origins]] = {}
        """The events that were held at a time (ms) and that no report has named since."""
        self.unread: dict[Step, Origins] = {}
        """Held events that should have been read long ago."""

    def record(self, step: Step, reported: OriginSet, run: SequenceKey, numbers: BitMap) -> Ordered:
        """Record a set that has a time. numbers: of the set, without events whose outcome is final."""
        mine, due = owner(step), reported.due
        if due is None or not numbers:
            return Ordered(numbers, [])
        if reported.outcome == "released":
            self._release(mine, due, run, numbers)
            return Ordered(numbers, [])
        known = {"parked": self.held, "redriven": self.held, "dead": self.dead}.get(reported.outcome, self.handed_over)
        ordered = self._order(mine, known, due, run, numbers)
        if known is self.handed_over:
            self._hand_over(mine, due, run, ordered.numbers)
        elif known is self.held:
            self._hold(mine, due, run, ordered.numbers)
        elif ordered.numbers:
            self.dead.setdefault(mine, Spans()).put(due, run, ordered.numbers)
        return ordered

    def _order(self, step: Step, known: dict[Step, Spans], due: Span, run: SequenceKey, numbers: BitMap) -> Ordered:
        """Keep the numbers without a later report, and remove their earlier ones.

        Of one second, dead is later than held, and held later than handed over.
        """
        ranks: list[tuple[dict[Step, Spans], Outcome]] = [
            (self.handed_over, "retrying"),
            (self.held, "parked"),
            (self.dead, "dead"),
        ]
        mine = next(rank for rank, (one, _) in enumerate(ranks) if one is known)
        no_more: list[tuple[Outcome, BitMap]] = []
        for rank, (other, outcome) in enumerate(ranks):
            spans = other.get(step)
            if rank == mine or spans is None:
                continue
            for span, there in spans.find(run, numbers):
                high, low = (span, due) if rank > mine else (due, span)
                is_high = is_back(high, low) if min(rank, mine) == 0 else high[1] >= low[1]
                if is_high == (mine > rank):
                    spans.discard(span, run, there)
                    no_more.append((outcome, there))
                else:
                    numbers = numbers - there
        return Ordered(numbers, no_more)

    def _hand_over(self, step: Step, due: Span, run: SequenceKey, numbers: BitMap) -> None:
        self.handed_over.setdefault(step, Spans()).put(due, run, numbers)
        released = self.released.setdefault(step, Spans())
        for span, there in released.find(run, numbers):
            if not is_back(span, due):
                released.discard(span, run, there)

    def _release(self, step: Step, due: Span, run: SequenceKey, numbers: BitMap) -> None:
        for span, there in self.handed_over.setdefault(step, Spans()).find(run, numbers, spans_around(due[0])):
            if not is_back(due, span):
                numbers = numbers - there
        self.released.setdefault(step, Spans()).put(due, run, numbers)

    def _hold(self, step: Step, since: Span, run: SequenceKey, numbers: BitMap) -> None:
        held = self.held.setdefault(step, Spans())
        for span, there in held.find(run, numbers):
            if span >= since or since[1] <= span[1]:
                numbers = numbers - there  # reported before
        held.put(since, run, numbers)
        for known in (self.held_at.get(step, (0, Origins()))[1], self.unread.get(step, Origins())):
            known.discard(run, numbers)

    def load(self, step: Step, outcome: Outcome, due: Span, origins: Origins) -> None:
        """Restore one item of `spans`."""
        known = self._by_outcome()[outcome].setdefault(step, Spans())
        for run, numbers in origins.runs():
            known.put(due, run, numbers)

    def spans(self) -> Iterator[tuple[Outcome, Step, Span, Origins]]:
        """Everything that a snapshot needs."""
        for outcome, known in self._by_outcome().items():
            for step, spans in known.items():
                for due, origins in spans.items():
                    yield outcome, step, due, origins

    def _by_outcome(self) -> dict[Outcome, dict[Step, Spans]]:
        return {"retrying": self.handed_over, "released": self.released, "parked": self.held, "dead": self.dead}

    def find_lost(
        self, step: Step, released_by: int, settled_by: int, ended: Sequence[ReportedOrigins]
    ) -> dict[Step, Origins]:
        """The events that are lost at this step of expel and at its step of the retrier, for `lost`. Forgets ended events.

        released_by: a due time (s); all events due before it have left the retrier. settled_by: no later than that; expel has
        settled the released events that were due before it. ended: events that wait for no other attempt.
        """
        handed_over, released = self.handed_over.get(step, Spans()), self.released.get(step, Spans())
        for known in (handed_over, released):
            known.remove(ended)
        at_retrier, at_expel = Origins(), self.unread.get(step, Origins()).copy()
        for due, waiting, came in _find_back(handed_over, released):
            if due[1] <= released_by:
                at_retrier.update(waiting - came)
                if due[1] <= settled_by:
                    at_expel.update(came)
        return {retrier_of(step): at_retrier, step: at_expel}

    def find_unread(self, step: Step, done: int | None, now: int, slack: int, delivered: ReportedOrigins) -> None:
        """Find the held events that should have been read again, for the next `find_lost`. Times in ms.

        done: expel has read and settled every event that was held before this time. It stays while the destination is paused.
        """
        held, dead = self.held.get(step, Spans()), self.dead.get(step, Spans())
        for known in (held, dead):
            known.remove([delivered])
            known.coarsen(now // 1000 - COARSE_AFTER_S)
        still = held.all()
        if step in self.unread:
            self.unread[step] = self.unread[step] & still
        at, unnamed = self.held_at.get(step, (now, Origins()))
        if step not in self.held_at or at > now:  # our clock may be set back
            self.held_at[step] = now, still.copy()
        elif done is not None and done >= at + slack:
            self.unread[step] = unnamed & still
            self.held_at[step] = now, still.copy()

    def end_waiting(self, step: Step, now: int) -> list[tuple[SequenceKey, BitMap]]:
        """Count everything that waits for this step of expel as dead since now (ms), and return it."""
        waiting = [origins for known in (self.handed_over, self.held) for origins in known.pop(step, Spans()).values()]
        found = [(run, numbers) for origins in waiting for run, numbers in origins.runs()]
        for run, numbers in found:
            self.dead.setdefault(step, Spans()).put(since_span(now), run, numbers)
        self.released.pop(step, None)
        for one in (step, retrier_of(step)):
            self.lost.pop(one, None)
        self.unread.pop(step, None)
        self.held_at.pop(step, None)
        return found

    def changed(self, lost: Mapping[Step, Origins]) -> Origins:
        """The origins in which `lost` would differ."""
        found = Origins()
        for step, now in lost.items():
            before = self.lost.get(step, Origins())
            found = found | (now - before) | (before - now)
        return found

    def steps(self) -> list[Step]:
        """Those of expel with waiting or dead events."""
        return list({**self.handed_over, **self.held, **self.dead})

    def all_dead(self) -> Origins:
        """The events that may be redriven."""
        found = Origins()
        for spans in self.dead.values():
            found.update(spans.all())
        return found

    def held_by(self, step: Step) -> Origins:
        """The events that this step of expel will read again; not to be changed."""
        return self.held.get(step, Spans()).all()

    def count_waiting(self, step: Step) -> int:
        """The events that were handed over or are held, without the lost ones; as of the last `find_lost`."""
        waiting = sum(
            len(origins) for known in (self.handed_over, self.held) for origins in known.get(step, Spans()).values()
        )
        return waiting - sum(len(self.lost.get(one, Origins())) for one in (step, retrier_of(step)))

    def timed(self, step: Step, outcome: Outcome, run: SequenceKey, numbers: BitMap) -> BitMap:
        """Of these parked or dead numbers, those for which a time was reported."""
        found = BitMap()
        for _, there in self._by_outcome()[outcome].get(owner(step), Spans()).find(run, numbers):
            found |= there
        return found

    def every(self) -> Iterator[Origins]:
        """All sets. Origins may be removed from them, not added."""
        for known in self._by_outcome().values():
            for spans in known.values():
                yield from spans.values()
        yield from self.lost.values()
        yield from self.unread.values()
        yield from (unnamed for _, unnamed in self.held_at.values())

    def prune(self) -> None:
        for known in self._by_outcome().values():
            for step in list(known):
                known[step].prune()
                if not known[step]:
                    del known[step]
        self.lost = {step: origins for step, origins in self.lost.items() if origins}
        self.unread = {step: origins for step, origins in self.unread.items() if origins}
        self.held_at = {step: known_at for step, known_at in self.held_at.items() if step in self.held}


def owner(step: Step) -> Step:
    """The step of expel to which one of the retrier belongs."""
    return Step("expel", step.pipe, step.destination)


def retrier_of(step: Step) -> Step:
    """The retrier's step for one of expel."""
    return Step("retrier", step.pipe, step.destination)


def _find_back(handed_over: Spans, released: Spans) -> Iterator[tuple[Span, Origins, Origins]]:
    """By span of what was handed over: its origins, and those of them that came back."""
    ending = sorted(released.items(), key=lambda item: item[0][1])
    back = Origins()
    for due, waiting in sorted(handed_over.items(), key=lambda item: item[0][0], reverse=True):
        while ending and is_back(ending[-1][0], due):  # true for every later due time as well
            back.update(ending.pop()[1])
        yield due, waiting, waiting & back
