"""What Spark calls with each micro-batch: one at a time, stopped between two batches, its failure kept for the job."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import structlog
from pyspark.sql import DataFrame

from services.core.pipes import dead_letter_topic
from spark.brokers.endpoint import BatchName, Endpoint
from spark.checkpoint import Checkpoint
from spark.dead_letters import Rejected, dead_letters
from spark.observed import BatchReport
from spark.transforms.preparation import Prepared

log = structlog.get_logger()


class Stopping(Exception):
    """The batch was not begun because the job is to stop; it comes again."""


class Handler(ABC):
    """One pipe's batches. `failure`: what ended the query, with its cause. writer: names the query to the broker."""

    def __init__(
        self,
        prepared: Prepared,
        endpoint: Endpoint,
        checkpoint: Checkpoint,
        writer: str,
        report: Callable[[BatchReport], None],
    ) -> None:
        self.prepared, self.endpoint, self.checkpoint, self.writer = prepared, endpoint, checkpoint, writer
        self.failure: BaseException | None = None
        self._report = report
        self._at_work = threading.Lock()
        self._stopping = threading.Event()

    def __call__(self, raw: DataFrame, batch_id: int) -> None:
        """Handle one batch. Raises a short error whose cause is in `failure`: Spark copies the text many times over."""
        with self._at_work:
            if self._stopping.is_set():
                raise Stopping
            try:
                self.checkpoint.make_durable(batch_id)
                begun = time.monotonic()
                report = self.handle(raw, batch_id)
                report.seconds = time.monotonic() - begun
                self._report(report)
            except BaseException as error:
                self.failure = error
                raise RuntimeError(f"batch {batch_id} failed: {type(error).__name__}") from None

    def finish(self, limit: float) -> bool:
        """Begin no further batch and wait up to `limit` seconds for the one at work. Whether it is over."""
        self._stopping.set()
        if self._at_work.acquire(timeout=limit):
            self._at_work.release()
            return True
        return False

    @abstractmethod
    def handle(self, raw: DataFrame, batch_id: int) -> BatchReport:
        """Do everything that the batch asks for, durably."""

    def bury(
        self, raw: DataFrame, found: Sequence[Rejected], batch_id: int, report: BatchReport, *, name: str = "dead"
    ) -> None:
        """Store dead letters of a batch, once for each `name`, and count them in its report."""
        if not found:
            return
        records = dead_letters(found, pipe=report.pipe, max_bytes=self.endpoint.max_record_bytes)
        batch = BatchName(f"{self.writer}:{name}", batch_id)
        self.endpoint.write_records(raw.sparkSession, records, dead_letter_topic(report.pipe), batch)
        for item in found:
            report.dead[item.reason] = report.dead.get(item.reason, 0) + 1
        log.warning("dead letters", pipe=report.pipe, batch=batch_id, events=len(found), reasons=report.dead)
