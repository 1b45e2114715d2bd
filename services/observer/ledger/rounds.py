"""What was handed over to the global retrier, what came back from it, and what should have: by when it was due.

An event goes round and round until it is delivered or dead, so that it was handed over and given back says nothing by itself:
only the latest of each counts. A due time is later in every round, so it orders them, in whatever order reports come.
"""

from collections.abc import Iterator, Mapping, Sequence

from pyroaring import BitMap

from services.core.ledger.due import Span, is_back, spans_around
from services.core.ledger.report import OriginSet, Outcome
from services.observer.ledger.flow import Step
from services.observer.ledger.origins import Origins, Run
from services.observer.ledger.spans import Spans


class Rounds:
    """By step of expel. released: of what was handed over last, as far as it came back. `lost`: of expel and the retrier, what
    `judge` found last.

    Grows with origins that wait for another attempt, packed, and with the seconds in which they were due.
    """

    def __init__(self) -> None:
        self.handed_over: dict[Step, Spans] = {}
        self.released: dict[Step, Spans] = {}
        self.lost: dict[Step, Origins] = {}

    def hear(self, step: Step, told: OriginSet, run: Run, numbers: BitMap) -> None:
        """Take a set of expel that is retrying, or of the retrier that is released; others say nothing of it.

        numbers: without those that wait for no other attempt.
        """
        if told.due is None or not numbers:
            return
        handed_over, released = self._of(owner(step))
        if told.outcome == "retrying":
            handed_over.put(told.due, run, numbers)
            for span, there in released.find(run, numbers):
                if not is_back(span, told.due):
                    released.take(span, run, there)
        elif told.outcome == "released":
            for span, there in handed_over.find(run, numbers, spans_around(told.due[0])):
                if not is_back(told.due, span):
                    numbers = numbers - there
            released.put(told.due, run, numbers)

    def load(self, step: Step, outcome: Outcome, due: Span, origins: Origins) -> None:
        """What a snapshot has: retrying or released."""
        handed_over, released = self._of(step)
        for run, numbers in origins.runs():
            (handed_over if outcome == "retrying" else released).put(due, run, numbers)

    def _of(self, step: Step) -> tuple[Spans, Spans]:
        return self.handed_over.setdefault(step, Spans()), self.released.setdefault(step, Spans())

    def judge(self, step: Step, left_by: int, seen_by: int, ended: Sequence[Origins]) -> dict[Step, Origins]:
        """What is lost at this step of expel and at its step of the retrier, for `lost`. What has ended is forgotten here.

        left_by: everything that was due before it (s) has left the retrier. seen_by: and what came back was seen to by expel; no
        later than left_by. ended: what waits for no other attempt.
        """
        handed_over, released = self._of(step)
        for known in (handed_over, released):
            known.remove(ended)
        there, back = Origins(), Origins()
        for due, waiting, came in _find_back(handed_over, released):
            if due[1] <= left_by:
                there.update(waiting - came)
                if due[1] <= seen_by:
                    back.update(came)
        return {retrier_of(step): there, step: back}

    def changed(self, lost: Mapping[Step, Origins]) -> Origins:
        """Those of which `lost` would say something else."""
        found = Origins()
        for step, now in lost.items():
            before = self.lost.get(step, Origins())
            found = found | (now - before) | (before - now)
        return found

    def steps(self) -> list[Step]:
        """Those that handed anything over."""
        return list(self.handed_over)

    def every(self) -> Iterator[Origins]:
        """All sets, to be taken from."""
        for known in (self.handed_over, self.released):
            for spans in known.values():
                yield from spans.values()
        yield from self.lost.values()

    def prune(self) -> None:
        """Drop what is empty."""
        for known in (self.handed_over, self.released):
            for step in list(known):
                known[step].prune()
                if not known[step]:
                    del known[step]
        self.lost = {step: origins for step, origins in self.lost.items() if origins}


def owner(step: Step) -> Step:
    """The step of expel to which one of the retrier belongs."""
    return Step("expel", step.pipe, step.destination)


def retrier_of(step: Step) -> Step:
    """The retrier's step for one of expel."""
    return Step("retrier", step.pipe, step.destination)


def _find_back(handed_over: Spans, released: Spans) -> Iterator[tuple[Span, Origins, Origins]]:
    """By span of what was handed over: that, and what of it came back."""
    ending = sorted(released.items(), key=lambda item: item[0][1])
    back = Origins()
    for due, waiting in sorted(handed_over.items(), key=lambda item: item[0][0], reverse=True):
        while ending and is_back(ending[-1][0], due):  # then so has each that was due later
            back.update(ending.pop()[1])
        yield due, waiting, waiting & back
