"""When a minute is final, for each destination by itself: a destination that is behind keeps no other one open.

A part of a pipe's minute is a destination, or None: what comes before them all, from ingest to the transform. No destination is
final before that is. A part that is still open when the minute is forgotten is given up: nobody knows what became of its events.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from services.core.ledger.minute import BEHIND_MS, MINUTE_MS
from services.observer.ledger.flow import Flow, Step
from services.observer.ledger.liveness import Liveness
from services.observer.ledger.settlement import Part, Row

STORED_MS = 30_000
"""From an event's arrival to where it is stored at most: ingest gives up before. What steps are behind counts from there."""
FOUND_FOR_MS = 15 * MINUTE_MS
"""So long after a minute's loss was found it matters to who asks how the pipe is, however old the minute is."""
GIVEN_UP = "it was open for too long and was forgotten; nobody knows what became of the missing events"

Key = tuple[str, int]
"""A pipe and a minute."""


class Finding(NamedTuple):
    """A part of a row: it became final, or, with a `before`, more of it is missing now than in this row of before."""

    row: Row
    part: Part
    before: Row | None = None


class Finality:
    """Which parts of which minutes are final. Grows with the minutes that are kept, and their open and lossy parts."""

    def __init__(self, flow: Flow, presence: Liveness, final_after: int, find: Callable[[str, int], Row]) -> None:
        self._flow, self._liveness, self._final_after, self._find = flow, presence, final_after, find
        self.open: dict[Key, set[str]] = {}
        """The open destinations of minutes whose first part is final. A destination that is new since is not among them."""
        self.then: dict[Key, dict[Part, int]] = {}
        """How many were missing of a part when it became final, or later, when more were lost while they waited. No zeros."""
        self.given_up: dict[Key, set[Part]] = {}

    def is_final(self, key: Key, part: Part) -> bool:
        """Whether what is missing of it is lost."""
        open_ones = self.open.get(key)
        return open_ones is not None and part not in open_ones and part not in self.given_up.get(key, ())

    def is_closed(self, key: Key) -> bool:
        """Whether every part is final or given up."""
        open_ones = self.open.get(key)
        if open_ones is None:
            return None in self.given_up.get(key, ())
        return not open_ones or not (open_ones & self._flow.pipes[key[0]].destinations.keys())

    def why_open(self, row: Row, now: int) -> dict[Part, str]:
        """For what each part waits that is not final, the first part first."""
        key = row.pipe, row.minute
        gone = self.given_up.get(key, ())
        if None in gone:
            return dict.fromkeys((None, *self._flow.pipes[row.pipe].destinations), GIVEN_UP)
        if key not in self.open and (reason := self._why_first_open(row, now)) is not None:
            return dict.fromkeys((None, *self._flow.pipes[row.pipe].destinations), reason)
        found: dict[Part, str] = dict.fromkeys(gone, GIVEN_UP)
        open_ones = self.open.get(key, self._flow.pipes[row.pipe].destinations)
        behind = [step.destination for step in row.steps if step.node == "expel" and step.missing]
        for part in behind:
            if part in open_ones and (reason := self._why_not_done(row, part, now)) is not None:
                found[part] = reason
        return found

    def _why_not_done(self, row: Row, part: Part, now: int) -> str | None:
        until = (row.minute + 1) * MINUTE_MS + BEHIND_MS + STORED_MS
        step = Step("transform", row.pipe) if part is None else Step("expel", row.pipe, part)
        return self._liveness.why_not_done(step, until, now)

    def _why_first_open(self, row: Row, now: int) -> str | None:
        end = (row.minute + 1) * MINUTE_MS
        if now < end + self._final_after:
            return "late events may come"
        for source in self._flow.pipes[row.pipe].sources:
            if (reason := self._why_source_open(source, row.minute, now)) is not None:
                return reason
        if any(step.node == "transform" and step.missing for step in row.steps):
            return self._why_not_done(row, None, now)
        return None

    def _why_source_open(self, source: str, minute: int, now: int) -> str | None:
        if self._liveness.fallen_silent(Step("ingest", source), now):
            return f"ingest of {source} fell silent; its unreported events are read from the stream"
        if not self._liveness.has_reported(Step("ingest", source), (minute + 1) * MINUTE_MS + BEHIND_MS):
            return f"ingest of {source} has not reported since the minute ended"
        for step in self._flow.feeders(source):
            fed_by = step.pipe, minute
            settled = self.is_final(fed_by, step.destination) or step.destination in self.given_up.get(fed_by, ())
            if not settled and self._find(*fed_by).accepted:
                return f"{step.pipe}, which feeds {source}, is not final"
        return None

    def judge(self, row: Row, now: int) -> list[Part]:
        """The parts that are final from now on."""
        key = row.pipe, row.minute
        if self.is_closed(key):
            return []
        waiting = self.why_open(row, now)
        if None in waiting:
            return []
        destinations = self._flow.pipes[row.pipe].destinations
        first: list[Part] = [] if key in self.open else [None]
        open_ones = self.open.setdefault(key, set(destinations))
        done = [part for part in destinations if part in open_ones and part not in waiting]
        open_ones.difference_update(done)
        found = [*first, *done]
        missing = row.missing_by_part()
        self.note(key, {part: missing.get(part, 0) for part in found})
        return found

    def note(self, key: Key, missing: dict[Part, int]) -> None:
        """So many are missing of these parts, which are final."""
        if lost := {part: count for part, count in missing.items() if count}:
            self.then.setdefault(key, {}).update(lost)

    def give_up(self, key: Key) -> list[Part]:
        """Its time is over: the parts that were open; of a minute whose first part was, that one stands for all."""
        if self.is_closed(key):
            return []
        open_ones = self.open.get(key)
        gone: set[Part] = {None}
        if open_ones is not None:
            gone = {part for part in self._flow.pipes[key[0]].destinations if part in open_ones}
        self.given_up.setdefault(key, set()).update(gone)
        if open_ones is not None:
            open_ones.clear()
        return sorted(gone, key=str)

    def late(self, row: Row) -> int:
        """How many were settled after they had been final as missing, summed over the parts."""
        missing = row.missing_by_part()
        then = self.then.get((row.pipe, row.minute), {})
        return sum(max(0, count - missing.get(part, 0)) for part, count in then.items())

    def forget(self, keys: Iterable[Key]) -> None:
        """Nothing is known of these minutes any more."""
        for key in keys:
            self.open.pop(key, None)
            self.then.pop(key, None)
            self.given_up.pop(key, None)

    def keys(self) -> set[Key]:
        """All minutes of which any part is final or given up."""
        return self.open.keys() | self.given_up.keys()
