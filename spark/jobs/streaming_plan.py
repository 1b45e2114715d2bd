"""A transform that is part of the streaming plan itself: in real-time mode, or one that keeps state over batches.

The query counts the records that fail a check, and leaves them out. A batch that has some is read again (`replay.BadRecords`). An
event on which the transform raises ends the query; `replay` then finds it, and the next run leaves it out.
"""

import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Any

import structlog
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from services.core.ledger.minute import MINUTE_MS
from services.core.pipe_file.topic_names import output_topic
from spark.batch_report import (
    NO_ORIGINS,
    ORIGINS,
    BatchReport,
    NothingObserved,
    add_settled,
    age,
    began,
    clock_now,
    count_by_lag,
    count_by_minute,
    gather_origins,
    read_lags,
    read_minutes,
    read_origins,
)
from spark.errors import is_of_broker, is_of_spark, shorten
from spark.java import progress_since
from spark.jobs.attempts import Stopping
from spark.jobs.culprits import FailureStreak, exactly
from spark.jobs.modes import REAL_TIME_BATCH_S, MorePartitions
from spark.jobs.moved_sources import fit_offsets, without_removed
from spark.jobs.query import POLL_S, Query, has_completed_trigger, is_in_trigger, wait_for_end
from spark.jobs.replay import (
    BadRecords,
    LateEvents,
    ReportedBatches,
    has_events,
    read_skipped,
    reject_culprits,
    reject_process_killers,
)
from spark.jobs.state_store import state_store
from spark.transforms.view import FAILED_CHECK, READ_AT, TIME

log = structlog.get_logger()

REAL_TIME_BATCH = f"{REAL_TIME_BATCH_S} seconds"
READ_S = 3.0
"""After so long without a failure, a real-time query is ready. A transform that is broken fails at once."""
_NAMES_NEEDED = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
"""With it, Spark keeps offsets by the names of the sources, and refuses a source without a name."""
_IDLE_BATCHES = "spark.sql.streaming.noDataMicroBatches.enabled"
_OFFSETS_FORMAT = "spark.sql.streaming.offsetLog.formatVersion"
SAVE_EVERY_S = 1.0
"""Of the notes beside the checkpoint: each is two syncs, or a write to the object store. A crash repeats the reports since."""
_REPARTITION_CHECK = "spark.sql.streaming.checkUnfinishedRepartitionOnRestart"
"""Whether a start looks if somebody changed the number of the state's parts and did not finish. Nobody does that here, and with
names this check of Spark 4.2.0 ends each start after an unfinished batch with `None.get` (SPARK-59662)."""
_OUT = "out"
_LAGS, _TOOK = "lags", "took"
_WRITTEN_AT = "_penstock_written"
_MORE_SLOTS = (
    "Try: a larger PENSTOCK_TRANSFORM_MASTER, e.g. local[9], and a restart of the service; or mode: micro-batch"
)
_PROGRESS_KEPT = 10
"""The number of batches whose observed values Spark keeps. We poll four times a second, and read missed batches again."""


class StreamingPlanQuery:
    """The running query of one pipe."""

    def __init__(self, query: Query) -> None:
        """Starts it."""
        self._query = query
        self._streak = FailureStreak(query.checkpoint)
        self._bad = BadRecords(query)
        self._reported = ReportedBatches(query) if query.ledger else None
        self._late = LateEvents(query) if query.prepared.transform.watermark is not None else None
        self._bad.begin()
        fit_offsets(query)
        with query.watchdog.watching(query.writer, "the search for events that end the process"):
            reject_process_killers(query, self._streak)
        self._start_transforming()
        self._last_batch = -1
        self._partitions = 0
        """Of its sources at the last look, in real-time mode."""
        self._saved_at = time.monotonic()
        self._at_work: tuple[int, bool] | None = None
        self._reads_since: float | None = None

    def _start_transforming(self) -> None:
        self._query.attempts.record_working()
        self._transforming = start_transforming(self._query)

    def wait(self) -> None:
        """Raises TransformBroken, too."""
        try:
            wait_for_end(self._transforming, self._query.watchdog)
        except StreamingQueryException as error:
            self._query.attempts.record_failure(error)
            self._record_progress()
            if self._reported is not None:
                self._reported.catch_up()
            with self._query.watchdog.watching(self._query.writer, "the search for events that fail"):
                found = 0 if is_of_broker(error) or is_of_spark(error) else reject_culprits(self._query, self._streak)
            if not found:
                raise
            log.warning("query_restarted_without_culprits", pipe=self._query.pipe, error=shorten(error))
            self._start_transforming()
        self._record_progress()
        self._update_watchdog()

    def _update_watchdog(self) -> None:
        """A batch of the streaming plan lasts from its trigger until Spark reports the next one."""
        query, at_work = self._query, self._transforming.status["isTriggerActive"]
        if not at_work:
            query.watchdog.end(query.writer)
        elif self._at_work != (self._last_batch, at_work):
            after = f"the batch after {self._last_batch}" if self._last_batch >= 0 else "the first batch"
            query.watchdog.begin(query.writer, after)
        self._at_work = (self._last_batch, at_work)

    def has_completed_trigger(self) -> bool:
        """In real-time mode also when its tasks have read for a while: the first trigger lasts as long as each one."""
        return has_completed_trigger(self._transforming) or (self._query.real_time and self._has_read())

    def _has_read(self) -> bool:
        if not _runs_tasks(self._query, self._transforming):
            self._reads_since = None
        elif self._reads_since is None:
            self._reads_since = time.monotonic()
        return self._reads_since is not None and time.monotonic() - self._reads_since > READ_S

    def stop(self, may_wait: Callable[[], bool]) -> None:
        """Stops right after a batch of a real-time query: in the middle of one, the next run would repeat the batch."""
        before = self._last_batch
        self._query.watchdog.end(self._query.writer)
        while is_in_trigger(self._transforming) and may_wait():
            self._record_progress()
            if self._last_batch > before:
                break
            time.sleep(POLL_S / 10)
        self._transforming.stop()
        try:
            self._query.attempts.record_failure(Stopping())
            self._record_progress()
            self._save()
        except Exception as error:  # the next start does it
            log.warning("last_batch_not_reported", pipe=self._query.pipe, error=shorten(error))

    def _record_progress(self) -> None:
        """Report the batches since the last call."""
        finished = progress_since(self._transforming, self._last_batch)
        if finished:
            self._query.checkpoint.check_claim()
        for progress in finished:
            # The progress of an idle query has the number of the batch to come.
            if "addBatch" in progress["durationMs"]:
                if self._query.figures is not None:
                    self._query.figures.record(progress)
                report, bad = to_report(self._query, progress)
                if self._reported is None:
                    self._query.report(report)
                else:
                    self._reported.report(progress["batchId"], report)
                self._last_batch = progress["batchId"]
                self._query.attempts.record_done(self._last_batch)
                self._query.checkpoint.make_durable(self._last_batch)
                self._check_partitions()
                if report.read:
                    self._streak.reset()
                self._bad.settle(self._last_batch, bad=bad > 0)
                if self._late is not None:
                    dropped = any(state["numRowsDroppedByWatermark"] for state in progress["stateOperators"])
                    self._late.settle(self._last_batch, dropped=dropped)
        if time.monotonic() - self._saved_at > SAVE_EVERY_S:
            self._save()

    def _save(self) -> None:
        """Save the positions beside the checkpoint."""
        self._saved_at = time.monotonic()
        self._bad.save()
        if self._reported is not None:
            self._reported.save()

    def _check_partitions(self) -> None:
        """When partitions were added that have no task slot, raise MorePartitions, where the pipe may go on in micro-batches. The
        last batch is settled by the next start. Where it may not, log it: the other partitions are read."""
        query, slots = self._query, self._query.prepared.partitions
        if not slots:
            return
        found = len(query.checkpoint.offsets(self._last_batch, query.broker.parse_offsets))
        if found > max(slots, self._partitions):
            if query.prepared.fallback is not None:
                raise MorePartitions(f"there are {found} partitions, and task slots for {slots} of them")
            log.error("partitions_are_not_read", pipe=query.pipe, partitions=found, task_slots=slots, hint=_MORE_SLOTS)
        self._partitions = found


def _runs_tasks(query: Query, running: StreamingQuery) -> bool:
    tracker = query.session.sparkContext.statusTracker()
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(str(running.runId))]
    stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
    return any(stage is not None and stage.numActiveTasks for stage in stages)


def start_transforming(query: Query) -> StreamingQuery:
    """Start the transforming query, without the events that are in the dead letters."""
    prepared, broker, frames = query.prepared, query.broker, {}
    skip = exactly(read_skipped(query))
    max_events = None if query.real_time else -(-prepared.transform.max_events // len(prepared.views))
    in_metrics, out_metrics = _metrics(query)
    if query.ledger:
        query.session.conf.set("spark.sql.streaming.numRecentProgressUpdates", str(_PROGRESS_KEPT))
    query.session.conf.set(_IDLE_BATCHES, prepared.idle_batches)
    query.session.conf.set(_NAMES_NEEDED, query.named_sources)
    query.session.conf.set(_OFFSETS_FORMAT, 2 if query.named_sources else 1)
    query.session.conf.set(_REPARTITION_CHECK, not query.named_sources)
    begins = query.checkpoint.begins()
    for stream, view in prepared.views.items():
        name = source_name(stream) if query.named_sources else None
        raw = broker.read_stream(
            query.session, [stream], max_events, checkpoint=query.checkpoint.path, name=name, begins=begins
        ).where(f"NOT ({skip})")
        raw = without_removed(query, raw)
        checked = view.check(raw, clock_now())
        frames[stream] = prepared.watermarked(view.good(checked.observe(_counted(stream), *in_metrics)))
    out = prepared.apply(frames, query.session)
    out = out.withColumn(_WRITTEN_AT, clock_now()) if query.real_time else out
    out = out.observe(_OUT, *out_metrics).drop(READ_AT, _WRITTEN_AT)
    by_time = not prepared.out.carries_events
    writer = broker.write_stream(out, output_topic(query.pipe), query.writer, by_time=by_time)
    writer = writer.queryName(query.pipe).option("checkpointLocation", query.checkpoint.path)
    if query.real_time:
        real_time_writer: Any = writer.outputMode("update")  # pyspark's own types do not know realTime yet
        started: StreamingQuery = real_time_writer.trigger(realTime=REAL_TIME_BATCH).start()
    else:
        interval = f"{round(prepared.transform.interval * 1000)} milliseconds"
        with state_store(query.session, prepared, query.checkpoint, named=query.named_sources):
            started = writer.outputMode("append").trigger(processingTime=interval).start()
    return started


def _counted(stream: str) -> str:
    """The name of the observed values of a source."""
    return f"in:{stream}"


def source_name(stream: str) -> str:
    """The name of a source in Spark, which allows no hyphen. Streams have no capitals."""
    return stream.replace("-", "H")


def _metrics(query: Query) -> tuple[list[Any], list[Any]]:
    """The observed values of the sources and of the output.

    In real-time mode each event is timed by itself: its batch lasts long after it was written.
    """
    events = f.count(f.lit(1)).alias("events")
    in_metrics, out_metrics = [events, f.count(FAILED_CHECK).alias("bad")], [events]
    if not query.real_time:
        in_metrics += [count_by_lag(age(f.col(TIME))).alias(_LAGS), began()]
        out_metrics += [count_by_lag(age(f.col("timestamp"))).alias(_LAGS), began()]
    else:
        read, written = f.col(READ_AT), f.col(_WRITTEN_AT)
        in_metrics += count_by_minute(read - f.unix_millis(f.col(TIME)), read, _LAGS)
        out_metrics += count_by_minute(written - f.unix_millis(f.col("timestamp")), written, _LAGS)
        if query.prepared.out.stamped:
            out_metrics += count_by_minute(written - read, written, _TOOK)
    if query.ledger:
        in_metrics.append(gather_origins(f.col(FAILED_CHECK).isNull()).alias(ORIGINS))
        out_metrics.append(gather_origins().alias(ORIGINS))
    return in_metrics, out_metrics


def to_report(query: Query, progress: Any) -> tuple[BatchReport, int]:
    """And the number of bad records. In real-time mode from the times of each event, else from the begin and end of the batch.

    Raises NothingObserved when a source was not counted: the next start reads the batch again for its report.
    """
    _check_counted(query, progress)
    report, lasted = BatchReport(query.pipe), progress["batchDuration"]
    begun = round(datetime.fromisoformat(progress["timestamp"]).timestamp() * 1000)
    if query.real_time:
        report.minute = (begun + lasted) // MINUTE_MS
    gathered, written, bad = [], NO_ORIGINS, 0
    for name, row in progress["observedMetrics"].items():
        if name == _OUT:
            report.written = row["events"]
            written = read_origins(row[ORIGINS]) if query.ledger else NO_ORIGINS
        else:
            bad += row["bad"]
            events = row["events"] - row["bad"]
            report.read += events
            if query.ledger:
                gathered.append((read_origins(row[ORIGINS]), events))
        if report.minute is not None:
            _add_timed(report, row, report.minute, is_out=name == _OUT)
            continue
        after = begun - row["began"] if row["events"] else 0
        if name == _OUT:
            report.lag_out = read_lags(row[_LAGS], later_ms=after + lasted)
            report.took = Counter({lasted: row["events"]})
        else:
            report.lag_in += read_lags(row[_LAGS], later_ms=max(0, after))  # a repeated batch began long ago
    if query.ledger:
        add_settled(report, gathered, written)
    return report, bad


def _add_timed(report: BatchReport, row: Any, minute: int, *, is_out: bool) -> None:
    """The lags of events that were timed one by one, from the observed values of a source or of the output."""
    for found, name in (("lag_out", _LAGS), ("took", _TOOK)) if is_out else (("lag_in", _LAGS),):
        if name in row:
            now, before = read_minutes(row, name, minute)
            getattr(report, found).update(now + before)
            getattr(report.earlier, found).update(before)


def _check_counted(query: Query, progress: Any) -> None:
    """Spark reports nothing for a source that its optimiser took out of the plan, and zero where a join read none of it."""
    seen, batch = progress["observedMetrics"], progress["batchId"]
    missing = [stream for stream in query.prepared.views if _counted(stream) not in seen]
    none_read = not missing and not any(seen[_counted(stream)]["events"] for stream in query.prepared.views)
    if (missing or (none_read and query.prepared.tables)) and has_events(query, batch):
        raise NothingObserved(f"Spark counted none of the events of batch {batch} ({', '.join(query.prepared.views)})")
