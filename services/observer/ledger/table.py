"""The loss table: a row per pipe and minute, final when nothing more is to come, aged into counts, corrected when it does."""

from typing import NamedTuple

import msgspec

from services.core.ledger.minute import BEHIND_MS, MINUTE_MS
from services.core.ledger.report import Report
from services.observer.ledger.book import Book
from services.observer.ledger.flow import RETRIER, Flow, Step
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


FOUND_FOR_MS = 15 * MINUTE_MS
"""So long after a minute's loss was found it matters to who asks how the pipe is, however old the minute is."""
RETRY_SLACK_MS = 120_000
"""How long after an event was due, and after the retrier and expel say that they are done with it, it is lost: partitions may be
between two owners, and clocks may differ."""
_JUDGE_EVERY_MS = 5_000


class Turn(NamedTuple):
    """What a tick brought. final: rows that became so. worse: final rows of which more is missing than before, (before, after):
    what was lost while it waited for another attempt."""

    final: list[Row]
    worse: list[tuple[Row, Row]]


class Table:
    """`apply` reports; `tick` about once a second; `row` and `settlement` at any time. Times in ms of the wall clock.

    Holds bitmaps of the minutes that are younger than `Ages.fold`, or not final and younger than `Ages.drop`; of older ones
    what is unsettled; and a row per pipe and minute for `Ages.drop`.
    """

    def __init__(self, flow: Flow, ages: Ages | None = None, *, by_partition: bool = True) -> None:
        self.flow = flow
        self.ages = ages or Ages()
        self.book = Book()
        self.presence = Presence(stamped=not by_partition)
        self.reaches = Reaches(by_partition=by_partition)
        self.final: dict[tuple[str, int], int] = {}
        """How many were missing when the minute of the pipe became final, or later, when more were lost while they waited."""
        self.found: dict[tuple[str, int], int] = {}
        """When a minute's loss was found, in ms: as it became final, or later, when more was. For FOUND_FOR_MS."""
        self.base: dict[tuple[str, int], Row] = {}
        """Counts of what is folded."""
        self.left_by = 0
        """Everything that was due before it (s) has left the retrier."""
        self.seen_by: dict[Step, tuple[int, int, int]] = {}
        """By step of expel, (a, b, c): of what came back it saw to all that was due before a (s), and to all that was due before
        b as soon as it has done what there was at c (ms)."""
        self._judged_at = 0
        self._dropped: set[int] = set()
        """Minutes of which only what waits is held."""
        self._rows: dict[tuple[str, int], Row] = {}
        """Rows of final minutes, as long as nothing of theirs is touched."""

    def apply(self, report: Report, heard_ms: int) -> None:
        """Unite with a report: in any order, any number of times. One of a step that the flow does not know changes nothing.

        heard_ms: as in `Presence.hear`.
        """
        if not self.flow.knows(Step(report.node, report.pipe, report.destination)):
            return
        self.presence.hear(report, heard_ms)
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

    def found_lately(self, pipe: str, now: int) -> list[Row]:
        """The rows of minutes whose loss was found in the last FOUND_FOR_MS, oldest first."""
        return [self.row(name, minute, now) for name, minute in sorted(self.found) if name == pipe]

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
            if not self.presence.has_told(Step("ingest", source), end + BEHIND_MS):
                return f"ingest of {source} has not spoken since the minute was over"
            for step in self.flow.feeders(source):
                if (step.pipe, row.minute) not in self.final and self._find(step.pipe, row.minute).accepted:
                    return f"{step.pipe}, which feeds {source}, is not final"
        for one in row.steps:
            if one.missing and one.node != "retrier":  # that judged itself, once it was done
                step = Step(one.node, row.pipe, one.destination)
                if (reason := self.presence.why_not_done(step, end + BEHIND_MS + STORED_MS, now)) is not None:
                    return reason
        return None

    def tick(self, now: int) -> Turn:
        """Let time pass. Costs the more the more minutes are open."""
        self._forget_touched()
        worse = [] if 0 <= now - self._judged_at < _JUDGE_EVERY_MS else self._judge(now)  # our clock may be set back
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
        self._note_found([*final, *(after for _, after in worse)], now)
        self.presence.forget(now)
        self.reaches.forget_marks(now)
        for incarnation in self.book.find_gone(now - self.ages.drop):
            self.book.forget(incarnation)
            self.reaches.forget(incarnation)
        return Turn(final, worse)

    def _note_found(self, rows: list[Row], now: int) -> None:
        self.found = {key: at for key, at in self.found.items() if now - at < FOUND_FOR_MS}
        self.found |= {(row.pipe, row.minute): now for row in rows if row.missing}

    def _judge(self, now: int) -> list[tuple[Row, Row]]:
        """Find what should have come back, or have been seen to; the final rows that this makes worse."""
        self._judged_at = now
        self.book.rounds.prune()  # what settled meanwhile left empty spans, and every later set is held against each
        done = self.presence.done_up_to(RETRIER, now)
        if done is not None:
            self.left_by = max(self.left_by, (done - RETRY_SLACK_MS) // 1000)
        changed = Origins()
        for step in self.book.rounds.steps():
            ended = self.book.ended(step)
            changed = changed | self.book.rounds.judge(step, self.left_by, self._see(step, now), ended)
        if not changed:
            return []
        touched = [
            (pipe, minute)
            for minute in self.book.minutes()
            if any(origins & changed for origins in self.book.accepted(minute).values())
            for pipe in self.flow.pipes
            if (pipe, minute) in self.final
        ]
        before = [self._find(*key) for key in touched]
        self.book.touch(changed)
        self._forget_touched()
        worse = []
        for key, row in zip(touched, before, strict=True):
            after = self._find(*key)
            if after.missing > self.final[key]:
                self.final[key] = after.missing
                worse.append((row, msgspec.structs.replace(after, why_open=None)))
        return worse

    def _see(self, step: Step, now: int) -> int:
        """Up to which due time (s) this step of expel has seen to what came back."""
        seen, next_one, since = self.seen_by.get(step, (0, self.left_by, now))
        done = self.presence.done_up_to(step, now, returned=True)
        since = min(since, now)
        if done is not None and done >= since + RETRY_SLACK_MS:
            seen, next_one, since = next_one, self.left_by, now
        self.seen_by[step] = seen, next_one, since
        return seen

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
        """Count off everything but what waits, which may wait for days, and what was lost while it did."""
        waiting = Origins()
        if keep_waiting:
            for pipe in self.flow.pipes:
                waiting = waiting | self.settlement(pipe, minute).waiting()
            for lost in self.book.rounds.lost.values():
                waiting = waiting | lost
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
