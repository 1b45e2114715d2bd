"""A row-by-row transform: each micro-batch is computed by itself, in Spark's foreachBatch.

One pass reads, judges, transforms, writes and counts; a second look at the batch is only taken when the count says that
there are records to reject, or when the transform failed. All of it is stored before Spark notes the batch as done, so a
crash at any moment computes the same batch again.
"""

import time
from collections.abc import Callable, Collection
from typing import Any

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as f

from services.core.pipes import output_topic
from spark.brokers.endpoint import BatchName, Endpoint
from spark.checkpoint import Checkpoint
from spark.dead_letters import TRANSFORM_ERROR, Rejected, judged, rejected
from spark.jobs.culprits import TransformBroken, exactly, find_culprits, fingerprint, try_transform
from spark.jobs.handler import Handler, log
from spark.observed import BatchReport, count_and_times, lags, read_counts
from spark.place import Place
from spark.transforms.preparation import Prepared, of_stream
from spark.view import TIME, VERDICT

ALL_FAILED = 20
"""So many poisoned events in a row, with none between them that passed, mean that the transform is broken."""


class BatchHandler(Handler):
    """Transforms batches, rejects what is no event, and finds the events on which the transform fails."""

    def __init__(
        self,
        prepared: Prepared,
        endpoint: Endpoint,
        checkpoint: Checkpoint,
        writer: str,
        report: Callable[[BatchReport], None],
    ) -> None:
        super().__init__(prepared, endpoint, checkpoint, writer, report)
        self._in_metrics = count_and_times(f.col(TIME), f.count(VERDICT).alias("bad"))
        self._out_metrics = count_and_times(f.col("timestamp"))
        self._failed_in_row = 0
        # Each view reads the batch, and so does each look at a deduplicated one: then keep it.
        self._keep = len(prepared.views) > 1 or prepared.deduplicates

    def handle(self, raw: DataFrame, batch_id: int) -> BatchReport:
        """One batch, output and dead letters. Raises TransformBroken, what reading and writing raise."""
        if self.prepared.deduplicates:
            self.checkpoint.check_clock(batch_id)
            raw = in_order(raw)
        if not self._keep:
            return self._transform(raw, batch_id)
        raw.persist()
        try:
            return self._transform(raw, batch_id)
        finally:
            raw.unpersist()

    def _transform(self, raw: DataFrame, batch_id: int) -> BatchReport:
        try:
            report, found = self._compute(raw, batch_id)
        except Exception as error:
            culprits = self._isolate(raw, error)
            if not culprits:
                raise
            log.warning("transform failed on events", pipe=self.prepared.pipe, batch=batch_id, events=len(culprits))
            table: Any = raw.where(exactly(culprits)).toArrow()
            failed = rejected(table, TRANSFORM_ERROR, lambda place: culprits[place])
            # Before the output: once that is stored, a repeat of this batch that finds no culprits would write nothing of them.
            aside = BatchReport(self.prepared.pipe)
            self.bury(raw, failed, batch_id, aside, name=f"dead:{fingerprint(culprits)}")
            report, found = self._compute(raw.where(f"NOT ({exactly(culprits)})"), batch_id)
            report.read += len(culprits)
            self._note_progress(report, [*found, *failed])
            self.bury(raw, found, batch_id, report)
            report.dead[TRANSFORM_ERROR] = report.dead.get(TRANSFORM_ERROR, 0) + len(failed)
            return report
        self._note_progress(report, found)
        self.bury(raw, found, batch_id, report)
        return report

    def _compute(self, raw: DataFrame, batch_id: int) -> tuple[BatchReport, list[Rejected]]:
        """Transform and write; gives the records that are no events beside the report."""
        prepared = self.prepared
        report = BatchReport(prepared.pipe)
        begun = _now_ms()
        seen = {stream: Observation() for stream in prepared.views}
        made = Observation()
        frames = {
            stream: view.good(view.judge(of_stream(prepared, raw, stream)).observe(seen[stream], *self._in_metrics))
            for stream, view in prepared.views.items()
        }
        out = prepared.apply(frames, raw.sparkSession).observe(made, *self._out_metrics)
        self.endpoint.write(out, output_topic(report.pipe), BatchName(self.writer, batch_id))
        ended = _now_ms()
        found: list[Rejected] = []
        for stream, observation in seen.items():
            values = read_counts(observation)
            report.read += values["events"]
            report.lag_in += lags(values["events"], values["times"], begun)
            if values["bad"]:
                view = prepared.views[stream]
                table: Any = view.bad(view.judge(of_stream(prepared, raw, stream))).toArrow()
                found += judged(table, view.checks)
        values = read_counts(made)
        report.written = values["events"]
        report.lag_out = lags(values["events"], values["times"], ended)
        return report, found

    def _isolate(self, raw: DataFrame, error: Exception) -> dict[Place, str]:
        """The events on which the transform fails; none when reading or writing failed. Raises TransformBroken."""
        raw.persist()  # every trial reads it
        try:
            table: Any = raw.select("topic", "partition", "offset").toArrow()
            places = sorted(Place(*row.values()) for row in table.to_pylist())
            return find_culprits(places, lambda some: try_transform(self.prepared, raw, some)) if places else {}
        except TransformBroken:
            raise
        except Exception as trouble:
            raise trouble from error
        finally:
            if not self._keep:
                raw.unpersist()

    def _note_progress(self, report: BatchReport, found: Collection[Rejected]) -> None:
        details = [item.detail for item in found if item.reason == TRANSFORM_ERROR]
        passed = report.read - len(found)
        self._failed_in_row = 0 if passed else self._failed_in_row + len(details)
        if self._failed_in_row >= ALL_FAILED:
            raise TransformBroken(f"it failed on the last {self._failed_in_row} events, all there were: {details[0]}")


def in_order(raw: DataFrame) -> DataFrame:
    """A batch in the order of its sources again, after duplicates were looked for by id."""
    return raw.repartition("topic", "partition").sortWithinPartitions("topic", "partition", "offset")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
