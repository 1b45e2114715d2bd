"""A row-by-row transform: each micro-batch is computed by itself, in Spark's foreachBatch.

One pass reads, checks, transforms, writes and counts. A second pass is only necessary when the counts show bad records, or when
the transform failed. All results are stored before Spark commits the batch, so a crash at any moment computes the same batch
again.
"""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec
from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as f

from services.core.pipe_file.topic_names import output_topic
from spark.batch_report import (
    NO_ORIGINS,
    ORIGINS,
    BatchReport,
    Gathered,
    Origins,
    add_accepted,
    add_outcome,
    add_settled,
    age,
    collect_origins,
    count_by_lag,
    gather_origins,
    read_lags,
    read_observed,
    read_origins,
    without,
)
from spark.brokers.contract import BatchName, TooMuch, WantedOrigins, is_too_much, limit_rows
from spark.errors import is_of_broker, is_of_spark, shorten
from spark.health import PART
from spark.java import is_answer
from spark.jobs.attempts import PART_OF, PartName, PartRunner
from spark.jobs.culprits import (
    FailureStreak,
    Part,
    exactly,
    find_culprits,
    fingerprint,
    list_events,
    list_records,
    part_of,
    ranges_of,
    within,
)
from spark.jobs.dead_letters import (
    DEAD,
    TRANSFORM_ERROR,
    Rejected,
    bad_records_name,
    reject_as,
    reject_bad_records,
    write_dead_letters,
    write_in_pieces,
)
from spark.jobs.moved_sources import fit_offsets, without_removed
from spark.jobs.query import BatchHandler, MicroBatchQuery, Query
from spark.jobs.state_store import state_store
from spark.records import OffsetRange, RecordOffset
from spark.transforms.output import OriginNumbering, number_batch
from spark.transforms.preparation import of_stream
from spark.transforms.view import FAILED_CHECK, TIME, drop_duplicates

STORED_FILE = "stored_behind.json"


def start_micro_batches(query: Query) -> MicroBatchQuery:
    """Run a row-by-row transform on each micro-batch."""
    transform = query.prepared.transform
    fit_offsets(query)
    source = without_removed(query, query.source())
    if transform.deduplicate_within is not None:
        # Ids are forgotten with the next data; a batch only for that would delay it.
        query.session.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        source = drop_duplicates(source, transform.deduplicate_within)
    with state_store(query.session, query.prepared, query.checkpoint):
        return MicroBatchQuery(query, source, TransformHandler(query), name=query.pipe, interval=transform.interval)


class _Names(NamedTuple):
    """The names of the output and the dead letters of a batch, or of a part. mark: as in `PartName`; empty for a batch."""

    output: BatchName
    dead: str
    mark: str


class StoredBehind(msgspec.Struct, frozen=True):
    """A note beside the checkpoint, before a batch is stored for the first time. ranges: of the output topic until then."""

    output: BatchName
    ranges: list[OffsetRange]


class TransformHandler(BatchHandler):
    """Transforms batches, rejects bad records, and finds the events on which the transform fails."""

    def __init__(self, query: Query) -> None:
        super().__init__(query)
        self._makes_new = query.ledger and not query.prepared.out.carries_events
        events = f.count(f.lit(1)).alias("events")
        lags = count_by_lag(age(f.col(TIME))).alias("lags")
        self._in_metrics = [events, lags, f.count(FAILED_CHECK).alias("bad")]
        if query.ledger:
            self._in_metrics.append(gather_origins().alias(ORIGINS))
        self._streak = FailureStreak(query.checkpoint)
        self._stored_behind: StoredBehind | None = None
        self.keeps = len(query.prepared.views) > 1 or query.prepared.deduplicates
        """Several views read the batch, and so does each pass over a deduplicated one: then Spark keeps it."""

    def process(self, raw: DataFrame, batch_id: int) -> BatchReport:
        """One batch, output and dead letters. Raises TransformBroken, Stopping, the errors of reading and writing."""
        deduplicates, checkpoint = self.query.prepared.deduplicates, self.query.checkpoint
        if deduplicates:
            checkpoint.check_clock(batch_id)
            raw = sort_by_offset(raw)
        if not self.keeps:
            return self._run(raw, batch_id)
        raw.persist()
        try:
            if not deduplicates:
                return self._run(raw, batch_id)
            kept = raw.count()
            checkpoint.make_durable(
                batch_id
            )  # the ids of this batch: a power cut must not lose those of a stored batch
            report = self._run(raw, batch_id)
            if self.query.ledger:
                self._add_duplicates(report, raw, kept, batch_id)
            return report
        finally:
            raw.unpersist()

    def _run(self, raw: DataFrame, batch_id: int) -> BatchReport:
        """In one go, unless the batch is known to be too much. Parts are reported one by one."""
        query, too_much = self.query, ""
        if query.attempts.of(batch_id) is None:
            try:
                report = self.transform(raw, batch_id, None)
            except TooMuch as error:
                too_much = str(error)
            else:
                query.attempts.record_done(batch_id)
                return report
        parts = BatchParts(self, raw, batch_id)
        PartRunner(query.attempts, parts, query.check_not_stopping).run(batch_id, too_much)
        query.attempts.record_done(batch_id)
        return BatchReport(query.pipe)

    def names_of(self, batch_id: int, part: PartName | None) -> _Names:
        """Of the whole batch when part is None."""
        writer = self.query.writer
        if part is None:
            return _Names(BatchName(writer, batch_id), bad_records_name(self.query.prepared), "")
        dead = bad_records_name(self.query.prepared, PART_OF)
        return _Names(BatchName(f"{writer}:{PART_OF}", part.epoch), dead, part.mark)

    def transform(self, raw: DataFrame, batch_id: int, part: PartName | None) -> BatchReport:
        """A batch, or a part of one, in one go. Raises TooMuch, TransformBroken, Stopping, the errors of reading and writing."""
        try:
            report = BatchReport(self.query.pipe)
            self._compute(raw, batch_id, part, report)
        except Exception as error:
            if is_of_broker(error) or is_of_spark(error) or not is_answer(error):
                raise
            if is_too_much(error):
                raise TooMuch(shorten(error)) from error
            culprits = self._find_culprits(raw, error)
            if not culprits:
                raise
            # Before the output: a repeat of a stored batch may find no culprits, and would then write no dead letters.
            report = BatchReport(self.query.pipe)
            dead = self._write_culprits(raw, culprits, batch_id, report)
            self._compute(raw, batch_id, part, report, culprits, dead)
            return report
        if report.read > report.dead.total():
            self._streak.reset()
        return report

    def reject_culprit(self, raw: DataFrame, culprit: RecordOffset, reason: str, batch_id: int) -> None:
        """Write this event of a batch to the dead letters, durably, and report it. Raises TransformBroken."""
        self._streak.add(1, 0, reason)
        report = BatchReport(self.query.pipe, read=1)
        self._write_culprits(raw, {culprit: reason}, batch_id, report)
        self.query.report(report)

    def _write_culprits(
        self, raw: DataFrame, culprits: Mapping[RecordOffset, str], batch_id: int, report: BatchReport
    ) -> Origins:
        failed = reject_as(raw.where(exactly(culprits)), TRANSFORM_ERROR, culprits.__getitem__)
        name = f"{DEAD}:{fingerprint(culprits)}"
        return write_dead_letters(self.query, failed, name, batch_id, report, counted=True)

    def _compute(
        self,
        raw: DataFrame,
        batch_id: int,
        part: PartName | None,
        report: BatchReport,
        culprits: Collection[RecordOffset] = (),
        dead: Origins | None = None,
    ) -> None:
        """Transform and write, send the bad records to the dead letters, and add all results to the report.

        culprits, dead: events to leave out, and their origins.
        """
        query, prepared, names = self.query, self.query.prepared, self.names_of(batch_id, part)
        seen = {stream: Observation() for stream in prepared.views}
        frames, counted = {}, {}
        for stream, view in prepared.views.items():
            counted[stream] = view.check(of_stream(prepared, raw, stream))
            checked = counted[stream].observe(seen[stream], *self._in_metrics)
            frames[stream] = view.good(checked.where(f"NOT ({exactly(culprits)})") if culprits else checked)
        numbering = self._numbering(batch_id, names)
        out = prepared.apply(frames, raw.sparkSession, numbering)
        if part is not None:
            out = limit_rows(out)  # the batch was too much once
        wanted = None
        if query.ledger:
            wanted = WantedOrigins(numbering.at_ms if numbering else None, self._stored_since(names.output))
        gathered: list[tuple[Gathered, int]] = []
        failed: Origins = {}

        def settle_bad() -> None:
            """Before the output, where that is stored once: a repeat with other columns may take these records for events, and
            then they would be in neither."""
            bad = 0
            for stream, observation in seen.items():
                values = read_observed(observation)
                if prepared.tables and not values["events"]:
                    # Outside of generated code (a wide table), a join whose other side has no rows reads no event.
                    values = counted[stream].agg(*self._in_metrics).collect()[0].asDict()
                bad += values["bad"]
                if query.ledger:
                    gathered.append((read_origins(values[ORIGINS]), values["events"]))
                report.read += values["events"]
                report.lag_in += read_lags(values["lags"])
            failed.update(self._write_bad_records(raw, batch_id, names, bad, report))

        written = query.broker.write(out, output_topic(query.pipe), names.output, wanted, settle_bad)
        ended = time.time_ns() // 1_000_000
        report.written = written.times.total()
        report.lag_out = Counter({ended - time: events for time, events in written.times.items()})
        if query.ledger:
            add_settled(report, gathered, NO_ORIGINS if numbering else written.origins, [dead or {}, failed])
        if numbering:
            add_accepted(report, written.origins)

    def _write_bad_records(
        self, raw: DataFrame, batch_id: int, names: _Names, bad: int, report: BatchReport
    ) -> Origins:
        """bad: their number. Returns their origins."""
        query, prepared = self.query, self.query.prepared
        if not bad:
            return {}

        def reject(ranges: Sequence[OffsetRange] | None) -> list[Rejected]:
            return reject_bad_records(prepared, raw if ranges is None else raw.where(within(part_of(ranges))))

        def whole() -> list[OffsetRange]:
            raw.persist()  # each piece reads it
            return query.planned_ranges(batch_id)

        try:
            return write_in_pieces(
                query, names.dead, names.output.epoch, whole, reject, report, events=bad, counted=True
            )
        finally:
            if not self.keeps:
                raw.unpersist()

    def _numbering(self, batch_id: int, names: _Names) -> OriginNumbering | None:
        """Of new events, with a ledger."""
        if not self._makes_new:
            return None
        query_id = self.query.writer.rpartition(":")[2]
        return number_batch(query_id, batch_id, self.query.checkpoint.planned_at(batch_id), names.mark)

    def _stored_since(self, output: BatchName) -> Sequence[OffsetRange]:
        """As in `WantedOrigins`. A repeat may use a newer content of a table, and compute what was not stored."""
        query, topic = self.query, output_topic(self.query.pipe)
        if not (query.broker.stores_once and query.prepared.tables):
            return ()
        if self._stored_behind is None:
            self._stored_behind = query.checkpoint.read_note(STORED_FILE, StoredBehind)
        if self._stored_behind is None or self._stored_behind.output != output:
            ranges = query.broker.stored_ranges(self.query.session, [topic])
            self._stored_behind = StoredBehind(output, ranges)
            query.checkpoint.write_note(STORED_FILE, self._stored_behind)
        return self._stored_behind.ranges

    def _add_duplicates(self, report: BatchReport, raw: DataFrame, kept: int, batch_id: int) -> None:
        """Report the events that deduplication dropped from a batch; if there are any, the batch is read again."""
        ranges = self.query.planned_ranges(batch_id)
        if kept < sum(part.end - part.start for part in ranges):
            every = collect_origins(self.query.broker.read_ranges(raw.sparkSession, ranges))
            add_outcome(report.sets, "filtered", without(every.all, collect_origins(raw).all))

    def _find_culprits(self, raw: DataFrame, error: Exception) -> dict[RecordOffset, str]:
        """The events on which the transform fails; none when it does not fail again. Raises TransformBroken, Stopping."""
        raw.persist()  # every trial reads it
        try:
            events = list_events(self.query.prepared, raw)
            culprits = find_culprits(events, lambda some: self.query.trial(raw, some)) if events else {}
            if culprits:
                self._streak.add(len(culprits), len(events) - len(culprits), next(iter(culprits.values())))
        except Exception as second:
            raise second from error
        finally:
            if not self.keeps:
                raw.unpersist()
        return culprits


class BatchParts:
    """A batch as `PartRunner` computes it."""

    def __init__(self, handler: TransformHandler, raw: DataFrame, batch: int) -> None:
        self._handler, self._query, self._raw, self._batch = handler, handler.query, raw, batch

    def _read(self, part: Part) -> DataFrame:
        return self._raw.where(within(part)) if self._handler.keeps or not part else self._query.read_part(part)

    def list_records(self, part: Part) -> Sequence[RecordOffset]:
        return list_records(self._read(part))

    def is_stored(self, name: PartName | None) -> bool:
        output = self._handler.names_of(self._batch, name).output
        stored = self._query.broker.last_epoch(output_topic(self._query.pipe), output.writer)
        return stored is not None and stored >= output.epoch

    def compute(self, part: Part, name: PartName | None) -> bool:
        query = self._query
        work, share = (f"batch {self._batch}", 1.0) if name is None else (f"a part of batch {self._batch}", PART)
        with query.watchdog.watching(query.writer, work, share):
            report = self._handler.transform(self._read(part), self._batch, name)
        query.report(report)
        return report.read > report.dead.total()

    def passes(self, record: RecordOffset) -> bool:
        return self._query.trial(self._read(ranges_of([record])), [record]) is None

    def reject(self, record: RecordOffset, reason: str) -> None:
        self._handler.reject_culprit(self._read(ranges_of([record])), record, reason, self._batch)


def sort_by_offset(raw: DataFrame) -> DataFrame:
    """A batch in the order of its sources again, after the search for duplicates by id."""
    return raw.repartition("topic", "partition").sortWithinPartitions("topic", "partition", "offset")
