"""The loss table: a row per pipe and minute, final when nothing more is to come, aged into counts, corrected when it does."""

import msgspec

from services.core.ledger.minute import BEHIND_MS, MINUTE_MS
from services.core.ledger.report import Report
from services.observer.ledger.book import Book
from services.observer.ledger.flow import Flow, Step
from services.observer.ledger.origins import Origins
from services.observer.ledger.presence import Presence
from services.observer.ledger.reaches import Reaches
from services.observer.ledger.row import Row, add, count
from services.observer.ledger.settlement import Settlement, settle

STORED_MS = 30_000
"""From an event's arrival to where it is stored at most: ingest gives up before. What steps are behind counts from there."""


class Ages(msgspec.Struct, frozen=True):
    """After a minute's end, in ms. final: no earlier is it final. fold: its sets become counts, but for what is unsettled.

    drop: its row is forgotten, and what is still missing in it. waiting: what waits for another attempt is forgotten, too.
    """

    final: int = 150_000
    fold: int = 3_600_000
    drop: int = 86_400_000
    waiting: int = 30 * 86_400_000


class Table:
    """`apply` reports; `tick` about once a second; `row` and `settlement` at any time. Times in ms of the wall clock.

    Holds bitmaps of the minutes that are younger than `Ages.fold`, or not final and younger than `Ages.drop`; of older ones
    what is unsettled; and a row per pipe and minute for `Ages.drop`.
    """

    def __init__(self, flow: Flow, ages: Ages | None = None) -> None:
        self.flow = flow
        self.ages = ages or Ages()
        self.book = Book()
        self.presence = Presence()
        self.reaches = Reaches()
        self.final: dict[tuple[str, int], int] = {}
        """How many were missing when the minute of the pipe became final."""
        self.base: dict[tuple[str, int], Row] = {}
        """Counts of what is folded."""
        self._dropped: set[int] = set()
        """Minutes of which only what waits is held."""
        self._rows: dict[tuple[str, int], Row] = {}
        """Rows of final minutes, as long as nothing of theirs is touched."""

    def apply(self, report: Report) -> None:
        """Unite with a report: in any order, any number of times. One of a step that the flow does not know changes nothing."""
        if not self.flow.knows(Step(report.node, report.pipe, report.destination)):
            return
        self.presence.hear(report)
        self.reaches.hear(report)
        self.book.apply(report)

    def minutes(self, pipe: str) -> list[int]:
        """Those that have a row, oldest first. A minute in which nothing came into the pipe has none."""
        folded = {minute for name, minute in self.base if name == pipe}
        return sorted(minute for minute in folded.union(self.book.minutes()) if self._find(pipe, minute).accepted)

    def row(self, pipe: str, minute: int, now: int) -> Row:
        """The row as it stands. Raises KeyError for an unknown pipe."""
        row = self._find(pipe, minute)
        missing_then = self.final.get((pipe, minute))
        if missing_then is None:
            return msgspec.structs.replace(row, why_open=self._why_open(row, now))
        return msgspec.structs.replace(row, why_open=None, late=max(0, missing_then - row.missing))

    def settlement(self, pipe: str, minute: int) -> Settlement:
        """The sets behind the row, without what is folded (of which nothing is missing)."""
        return settle(self.flow, pipe, self.book.accepted(minute), self.book)

    def _find(self, pipe: str, minute: int) -> Row:
        key = (pipe, minute)
        if (known := self._rows.get(key)) is not None:
            return known
        row = count(pipe, minute, self.settlement(pipe, minute))
        if (base := self.base.get(key)) is not None:
            row = add(row, base)
        if key in self.final:
            self._rows[key] = row
        return row

    def _why_open(self, row: Row, now: int) -> str | None:
        """What the minute waits for; None when it is as it will be."""
        end = (row.minute + 1) * MINUTE_MS
        if now < end + self.ages.final:
            return "late events may come"
        for source in self.flow.pipes[row.pipe].sources:
            if self.presence.fallen_silent(Step("ingest", source), now):
                return f"ingest of {source} fell silent; what it did not tell is read from the stream"
            for step in self.flow.feeders(source):
                if (step.pipe, row.minute) not in self.final and self._find(step.pipe, row.minute).accepted:
                    return f"{step.pipe}, which feeds {source}, is not final"
        for one in row.steps:
            if one.missing:
                step = Step(one.node, row.pipe, one.destination)
                if (reason := self.presence.why_not_done(step, end + BEHIND_MS + STORED_MS, now)) is not None:
                    return reason
        return None

    def tick(self, now: int) -> list[Row]:
        """Let time pass: the rows that became final by this. Costs the more the more minutes are open."""
        self._forget_touched()
        final = []
        for minute in self.book.minutes():
            age = now - (minute + 1) * MINUTE_MS
            if age < self.ages.final:
                continue
            final += self._finish(minute, now)
            if age >= self.ages.waiting or (age >= self.ages.drop and minute not in self._dropped):
                self._drop(minute, keep_waiting=age < self.ages.waiting)
            elif age >= self.ages.fold and not self.book.is_folded(minute) and self._is_final(minute):
                self._fold(minute)
        self._drop_rows(now)
        self.presence.forget(now)
        self.reaches.forget_marks(now)
        for incarnation in self.book.find_gone(now - self.ages.drop):
            self.book.forget(incarnation)
            self.reaches.forget(incarnation)
        return final

    def _forget_touched(self) -> None:
        touched = self.book.take_touched()
        if not touched:
            return
        for minute in self.book.minutes():
            if any(origins & touched for origins in self.book.accepted(minute).values()):
                self._dropped.discard(minute)
                for pipe in self.flow.pipes:
                    self._rows.pop((pipe, minute), None)

    def _finish(self, minute: int, now: int) -> list[Row]:
        found = []
        for pipe in self.flow.pipes:
            if (pipe, minute) in self.final or not self._find(pipe, minute).accepted:
                continue
            row = self.row(pipe, minute, now)
            if row.why_open is None:
                self.final[pipe, minute] = row.missing
                found.append(row)
        return found

    def _is_final(self, minute: int) -> bool:
        return all((pipe, minute) in self.final or not self._find(pipe, minute).accepted for pipe in self.flow.pipes)

    def _fold(self, minute: int) -> None:
        """Keep the sets of what is unsettled in any pipe; count the rest."""
        unsettled = Origins()
        for pipe in self.flow.pipes:
            settlement = self.settlement(pipe, minute)
            unsettled = unsettled | settlement.missing() | settlement.waiting()
        self._count_off(minute, unsettled)

    def _drop(self, minute: int, *, keep_waiting: bool) -> None:
        """Count off everything but what waits, which may wait for days."""
        waiting = Origins()
        if keep_waiting:
            for pipe in self.flow.pipes:
                waiting = waiting | self.settlement(pipe, minute).waiting()
        self._count_off(minute, waiting)
        self._dropped.add(minute)

    def _count_off(self, minute: int, kept: Origins) -> None:
        accepted = self.book.accepted(minute)
        gone = {place: origins - kept for place, origins in accepted.items()}
        for pipe in self.flow.pipes:
            part = count(pipe, minute, settle(self.flow, pipe, gone, self.book))
            if part.accepted:
                base = self.base.get((pipe, minute))
                self.base[pipe, minute] = part if base is None else add(base, part)
        every = Origins()
        for origins in gone.values():
            every = every | origins
        self.book.fold(minute, every)

    def _drop_rows(self, now: int) -> None:
        """Of minutes that are old and hold nothing any more."""
        oldest = (now - self.ages.drop) // MINUTE_MS
        held = set(self.book.minutes())
        for key in [key for key in (*self.base, *self.final) if key[1] < oldest and key[1] not in held]:
            for known in (self.base, self.final, self._rows):
                known.pop(key, None)
        self._dropped &= held
