"""A row-by-row transform: each micro-batch is computed by itself, in Spark's foreachBatch.

One pass reads, judges, transforms, writes and counts; a second look at the batch is only taken when the count says that
there are records to reject, or when the transform failed. All of it is stored before Spark notes the batch as done, so a
crash at any moment computes the same batch again.
"""

import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as f

from services.core.pipes import output_topic
from spark.brokers.endpoint import BatchName
from spark.dead_letters import TRANSFORM_ERROR, rejected
from spark.errors import is_of_broker
from spark.jobs.burial import bury
from spark.jobs.culprits import exactly, find_culprits, fingerprint, places_of, try_transform
from spark.jobs.handler import Handler
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
            return self._transform(raw, batch_id)
        raw.persist()
        try:
            kept = raw.count() if deduplicates else 0
            if (
                deduplicates
            ):  # the ids that this batch adds are noted: a power cut must not take them from a stored batch
                checkpoint.make_durable(batch_id)
            report = self._transform(raw, batch_id)
            if deduplicates and self.query.ledger:
                self._add_duplicates(report, raw, kept, batch_id)
            return report
        finally:
            raw.unpersist()

    def _transform(self, raw: DataFrame, batch_id: int) -> BatchReport:
        try:
            report = BatchReport(self.query.pipe)
            self._compute(raw, batch_id, report)
        except Exception as error:
            culprits = {} if is_of_broker(error) else self._isolate(raw, error)
            if not culprits:
                raise
            table: Any = raw.where(exactly(culprits)).toArrow()
            failed = rejected(table, TRANSFORM_ERROR, lambda place: culprits[place])
            # Before the output: once that is stored, a repeat of this batch that finds no culprits would write nothing of them.
            report = BatchReport(self.query.pipe)
            dead = bury(self.query, failed, f"{DEAD}:{fingerprint(culprits)}", batch_id, report, counted=True)
            self._compute(raw, batch_id, report, culprits, dead)
            return report
        if report.read > report.dead.total():
            self._streak.end()
        return report

    def _compute(
        self,
        raw: DataFrame,
        batch_id: int,
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
        numbering = self._number(batch_id) if self._makes_new else None
        out = prepared.apply(frames, raw.sparkSession, numbering)
        name = BatchName(query.writer, batch_id)
        written = query.endpoint.write(out, output_topic(query.pipe), name, self._wanted)
        ended = _now_ms()
        bad, gathered = 0, []
        for stream, observation in seen.items():
            values = read_counts(observation)
            bad += values["bad"]
            gathered.append((self._origins_read(values, raw, stream), values["events"]))
            report.read += values["events"]
            report.lag_in += read_lags(values["lags"])
        report.written = written.times.total()
        report.lag_out = Counter({ended - time: events for time, events in written.times.items()})
        buried = bury(query, reject(prepared, raw), DEAD, batch_id, report, counted=True) if bad else {}
        if query.ledger:
            add_settled(report, gathered, "" if numbering else written.origins, [dead or {}, buried])
        if numbering:
            add_made(report, written.origins, numbering.at_ms)

    def _judge(self, view: SourceView, raw: DataFrame) -> DataFrame:
        """With COLUMN for the ledger: as it was read, or where duplicates are left out, by each event's own header."""
        if not self.query.ledger:
            return view.judge(raw)
        return with_origin(view.judge(raw)) if self.query.prepared.deduplicates else view.judge(raw, keep=[COLUMN])

    def _origins_read(self, values: Mapping[str, Any], raw: DataFrame, stream: str) -> str:
        """What was gathered. When these are not the records that came, each record is asked: one that was lost on the way
        must not count as filtered."""
        packed, origins = split_count(values.get(ORIGINS, ""))
        if self._packed and packed != values["events"]:
            return collect_text(of_stream(self.query.prepared, raw, stream))
        return origins

    def _number(self, batch_id: int) -> Numbering:
        query_id = self.query.writer.rpartition(":")[2]
        return number_batch(query_id, batch_id, self.query.checkpoint.began(batch_id))

    def _add_duplicates(self, report: BatchReport, raw: DataFrame, kept: int, batch_id: int) -> None:
        """Report what is no longer in a deduplicated batch: it is read again, if there is any."""
        spans = spans_of(self.query, batch_id)
        if kept < sum(span.end - span.start for span in spans):
            every = collect_origins(self.query.endpoint.read_spans(raw.sparkSession, spans), self.query.pipe)
            put(report.sets, "filtered", without(every, collect_origins(raw, self.query.pipe)))

    def _isolate(self, raw: DataFrame, error: Exception) -> dict[Place, str]:
        """The events on which the transform fails; none when it does not fail again. Raises TransformBroken, Stopping."""

        def trial(places: Any) -> str | None:
            self.query.check_not_stopping()
            return try_transform(self.query.prepared, raw, places)

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


def in_order(raw: DataFrame) -> DataFrame:
    """A batch in the order of its sources again, after duplicates were looked for by id."""
    return raw.repartition("topic", "partition").sortWithinPartitions("topic", "partition", "offset")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
