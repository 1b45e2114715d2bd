"""A row-by-row transform: each micro-batch is computed by itself, in Spark's foreachBatch.

One pass reads, judges, transforms, writes and counts; a second look at the batch is only taken when the count says that
there are records to reject, or when the transform failed. All of it is stored before Spark notes the batch as done, so a
crash at any moment computes the same batch again.
"""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as f

from services.core.pipes import output_topic
from spark.brokers.endpoint import BatchName
from spark.collecting import is_too_much
from spark.dead_letters import TRANSFORM_ERROR, rejected
from spark.errors import is_answer, is_of_broker, shorten
from spark.jobs.burial import bury
from spark.jobs.culprits import exactly, find_culprits, fingerprint, places_of, records_of
from spark.jobs.handler import Handler
from spark.jobs.parts import PART_OF, Part, PartByPart, PartName, TooMuch, within
from spark.jobs.pulse import PART
from spark.jobs.query import Query
from spark.jobs.ranges import spans_of
from spark.jobs.rejects import DEAD, reject
from spark.jobs.streak import Streak
from spark.numbering import Numbering, number_batch
from spark.observed import ORIGINS, BatchReport, age, count_by_lag, in_text, read_counts, read_lags
from spark.origins import (
    COLUMN,
    Origins,
    add_made,
    add_settled,
    collect_origins,
    collect_text,
    gather,
    put,
    split_count,
    with_origin,
    without,
)
from spark.place import Place
from spark.transforms.preparation import of_stream
from spark.view import TIME, VERDICT, SourceView
from spark.written import Wanted


class _Names(NamedTuple):
    """What names the output and the dead letters of a batch, or of a part of one. mark: as in `PartName`; empty of a batch."""

    output: BatchName
    dead: str
    mark: str


def _whole(query: Query, batch: int) -> _Names:
    return _Names(BatchName(query.writer, batch), DEAD, "")


def _part(query: Query, name: PartName) -> _Names:
    return _Names(BatchName(f"{query.writer}:{PART_OF}", name.epoch), f"{DEAD}:{PART_OF}", name.mark)


class BatchHandler(Handler):
    """Transforms batches, rejects what is no event, and finds the events on which the transform fails."""

    def __init__(self, query: Query) -> None:
        super().__init__(query)
        self._makes_new = query.ledger and not query.prepared.out.carries_events
        events = f.count(f.lit(1)).alias("events")
        lags = in_text(count_by_lag(age(f.col(TIME)))).alias("lags")
        self._in_metrics = [events, lags, f.count(VERDICT).alias("bad")]
        self._wanted, self._packed = Wanted.NONE, False
        if query.ledger:
            self._in_metrics.append(gather().alias(ORIGINS))
            self._wanted = Wanted.TIMED if self._makes_new else Wanted.PLAIN
            self._packed = query.endpoint.packs_origins and not query.prepared.deduplicates
        self._streak = Streak(query.checkpoint)
        # Each view reads the batch, and so does each look at a deduplicated one: then keep it.
        self._keep = len(query.prepared.views) > 1 or query.prepared.deduplicates

    def handle(self, raw: DataFrame, batch_id: int) -> BatchReport:
        """One batch, output and dead letters. Raises TransformBroken, Stopping, what reading and writing raise."""
        deduplicates, checkpoint = self.query.prepared.deduplicates, self.query.checkpoint
        if deduplicates:
            checkpoint.check_clock(batch_id)
            raw = in_order(raw)
        if not self._keep:
            return self._do(raw, batch_id)
        raw.persist()
        try:
            kept = raw.count() if deduplicates else 0
            if (
                deduplicates
            ):  # the ids that this batch adds are noted: a power cut must not take them from a stored batch
                checkpoint.make_durable(batch_id)
            report = self._do(raw, batch_id)
            if deduplicates and self.query.ledger:
                self._add_duplicates(report, raw, kept, batch_id)
            return report
        finally:
            raw.unpersist()

    def _do(self, raw: DataFrame, batch_id: int) -> BatchReport:
        """In one go, as long as nothing says that it is too much. The report of what is done in parts was told part by part."""
        attempts, too_much = self.query.attempts, ""
        if attempts.of(batch_id) is None:
            try:
                report = self.transform(raw, batch_id, _whole(self.query, batch_id))
            except TooMuch as error:
                too_much = str(error)
            else:
                attempts.done(batch_id)
                return report
        parts = BatchParts(self, raw, batch_id)
        PartByPart(attempts, parts, self.query.check_not_stopping).run(batch_id, too_much)
        attempts.done(batch_id)
        return BatchReport(self.query.pipe)

    def transform(self, raw: DataFrame, batch_id: int, names: "_Names") -> BatchReport:
        """A batch, or a part of one, in one go. Raises TooMuch, TransformBroken, Stopping, what reading and writing raise."""
        try:
            report = BatchReport(self.query.pipe)
            self._compute(raw, batch_id, names, report)
        except Exception as error:
            if is_of_broker(error) or not is_answer(error):
                raise
            if is_too_much(error):
                raise TooMuch(shorten(error)) from error
            culprits = self._isolate(raw, error)
            if not culprits:
                raise
            # Before the output: once that is stored, a repeat of this batch that finds no culprits would write nothing of them.
            report = BatchReport(self.query.pipe)
            dead = self._bury_culprits(raw, culprits, batch_id, report)
            self._compute(raw, batch_id, names, report, culprits, dead)
            return report
        if report.read > report.dead.total():
            self._streak.end()
        return report

    def _bury_culprits(
        self, raw: DataFrame, culprits: Mapping[Place, str], batch_id: int, report: BatchReport
    ) -> Origins:
        table: Any = raw.where(exactly(culprits)).toArrow()
        failed = rejected(table, TRANSFORM_ERROR, culprits.__getitem__)
        return bury(self.query, failed, f"{DEAD}:{fingerprint(culprits)}", batch_id, report, counted=True)

    def reject_culprits(self, raw: DataFrame, culprits: Mapping[Place, str], batch_id: int) -> None:
        """Send these events of a batch to the dead letters, durably, and tell of it. Raises TransformBroken."""
        self._streak.extend(len(culprits), 0, next(iter(culprits.values())))
        report = BatchReport(self.query.pipe, read=len(culprits))
        self._bury_culprits(raw, culprits, batch_id, report)
        self.query.report(report)

    def _compute(
        self,
        raw: DataFrame,
        batch_id: int,
        names: "_Names",
        report: BatchReport,
        culprits: Collection[Place] = (),
        dead: Origins | None = None,
    ) -> None:
        """Transform and write, send the records that are no events to the dead letters, and add it all to the report.

        culprits, dead: events to be left out, and their origins.
        """
        query, prepared = self.query, self.query.prepared
        seen = {stream: Observation() for stream in prepared.views}
        frames = {}
        for stream, view in prepared.views.items():
            judged = self._judge(view, of_stream(prepared, raw, stream)).observe(seen[stream], *self._in_metrics)
            frames[stream] = view.good(judged.where(f"NOT ({exactly(culprits)})") if culprits else judged)
        numbering = self._number(batch_id, names.mark) if self._makes_new else None
        out = prepared.apply(frames, raw.sparkSession, numbering)
        written = query.endpoint.write(out, output_topic(query.pipe), names.output, self._wanted)
        ended = _now_ms()
        bad, gathered = 0, []
        for stream, observation in seen.items():
            values = read_counts(observation)
            bad += values["bad"]
            gathered.append((self._origins_read(values, raw, stream, whole=not names.mark), values["events"]))
            report.read += values["events"]
            report.lag_in += read_lags(values["lags"])
        report.written = written.times.total()
        report.lag_out = Counter({ended - time: events for time, events in written.times.items()})
        buried = bury(query, reject(prepared, raw), names.dead, names.output.epoch, report, counted=True) if bad else {}
        if query.ledger:
            add_settled(report, gathered, "" if numbering else written.origins, [dead or {}, buried])
        if numbering:
            add_made(report, written.origins, numbering.at_ms)

    def _judge(self, view: SourceView, raw: DataFrame) -> DataFrame:
        """With COLUMN for the ledger: as it was read, or where duplicates are left out, by each event's own header."""
        if not self.query.ledger:
            return view.judge(raw)
        return with_origin(view.judge(raw)) if self.query.prepared.deduplicates else view.judge(raw, keep=[COLUMN])

    def _origins_read(self, values: Mapping[str, Any], raw: DataFrame, stream: str, *, whole: bool) -> str:
        """What was gathered. When these are not the records that came, each record is asked: one that was lost on the way
        must not count as filtered. Nor does one row speak for several, when only some of them are in this part of the batch."""
        packed, origins = split_count(values.get(ORIGINS, ""))
        if self._packed and (packed != values["events"] or not whole):
            return collect_text(of_stream(self.query.prepared, raw, stream))
        return origins

    def _number(self, batch_id: int, mark: str) -> Numbering:
        query_id = self.query.writer.rpartition(":")[2]
        return number_batch(query_id, batch_id, self.query.checkpoint.began(batch_id), mark)

    def _add_duplicates(self, report: BatchReport, raw: DataFrame, kept: int, batch_id: int) -> None:
        """Report what is no longer in a deduplicated batch: it is read again, if there is any."""
        spans = spans_of(self.query, batch_id)
        if kept < sum(span.end - span.start for span in spans):
            every = collect_origins(self.query.endpoint.read_spans(raw.sparkSession, spans), self.query.pipe)
            put(report.sets, "filtered", without(every, collect_origins(raw, self.query.pipe)))

    def _isolate(self, raw: DataFrame, error: Exception) -> dict[Place, str]:
        """The events on which the transform fails; none when it does not fail again. Raises TransformBroken, Stopping."""

        def trial(places: Any) -> str | None:
            return self.query.trial(raw, places)

        raw.persist()  # every trial reads it
        try:
            places = places_of(self.query.prepared, raw)
            culprits = find_culprits(places, trial) if places else {}
            if culprits:
                self._streak.extend(len(culprits), len(places) - len(culprits), next(iter(culprits.values())))
        except Exception as trouble:
            raise trouble from error
        finally:
            if not self._keep:
                raw.unpersist()
        return culprits


class BatchParts:
    """A batch as `PartByPart` works on it."""

    def __init__(self, handler: BatchHandler, raw: DataFrame, batch: int) -> None:
        self._handler, self._query, self._raw, self._batch = handler, handler.query, raw, batch

    def _names(self, name: PartName | None) -> _Names:
        return _whole(self._query, self._batch) if name is None else _part(self._query, name)

    def places(self, part: Part) -> Sequence[Place]:
        """See PartWork."""
        return records_of(self._raw.where(within(part)))

    def is_stored(self, name: PartName | None) -> bool:
        """See PartWork."""
        output = self._names(name).output
        stored = self._query.endpoint.last_epoch(output_topic(self._query.pipe), output.writer)
        return stored is not None and stored >= output.epoch

    def compute(self, part: Part, name: PartName | None) -> bool:
        """See PartWork."""
        query = self._query
        what, share = (f"batch {self._batch}", 1.0) if name is None else (f"a part of batch {self._batch}", PART)
        with query.pulse.at_work(query.writer, what, share):
            report = self._handler.transform(self._raw.where(within(part)), self._batch, self._names(name))
        query.report(report)
        return report.read > report.dead.total()

    def passes(self, place: Place) -> bool:
        """See PartWork."""
        return self._query.trial(self._raw, [place]) is None

    def condemn(self, place: Place, why: str, name: PartName) -> None:
        """See PartWork."""
        self._handler.reject_culprits(self._raw, {place: why}, self._batch)


def in_order(raw: DataFrame) -> DataFrame:
    """A batch in the order of its sources again, after duplicates were looked for by id."""
    return raw.repartition("topic", "partition").sortWithinPartitions("topic", "partition", "offset")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
