"""One pipe's query: started, watched, restarted when it dies, stopped in order, and stopped while an operator pauses the pipe."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import structlog
from pyspark.sql import SparkSession

from services.core.backoff import Backoff
from services.core.broker.errors import BrokerError
from services.core.control.pauses import Pause
from services.core.ledger.report import TELEMETRY, SparkFigures
from services.core.metrics import TRANSFORM_MODE
from spark.batch_report import BatchReport
from spark.brokers.contract import BacklogMeter, Measurement, SparkBroker
from spark.errors import is_of_broker, java_causes, shorten
from spark.figures import QueryFigures
from spark.health import STARTING, QueryState, Watchdog
from spark.jobs.attempts import Attempts, Stopping, SuspectLock, hand_over_attempt
from spark.jobs.checkpoint import (
    Checkpoint,
    CheckpointDamaged,
    ClockWentBack,
    claims_on,
    open_checkpoint,
    peek_checkpoint,
)
from spark.jobs.claims import BEAT_S, CheckpointInUse, Claims
from spark.jobs.culprits import TransformBroken
from spark.jobs.micro_batch import start_micro_batches
from spark.jobs.modes import REFUSED, MorePartitions, enter_mode, mode_of
from spark.jobs.query import POLL_S, Query, RunningQuery, warm_up
from spark.jobs.replay import reported_offsets
from spark.jobs.restart import find_begins
from spark.jobs.start_checks import adopt_checkpoint, check_not_older, record_ran
from spark.jobs.state_store import checkpoint_version
from spark.jobs.streaming_plan import StreamingPlanQuery
from spark.marks import Marks
from spark.reporter import PipeReporter
from spark.session import own_session
from spark.tables import unread_tables
from spark.transforms.preparation import Prepared

log = structlog.get_logger()

FIRST_WAIT_S = 0.5
MAX_WAIT_S = 30.0
BACKLOG_EVERY_S = 5.0
BATCH_TIMEOUT_S = 300.0
STANDBY_EVERY_S = 0.5
"""Seconds between two looks at the lock of a checkpoint that another process uses."""
_NOT_OF_SPARK = (TransformBroken, CheckpointDamaged, ClockWentBack)
"""Failures that another Java would repeat."""


def _attempts_of(prepared: Prepared) -> Attempts:
    return Attempts(prepared.version, tries=not prepared.per_batch, real_time=prepared.real_time)


class Job:
    """Runs in a thread of its own. Callbacks are called from there and from Spark's threads."""

    def __init__(
        self,
        prepared: Prepared,
        broker: SparkBroker,
        marks: Marks,
        *,
        checkpoints: str,
        ledger: bool,
        on_batch: Callable[[BatchReport], None],
        on_state: Callable[[QueryState], None],
        on_backlog: Callable[[Measurement], None] = lambda _: None,
        on_phase: Callable[[str], None] = lambda _: None,
        watchdog: Watchdog | None = None,
        suspects: SuspectLock | None = None,
        executors: Callable[[], int] = lambda: 0,
        ui: str = "",
    ) -> None:
        """ledger: whether to report the outcome of each event. suspects: shared by all jobs of a process. executors, ui: as in
        `SparkFigures`. on_phase: called with what a start is doing."""
        self.pipe = prepared.pipe
        self._watchdog, self._suspects = watchdog or Watchdog(BATCH_TIMEOUT_S), suspects or SuspectLock()
        self._figures = QueryFigures(self.pipe)
        self._executors, self._ui, self._on_phase = executors, ui, on_phase
        self._attempts = _attempts_of(prepared)
        self._claims: Claims | None = None
        self._prepared, self._broker, self._marks = prepared, broker, marks
        self._checkpoints, self._ledger = checkpoints, ledger
        self._reporter: PipeReporter | None = None
        self._on_batch, self._on_state, self._on_backlog = on_batch, on_state, on_backlog
        self._stop = threading.Event()
        self._halt = threading.Event()
        """Set while the query must not run: by a stop for good, by a pause until the resume."""
        self._changing = threading.Lock()
        self._pause: Pause | None = None
        self._drained_by = 0.0
        """On the monotonic clock; known once `_stop` is set."""
        self._backoff = Backoff(FIRST_WAIT_S, MAX_WAIT_S)
        self._worked = self._standing_by = self._holds = False

    def stop(self, drain: float) -> None:
        """Make `run` finish the current batch, for at most `drain` seconds, and return. Does not block."""
        with self._changing:
            self._drained_by = time.monotonic() + drain
            self._stop.set()
            self._halt.set()

    def excuse(self) -> None:
        """The process is about to end, and not because of this pipe's batch. Blocking. Thread-safe enough for an end."""
        try:
            self._attempts.excuse()
        except Exception as error:  # then the end counts as one of the batch, which costs time and no event
            log.warning("end_of_process_not_excused", pipe=self.pipe, error=shorten(error))

    def set_pause(self, pause: Pause | None) -> None:
        """Stop the query after its current batch, until the next call with None. Does not block. Thread-safe.

        Its checkpoint stays, and its backlog is still measured and reported.
        """
        with self._changing:
            self._pause = pause
            if pause is not None:
                self._halt.set()
            elif not self._stop.is_set():
                self._halt.clear()

    @property
    def holds_checkpoint(self) -> bool:
        """Whether this process runs the pipe: not while it stands by or the pipe is paused. Thread-safe."""
        return self._holds

    @property
    def stands_by(self) -> bool:
        """Whether another process runs the pipe. Thread-safe."""
        return self._standing_by

    def run(self, session: SparkSession) -> None:
        """Keep the query running until `stop`. Blocking. Passes failures to `on_state`, and retries for ever."""
        self._show_mode()
        session = own_session(session)
        session.sparkContext.setLocalProperty("spark.scheduler.pool", self.pipe)
        if self._ledger:
            self._reporter = PipeReporter(
                self.pipe, partial(self._broker.append, session, TELEMETRY), stream_of=self._broker.stream_of
            )
            self._reporter.figures = self._take_figures
        measuring = threading.Thread(
            target=self._measure_backlog, args=[session], name=f"backlog-{self.pipe}", daemon=True
        )
        measuring.start()
        while not self._stop.is_set():
            if (pause := self._pause) is not None:
                self._wait_for_resume(pause)
                continue
            try:
                self._run_once(session)
            except Stopping:
                continue
            except CheckpointInUse as error:
                self._stand_by(str(error))
            except Exception as error:
                if not self._fall_back(error):
                    self._record_failure(error)
        measuring.join()
        if self._reporter is not None:
            self._reporter.close()

    def _fall_back(self, error: Exception) -> bool:
        """Go on in micro-batches when Spark refuses real-time mode, or cannot give each partition a task slot."""
        fallback = self._prepared.fallback
        if fallback is None or not (isinstance(error, MorePartitions) or REFUSED in str(error)):
            return False
        refused = not isinstance(error, MorePartitions)
        self._prepared = replace(fallback, why_not="refused" if refused else "partitions")
        self._attempts = _attempts_of(self._prepared)
        hint = "Try: mode: micro-batch, so that no start tries it again" if refused else "Try: a restart of the service"
        log.warning("pipe_mode", pipe=self.pipe, mode="micro-batch", because=shorten(error), hint=hint)
        self._show_mode()
        return True

    def _show_mode(self) -> None:
        TRANSFORM_MODE.remove_by_labels({"pipe": self.pipe})
        TRANSFORM_MODE.labels(self.pipe, mode_of(self._prepared), self._prepared.why_not).set(1)

    def _wait_for_resume(self, pause: Pause) -> None:
        """Until the resume or the stop. Failures from before the pause count no longer."""
        self._holds = False
        log.warning(
            "pipe_paused", pipe=self.pipe, by=pause.by, reason=pause.because, hint="its events wait in its sources"
        )
        self._backoff.reset()
        self._worked = False
        self._on_state(QueryState(self.pipe, None, 0, paused=pause.text))
        while self._pause is not None and not self._stop.wait(POLL_S):
            pass
        if not self._stop.is_set():
            log.info("pipe_resumed", pipe=self.pipe)
            self._on_state(QueryState(self.pipe, STARTING, 0))

    def _stand_by(self, reason: str) -> None:
        """Another process runs the pipe: wait before the next look at its lock. That process works, so this is no failure."""
        self._holds = False
        if not self._standing_by:
            log.warning(
                "pipe_on_standby", pipe=self.pipe, reason=reason, hint="this process takes over when that one ends"
            )
            self._standing_by = True
            self._backoff.reset()
            self._worked = False
            # That process counts from now on. What this one knows of a batch may be from before.
            self._attempts = _attempts_of(self._prepared)
        self._on_state(QueryState(self.pipe, None, 0, standby=reason))
        self._halt.wait(STANDBY_EVERY_S if self._claims is None else BEAT_S)

    def _run_once(self, session: SparkSession) -> None:
        topics = self._broker.identify(session, list(self._prepared.views))
        if self._claims is None:
            self._claims = claims_on(session, self._checkpoints, self.pipe)
        with open_checkpoint(session, self._checkpoints, self.pipe, self._claims) as checkpoint:
            self._holds = True
            if self._standing_by:
                log.info("pipe_taken_over", pipe=self.pipe)
                self._standing_by = False
                self._on_state(QueryState(self.pipe, STARTING, 0))
            try:
                self._wait_for_tables(checkpoint)
                self._run_query(session, checkpoint, topics)
            except Stopping:
                raise
            except Exception as error:
                self._check_in_use(checkpoint, error)
                raise

    def _wait_for_tables(self, checkpoint: Checkpoint) -> None:
        """Until each was read, which begins once the checkpoint is held. Raises Stopping, CheckpointInUse."""
        if not unread_tables(self._prepared.tables):
            return
        while reason := unread_tables(self._prepared.tables):
            self._on_state(QueryState(self.pipe, reason, 0))
            if self._halt.wait(POLL_S):
                raise Stopping
            if checkpoint.is_lost:
                checkpoint.check_claim()
        self._on_state(QueryState(self.pipe, "starting", 0))

    def _run_query(self, session: SparkSession, checkpoint: Checkpoint, topics: Mapping[str, str]) -> None:
        one_source = len(self._prepared.views) == 1  # else a plan for each batch cannot use the checkpoint
        if self._prepared.in_plan and one_source and hand_over_attempt(checkpoint, self._prepared.version):
            self._prepared = replace(self._prepared, in_plan=False)
            self._attempts = _attempts_of(self._prepared)
        tables = self._table_versions()
        query = self._open_query(session, checkpoint, topics)
        self._attempts.open(checkpoint)
        self._attempts.check()
        with self._suspects.acquire(self._attempts.ended, self._halt.is_set) as release:
            running = self._start(query)
            halted: float | None = None
            try:
                while not self._halt.is_set() and not checkpoint.is_lost and not running.has_completed_trigger():
                    running.wait()
                self._record_success()
                release()
                while not self._halt.is_set() and not checkpoint.is_lost and not self._needs_other_tables(tables):
                    running.wait()
                checkpoint.check_claim()
                halted = time.monotonic()
                if not self._halt.is_set():
                    log.info("query_starts_again", pipe=self.pipe, because="a table of it has a new content")
            finally:
                running.stop(lambda: self._may_finish(halted))
                if halted is not None and self._stop.is_set():
                    self.excuse()  # Spark plans the next batch while the last one ends

    def _check_in_use(self, checkpoint: Checkpoint, error: Exception) -> None:
        """Whether the query failed because another process has taken over. Raises CheckpointInUse then."""
        try:
            checkpoint.check_claim()
        except CheckpointInUse as lost:
            log.warning("query_ended_by_takeover", pipe=self.pipe, error=shorten(error))
            raise lost from error
        except Exception as unknown:
            log.debug("claim_not_checked", pipe=self.pipe, error=shorten(unknown))

    def _needs_other_tables(self, versions: list[int]) -> bool:
        """Whether its plan has the former content of a table, and the query must start again."""
        return not self._prepared.per_batch and self._table_versions() != versions

    def _table_versions(self) -> list[int]:
        return [table.version for table in self._prepared.tables.values()]

    def _may_finish(self, halted: float | None) -> bool:
        """Whether the current batch may go on. A pause waits for its end, nobody wants it computed again. A stop limits it.

        halted: when the pause or the stop was noticed; None: the query failed, and has nothing to finish.
        """
        if halted is None:
            return False
        return time.monotonic() < (self._drained_by if self._stop.is_set() else halted + self._watchdog.limit)

    def _start(self, query: Query) -> RunningQuery:
        warms_up = self._prepared.per_batch or self._prepared.in_plan
        if warms_up and self._attempts.current is None:
            self._attempts.record_warm_up(query.checkpoint, begins=True)
            self._on_phase("trial run on stored events")
            warm_up(query)
            self._attempts.record_warm_up(query.checkpoint, begins=False)
        self._on_phase("reads the first batch")
        return start_micro_batches(query) if self._prepared.per_batch else StreamingPlanQuery(query)

    def _open_query(self, session: SparkSession, checkpoint: Checkpoint, topics: Mapping[str, str]) -> Query:
        identity = adopt_checkpoint(
            checkpoint,
            self._prepared,
            topics,
            self._marks,
            version=max(
                self._broker.checkpoint_version(self._prepared.per_batch),
                checkpoint_version(self._prepared, checkpoint),
            ),
            begins_of=partial(find_begins, session, self._checkpoints, self._broker, ledger=self._ledger),
        )
        ran = threading.Event()

        def report(done: BatchReport) -> None:
            if self._reporter is not None:
                self._report(self._reporter, done)
            if not ran.is_set() and record_ran(checkpoint, identity, self._marks):
                ran.set()
            if done.read:  # else it is a report of late events of an earlier run
                self._record_success()
            self._on_batch(done)

        query = Query(
            session,
            self._prepared,
            self._broker,
            checkpoint,
            writer=f"{self.pipe}:{identity.id}",
            report=report,
            ledger=self._ledger,
            stopping=self._halt,
            attempts=self._attempts,
            watchdog=self._watchdog,
            figures=self._figures,
            named_sources=identity.named,
        )
        check_not_older(query)
        enter_mode(query, identity.kind)
        return query

    def _report(self, reporter: PipeReporter, done: BatchReport) -> None:
        """Retries for ever: the output of the batch is stored, and would be written again with it. Raises Stopping."""
        failed = False
        while True:
            try:
                reporter.report(done)
            except BrokerError as error:
                failed = True
                self._record_failure(error, "batch_not_reported")
                if self._halt.is_set():
                    raise Stopping from error
            else:
                if failed:
                    self._record_success()
                return

    def _take_figures(self, seconds: float, events: int) -> SparkFigures:
        found = self._figures.take()
        return SparkFigures(
            round(seconds, 1),
            events,
            found.batches,
            found.batch_ms,
            found.longest_ms,
            found.state_rows,
            found.state_bytes,
            self._executors(),
            self._ui,
            self._prepared.real_time,
        )

    def _record_failure(self, error: Exception, event: str = "query_failed") -> None:
        """And wait before the next attempt."""
        self._backoff.fail()
        wait = self._backoff.delay()
        problem = f"{type(error).__name__}: {shorten(error)}"
        if self._prepared.real_time and REFUSED in str(error):
            problem = f"{problem.rstrip('.')}. Try: mode: micro-batch, or mode: auto, which takes what Spark allows"
        # One line: Spark's stack does not help a person.
        log.error(
            event,
            pipe=self.pipe,
            error=problem,
            failures=self._backoff.failures,
            again_in_seconds=round(wait, 1),
            java=java_causes(error),
        )
        of_spark = not isinstance(error, _NOT_OF_SPARK) and not is_of_broker(error)
        self._on_state(QueryState(self.pipe, problem, self._backoff.failures, of_spark))
        self._halt.wait(wait)

    def _record_success(self) -> None:
        """A trigger was completed, or a batch stored."""
        if not self._halt.is_set() and (self._backoff.failures or not self._worked):
            self._backoff.reset()
            self._worked = True
            self._on_state(QueryState(self.pipe, None, 0))

    def _measure_backlog(self, session: SparkSession) -> None:
        checkpoint = peek_checkpoint(session, self._checkpoints, self.pipe)
        meter = self._broker.open_meter(session, list(self._prepared.views))
        while not self._stop.is_set():
            try:
                found = self._measure(meter, checkpoint)
            except Exception as error:  # the query reports what is wrong with the broker or the checkpoint
                log.debug("backlog_unknown", pipe=self.pipe, error=shorten(error))
            else:
                self._on_backlog(found)
            if self._reporter is not None:
                self._reporter.report_heartbeat()
            self._stop.wait(BACKLOG_EVERY_S)

    def _measure(self, meter: BacklogMeter, checkpoint: Checkpoint) -> Measurement:
        done = checkpoint.committed_offsets(self._broker.parse_offsets)
        if self._reporter is None:
            return meter.measure(done, done)
        found = meter.measure(done, reported_offsets(self._prepared, self._broker, checkpoint))
        self._reporter.record_settled_up_to(found.settled_up_to)
        return found
