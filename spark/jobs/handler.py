"""What Spark calls with each micro-batch: one at a time, stopped between two batches, its failure kept for the job."""

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter

from pyspark.sql import DataFrame

from spark.jobs.query import Query, Stopping
from spark.observed import BatchReport


class Handler(ABC):
    """One query's batches. `failure`: what ended the query, with its cause."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self.failure: BaseException | None = None
        self._at_work = threading.Lock()
        self._ended = threading.Event()

    def __call__(self, raw: DataFrame, batch_id: int) -> None:
        """Handle one batch. Raises a short error whose cause is in `failure`: Spark copies the text many times over."""
        with self._at_work:
            if self._ended.is_set():
                raise Stopping
            try:
                self.query.checkpoint.make_durable(batch_id)
                begun = time.monotonic()
                with self.query.pulse.at_work(self.query.writer, f"batch {batch_id}"):
                    report = self.handle(raw, batch_id)
                report.took += Counter({round((time.monotonic() - begun) * 1000): report.lag_out.total()})
                self.query.report(report)
            except BaseException as error:
                self.failure = error
                raise RuntimeError(f"batch {batch_id} failed: {type(error).__name__}") from None

    def finish(self, limit: float) -> bool:
        """Begin no further batch and wait up to `limit` seconds for the one at work. Whether it is over."""
        self._ended.set()
        if self._at_work.acquire(timeout=limit):
            self._at_work.release()
            return True
        return False

    @abstractmethod
    def handle(self, raw: DataFrame, batch_id: int) -> BatchReport:
        """Do everything that the batch asks for, durably."""
