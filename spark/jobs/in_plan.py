"""A transform that is part of the streaming plan itself: in real-time mode, or one that keeps state over batches.

Two queries: one transforms the good events; another, in micro-batches, sends what is no event to the dead letters. An
event on which the transform raises ends the first one; `isolation` then finds it, and the next run leaves it out.
"""

import time
from collections import Counter
from typing import Any

import structlog
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from services.core.pipes import output_topic
from spark.dead_letters import TRANSFORM_ERROR
from spark.errors import is_of_broker, shorten
from spark.jobs.culprits import exactly
from spark.jobs.isolation import put_culprits_aside, read_skipped
from spark.jobs.late import LateEvents
from spark.jobs.query import Query
from spark.jobs.rejects import REJECTS, RejectHandler
from spark.jobs.runs import POLL_S, PerBatchRun, has_worked, wait_for_end
from spark.jobs.streak import Streak
from spark.observed import BatchReport, count_and_times, lags
from spark.view import TIME, VERDICT

log = structlog.get_logger()

REAL_TIME_BATCH = "15 seconds"
"""A real-time query works on each event at once and notes its progress so often; after a crash it repeats at most that.

Events wait while it is noted, 0.2 to 0.6 s: with 5 seconds these were more than 5 % of them."""
REJECT_EVERY_S = 5.0
"""Nobody waits for dead letters, and each look at them takes time from the events that are transformed."""
_OUT = "out"


class InPlanRun:
    """Both queries of one pipe."""

    def __init__(self, query: Query) -> None:
        """Starts them."""
        self._query = query
        self._streak = Streak(query.checkpoint)
        self._late = LateEvents(query) if query.prepared.transform.watermark is not None else None
        self._transforming = start_transforming(query)
        self._seen = -1
        beside = query.beside(REJECTS)
        interval = max(REJECT_EVERY_S, query.prepared.transform.interval)
        try:
            self._rejects = PerBatchRun(
                beside, beside.source(), RejectHandler(beside), name=f"{query.pipe}.dead", interval=interval
            )
        except BaseException:
            self._transforming.stop()
            raise

    def watch(self) -> None:
        """See Run. Raises TransformBroken, too."""
        self._rejects.watch()
        try:
            wait_for_end(self._transforming)
        except StreamingQueryException as error:
            self._note_progress()
            found = 0 if is_of_broker(error) else put_culprits_aside(self._query, self._streak)
            if not found:
                raise
            self._query.report(BatchReport(self._query.pipe, read=found, dead=Counter({TRANSFORM_ERROR: found})))
            log.warning("started again without events that fail", pipe=self._query.pipe, error=shorten(error))
            self._transforming = start_transforming(self._query)
        self._note_progress()

    def works(self) -> bool:
        """See Run."""
        return has_worked(self._transforming) and self._rejects.works()

    def end(self, limit: float) -> None:
        """See Run. A real-time query is ended just behind a batch: in the middle of one it would repeat up to all of it."""
        deadline = time.monotonic() + limit
        before = self._seen
        running = self._transforming
        while running.isActive and running.status["isTriggerActive"] and time.monotonic() < deadline:
            self._note_progress()
            if self._seen > before:
                break
            time.sleep(POLL_S / 10)
        running.stop()
        try:
            self._note_progress()
        except Exception as error:  # whatever it is, the next start does it
            log.warning("late events left to the next start", pipe=self._query.pipe, error=shorten(error))
        self._rejects.end(max(0.0, deadline - time.monotonic()))

    def _note_progress(self) -> None:
        """What each batch did since the last look."""
        for progress in self._transforming.recentProgress:
            # What Spark tells of an idle query carries the number of the batch that is yet to come.
            if progress["batchId"] > self._seen and "addBatch" in progress["durationMs"]:
                self._seen = progress["batchId"]
                report = _to_report(self._query.pipe, progress)
                self._query.report(report)
                self._query.checkpoint.make_durable(self._seen)
                if report.read:
                    self._streak.end()
                if self._late is not None:
                    dropped = any(state["numRowsDroppedByWatermark"] for state in progress["stateOperators"])
                    self._late.settle(self._seen, dropped=dropped)


def start_transforming(query: Query) -> StreamingQuery:
    """Start the transforming query, without the events that were put aside."""
    prepared, endpoint, frames = query.prepared, query.endpoint, {}
    skip = exactly(read_skipped(query))
    real_time = prepared.transform.mode == "real-time"
    share = -(-prepared.transform.max_events // len(prepared.views))
    metrics = count_and_times(f.col(TIME), f.count(VERDICT).alias("bad"))
    for stream, view in prepared.views.items():
        raw = endpoint.read_stream(query.session, [stream], None if real_time else share).where(f"NOT ({skip})")
        frames[stream] = prepared.watermarked(view.good(view.judge(raw).observe(f"in:{stream}", *metrics)))
    out = prepared.apply(frames, query.session).observe(_OUT, *count_and_times(f.col("timestamp")))
    writer = endpoint.write_stream(out, output_topic(query.pipe), query.writer)
    writer = writer.queryName(query.pipe).option("checkpointLocation", query.checkpoint.place)
    if real_time:
        real_time_writer: Any = writer.outputMode("update")  # pyspark's own types do not know realTime yet
        started: StreamingQuery = real_time_writer.trigger(realTime=REAL_TIME_BATCH).start()
        return started
    interval = f"{round(prepared.transform.interval * 1000)} milliseconds"
    return writer.outputMode("append").trigger(processingTime=interval).start()


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
