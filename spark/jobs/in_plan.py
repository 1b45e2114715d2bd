"""A transform that is part of the streaming plan itself: in real-time mode, or one that keeps state over batches.

Two queries: one transforms the good events; another, in micro-batches, sends what is no event to the dead letters. An
event on which the transform raises ends the first one; `isolation` then finds it, and the next run leaves it out.
"""

import json
import time
from collections import Counter
from datetime import datetime
from typing import Any

import structlog
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery

from services.core.pipes import output_topic
from spark.errors import is_of_broker, shorten
from spark.jobs.culprits import exactly
from spark.jobs.isolation import put_culprits_aside, read_skipped, search_by_parts
from spark.jobs.late import LateEvents
from spark.jobs.query import Query, Stopping
from spark.jobs.rejects import REJECTS, RejectHandler
from spark.jobs.runs import POLL_S, PerBatchRun, has_worked, wait_for_end
from spark.jobs.streak import Streak
from spark.jobs.told import ToldBatches
from spark.observed import ORIGINS, BatchReport, age, began, clock_now, count_by_lag, read_lags
from spark.origins import COLUMN, add_settled, gather, with_origin
from spark.view import READ_AT, TIME, VERDICT

log = structlog.get_logger()

REAL_TIME_BATCH = "15 seconds"
"""A real-time query works on each event at once and notes its progress so often; after a crash it repeats at most that.

Events wait while it is noted, 0.2 to 0.6 s: with 5 seconds these were more than 5 % of them."""
REJECT_EVERY_S = 5.0
"""Nobody waits for dead letters, and each look at them takes time from the events that are transformed."""
_OUT = "out"
_TOOK = "took"
_WRITTEN_AT = "_penstock_written"
_PROGRESS_KEPT = 10
"""Of so many batches Spark keeps what was gathered; we look four times a second, and read again what we missed."""


class InPlanRun:
    """Both queries of one pipe."""

    def __init__(self, query: Query) -> None:
        """Starts them."""
        self._query = query
        self._streak = Streak(query.checkpoint)
        self._told = ToldBatches(query) if query.ledger else None
        self._late = LateEvents(query) if query.prepared.transform.watermark is not None else None
        with query.pulse.at_work(query.writer, "the search for events that end the process"):
            search_by_parts(query, self._streak)
        query.attempts.set_working()
        self._transforming = start_transforming(query)
        self._seen = -1
        self._at_work: tuple[int, bool] | None = None
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
            self._query.attempts.leave(error)
            self._note_progress()
            if self._told is not None:
                self._told.catch_up()
            with self._query.pulse.at_work(self._query.writer, "the search for events that fail"):
                found = 0 if is_of_broker(error) else put_culprits_aside(self._query, self._streak)
            if not found:
                raise
            self._query.attempts.set_working()
            log.warning("started again without events that fail", pipe=self._query.pipe, error=shorten(error))
            self._transforming = start_transforming(self._query)
        self._note_progress()
        self._note_work()

    def _note_work(self) -> None:
        """A query in the plan is at work from the begin of a batch until Spark tells of the next."""
        query, at_work = self._query, self._transforming.status["isTriggerActive"]
        if not at_work:
            query.pulse.end(query.writer)
        elif self._at_work != (self._seen, at_work):
            query.pulse.begin(query.writer, f"the batch after {self._seen}" if self._seen >= 0 else "the first batch")
        self._at_work = (self._seen, at_work)

    def works(self) -> bool:
        """See Run."""
        return has_worked(self._transforming) and self._rejects.works()

    def end(self, limit: float) -> None:
        """See Run. A real-time query is ended just behind a batch: in the middle of one it would repeat up to all of it."""
        deadline = time.monotonic() + limit
        before = self._seen
        running = self._transforming
        self._query.pulse.end(self._query.writer)
        while running.isActive and running.status["isTriggerActive"] and time.monotonic() < deadline:
            self._note_progress()
            if self._seen > before:
                break
            time.sleep(POLL_S / 10)
        running.stop()
        self._query.attempts.leave(Stopping())
        try:
            self._note_progress()
        except Exception as error:  # whatever it is, the next start does it
            log.warning("the last batch is told at the next start", pipe=self._query.pipe, error=shorten(error))
        self._rejects.end(max(0.0, deadline - time.monotonic()))

    def _note_progress(self) -> None:
        """What each batch did since the last look."""
        for progress in _progress_since(self._transforming, self._seen):
            # What Spark tells of an idle query carries the number of the batch that is yet to come.
            if "addBatch" in progress["durationMs"]:
                report = _to_report(self._query, progress)
                if self._told is None:
                    self._query.report(report)
                else:
                    self._told.tell(progress["batchId"], report)
                self._seen = progress["batchId"]
                self._query.attempts.done(self._seen)
                self._query.checkpoint.make_durable(self._seen)
                if report.read:
                    self._streak.end()
                if self._late is not None:
                    dropped = any(state["numRowsDroppedByWatermark"] for state in progress["stateOperators"])
                    self._late.settle(self._seen, dropped=dropped)
        if self._told is not None:
            self._told.note()


def start_transforming(query: Query) -> StreamingQuery:
    """Start the transforming query, without the events that were put aside."""
    prepared, endpoint, frames = query.prepared, query.endpoint, {}
    skip = exactly(read_skipped(query))
    real_time = prepared.transform.mode == "real-time"
    share = -(-prepared.transform.max_events // len(prepared.views))
    lag_in, lag_out = age(f.col(TIME)), age(f.col("timestamp"))
    if real_time:  # each event for itself: its batch lasts long after it was written
        lag_in = f.col(READ_AT) - f.unix_millis(f.col(TIME))
        lag_out = f.col(_WRITTEN_AT) - f.unix_millis(f.col("timestamp"))
    events = f.count(f.lit(1)).alias("events")
    metrics = [events, count_by_lag(lag_in).alias("lags"), f.count(VERDICT).alias("bad")]
    out_metrics = [events, count_by_lag(lag_out).alias("lags")]
    if not real_time:
        metrics.append(began())
        out_metrics.append(began())
    elif prepared.out.stamped:
        out_metrics.append(count_by_lag(f.col(_WRITTEN_AT) - f.col(READ_AT)).alias(_TOOK))
    if query.ledger:
        query.session.conf.set("spark.sql.streaming.numRecentProgressUpdates", str(_PROGRESS_KEPT))
        metrics.append(gather().alias(ORIGINS))
        out_metrics.append(gather().alias(ORIGINS))
    for stream, view in prepared.views.items():
        raw = endpoint.read_stream(query.session, [stream], None if real_time else share).where(f"NOT ({skip})")
        judged = view.judge(raw, clock_now())
        judged = (with_origin(judged, f.col(VERDICT).isNull()) if query.ledger else judged).observe(
            f"in:{stream}", *metrics
        )
        frames[stream] = prepared.watermarked(view.good(judged))
    out = prepared.apply(frames, query.session)
    out = with_origin(out) if query.ledger else out
    out = out.withColumn(_WRITTEN_AT, clock_now()) if real_time else out
    out = out.observe(_OUT, *out_metrics).drop(READ_AT, _WRITTEN_AT, COLUMN)
    writer = endpoint.write_stream(out, output_topic(query.pipe), query.writer)
    writer = writer.queryName(query.pipe).option("checkpointLocation", query.checkpoint.place)
    if real_time:
        real_time_writer: Any = writer.outputMode("update")  # pyspark's own types do not know realTime yet
        started: StreamingQuery = real_time_writer.trigger(realTime=REAL_TIME_BATCH).start()
        return started
    interval = f"{round(prepared.transform.interval * 1000)} milliseconds"
    return writer.outputMode("append").trigger(processingTime=interval).start()


def _progress_since(running: StreamingQuery, batch: int) -> list[Any]:
    """What Spark tells of later batches, oldest first. The rest stays in Java: what was gathered makes it long."""
    found: list[Any] = []
    for progress in reversed(list(running._jsq.recentProgress())):
        if progress.batchId() <= batch:
            break
        found.append(StreamingQueryProgress.fromJson(json.loads(progress.json())))
    return found[::-1]


def _to_report(query: Query, progress: Any) -> BatchReport:
    """In real-time mode each event is timed for itself, else all of a batch by its beginning and end."""
    report, lasted = BatchReport(query.pipe), progress["batchDuration"]
    begun = round(datetime.fromisoformat(progress["timestamp"]).timestamp() * 1000)
    real_time = query.prepared.transform.mode == "real-time"
    gathered, written = [], ""
    for name, row in progress["observedMetrics"].items():
        after = 0 if real_time or not row["events"] else begun - row["began"]
        if name == _OUT:
            report.written = row["events"]
            written = row[ORIGINS] if query.ledger else ""
            report.lag_out = read_lags(row["lags"], later_ms=0 if real_time else after + lasted)
            if not real_time:
                report.took = Counter({lasted: row["events"]})
            elif query.prepared.out.stamped:
                report.took = read_lags(row[_TOOK])
        else:
            events = row["events"] - row["bad"]
            report.read += events
            gathered.append((row[ORIGINS] if query.ledger else "", events))
            report.lag_in += read_lags(row["lags"], later_ms=max(0, after))  # a batch that is done again began long ago
    if query.ledger:
        add_settled(report, gathered, written)
    return report
