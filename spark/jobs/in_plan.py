"""A transform that is part of the streaming plan itself: in real-time mode, or one that keeps state over batches.

Two queries: one transforms the good events; another, in micro-batches, sends what is no event to the dead letters. An
event on which the transform raises ends the first one; `isolation` then finds it, and the next run leaves it out.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import structlog
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from services.core.pipes import output_topic
from spark.brokers.endpoint import Endpoint
from spark.checkpoint import Checkpoint
from spark.dead_letters import TRANSFORM_ERROR
from spark.deduplication import drop_duplicates
from spark.errors import shorten
from spark.jobs.culprits import exactly
from spark.jobs.isolation import put_culprits_aside
from spark.jobs.rejects import RejectHandler
from spark.jobs.runs import POLL_S, PerBatchRun, wait_for_end
from spark.observed import BatchReport, count_and_times, lags
from spark.transforms.preparation import Prepared
from spark.view import TIME, VERDICT

log = structlog.get_logger()

REAL_TIME_BATCH = "5 seconds"
"""A real-time query works on each event at once and notes its progress so often; after a crash it repeats at most that."""
_OUT = "out"


class EventsDropped(Exception):
    """Spark dropped events that came later than a watermark of the transform allows."""


class InPlanRun:
    """Both queries of one pipe."""

    def __init__(
        self,
        session: SparkSession,
        prepared: Prepared,
        endpoint: Endpoint,
        checkpoint: Checkpoint,
        writer: str,
        report: Callable[[BatchReport], None],
    ) -> None:
        """Starts them."""
        self._start = partial(start_query, session, prepared, endpoint, checkpoint, writer)
        self._isolate = partial(put_culprits_aside, session, prepared, endpoint, checkpoint, writer)
        self._pipe, self._report = prepared.pipe, report
        self._query = self._start()
        self._seen = -1
        beside = checkpoint.beside("rejects")
        handler = RejectHandler(prepared, endpoint, beside, f"{writer}:rejects", report)
        source = endpoint.read_stream(session, list(prepared.views), prepared.transform.max_events)
        interval = max(1.0, prepared.transform.interval)
        try:
            self._rejects = PerBatchRun(source, handler, beside, name=f"{prepared.pipe}.dead", interval=interval)
        except BaseException:
            self._query.stop()
            raise

    def watch(self) -> None:
        """See Run. Raises EventsDropped and TransformBroken, too."""
        self._rejects.watch()
        try:
            wait_for_end(self._query)
        except StreamingQueryException as error:
            found = self._isolate()
            if not found:
                raise
            self._report(BatchReport(self._pipe, read=found, dead={TRANSFORM_ERROR: found}))
            log.warning(
                "query started again without the events that it failed on", pipe=self._pipe, error=shorten(error)
            )
            self._query = self._start()
        self._note_progress()

    def end(self, limit: float) -> None:
        """See Run. A real-time query is ended just behind a batch: in the middle of one it would repeat up to all of it."""
        deadline = time.monotonic() + limit
        before = self._seen
        while self._query.isActive and self._query.status["isTriggerActive"] and time.monotonic() < deadline:
            self._note_progress()
            if self._seen > before:
                break
            time.sleep(POLL_S / 10)
        self._query.stop()
        self._rejects.end(max(0.0, deadline - time.monotonic()))

    def _note_progress(self) -> None:
        for progress in self._query.recentProgress:
            if progress["batchId"] > self._seen:
                self._seen = progress["batchId"]
                self._report(_to_report(self._pipe, progress))
                _check_dropped(progress)


def _check_dropped(progress: Any) -> None:
    dropped = sum(state["numRowsDroppedByWatermark"] for state in progress["stateOperators"])
    if dropped:
        raise EventsDropped(
            f"{dropped} events of batch {progress['batchId']} came later than the transform's watermark allows and were "
            "dropped. Try: a longer delay in withWatermark, or a watermark on event.arrival"
        )


def start_query(
    session: SparkSession, prepared: Prepared, endpoint: Endpoint, checkpoint: Checkpoint, writer: str
) -> StreamingQuery:
    """Start the transforming query, without the events that were put aside."""
    frames = {}
    skip = exactly(checkpoint.read_skipped())
    real_time = prepared.transform.mode == "real-time"
    share = -(-prepared.transform.max_events // len(prepared.views))
    metrics = count_and_times(f.col(TIME), f.count(VERDICT).alias("bad"))
    for stream, view in prepared.views.items():
        raw = endpoint.read_stream(session, [stream], None if real_time else share).where(f"NOT ({skip})")
        if prepared.transform.deduplicate_within is not None:
            raw = drop_duplicates(raw, prepared.transform.deduplicate_within)
        frames[stream] = view.good(view.judge(raw).observe(f"in:{stream}", *metrics))
    out: DataFrame = prepared.apply(frames, session).observe(_OUT, *count_and_times(f.col("timestamp")))
    stream_writer = endpoint.write_stream(out, output_topic(prepared.pipe), writer)
    stream_writer = stream_writer.queryName(prepared.pipe).option("checkpointLocation", checkpoint.place)
    if real_time:
        real_time_writer: Any = stream_writer.outputMode("update")  # pyspark's own types do not know realTime yet
        started: StreamingQuery = real_time_writer.trigger(realTime=REAL_TIME_BATCH).start()
        return started
    interval = f"{round(prepared.transform.interval * 1000)} milliseconds"
    return stream_writer.outputMode("append").trigger(processingTime=interval).start()


def _to_report(pipe: str, progress: Any) -> BatchReport:
    now = time.time_ns() // 1_000_000
    report = BatchReport(pipe, seconds=progress["batchDuration"] / 1000)
    for name, row in progress["observedMetrics"].items():
        if name == _OUT:
            report.written = row["events"]
            report.lag_out = lags(row["events"], row["times"], now)
        else:
            report.read += row["events"] - row["bad"]
            report.lag_in += lags(row["events"], row["times"], now - progress["batchDuration"])
    return report
