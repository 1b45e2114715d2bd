"""For a query whose transform is part of the streaming plan: reading its events again as a batch.

Such a plan writes one output, and says neither which event made it fail, nor which events it dropped. So four things read
events again: the search for culprits after a failure, the dead letters of a batch with bad records, the reports of batches that a
crash left unreported, and the search for late events.
"""

from collections.abc import Mapping, Sequence
from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from spark.batch_report import BatchReport, Origins, add_outcome, collect_origins, union, without
from spark.brokers.contract import SparkBroker
from spark.jobs.attempts import MAX_ENDED, PartName, PartRunner
from spark.jobs.checkpoint import Checkpoint
from spark.jobs.culprits import (
    FailureStreak,
    Part,
    exactly,
    find_culprits,
    fingerprint,
    list_events,
    list_records,
    ranges_of,
)
from spark.jobs.dead_letters import (
    DEAD,
    LATE,
    PIECE,
    TRANSFORM_ERROR,
    Rejected,
    name_ranges,
    reject_as,
    reject_bad_records,
    reject_late,
    write_dead_letters,
    write_in_pieces,
)
from spark.jobs.open_batches import REJECTED_FILE, REPORTED_FILE, UpTo, of_last_run, read_up_to, write_up_to
from spark.jobs.query import Query
from spark.records import RAW_NAMES, OffsetRange, Offsets, RecordOffset
from spark.transforms.preparation import Prepared, of_stream
from spark.transforms.view import TIME

REJECTS = "rejects"
"""Earlier versions read bad records in a second query. It names that query: its writer and its checkpoint."""
SKIPPED_FILE = "skipped.json"
LATE_FILE = "late_up_to.json"
SEARCHED_EVENTS = 200_000
"""A real-time query plans no batches: when it ended processes, the search covers about this number of events after its commit."""


def read_skipped(query: Query) -> list[RecordOffset]:
    """Events that the query leaves out, because they are in the dead letters. Those before its position are forgotten."""
    known = query.checkpoint.read_note(SKIPPED_FILE, list[RecordOffset]) or []
    committed = query.checkpoint.committed_offsets(query.broker.parse_offsets)
    ahead = [record for record in known if int(record.offset) >= committed.get((record.topic, record.partition), 0)]
    if len(ahead) < len(known):
        query.checkpoint.write_note(SKIPPED_FILE, ahead)
    return ahead


def _read_unskipped(query: Query, ranges: Sequence[OffsetRange], skipped: Sequence[RecordOffset]) -> DataFrame:
    return _unskipped(query.broker.read_ranges(query.session, ranges), skipped)


def _unskipped(raw: DataFrame, skipped: Sequence[RecordOffset]) -> DataFrame:
    return raw.where(f"NOT ({exactly(skipped)})")


def has_events(query: Query, batch: int) -> bool:
    """Whether a committed batch has events that are not left out."""
    ranges = query.planned_ranges(batch)
    skipped = query.checkpoint.read_note(SKIPPED_FILE, list[RecordOffset]) or []
    return bool(ranges) and not _read_unskipped(query, ranges, skipped).isEmpty()


def _pending_ranges(query: Query) -> list[OffsetRange]:
    """The records of the batch that was planned and not done; without one, all up to the present end."""
    committed, planned = query.checkpoint.newest("commits"), query.checkpoint.newest("offsets")
    if planned is not None and planned != committed:
        return query.planned_ranges(planned)
    start = query.checkpoint.offsets(committed, query.broker.parse_offsets)
    stored = query.broker.stored_ranges(query.session, list(query.prepared.views))
    return query.ranges_between(start, {(part.topic, part.partition): part.end for part in stored})


def reject_culprits(query: Query, streak: FailureStreak) -> int:
    """Find the events on which the transform fails, write them to the dead letters, and leave them out from now on.

    Returns their number; 0: the transform is not the cause. Raises TransformBroken, Stopping.
    """
    skipped = read_skipped(query)
    passed = 0
    for ranges in query.broker.split_ranges(_pending_ranges(query), query.prepared.transform.max_events):
        raw = _read_unskipped(query, ranges, skipped).persist()
        try:
            events = list_events(query.prepared, raw)
            culprits = find_culprits(events, lambda some, raw=raw: query.trial(raw, some)) if events else {}  # type: ignore[misc]
            passed += len(events) - len(culprits)
            if culprits:
                streak.add(len(culprits), passed, next(iter(culprits.values())))
                _reject(query, raw, culprits, skipped)
                return len(culprits)
        finally:
            raw.unpersist()
    return 0


def _reject(
    query: Query, raw: DataFrame, culprits: Mapping[RecordOffset, str], skipped: Sequence[RecordOffset]
) -> None:
    found = reject_as(raw.where(exactly(culprits)), TRANSFORM_ERROR, culprits.__getitem__)
    report = BatchReport(query.pipe, read=len(culprits))
    write_dead_letters(query, found, f"skipped:{fingerprint(culprits)}", 0, report)
    query.report(report)
    query.checkpoint.write_note(SKIPPED_FILE, [*skipped, *culprits])


def reject_process_killers(query: Query, streak: FailureStreak) -> None:
    """When the batch to come ended processes: find the events that do, and reject them. Raises TransformBroken, Stopping."""
    attempt = query.attempts.current
    if attempt is not None and (attempt.ended >= MAX_ENDED or attempt.parts not in (((),), ())):
        known = read_skipped(query)
        PartRunner(query.attempts, TrialParts(query, streak), query.check_not_stopping).run(attempt.batch)
        if query.real_time and len(read_skipped(query)) > len(known):
            query.attempts.begin(attempt.batch)  # its batch grows: another culprit may arrive before the commit


class TrialParts:
    """The batch to come as `PartRunner` computes it: only dead letters are written."""

    def __init__(self, query: Query, streak: FailureStreak) -> None:
        self._query, self._streak = query, streak

    def _read(self, part: Part = ()) -> DataFrame:
        """Only the records of the part are read; without one, all of the batch."""
        query, skipped = self._query, read_skipped(self._query)
        if part:
            return _unskipped(query.read_part(part), skipped)
        ranges = _pending_ranges(query)
        if query.real_time:
            ranges = next(query.broker.split_ranges(ranges, SEARCHED_EVENTS), [])
        return _read_unskipped(query, ranges, skipped)

    def list_records(self, part: Part) -> Sequence[RecordOffset]:
        return list_records(self._read(part))

    def is_stored(self, name: PartName | None) -> bool:
        return False

    def compute(self, part: Part, name: PartName | None) -> bool:
        """An event that fails without ending the process is not searched here."""
        records = self.list_records(part)
        return not records or self._query.trial(self._read(part), records) is None

    def passes(self, record: RecordOffset) -> bool:
        return self._query.trial(self._read(ranges_of([record])), [record]) is None

    def reject(self, record: RecordOffset, reason: str) -> None:
        self._streak.add(1, 0, reason)
        _reject(self._query, self._read(ranges_of([record])), {record: reason}, read_skipped(self._query))


class BadRecords:
    """Sends the records of a query's batches that fail a check to the dead letters, one batch after the other.

    The query counts them, and leaves them out. A batch that has some is read again after Spark committed it. A note beside the
    checkpoint has the position up to which this is done. The next start reads the batches again that a crash left open.
    """

    def __init__(self, query: Query) -> None:
        """Settles the open batches of the last run. Blocking. Raises the errors of reading and writing."""
        self._query = of_last_run(query)
        newest = query.checkpoint.newest("commits")
        known = query.checkpoint.read_note(REJECTED_FILE, UpTo)
        if known is None:
            begun = query.checkpoint.offsets(None, query.broker.parse_offsets)
            former = begun | query.checkpoint.beside(REJECTS).committed_offsets(query.broker.parse_offsets)
            known = write_up_to(query, REJECTED_FILE, -1 if newest is None else newest - 1, former)
        self._saved = self._done = known
        if newest is not None:
            self.settle(newest, bad=True)
            self.save()
        self._query = query

    def begin(self) -> None:
        """Before the first batch of a run, and after all that `of_last_run` is for: note by which columns it checks."""
        if self._saved.columns != self._query.prepared.columns:
            self._saved = write_up_to(self._query, REJECTED_FILE, self._done.batch, self._done.offsets())

    def settle(self, batch: int, *, bad: bool) -> None:
        """This batch is done. bad: it has bad records, or may have. So may the batches since the last settled one."""
        for following in range(self._done.batch + 1, batch + 1):
            if following < batch and not self._query.checkpoint.has_batch("offsets", following):
                continue  # Spark removed the file long ago: the next batch that is left covers this one
            end, known = (
                self._query.checkpoint.offsets(following, self._query.broker.parse_offsets),
                self._done.offsets(),
            )
            # The second query of earlier versions may have been ahead.
            further = {place: max(offset, known.get(place, 0)) for place, offset in end.items()}
            if bad or following < batch:
                self._reject(following, end)
                self._done = self._saved = write_up_to(self._query, REJECTED_FILE, following, further)
            else:
                self._done = UpTo.at(following, further)

    def save(self) -> None:
        """Save the position. Otherwise a crash reads batches without bad records again, which is harmless."""
        if self._done.batch > self._saved.batch:
            self._saved = write_up_to(self._query, REJECTED_FILE, self._done.batch, self._done.offsets())

    def _reject(self, batch: int, end: Offsets) -> None:
        """In pieces, each of which is stored, reported and noted before the next: a crash repeats one. What is left of the batch
        decides where a piece ends, so a repeat has the same name.
        """
        query, position = self._query, self._done.offsets()
        left = query.ranges_between(position, end)
        while piece := next(query.broker.split_ranges(left, PIECE), None):
            ends = {(topic, partition): until for topic, partition, _, until in piece}
            left = [part._replace(start=ends.get((part.topic, part.partition), part.start)) for part in left]
            left = [part for part in left if part.start < part.end]
            self._reject_piece(piece, f"{DEAD}:{name_ranges(piece)}" if left else DEAD, batch)
            if left:
                position |= ends
                self._done = self._saved = write_up_to(query, REJECTED_FILE, batch - 1, position)

    def _reject_piece(self, piece: Sequence[OffsetRange], name: str, batch: int) -> None:
        query, report = self._query, BatchReport(self._query.pipe)

        def reject(ranges: Sequence[OffsetRange] | None) -> list[Rejected]:
            return reject_bad_records(query.prepared, query.broker.read_ranges(query.session, ranges or piece))

        with query.watchdog.watching(f"{query.writer}:{DEAD}", f"the bad records of batch {batch}"):
            write_in_pieces(query, name, batch, lambda: piece, reject, report, events=PIECE)
        if report.dead:
            report.read = report.dead.total()
            query.report(report)


class ReportedBatches:
    """Reports a query's batches, one after the other, without a gap.

    A batch is reported after Spark committed it. So the next start reads the batches again that a crash left unreported.
    """

    def __init__(self, query: Query) -> None:
        """Reports the unreported batches of the last run. Blocking. Raises the errors of reading and writing."""
        self._query, self._read = query, of_last_run(query)
        known = query.checkpoint.read_note(REPORTED_FILE, UpTo)
        newest = query.checkpoint.newest("commits")
        if known is None:  # batches from before the ledger was switched on stay outside of it
            known = self._write(-1 if newest is None else newest)
        self._saved, self._last = known, known.batch
        self.catch_up()
        self._read = query

    def report(self, batch: int, report: BatchReport) -> None:
        """This batch is done. Batches between the last reported one and this one are read again."""
        if batch - 1 > self._last:
            self._read_again(batch - 1)
        self._query.report(report)
        self._last = batch

    def save(self) -> None:
        """Save the last reported batch. Otherwise a crash repeats reports, which is harmless."""
        if self._last > self._saved.batch:
            self._saved = self._write(self._last)

    def catch_up(self) -> None:
        """Report all batches that are committed and not reported."""
        newest = self._query.checkpoint.newest("commits")
        if newest is not None and newest > self._last:
            self._read_again(newest)
            self.save()

    def _write(self, batch: int) -> UpTo:
        end = self._query.checkpoint.offsets(batch if batch >= 0 else None, self._query.broker.parse_offsets)
        return write_up_to(self._query, REPORTED_FILE, batch, end)

    def _read_again(self, batch: int) -> None:
        """From the saved end to the end of this batch."""
        query = self._query
        unreported = self._read.ranges_between(
            self._saved.offsets(), query.checkpoint.offsets(batch, query.broker.parse_offsets)
        )
        for part in query.broker.split_ranges(unreported, query.prepared.transform.max_events):
            query.report(self._recompute(part))
        self._last = batch

    def _recompute(self, ranges: list[OffsetRange]) -> BatchReport:
        """The outcomes of these events, by the present transform if it is row by row. Otherwise, and where the sources changed,
        each event counts as filtered.
        """
        query, prepared, read_by = self._query, self._query.prepared, self._read.prepared
        skipped = query.checkpoint.read_note(SKIPPED_FILE, list[RecordOffset]) or []
        raw = _read_unskipped(query, ranges, skipped)
        views = read_by.views.items()
        good = [view.good_raw(view.check(of_stream(read_by, raw, stream))).select(*RAW_NAMES) for stream, view in views]
        read = union(collect_origins(frame).counted(query.pipe) for frame in good)
        written: Origins = {}
        if prepared.row_by_row and read_by.views.keys() == prepared.views.keys():
            raw = raw if read_by is prepared else reduce(DataFrame.union, good)
            written = collect_origins(prepared.apply(prepared.views_of(raw), query.session)).all
        report = BatchReport(query.pipe)
        add_outcome(report.sets, "passed", written)
        add_outcome(report.sets, "filtered", without(read, written))
        return report


def reported_offsets(prepared: Prepared, broker: SparkBroker, checkpoint: Checkpoint) -> Offsets:
    """The position up to which all that a pipe's query has read is reported, and its bad records are, too."""
    done = checkpoint.committed_offsets(broker.parse_offsets)
    if prepared.per_batch:
        return done
    reported, rejected = read_up_to(checkpoint, REPORTED_FILE), read_up_to(checkpoint, REJECTED_FILE)
    return {place: min(reported[place], rejected[place]) for place in reported.keys() & rejected.keys()}


class LateEvents:
    """Writes the late events of a query's batches to the dead letters, one batch after the other.

    Spark drops the events behind the watermark of a transform over several events, and reports only their number in a batch. So
    the events of such a batch are read again, and those behind its watermark go to the dead letters. A note beside the checkpoint
    has the last batch that is settled. The next start settles the batches that a crash left open.
    """

    def __init__(self, query: Query) -> None:
        """Settles the open batches of the last run. Blocking. Raises the errors of reading and writing."""
        self._query = query
        settled = query.checkpoint.read_note(LATE_FILE, int)
        self._settled = -1 if settled is None else settled
        if settled is None:
            query.checkpoint.write_note(LATE_FILE, -1)
        done = query.checkpoint.newest("commits")
        if done is not None:
            self._query = of_last_run(query)
            self.settle(done, dropped=True)
            self._query = query

    def settle(self, batch: int, *, dropped: bool) -> None:
        """This batch is done. dropped: Spark dropped rows of it, or may have. It may have dropped rows of earlier ones."""
        for following in range(self._settled + 1, batch + 1):
            if dropped or following < batch:
                self._write_late(following)
            self._query.checkpoint.write_note(LATE_FILE, following)
            self._settled = following

    def _write_late(self, batch: int) -> None:
        query = self._query
        watermark = query.checkpoint.watermark(batch)
        ranges = query.planned_ranges(batch)
        if not watermark or not ranges:
            return

        def reject(some: Sequence[OffsetRange] | None) -> list[Rejected]:
            raw, found = query.broker.read_ranges(query.session, some or ranges), []
            for stream, view in query.prepared.views.items():
                checked = view.check(of_stream(query.prepared, raw, stream))
                late = view.good_raw(checked.where(f.col(TIME) <= f.timestamp_millis(f.lit(watermark))))
                found += reject_late(late, watermark, batch)
            return found

        report, events = BatchReport(query.pipe), query.prepared.transform.max_events
        write_in_pieces(query, LATE, batch, lambda: ranges, reject, report, events=events, counted=True)
        query.report(report)
