"""When a minute is final, for each destination by itself: a destination that is behind keeps no other one open.

A part of a pipe's minute is a destination, or None: everything before the destinations, from ingest to the transform. No
destination is final before that part. A part that is open when the minute is forgotten is given up.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from services.core.ledger.minute import BEHIND_MS, MINUTE_MS
from services.observer.ledger.flow import Flow, Step
from services.observer.ledger.liveness import Liveness
from services.observer.ledger.settlement import LATE_EVENTS, Part, Row

STORED_MS = 30_000
"""The limit from an event's arrival to its storage: ingest gives up before. A `behind_ms` counts from storage."""
MEASURED_MS = 30_000
"""A `behind_ms` is of a measurement that is at most so old."""
FOUND_FOR_MS = 15 * MINUTE_MS
"""For so long after a minute's loss was found, it counts for the health of the pipe, however old the minute is."""
GIVEN_UP = "it was open for too long and was forgotten; nobody knows what became of the missing events"
NEWER_REPORTS = "there are reports of a newer version, which this observer cannot read; upgrade the observer"

Key = tuple[str, int]
"""A pipe and a minute."""


class Finding(NamedTuple):
    """A part of a row became final; or, with `before`, more of a final part is missing than in that earlier row."""

    row: Row
    part: Part
    before: Row | None = None


class Finality:
    """Which parts of which minutes are final. Grows with the minutes that are kept, and their open and lossy parts."""

    def __init__(self, flow: Flow, liveness: Liveness, final_after: int, find: Callable[[str, int], Row]) -> None:
        self._flow, self._liveness, self._final_after, self._find = flow, liveness, final_after, find
        self.open: dict[Key, set[str]] = {}
        """The open destinations of minutes whose first part is final. A destination that was added since is not among them."""
        self.final_missing: dict[Key, dict[Part, int]] = {}
        """The missing events of a part when it became final, or when more of the waiting ones were lost. No zeros."""
        self.given_up: dict[Key, set[Part]] = {}
        self.awaited: dict[Key, int] = {}
        """Minutes whose results come late, with the events that were missing behind the transform when this was seen."""
        self.fed_ms: dict[Key, int] = {}
        """Of such minutes: when their first part became final. The transform's results came to the destinations until
        then, so a destination that had done everything before is not done."""
        self.newer_ms = 0
        """Until this time (ms), reports came that this version cannot read. They may have settled what is missing."""

    def is_final(self, key: Key, part: Part) -> bool:
        """Whether the missing events of the part are lost."""
        open_ones = self.open.get(key)
        return open_ones is not None and part not in open_ones and part not in self.given_up.get(key, ())

    def is_closed(self, key: Key) -> bool:
        """Whether every part is final or given up."""
        open_ones = self.open.get(key)
        if open_ones is None:
            return None in self.given_up.get(key, ())
        return not open_ones or not (open_ones & self._flow.pipes[key[0]].destinations.keys())

    def why_open(self, row: Row, now: int) -> dict[Part, str]:
        """By part that is not final, the reason; the first part first."""
        key, destinations = (row.pipe, row.minute), self._flow.pipes[row.pipe].destinations
        gone = self.given_up.get(key, ())
        first = GIVEN_UP if None in gone else None if key in self.open else self._why_first_open(row, now)
        if first is not None:
            return dict.fromkeys((None, *destinations), first)
        found: dict[Part, str] = dict.fromkeys(gone, GIVEN_UP)
        open_ones = self.open.get(key, destinations)
        for step in row.steps:
            part = step.destination
            is_open = step.node == "expel" and step.missing and part in open_ones
            if is_open and (reason := self._why_not_done(row, part, now)) is not None:
                found[part] = reason
        return found

    def _why_not_done(self, row: Row, part: Part, now: int) -> str | None:
        if row.minute * MINUTE_MS <= self.newer_ms:
            return NEWER_REPORTS
        until = (row.minute + 1) * MINUTE_MS + BEHIND_MS + STORED_MS
        fed = None if part is None else self.fed_ms.get((row.pipe, row.minute))
        if fed is not None:
            until = max(until, fed + MEASURED_MS)
        step = Step("transform", row.pipe) if part is None else Step("expel", row.pipe, part)
        return self._liveness.why_not_done(step, until, now)

    def _why_first_open(self, row: Row, now: int) -> str | None:
        if now < (row.minute + 1) * MINUTE_MS + self._final_after:
            return LATE_EVENTS
        for source in self._flow.pipes[row.pipe].sources:
            if (reason := self._why_source_open(source, row.minute, now)) is not None:
                return reason
        if any(step.node == "transform" and step.missing for step in row.steps):
            return self._why_not_done(row, None, now)
        return None

    def _why_source_open(self, source: str, minute: int, now: int) -> str | None:
        if source in self._flow.others:
            return None  # its events are accepted by the readers, whose steps are judged
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

    def close_parts(self, row: Row, now: int) -> list[Part]:
        """The parts that are final from now on."""
        key = row.pipe, row.minute
        if self.is_closed(key):
            return []
        waiting = self.why_open(row, now)
        if None in waiting:
            self.await_results(row, now)
            return []
        if self.awaited.pop(key, 0) > _missing_results(row):
            self.fed_ms[key] = now
            waiting = self.why_open(row, now)
            if None in waiting:  # a pipe that feeds it has become final just now
                return []
        found: list[Part] = [] if key in self.open else [None]
        destinations = self._flow.pipes[row.pipe].destinations
        open_ones = self.open.setdefault(key, set(destinations))
        found += [part for part in destinations if part in open_ones and part not in waiting]
        open_ones.difference_update(found)
        missing = row.missing_by_part()
        self.record_missing(key, {part: missing.get(part, 0) for part in found})
        return found

    def await_results(self, row: Row, now: int) -> None:
        """Note whether a transform that lives has results to come, later than a destination's reports have to reach."""
        is_late = now >= (row.minute + 1) * MINUTE_MS + BEHIND_MS + STORED_MS
        key, missing = (row.pipe, row.minute), _missing_results(row)
        if is_late and missing and key not in self.awaited and self._liveness.alive(Step("transform", row.pipe), now):
            self.awaited[key] = missing

    def record_missing(self, key: Key, missing: dict[Part, int]) -> None:
        """Keep the number of missing events of these final parts."""
        if lost := {part: count for part, count in missing.items() if count}:
            self.final_missing.setdefault(key, {}).update(lost)

    def give_up(self, key: Key) -> list[Part]:
        """Give up the open parts, and return them; None stands for all of a minute whose first part was open."""
        if self.is_closed(key):
            return []
        open_ones = self.open.get(key)
        gone: set[Part] = {None}
        if open_ones is not None:
            gone = {part for part in self._flow.pipes[key[0]].destinations if part in open_ones}
            open_ones.clear()
        self.given_up.setdefault(key, set()).update(gone)
        return sorted(gone, key=str)

    def late(self, row: Row) -> int:
        """The events that were settled after they had been final as missing, summed over the parts."""
        missing = row.missing_by_part()
        final = self.final_missing.get((row.pipe, row.minute), {})
        return sum(max(0, count - missing.get(part, 0)) for part, count in final.items())

    def forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            for known in (self.open, self.final_missing, self.given_up, self.awaited, self.fed_ms):
                known.pop(key, None)

    def keys(self) -> set[Key]:
        """All minutes of which anything is known."""
        return self.open.keys() | self.given_up.keys() | self.awaited.keys() | self.fed_ms.keys()


def _missing_results(row: Row) -> int:
    return sum(step.missing for step in row.steps if step.node == "transform")
