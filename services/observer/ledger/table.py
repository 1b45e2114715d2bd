"""The loss table: a row per pipe and minute. It becomes final, its sets become counts, and late events correct it."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

import msgspec

from services.core.ledger.minute import BEHIND_MS, MINUTE_MS
from services.core.ledger.report import Report, Span
from services.observer.ledger.finality import FOUND_FOR_MS, Finality, Finding, Key
from services.observer.ledger.flow import RETRIER, Flow, Step
from services.observer.ledger.liveness import SILENT_AFTER_MS, Liveness
from services.observer.ledger.origin_sets import OriginSets
from services.observer.ledger.origins import Origins, SequenceKey, Spans
from services.observer.ledger.reported_offsets import ReportedOffsets
from services.observer.ledger.settlement import Accepted, Part, Row, Settlement, add, count, settle


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


class SilentIngest(NamedTuple):
    """An ingest process that ended without a last report. at_ms: of its newest one. incarnations: those that it reported."""

    stream: str
    instance: str
    at_ms: int
    incarnations: Collection[str]


class UnknownIncarnation(NamedTuple):
    """An ingest process that ended before its first report. streams: its events are in one of them. first_ms: first named."""

    incarnation: str
    streams: list[str]
    first_ms: int


class TickResult(NamedTuple):
    """What a tick brought. verdicts: parts that became final, and final ones of which more is missing than before, lost while it
    waited for another attempt. final: rows of which the last part became so. given_up: parts that never will."""

    verdicts: list[Finding]
    final: list[Row]
    given_up: list[Finding]


class Table:
    """`apply` reports; `tick` about once a second; `row` and `settlement` at any time. Times in ms of the wall clock.

    Holds bitmaps of the minutes that are younger than `Ages.fold`, or not final and younger than `Ages.drop`; of older ones
    what is unsettled; and a row per pipe and minute for `Ages.drop`.
    """

    def __init__(self, flow: Flow, ages: Ages | None = None, *, by_partition: bool = True) -> None:
        self.flow = flow
        self.ages = ages or Ages()
        self.origin_sets = OriginSets()
        self.liveness = Liveness(stamped=not by_partition)
        self.offsets = ReportedOffsets(by_partition=by_partition)
        self.finality = Finality(flow, self.liveness, self.ages.final, self._find)
        self.found: dict[Key, int] = {}
        """When a minute's loss was found, in ms: as a part became final, or later, when more was. For FOUND_FOR_MS."""
        self.base: dict[Key, Row] = {}
        """Counts of what is folded."""
        self.left_by = 0
        """Everything that was due before it (s) has left the retrier."""
        self.seen_by: dict[Step, tuple[int, int, int]] = {}
        """Three times by step of expel. Every returned event that was due before the first (s) is settled. Those due before the
        second (s) will be, once expel has settled everything that was stored at the third (ms)."""
        self._judged_at = 0
        self._dropped: dict[int, int] = {}
        """Minutes of which only what waits or is dead is held, and how many of the ages since `drop` are over."""
        self._rows: dict[Key, Row] = {}
        """As long as nothing of theirs is touched."""

    def apply(self, report: Report, received_ms: int) -> None:
        """Unite with a report: in any order, any number of times. One of a pipe that the flow does not know changes nothing.

        received_ms: as in `Liveness.hear`.
        """
        if not self.flow.knows(Step(report.node, report.pipe, report.destination)):
            if report.pipe in self.flow.pipes:
                self.origin_sets.apply(report)  # of a destination that was removed, and may be put back
            return
        self.liveness.record(report, received_ms)
        self.offsets.record(report)
        self.origin_sets.apply(report)

    def minutes(self, pipe: str) -> list[int]:
        """Those that have a row, oldest first. A minute in which nothing came into the pipe has none."""
        folded = {minute for name, minute in self.base if name == pipe}
        return sorted(
            minute for minute in folded.union(self.origin_sets.minutes()) if self._find(pipe, minute).accepted
        )

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
        return settle(self.flow, pipe, self.origin_sets.accepted(minute), self.origin_sets)

    def silent_ingests(self, now: int) -> list[SilentIngest]:
        """Ingest processes that ended without a last report."""
        return [
            SilentIngest(stream, name, beat.at_ms, self.offsets.runs.get((stream, name), set()))
            for stream in sorted({source for pipe in self.flow.pipes.values() for source in pipe.sources})
            for name, beat in self.liveness.fallen_silent(Step("ingest", stream), now).items()
        ]

    def unknown_incarnations(self, now: int) -> list[UnknownIncarnation]:
        """Incarnations that steps have named for SILENT_AFTER_MS and that ingest never reported."""
        found = []
        for incarnation, steps in self.origin_sets.unknown_incarnations().items():
            first = self.origin_sets.first_named.get(incarnation, now)
            known = [step for step in steps if self.flow.knows(step)]  # a snapshot may name a pipe that is gone
            streams = sorted({source for step in known for source in self.flow.pipes[step.pipe].sources})
            if now - first >= SILENT_AFTER_MS:
                found.append(UnknownIncarnation(incarnation, streams, first))
        return found

    def has_unaccepted(self, incarnation: str) -> bool:
        """Whether steps name origins of it that no ingest has reported as accepted."""
        return self.origin_sets.has_unaccepted(incarnation)

    def unreported_from(self, stream: str, partition: int, incarnations: Collection[str], since: int) -> int | None:
        """The offset at which to read for events that these did not report since then (ms); None: from the beginning."""
        starts = [self.offsets.start(stream, SequenceKey(one, partition), since) for one in incarnations]
        return None if None in starts else min(one for one in starts if one is not None)

    def stored_between(self, stream: str, partition: int, minute: int) -> tuple[int | None, int | None]:
        """The offsets between which the events of a minute are stored; None where no bound is known."""
        last = minute + (BEHIND_MS + MINUTE_MS) // MINUTE_MS
        return self.offsets.before(stream, partition, minute - 1), self.offsets.after(stream, partition, last)

    def lost_on_return(self, step: Step) -> tuple[Origins, Origins]:
        """What this step of expel lost of the events that came back to it, and those of them that were parked or redriven."""
        lost = self.origin_sets.lost(step)
        return lost, lost & self.origin_sets.retries.is_held(step)

    def handed_over(self, step: Step) -> Iterable[tuple[Span, Origins]]:
        """What waits at the retrier for this step of expel, by the span in which it is due."""
        return self.origin_sets.retries.handed_over.get(step, Spans()).items()

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

    def tick(self, now: int) -> TickResult:
        """Let time pass. Costs the more the more minutes are open."""
        self._forget_touched()
        verdicts = [] if 0 <= now - self._judged_at < _JUDGE_EVERY_MS else self._judge(now)  # our clock may be set back
        final: list[Row] = []
        given_up: list[Finding] = []
        for minute in self.origin_sets.minutes():
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
            elif age >= self.ages.fold and not self.origin_sets.is_folded(minute) and self._is_final(minute):
                self._fold(minute)
        self._drop_rows(now)
        self._note_found([verdict.row for verdict in verdicts], now)
        self.liveness.forget(now)
        self.offsets.forget_marks(now)
        for incarnation in self.origin_sets.find_gone(now - self.ages.drop):
            self.origin_sets.forget(incarnation)
            self.offsets.forget(incarnation)
        return TickResult(verdicts, final, given_up)

    def _note_found(self, rows: list[Row], now: int) -> None:
        self.found = {key: at for key, at in self.found.items() if now - at < FOUND_FOR_MS}
        self.found |= {(row.pipe, row.minute): now for row in rows if row.lost}

    def _judge(self, now: int) -> list[Finding]:
        """Find the events that the retrier or expel lost. Returns the final parts that get worse by it."""
        self._judged_at = now
        self.origin_sets.retries.prune()  # what settled meanwhile left empty spans, and every later set is held against each
        done = self.liveness.done_up_to(RETRIER, now)
        if done is not None:
            self.left_by = max(self.left_by, (done - RETRY_SLACK_MS) // 1000)
        lost: dict[Step, Origins] = {}
        for step in self.origin_sets.retries.steps():
            if not self.flow.knows(step):
                self.origin_sets.end_waiting(step, now)
                continue
            ended = self.origin_sets.ended(step)
            held_up_to = self.liveness.done_up_to(step, now, "held")
            self.origin_sets.retries.judge_held(
                step, held_up_to, now, RETRY_SLACK_MS, self.origin_sets.reported(step, "delivered")
            )
            lost |= self.origin_sets.retries.judge(step, self.left_by, self._see(step, now), ended)
        changed = self.origin_sets.retries.changed(lost)
        if not changed:
            return []
        before = {
            (pipe, minute): self._find(pipe, minute)
            for minute in self.origin_sets.minutes()
            if any(origins.meets(changed) for origins in self.origin_sets.accepted(minute).values())
            for pipe in self.flow.pipes
            if (pipe, minute) in self.finality.open
        }
        self.origin_sets.retries.lost |= lost
        self.origin_sets.touch(changed)
        return [verdict for key, row in before.items() for verdict in self._compare(key, row, now)]

    def _compare(self, key: Key, before: Row, now: int) -> Iterator[Finding]:
        after, then = self.row(*key, now), self.finality.then.get(key, {})
        worse = {part: n for part, n in after.missing_by_part().items() if n > then.get(part, 0)}
        for part, missing in worse.items():
            if self.finality.is_final(key, part):
                self.finality.note(key, {part: missing})
                yield Finding(after, part, before)

    def _see(self, step: Step, now: int) -> int:
        """The due time (s) up to which this step of expel has processed the released events."""
        seen, next_one, since = self.seen_by.get(step, (0, self.left_by, now))
        done = self.liveness.done_up_to(step, now, "returned")
        since = min(since, now)
        if done is not None and done >= since + RETRY_SLACK_MS:
            seen, next_one, since = next_one, self.left_by, now
        self.seen_by[step] = seen, next_one, since
        return seen

    def _forget_touched(self) -> None:
        touched = self.origin_sets.drain_touched()
        if not touched:
            return
        for minute in self.origin_sets.minutes():
            if any(origins.meets(touched) for origins in self.origin_sets.accepted(minute).values()):
                self._dropped.pop(minute, None)
                for pipe in self.flow.pipes:
                    self._rows.pop((pipe, minute), None)

    def _finish(self, minute: int, now: int) -> list[Finding]:
        found: list[Finding] = []
        for pipe in self.flow.pipes:
            key = pipe, minute
            if self.finality.is_closed(key) or not self._find(*key).accepted:
                continue
            if parts := self.finality.judge(self._find(*key), now):
                self._rows.pop(key, None)  # more of what is missing is lost
                row = self.row(*key, now)
                found += [Finding(row, part) for part in parts]
        return found

    def _give_up(self, minute: int, now: int) -> list[Finding]:
        keys = [(pipe, minute) for pipe in self.flow.pipes]
        before = {key: self.row(*key, now) for key in keys if not self.finality.is_closed(key)}
        rows = {key: row for key, row in before.items() if row.accepted}
        return [Finding(row, part) for key, row in rows.items() for part in self.finality.give_up(key)]

    def _is_final(self, minute: int) -> bool:
        keys = [(pipe, minute) for pipe in self.flow.pipes]
        return all(self.finality.is_closed(key) or not self._find(*key).accepted for key in keys)

    def _fold(self, minute: int) -> None:
        """Keep the sets of what is unsettled in any pipe, or dead and may be redriven; count the rest."""
        unsettled = self.origin_sets.retries.buried()
        for pipe in self.flow.pipes:
            settlement = self.settlement(pipe, minute)
            unsettled = unsettled | settlement.missing() | settlement.waiting()
        self._count_off(minute, unsettled)

    def _drop(self, minute: int, over: int) -> None:
        """Count off everything but what waits, which may wait for days, what was lost while it did, and what is dead."""
        waiting = self.origin_sets.retries.buried() if over < 2 else Origins()
        if over < 3:
            for pipe in self.flow.pipes:
                waiting = waiting | self.settlement(pipe, minute).waiting()
            for lost in self.origin_sets.retries.lost.values():
                waiting = waiting | lost
        self._count_off(minute, waiting)
        self._dropped[minute] = over

    def _count_off(self, minute: int, kept: Origins) -> None:
        accepted = self.origin_sets.accepted(minute)
        gone = {place: origins - kept for place, origins in accepted.items()}
        for pipe in self.flow.pipes:
            part = self._count_part((pipe, minute), gone)
            if part.accepted:
                base = self.base.get((pipe, minute))
                self.base[pipe, minute] = part if base is None else add(base, part)
        every = Origins()
        for origins in gone.values():
            every = every | origins
        self.origin_sets.fold(minute, every)

    def _count_part(self, key: Key, accepted: Accepted) -> Row:
        settlement = settle(self.flow, key[0], accepted, self.origin_sets)
        return count(*key, settlement, lambda part: self.finality.is_final(key, part))

    def _drop_rows(self, now: int) -> None:
        """Of minutes that are old and hold nothing any more."""
        oldest = (now - self.ages.drop) // MINUTE_MS
        held = set(self.origin_sets.minutes())
        known = {*self.base, *self._rows, *self.finality.keys()}
        gone = [key for key in known if key[1] < oldest and key[1] not in held]
        self.finality.forget(gone)
        for key in gone:
            self.base.pop(key, None)
            self._rows.pop(key, None)
        self._dropped = {minute: over for minute, over in self._dropped.items() if minute in held}
