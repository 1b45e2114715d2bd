"""One pipe's query: started, watched, started again when it dies, stopped in good order."""

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog
from pyspark.sql import SparkSession

from services.core.broker.errors import BrokerError
from services.core.ledger.report import TELEMETRY
from spark.adoption import adopt, check_not_older, note_ran
from spark.brokers.endpoint import Endpoint
from spark.brokers.gauge import Backlog, Gauge
from spark.checkpoint import (
    Checkpoint,
    CheckpointDamaged,
    CheckpointInUse,
    ClockWentBack,
    open_checkpoint,
    peek_checkpoint,
)
from spark.errors import is_of_broker, java_causes, shorten
from spark.jobs.culprits import TransformBroken
from spark.jobs.in_plan import InPlanRun
from spark.jobs.parts import Attempts
from spark.jobs.pulse import Pulse
from spark.jobs.query import Query, Stopping
from spark.jobs.runs import Run, start_per_batch
from spark.jobs.told import settled_position
from spark.jobs.turn import Turn
from spark.jobs.warm_up import warm_up
from spark.observed import BatchReport
from spark.reporter import PipeReporter
from spark.session import own_session
from spark.transforms.preparation import Prepared

log = structlog.get_logger()

ATTEMPTS = 5
"""After so many failures without a stored batch between them the pipe counts as broken."""
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 30.0
BACKLOG_EVERY_S = 5.0
BATCH_TIMEOUT_S = 300.0
_KNOWN = (TransformBroken, CheckpointDamaged, CheckpointInUse, ClockWentBack)
"""Kinds of failures that are the same in another Java."""


@dataclass(frozen=True, slots=True)
class JobState:
    """How a pipe's query is doing. problem: None once it has completed a trigger since its start, else why not, for a
    person. failures: in a row. of_spark: the last one was neither the broker's nor the transform's nor the checkpoint's."""

    pipe: str
    problem: str | None
    failures: int
    of_spark: bool = False

    @property
    def broken(self) -> bool:
        """Whether starting it again has not helped often enough."""
        return self.failures >= ATTEMPTS


class Job:
    """Runs in a thread of its own. Callbacks are called from there and from Spark's threads."""

    def __init__(
        self,
        prepared: Prepared,
        endpoint: Endpoint,
        *,
        checkpoints: str,
        ledger: bool,
        on_batch: Callable[[BatchReport], None],
        on_state: Callable[[JobState], None],
        on_backlog: Callable[[Backlog], None] = lambda _: None,
        pulse: Pulse | None = None,
        turn: Turn | None = None,
    ) -> None:
        """ledger: whether to report what became of which events. turn: shared by all jobs of a process."""
        self.pulse, self._turn = pulse or Pulse(BATCH_TIMEOUT_S), turn or Turn()
        self._attempts = Attempts(prepared.version)
        self._prepared, self._endpoint, self._checkpoints, self._ledger = prepared, endpoint, checkpoints, ledger
        self._reporter: PipeReporter | None = None
        self._on_batch, self._on_state, self._on_backlog = on_batch, on_state, on_backlog
        self._stop = threading.Event()
        self._drain = 0.0
        self._failures = 0
        self._told = False
        self.pipe = prepared.pipe

    def stop(self, drain: float) -> None:
        """Make `run` finish the batch at work, for at most `drain` seconds, and return. Does not block."""
        self._drain = drain
        self._stop.set()

    def run(self, session: SparkSession) -> None:
        """Keep the query running until `stop`. Blocking. Failures are told by `on_state`, and tried again for ever."""
        session = own_session(session)
        session.sparkContext.setLocalProperty("spark.scheduler.pool", self.pipe)
        if self._ledger:
            self._reporter = PipeReporter(self.pipe, self._endpoint.open_appender(session, TELEMETRY))
        watching = threading.Thread(
            target=self._watch_backlog, args=[session], name=f"backlog-{self.pipe}", daemon=True
        )
        watching.start()
        while not self._stop.is_set():
            try:
                self._run_once(session)
            except Stopping:
                break
            except Exception as error:
                self._note_failure(error)
        watching.join()
        if self._reporter is not None:
            self._reporter.close()

    def _note_failure(self, error: Exception, event: str = "query failed") -> None:
        """Tell it, and wait before the next try."""
        self._failures += 1
        wait = random.uniform(0.5, 1) * min(MAX_WAIT_S, FIRST_WAIT_S * 2**self._failures)  # noqa: S311
        problem = f"{type(error).__name__}: {shorten(error)}"
        # One line: Spark's stack says nothing to a person.
        log.error(
            event,
            pipe=self.pipe,
            error=problem,
            failures=self._failures,
            again_in_seconds=round(wait, 1),
            java=java_causes(error),
        )
        of_spark = not isinstance(error, _KNOWN) and not is_of_broker(error)
        self._on_state(JobState(self.pipe, problem, self._failures, of_spark))
        self._stop.wait(wait)

    def _run_once(self, session: SparkSession) -> None:
        topics = self._endpoint.check(session, list(self._prepared.views))
        with open_checkpoint(session, self._checkpoints, self.pipe) as checkpoint:
            query = self._adopt(session, checkpoint, topics)
            self._attempts.open(checkpoint)
            self._attempts.check()
            with self._turn.alone(self._attempts.ended, self._stop.is_set) as give_back:
                if self._prepared.per_batch and self._attempts.current is None:
                    self._attempts.warming_up(checkpoint, begins=True)
                    warm_up(query)
                    self._attempts.warming_up(checkpoint, begins=False)
                run: Run = start_per_batch(query) if self._prepared.per_batch else InPlanRun(query)
                try:
                    while not self._stop.is_set() and not run.works():
                        run.watch()
                    self._note_success()
                    give_back()
                    while not self._stop.is_set():
                        run.watch()
                finally:
                    run.end(self._drain)

    def _adopt(self, session: SparkSession, checkpoint: Checkpoint, topics: Mapping[str, str]) -> Query:
        identity = adopt(checkpoint, self._prepared, topics)
        ran = threading.Event()

        def report(done: BatchReport) -> None:
            if self._reporter is not None:
                self._tell(self._reporter, done)
            if not ran.is_set() and note_ran(checkpoint, identity):
                ran.set()
            if done.read:  # else it tells of late events of an earlier run
                self._note_success()
            self._on_batch(done)

        writer = f"{self.pipe}:{identity.id}"
        query = Query(
            session,
            self._prepared,
            self._endpoint,
            checkpoint,
            writer,
            report,
            self._ledger,
            self._stop,
            self._attempts,
            self.pulse,
        )
        check_not_older(query)
        return query

    def _tell(self, reporter: PipeReporter, done: BatchReport) -> None:
        """For as long as it takes: what the batch wrote is stored, and would be written again with it. Raises Stopping."""
        failed = False
        while True:
            try:
                reporter.tell(done)
            except BrokerError as error:
                failed = True
                self._note_failure(error, "batch not told")
                if self._stop.is_set():
                    raise Stopping from error
            else:
                if failed:
                    self._note_success()
                return

    def _note_success(self) -> None:
        """A trigger was completed, or a batch stored."""
        if not self._stop.is_set() and (self._failures or not self._told):
            self._failures, self._told = 0, True
            self._on_state(JobState(self.pipe, None, 0))

    def _watch_backlog(self, session: SparkSession) -> None:
        checkpoint = peek_checkpoint(session, self._checkpoints, self.pipe)
        gauge = self._endpoint.open_gauge(session, list(self._prepared.views))
        while not self._stop.is_set():
            try:
                found = self._look(gauge, checkpoint)
            except Exception as error:  # whatever is wrong with the broker or the checkpoint is the query's to tell
                log.debug("backlog unknown", pipe=self.pipe, error=shorten(error))
            else:
                self._on_backlog(found)
            if self._reporter is not None:
                self._reporter.beat()
            self._stop.wait(BACKLOG_EVERY_S)

    def _look(self, gauge: Gauge, checkpoint: Checkpoint) -> Backlog:
        parse = self._endpoint.parse_position
        done = checkpoint.done_up_to(parse)
        if self._reporter is None:
            return gauge.look(done, done).backlog
        look = gauge.look(done, settled_position(self._prepared, self._endpoint, checkpoint))
        self._reporter.settled_up_to(look.settled_up_to)
        return look.backlog
