"""The loss table: a row per pipe and minute. It becomes final, its sets become counts, and late events correct it."""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import msgspec

from services.core.ledger.minute import BEHIND_MS, MINUTE_MS
from services.core.ledger.report import Report, Span
from services.observer.ledger.finality import FOUND_FOR_MS, Finality, Finding, Key
from services.observer.ledger.flow import RETRIER, Flow, Step
from services.observer.ledger.liveness import SILENT_AFTER_MS, Liveness
from services.observer.ledger.origin_sets import OriginSets, named_in
from services.observer.ledger.origins import Origins, SequenceKey
from services.observer.ledger.reported_offsets import ReportedOffsets
from services.observer.ledger.settlement import Part, Row, Settlement, count, settle, union
from services.observer.ledger.spans import Spans


class Ages(msgspec.Struct, frozen=True):
    """The age of a minute, in ms since its end, at which something happens to it.

    final: it may be final, at the earliest. fold: its sets become counts, except for unsettled events; so do those that are
    reported later. drop: its row is forgotten, with its missing events; parts that are not final are given up. redrive: its dead
    letters are forgotten, so a later redrive is not followed. waiting: the events that wait for another attempt are forgotten.
    """

    final: int = 150_000
    fold: int = 3_600_000
    drop: int = 86_400_000
    redrive: int = 7 * 86_400_000
    waiting: int = 30 * 86_400_000


RETRY_SLACK_MS = 120_000
"""An event is lost for so long after the time at which the retrier and expel say that they are done with it: a partition may be
between two owners, and clocks differ."""
_SEARCH_EVERY_MS = 5_000
_START_MS = 3_000
"""What ingest or a transform reports within this time after the first report of a destination may have been stored before."""


class SilentIngest(NamedTuple):
    """An ingest process that ended without a closing report. at_ms: of its newest report. incarnations: that it reported."""

    stream: str
    instance: str
    at_ms: int
    incarnations: Collection[str]


class UnknownIncarnation(NamedTuple):
    """An ingest process that ended before its first report. streams: one of them has its events. first_ms: when a step named
    it."""

    incarnation: str
    streams: list[str]
    first_ms: int


class TickResult(NamedTuple):
    """The results of a tick. verdicts: parts that became final, and final parts of which more is missing than before. final:
    rows whose last part became final. given_up: parts that never will."""

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
        """When a minute's loss was last found, in ms; kept for FOUND_FOR_MS."""
        self.base: dict[Key, Row] = {}
        """Counts of what is folded."""
        self.begun: dict[Step, int] = {}
        """By step of expel, the time (ms) of its first report that shows that it reads."""
        self.released_by = 0
        """Everything that was due before it (s) has left the retrier."""
        self.returns: dict[Step, tuple[int, int, int]] = {}
        """Three times by step of expel. Every returned event that was due before the first (s) is settled. Those due before the
        second (s) will be, once expel has settled everything that was stored at the third (ms)."""
        self._searched_at = 0
        self._dropped: dict[int, int] = {}
        """By minute of which only waiting or dead events are held: the number of ages from `drop` on that it has passed."""
        self._rows: dict[Key, Row] = {}
        """Rows none of whose events was touched since."""

    def apply(self, report: Report, received_ms: int) -> None:
        """Unite with a report: in any order, any number of times. A report of an unknown pipe changes nothing.

        received_ms: as in `Liveness.record`.
        """
        if not self.flow.knows(Step(report.node, report.pipe, report.destination)):
            if report.pipe in self.flow.pipes:
                self.origin_sets.apply(report)  # of a destination that was removed, and may be put back
            return
        self.liveness.record(report, received_ms)
        self.offsets.record(report)
        self.origin_sets.apply(report)
        self._find_start(report)

    def _find_start(self, report: Report) -> None:
        """Count what was stored before a destination with `start: latest` began as skipped there: it never gets these events.

        Only its first report counts. Afterwards, what is missing is missing, also when its position jumps.
        """
        step = Step(report.node, report.pipe, report.destination)
        if report.node == "expel" and step not in self.begun:
            if report.behind_ms is not None or report.sets:
                self.begun[step] = report.at_ms
                self._skip_missing(step, None)
        elif report.node in ("ingest", "transform") and report.sets:
            for begun, at_ms in self.begun.items():
                if report.at_ms <= at_ms + _START_MS and self.flow.knows(begun):
                    self._skip_missing(begun, named_in(report))

    def _skip_missing(self, step: Step, among: Origins | None) -> None:
        if step.destination not in self.flow.pipes[step.pipe].late:
            return
        for minute in self.origin_sets.minutes():
            for one in self.settlement(step.pipe, minute).steps:
                if one.step == step:
                    self.origin_sets.skip(step, one.missing if among is None else one.missing & among)

    def minutes(self, pipe: str) -> list[int]:
        """The minutes with a row, oldest first. A minute in which no event entered the pipe has none."""
        folded = {minute for name, minute in self.base if name == pipe}
        return sorted(
            minute for minute in folded.union(self.origin_sets.minutes()) if self._find(pipe, minute).accepted
        )

    def row(self, pipe: str, minute: int, now: int) -> Row:
        """The row as of now. Raises KeyError for an unknown pipe."""
        row, key = self._find(pipe, minute), (pipe, minute)
        waiting = self.finality.why_open(row, now)
        if any(
            n and part not in waiting and not self.finality.is_final(key, part)
            for part, n in row.missing_by_part().items()
        ):
            row = self._sum_up(key, lambda part: part not in waiting)  # final at the next tick
        steps = tuple(msgspec.structs.replace(step, why_open=waiting.get(step.destination)) for step in row.steps)
        why = next(iter(waiting.values()), None)
        return msgspec.structs.replace(row, steps=steps, why_open=why, late=self.finality.late(row))

    def found_lately(self, pipe: str, now: int) -> list[Row]:
        """The rows of minutes whose loss was found in the last FOUND_FOR_MS, oldest first."""
        return [self.row(name, minute, now) for name, minute in sorted(self.found) if name == pipe]

    def settlement(self, pipe: str, minute: int) -> Settlement:
        """The sets behind the row, without folded events (none of them is missing)."""
        return settle(self.flow, pipe, self.origin_sets.accepted(minute), self.origin_sets)

    def silent_ingests(self, now: int) -> list[SilentIngest]:
        return [
            SilentIngest(stream, name, beat.at_ms, self.offsets.runs.get((stream, name), set()))
            for stream in sorted(
                {source for pipe in self.flow.pipes.values() for source in pipe.sources} - self.flow.others
            )
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

    def unreported_from(self, stream: str, partition: int, incarnations: Collection[str], since: int) -> int | None:
        """Where to look for events that these have not reported since then (ms); None: at the partition's beginning."""
        starts = [self.offsets.start(stream, SequenceKey(one, partition), since) for one in incarnations]
        return None if None in starts else min(one for one in starts if one is not None)

    def stored_between(self, stream: str, partition: int, minute: int) -> tuple[int | None, int | None]:
        """The offsets between which the events of a minute are stored; None for an unknown bound."""
        last = minute + (BEHIND_MS + MINUTE_MS) // MINUTE_MS
        return self.offsets.before(stream, partition, minute - 1), self.offsets.after(stream, partition, last)

    def lost_on_return(self, step: Step) -> tuple[Origins, Origins]:
        """The returned events that this step of expel lost; and those of them that were parked or redriven."""
        lost = self.origin_sets.lost(step)
        return lost, lost & self.origin_sets.retries.held_by(step)

    def count_waiting(self, step: Step) -> int:
        """The events that wait for another attempt of this step of expel: handed over or parked, and not lost."""
        return self.origin_sets.retries.count_waiting(step)

    def handed_over(self, step: Step) -> Iterable[tuple[Span, Origins]]:
        """The events that wait at the retrier for this step of expel, by the span in which they are due."""
        return self.origin_sets.retries.handed_over.get(step, Spans()).items()

    def _find(self, pipe: str, minute: int) -> Row:
        self._forget_touched()
        key = (pipe, minute)
        if (known := self._rows.get(key)) is None:
            known = self._rows[key] = self._sum_up(key, partial(self.finality.is_final, key))
        return known

    def _sum_up(self, key: Key, is_final: Callable[[Part], bool]) -> Row:
        row = count(*key, self.settlement(*key), is_final)
        base = self.base.get(key)
        return row if base is None else row + base

    def tick(self, now: int) -> TickResult:
        """Let time pass. The cost grows with the number of open minutes."""
        self._forget_touched()
        is_early = 0 <= now - self._searched_at < _SEARCH_EVERY_MS  # our clock may be set back
        verdicts = [] if is_early else self._find_lost(now)
        final: list[Row] = []
        given_up: list[Finding] = []
        for minute in self.origin_sets.minutes():
            age = now - (minute + 1) * MINUTE_MS
            if age < self.ages.final:
                self._await_results(minute, now)
                continue
            for verdict in self._finish(minute, now):
                verdicts.append(verdict)
                if verdict.row.why_open is None and verdict.row not in final[-1:]:
                    final.append(verdict.row)
            over = sum(age >= one for one in (self.ages.drop, self.ages.redrive, self.ages.waiting))
            if over == 3 or over > self._dropped.get(minute, 0):
                given_up += self._give_up(minute, now)
                self._drop(minute, over)
            elif age >= self.ages.fold and minute in self.origin_sets.unfolded and self._is_final(minute):
                self._fold(minute)
        self._drop_rows(now)
        self.found = {key: at for key, at in self.found.items() if now - at < FOUND_FOR_MS}
        self.found |= {(verdict.row.pipe, verdict.row.minute): now for verdict in verdicts if verdict.row.lost}
        self.liveness.forget(now)
        self.offsets.forget_marks(now)
        for incarnation in self.origin_sets.find_gone(now - self.ages.drop):
            self.origin_sets.forget(incarnation)
            self.offsets.forget(incarnation)
        return TickResult(verdicts, final, given_up)

    def _find_lost(self, now: int) -> list[Finding]:
        """Find the events that the retrier or expel lost. Returns the final parts of which more is missing by that."""
        self._searched_at = now
        if self.finality.newer_ms and now - self.finality.newer_ms < self.ages.drop:
            return []  # unread reports may have settled them
        retries = self.origin_sets.retries
        retries.prune()  # every later set is compared with each span, also with an empty one
        done = self.liveness.done_up_to(RETRIER, now)
        if done is not None:
            self.released_by = max(self.released_by, (done - RETRY_SLACK_MS) // 1000)
        lost: dict[Step, Origins] = {}
        for step in retries.steps():
            if not self.flow.knows(step):
                self.origin_sets.end_waiting(step, now)
                continue
            ended = self.origin_sets.ended(step)
            held_up_to = self.liveness.done_up_to(step, now, "held")
            delivered = self.origin_sets.reported(step, "delivered")
            retries.find_unread(step, held_up_to, now, RETRY_SLACK_MS, delivered)
            lost |= retries.find_lost(step, self.released_by, self._returns_settled_by(step, now), ended)
        changed = retries.changed(lost)
        if not changed:
            return []
        before = {
            (pipe, minute): self._find(pipe, minute)
            for minute in self.origin_sets.minutes_of(changed)
            for pipe in self.flow.pipes
            if (pipe, minute) in self.finality.open
        }
        retries.lost |= lost
        self.origin_sets.touch(changed)
        return [finding for key, row in before.items() for finding in self._compare(key, row, now)]

    def _compare(self, key: Key, before: Row, now: int) -> Iterator[Finding]:
        after, final = self.row(*key, now), dict(self.finality.final_missing.get(key, {}))
        for part, missing in after.missing_by_part().items():
            if missing > final.get(part, 0) and self.finality.is_final(key, part):
                self.finality.record_missing(key, {part: missing})
                yield Finding(after, part, before)

    def _returns_settled_by(self, step: Step, now: int) -> int:
        """The due time (s) up to which this step of expel has settled the released events."""
        settled_by, next_one, since = self.returns.get(step, (0, self.released_by, now))
        done = self.liveness.done_up_to(step, now, "returned")
        since = min(since, now)
        if done is not None and done >= since + RETRY_SLACK_MS:
            settled_by, next_one, since = next_one, self.released_by, now
        self.returns[step] = settled_by, next_one, since
        return settled_by

    def _forget_touched(self) -> None:
        touched = self.origin_sets.drain_touched()
        for minute in self.origin_sets.minutes_of(touched) if touched else ():
            self._dropped.pop(minute, None)
            for pipe in self.flow.pipes:
                self._rows.pop((pipe, minute), None)

    def _finish(self, minute: int, now: int) -> list[Finding]:
        found: list[Finding] = []
        for pipe in self.flow.pipes:
            key = pipe, minute
            if self.finality.is_closed(key) or not self._find(*key).accepted:
                continue
            if parts := self.finality.close_parts(self._find(*key), now):
                self._rows.pop(key, None)  # more of its missing events are lost
                row = self.row(*key, now)
                found += [Finding(row, part) for part in parts]
        return found

    def _await_results(self, minute: int, now: int) -> None:
        """Before a minute may be final: see whether its results come late."""
        for pipe in self.flow.pipes:
            if (row := self._find(pipe, minute)).accepted:
                self.finality.await_results(row, now)

    def _give_up(self, minute: int, now: int) -> list[Finding]:
        keys = [key for pipe in self.flow.pipes if not self.finality.is_closed(key := (pipe, minute))]
        rows = {key: row for key in keys if (row := self.row(*key, now)).accepted}  # before any of them is given up
        return [Finding(row, part) for key, row in rows.items() for part in self.finality.give_up(key)]

    def _is_final(self, minute: int) -> bool:
        keys = [(pipe, minute) for pipe in self.flow.pipes]
        return all(self.finality.is_closed(key) or not self._find(*key).accepted for key in keys)

    def _fold(self, minute: int) -> None:
        """Keep the events that are unsettled in any pipe, or dead and may be redriven; count the others."""
        unsettled = self.origin_sets.retries.all_dead()
        for pipe in self.flow.pipes:
            settlement = self.settlement(pipe, minute)
            unsettled.update(settlement.missing())
            unsettled.update(settlement.waiting())
        self._count_except(unsettled, minute)

    def _drop(self, minute: int, over: int) -> None:
        """Count all events except those that are dead, wait, or were lost while they waited."""
        kept = self.origin_sets.retries.all_dead() if over < 2 else Origins()
        if over < 3:
            for pipe in self.flow.pipes:
                kept.update(self.settlement(pipe, minute).waiting())
            for lost in self.origin_sets.retries.lost.values():
                kept.update(lost)
        self._count_except(kept, minute)
        self._dropped[minute] = over

    def _count_except(self, kept: Origins, minute: int) -> None:
        accepted = self.origin_sets.accepted(minute)
        gone = {place: origins - kept for place, origins in accepted.items()}
        for key in [(pipe, minute) for pipe in self.flow.pipes]:
            settlement = settle(self.flow, key[0], gone, self.origin_sets)
            part = count(*key, settlement, partial(self.finality.is_final, key))
            if part.accepted:
                self.base[key] = self.base[key] + part if key in self.base else part
        self.origin_sets.fold(minute, union(gone.values()))

    def _drop_rows(self, now: int) -> None:
        """Drop the rows of old minutes of which no event is held."""
        oldest = (now - self.ages.drop) // MINUTE_MS
        held = set(self.origin_sets.minutes())
        known = {*self.base, *self._rows, *self.finality.keys()}
        gone = [key for key in known if key[1] < oldest and key[1] not in held]
        self.finality.forget(gone)
        for key in gone:
            self.base.pop(key, None)
            self._rows.pop(key, None)
        self._dropped = {minute: over for minute, over in self._dropped.items() if minute in held}
