"""The loss table: a row per pipe and minute, final when nothing more is to come, aged into counts, corrected when it does."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from services.core.ledger.minute import MINUTE_MS
from services.core.ledger.report import Report
from services.observer.ledger.book import Book
from services.observer.ledger.finality import FOUND_FOR_MS, Finality, Key, Verdict
from services.observer.ledger.flow import RETRIER, Flow, Step
from services.observer.ledger.origins import Origins
from services.observer.ledger.presence import Presence
from services.observer.ledger.reaches import Reaches
from services.observer.ledger.row import Part, Row, add, count
from services.observer.ledger.settlement import Accepted, Settlement, settle


class Ages(msgspec.Struct, frozen=True):
    """After a minute's end, in ms. final: no earlier is it final. fold: its sets become counts, but for what is unsettled.

    drop: its row is forgotten, and what is still missing in it; what is not final then is given up. redrive: its dead letters are
    forgotten, so what is redriven later is not followed. waiting: what waits for another attempt is forgotten, too.
    """

    final: int = 150_000
    fold: int = 3_600_000
    drop: int = 86_400_000
    redrive: int = 7 * 86_400_000
    waiting: int = 30 * 86_400_000


RETRY_SLACK_MS = 120_000
"""How long after an event was due, and after the retrier and expel say that they are done with it, it is lost: partitions may be
between two owners, and clocks may differ."""
_JUDGE_EVERY_MS = 5_000


class Turn(NamedTuple):
    """What a tick brought. verdicts: parts that became final, and final ones of which more is missing than before, lost while it
    waited for another attempt. final: rows of which the last part became so. given_up: parts that never will."""

    verdicts: list[Verdict]
    final: list[Row]
    given_up: list[Verdict]


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
        self.finality = Finality(flow, self.presence, self.ages.final, self._find)
        self.found: dict[Key, int] = {}
        """When a minute's loss was found, in ms: as a part became final, or later, when more was. For FOUND_FOR_MS."""
        self.base: dict[Key, Row] = {}
        """Counts of what is folded."""
        self.left_by = 0
        """Everything that was due before it (s) has left the retrier."""
        self.seen_by: dict[Step, tuple[int, int, int]] = {}
        """By step of expel, (a, b, c): of what came back it saw to all that was due before a (s), and to all that was due before
        b as soon as it has done what there was at c (ms)."""
        self._judged_at = 0
        self._dropped: dict[int, int] = {}
        """Minutes of which only what waits or is dead is held, and how many of the ages since `drop` are over."""
        self._rows: dict[Key, Row] = {}
        """As long as nothing of theirs is touched."""

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
        row, key = self._find(pipe, minute), (pipe, minute)
        waiting = self.finality.why_open(row, now)
        if any(
            n and part not in waiting and not self.finality.is_final(key, part)
            for part, n in row.missing_by_part().items()
        ):
            row = self._sum_up(key, lambda part: part not in waiting)  # the next tick judges it
        steps = tuple(msgspec.structs.replace(step, why_open=waiting.get(step.destination)) for step in row.steps)
        why = next(iter(waiting.values()), None)
        return msgspec.structs.replace(row, steps=steps, why_open=why, late=self.finality.late(row))

    def found_lately(self, pipe: str, now: int) -> list[Row]:
        """The rows of minutes whose loss was found in the last FOUND_FOR_MS, oldest first."""
        return [self.row(name, minute, now) for name, minute in sorted(self.found) if name == pipe]

    def settlement(self, pipe: str, minute: int) -> Settlement:
        """The sets behind the row, without what is folded (of which nothing is missing)."""
        return settle(self.flow, pipe, self.book.accepted(minute), self.book)

    def _find(self, pipe: str, minute: int) -> Row:
        self._forget_touched()
        key = (pipe, minute)
        if (known := self._rows.get(key)) is None:
            known = self._rows[key] = self._sum_up(key, lambda part: self.finality.is_final(key, part))
        return known

    def _sum_up(self, key: Key, is_final: Callable[[Part], bool]) -> Row:
        row = count(*key, self.settlement(*key), is_final)
        base = self.base.get(key)
        return row if base is None else add(row, base)

    def tick(self, now: int) -> Turn:
        """Let time pass. Costs the more the more minutes are open."""
        self._forget_touched()
        verdicts = [] if 0 <= now - self._judged_at < _JUDGE_EVERY_MS else self._judge(now)  # our clock may be set back
        final: list[Row] = []
        given_up: list[Verdict] = []
        for minute in self.book.minutes():
            age = now - (minute + 1) * MINUTE_MS
            if age < self.ages.final:
                continue
            for verdict in self._finish(minute, now):
                verdicts.append(verdict)
                if verdict.row.why_open is None and verdict.row not in final[-1:]:
                    final.append(verdict.row)
            over = sum(age >= one for one in (self.ages.drop, self.ages.redrive, self.ages.waiting))
            if over == 3 or over > self._dropped.get(minute, 0):
                given_up += self._give_up(minute, now)
                self._drop(minute, over)
            elif age >= self.ages.fold and not self.book.is_folded(minute) and self._is_final(minute):
                self._fold(minute)
        self._drop_rows(now)
        self._note_found([verdict.row for verdict in verdicts], now)
        self.presence.forget(now)
        self.reaches.forget_marks(now)
        for incarnation in self.book.find_gone(now - self.ages.drop):
            self.book.forget(incarnation)
            self.reaches.forget(incarnation)
        return Turn(verdicts, final, given_up)

    def _note_found(self, rows: list[Row], now: int) -> None:
        self.found = {key: at for key, at in self.found.items() if now - at < FOUND_FOR_MS}
        self.found |= {(row.pipe, row.minute): now for row in rows if row.lost}

    def _judge(self, now: int) -> list[Verdict]:
        """Find what should have come back, or have been seen to; the final parts that this makes worse."""
        self._judged_at = now
        self.book.rounds.prune()  # what settled meanwhile left empty spans, and every later set is held against each
        done = self.presence.done_up_to(RETRIER, now)
        if done is not None:
            self.left_by = max(self.left_by, (done - RETRY_SLACK_MS) // 1000)
        lost: dict[Step, Origins] = {}
        for step in self.book.rounds.steps():
            ended = self.book.ended(step)
            held_up_to = self.presence.done_up_to(step, now, "held")
            self.book.rounds.judge_held(step, held_up_to, now, RETRY_SLACK_MS, self.book.told(step, "delivered"))
            lost |= self.book.rounds.judge(step, self.left_by, self._see(step, now), ended)
        changed = self.book.rounds.changed(lost)
        if not changed:
            return []
        before = {
            (pipe, minute): self._find(pipe, minute)
            for minute in self.book.minutes()
            if any(origins.meets(changed) for origins in self.book.accepted(minute).values())
            for pipe in self.flow.pipes
            if (pipe, minute) in self.finality.open
        }
        self.book.rounds.lost |= lost
        self.book.touch(changed)
        return [verdict for key, row in before.items() for verdict in self._compare(key, row, now)]

    def _compare(self, key: Key, before: Row, now: int) -> Iterator[Verdict]:
        after, then = self.row(*key, now), self.finality.then.get(key, {})
        worse = {part: n for part, n in after.missing_by_part().items() if n > then.get(part, 0)}
        for part, missing in worse.items():
            if self.finality.is_final(key, part):
                self.finality.note(key, {part: missing})
                yield Verdict(after, part, before)

    def _see(self, step: Step, now: int) -> int:
        """Up to which due time (s) this step of expel has seen to what came back."""
        seen, next_one, since = self.seen_by.get(step, (0, self.left_by, now))
        done = self.presence.done_up_to(step, now, "returned")
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
            if any(origins.meets(touched) for origins in self.book.accepted(minute).values()):
                self._dropped.pop(minute, None)
                for pipe in self.flow.pipes:
                    self._rows.pop((pipe, minute), None)

    def _finish(self, minute: int, now: int) -> list[Verdict]:
        found: list[Verdict] = []
        for pipe in self.flow.pipes:
            key = pipe, minute
            if self.finality.is_closed(key) or not self._find(*key).accepted:
                continue
            if parts := self.finality.judge(self._find(*key), now):
                self._rows.pop(key, None)  # more of what is missing is lost
                row = self.row(*key, now)
                found += [Verdict(row, part) for part in parts]
        return found

    def _give_up(self, minute: int, now: int) -> list[Verdict]:
        keys = [(pipe, minute) for pipe in self.flow.pipes]
        before = {key: self.row(*key, now) for key in keys if not self.finality.is_closed(key)}
        rows = {key: row for key, row in before.items() if row.accepted}
        return [Verdict(row, part) for key, row in rows.items() for part in self.finality.give_up(key)]

    def _is_final(self, minute: int) -> bool:
        keys = [(pipe, minute) for pipe in self.flow.pipes]
        return all(self.finality.is_closed(key) or not self._find(*key).accepted for key in keys)

    def _fold(self, minute: int) -> None:
        """Keep the sets of what is unsettled in any pipe, or dead and may be redriven; count the rest."""
        unsettled = self.book.rounds.buried()
        for pipe in self.flow.pipes:
            settlement = self.settlement(pipe, minute)
            unsettled = unsettled | settlement.missing() | settlement.waiting()
        self._count_off(minute, unsettled)

    def _drop(self, minute: int, over: int) -> None:
        """Count off everything but what waits, which may wait for days, what was lost while it did, and what is dead."""
        waiting = self.book.rounds.buried() if over < 2 else Origins()
        if over < 3:
            for pipe in self.flow.pipes:
                waiting = waiting | self.settlement(pipe, minute).waiting()
            for lost in self.book.rounds.lost.values():
                waiting = waiting | lost
        self._count_off(minute, waiting)
        self._dropped[minute] = over

    def _count_off(self, minute: int, kept: Origins) -> None:
        accepted = self.book.accepted(minute)
        gone = {place: origins - kept for place, origins in accepted.items()}
        for pipe in self.flow.pipes:
            part = self._count_part((pipe, minute), gone)
            if part.accepted:
                base = self.base.get((pipe, minute))
                self.base[pipe, minute] = part if base is None else add(base, part)
        every = Origins()
        for origins in gone.values():
            every = every | origins
        self.book.fold(minute, every)

    def _count_part(self, key: Key, accepted: Accepted) -> Row:
        settlement = settle(self.flow, key[0], accepted, self.book)
        return count(*key, settlement, lambda part: self.finality.is_final(key, part))

    def _drop_rows(self, now: int) -> None:
        """Of minutes that are old and hold nothing any more."""
        oldest = (now - self.ages.drop) // MINUTE_MS
        held = set(self.book.minutes())
        known = {*self.base, *self._rows, *self.finality.keys()}
        gone = [key for key in known if key[1] < oldest and key[1] not in held]
        self.finality.forget(gone)
        for key in gone:
            self.base.pop(key, None)
            self._rows.pop(key, None)
        self._dropped = {minute: over for minute, over in self._dropped.items() if minute in held}
