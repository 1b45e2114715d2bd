"""One pipe's query: started, watched, started again when it dies, stopped in good order."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import structlog
from pyspark.sql import SparkSession

from services.core.pipes import output_topic
from spark.adoption import adopt, check_not_older
from spark.brokers.endpoint import Endpoint
from spark.checkpoint import Checkpoint, Identity, open_checkpoint
from spark.errors import shorten
from spark.jobs.in_plan import InPlanRun
from spark.jobs.runs import Run, start_per_batch
from spark.observed import BatchReport
from spark.session import own_session
from spark.transforms.preparation import Prepared

log = structlog.get_logger()

ATTEMPTS = 5
"""After so many failures without a stored batch between them the pipe counts as broken."""
FIRST_WAIT_S = 0.5
MAX_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class JobState:
    """How a pipe's query is doing. problem: None while it runs, else why not, for a person. failures: in a row."""

    pipe: str
    problem: str | None
    failures: int

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
        on_batch: Callable[[BatchReport], None],
        on_state: Callable[[JobState], None],
    ) -> None:
        self._prepared, self._endpoint, self._checkpoints = prepared, endpoint, checkpoints
        self._on_batch, self._on_state = on_batch, on_state
        self._stop = threading.Event()
        self._drain = 0.0
        self._failures = 0
        self.pipe = prepared.pipe

    def stop(self, drain: float) -> None:
        """Make `run` finish the batch at work, for at most `drain` seconds, and return. Does not block."""
        self._drain = drain
        self._stop.set()

    def run(self, session: SparkSession) -> None:
        """Keep the query running until `stop`. Blocking. Failures are told by `on_state`, and tried again for ever."""
        session = own_session(session)
        session.sparkContext.setLocalProperty("spark.scheduler.pool", self.pipe)
        while not self._stop.is_set():
            try:
                self._run_once(session)
            except Exception as error:
                self._failures += 1
                wait = random.uniform(0.5, 1) * min(MAX_WAIT_S, FIRST_WAIT_S * 2**self._failures)  # noqa: S311
                problem = f"{type(error).__name__}: {shorten(error)}"
                log.error(  # noqa: TRY400  one line: Spark's stack says nothing to a person
                    "query failed",
                    pipe=self.pipe,
                    error=problem,
                    failures=self._failures,
                    again_in_seconds=round(wait, 1),
                )
                self._on_state(JobState(self.pipe, problem, self._failures))
                self._stop.wait(wait)

    def _run_once(self, session: SparkSession) -> None:
        topics = self._endpoint.check(session, list(self._prepared.views))
        with open_checkpoint(session, self._checkpoints, self.pipe) as checkpoint:
            identity = adopt(checkpoint, self._prepared, topics)
            writer = f"{self.pipe}:{identity.id}"
            check_not_older(checkpoint, self._endpoint.last_epoch(output_topic(self.pipe), writer))
            run = self._start(session, checkpoint, identity)
            try:
                self._on_state(JobState(self.pipe, None, self._failures))
                while not self._stop.is_set():
                    run.watch()
            finally:
                run.end(self._drain)

    def _start(self, session: SparkSession, checkpoint: Checkpoint, identity: Identity) -> Run:
        start = start_per_batch if self._prepared.per_batch else InPlanRun
        first = threading.Event()

        def done(report: BatchReport) -> None:
            if not identity.ran and not first.is_set():
                checkpoint.write_identity(msgspec.structs.replace(identity, ran=True))
            first.set()
            self._done(report)

        return start(session, self._prepared, self._endpoint, checkpoint, f"{self.pipe}:{identity.id}", done)

    def _done(self, report: BatchReport) -> None:
        if self._failures:
            self._failures = 0
            self._on_state(JobState(self.pipe, None, 0))
        self._on_batch(report)
