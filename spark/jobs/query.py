"""One query of a pipe: its parts, how it runs in micro-batches, and its warm-up."""

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import structlog
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark.batch_report import BatchReport
from spark.brokers.contract import SparkBroker
from spark.figures import QueryFigures
from spark.health import ANSWER, PART, PLANNING, Watchdog
from spark.jobs.attempts import Attempts, Stopping
from spark.jobs.checkpoint import Checkpoint
from spark.jobs.culprits import Part, to_ranges, try_transform
from spark.records import RAW, OffsetRange, Offsets, RecordOffset, offset_text
from spark.transforms.preparation import Prepared

log = structlog.get_logger()

POLL_S = 0.25
ANSWER_S = 120.0
"""Java hangs when it answers nothing for so long. Its longest pauses, to free memory, last some seconds."""
_SETTLE_S = 0.02
_IDLE = "Waiting for data to arrive"
"""Spark's status of a query that found nothing new and has nothing left to do."""
WARM_S = 1.0
"""A transform is warm when a run takes no longer."""
WARM_UP_RUNS, WARM_UP_LIMIT_S = 5, 10.0
"""After this number of runs, or of seconds, the query starts though its transform is not warm."""
_WARM_UP_EVENTS = 20


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a pipe.

    writer: its name at the broker. report: reports a stored batch; returns when the report is durable. ledger: whether reports
    have sets of origins. stopping: set once the job is to stop. figures: None where nobody looks at them. named_sources: as in
    `Identity.named`.
    """

    session: SparkSession
    prepared: Prepared
    broker: SparkBroker
    checkpoint: Checkpoint
    writer: str
    report: Callable[[BatchReport], None]
    ledger: bool
    stopping: threading.Event
    attempts: Attempts
    watchdog: Watchdog
    figures: QueryFigures | None = None
    named_sources: bool = False

    @property
    def pipe(self) -> str:
        return self.prepared.pipe

    @property
    def real_time(self) -> bool:
        return self.prepared.real_time

    def beside(self, name: str) -> "Query":
        """Another query of the same pipe, with a checkpoint of its own."""
        return replace(self, checkpoint=self.checkpoint.beside(name), writer=f"{self.writer}:{name}")

    def source(self) -> DataFrame:
        """All the pipe's sources as one raw stream."""
        max_events = self.prepared.transform.max_events
        return self.broker.read_stream(
            self.session,
            list(self.prepared.views),
            max_events,
            checkpoint=self.checkpoint.path,
            begins=self.checkpoint.begins(),
        )

    def trial(self, raw: DataFrame, records: Sequence[RecordOffset]) -> str | None:
        """Run the transform on these records of a batch and store nothing: None when it passed, else its error.

        Raises Stopping, TooMuch.
        """
        self.check_not_stopping()
        self.watchdog.begin(self.writer, "a trial of some events", PART)
        problem = try_transform(self.prepared, self.broker, raw, records)
        self.watchdog.begin(self.writer, "the search for events that fail")
        return problem

    def read_part(self, part: Part) -> DataFrame:
        """These records, read by themselves. A source that was removed since has none."""
        ranges = [one for one in to_ranges(part) if one.topic in self.prepared.views]
        return self.broker.read_ranges(self.session, ranges) if ranges else self.session.createDataFrame([], RAW)

    def check_not_stopping(self) -> None:
        """Between two steps of long work. Raises Stopping."""
        if self.stopping.is_set():
            raise Stopping

    def ranges_between(self, begin: Offsets, end: Offsets) -> list[OffsetRange]:
        """The stored records between two positions; a partition without begin is read from its start."""
        found = []
        for topic, partition, start, _ in self.broker.stored_ranges(self.session, list(self.prepared.views)):
            place = (topic, partition)
            found.append(OffsetRange(topic, partition, max(start, begin.get(place, start)), end.get(place, start)))
        return [part for part in found if part.start < part.end]

    def planned_ranges(self, batch: int) -> list[OffsetRange]:
        before = self.checkpoint.offsets(batch - 1 if batch else None, self.broker.parse_offsets)
        return self.ranges_between(before, self.checkpoint.offsets(batch, self.broker.parse_offsets))


class RunningQuery(Protocol):
    """One run of a pipe's query or queries."""

    def wait(self) -> None:
        """Wait up to POLL_S. Raises the error that ended a query."""

    def has_completed_trigger(self) -> bool:
        """Whether a trigger was completed since the start: a batch, or a poll that found nothing."""

    def stop(self, may_wait: Callable[[], bool]) -> None:
        """Finish the current batch, unless `may_wait` says no before that: the next run computes it again. Blocking."""


class BatchHandler(ABC):
    """Spark calls it with each micro-batch, one at a time. `failure`: the error that ended the query, with its cause."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self.failure: BaseException | None = None
        self.batches = 0
        """That it began."""
        self._at_work = threading.Lock()
        self._ended = threading.Event()

    def __call__(self, raw: DataFrame, batch_id: int) -> None:
        """Process one batch. Raises a short error whose cause is in `failure`: Spark copies the text many times over."""
        with self._at_work:
            if self._ended.is_set():
                raise Stopping
            self.batches += 1
            try:
                self.query.checkpoint.check_claim()
                self.query.checkpoint.make_durable(batch_id)
                begun = time.monotonic()
                with self.query.watchdog.watching(self.query.writer, f"batch {batch_id}"):
                    report = self.process(raw, batch_id)
                report.took += Counter({round((time.monotonic() - begun) * 1000): report.lag_out.total()})
                self.query.checkpoint.check_claim()  # else the report may contradict that of the next holder
                self.query.report(report)
            except BaseException as error:
                self.failure = error
                raise RuntimeError(f"batch {batch_id} failed: {type(error).__name__}") from None

    @property
    def is_at_work(self) -> bool:
        return self._at_work.locked()

    def finish(self, may_wait: Callable[[], bool]) -> None:
        """Begin no further batch and wait for the current one while `may_wait` agrees."""
        self._ended.set()
        while not self._at_work.acquire(timeout=_SETTLE_S):
            if not may_wait():
                return
        self._at_work.release()

    @abstractmethod
    def process(self, raw: DataFrame, batch_id: int) -> BatchReport:
        """Store all results of the batch, durably."""


class MicroBatchQuery:
    """A running query whose micro-batches a handler processes."""

    def __init__(self, query: Query, source: DataFrame, handler: BatchHandler, *, name: str, interval: float) -> None:
        """Starts it. interval: at most one batch in so many seconds."""
        self._handler, self._planned = handler, -1
        writer = source.writeStream.foreachBatch(handler).queryName(name)
        writer = writer.option("checkpointLocation", query.checkpoint.path)
        self._running = writer.trigger(processingTime=f"{round(interval * 1000)} milliseconds").start()

    def wait(self) -> None:
        """Raises the handler's error, if there is one."""
        wait_for_end(self._running, self._handler.query.watchdog, self._handler)
        if (figures := self._handler.query.figures) is not None:
            figures.follow(self._running)
        self._watch_planning()

    def _watch_planning(self) -> None:
        """Spark asks the source where the next batch ends before it calls the handler. A disk that hangs shows there first."""
        handler, watchdog = self._handler, self._handler.query.watchdog
        if handler.is_at_work or not is_in_trigger(self._running):
            watchdog.end(PLANNING)
            self._planned = -1
        elif self._planned != handler.batches:
            self._planned = handler.batches
            watchdog.begin(PLANNING, "the search for new events")

    def has_completed_trigger(self) -> bool:
        return has_completed_trigger(self._running)

    def stop(self, may_wait: Callable[[], bool]) -> None:
        self._handler.query.watchdog.end(PLANNING)
        self._handler.finish(may_wait)
        while is_in_trigger(self._running) and may_wait():  # Spark commits the batch
            time.sleep(_SETTLE_S)
        self._running.stop()


def wait_for_end(running: StreamingQuery, watchdog: Watchdog, handler: BatchHandler | None = None) -> None:
    """Wait up to POLL_S for the query to end; raises its error.

    Java answers within that time, whatever its batch does: one that hangs is noticed although no batch is under way.
    """
    try:
        with watchdog.watching(ANSWER, "the answer of Java", ANSWER_S / watchdog.limit):
            ended = running.awaitTermination(POLL_S)  # type: ignore[arg-type]  # a float is fine: it is passed on in ms
    except StreamingQueryException as error:
        raise (handler and handler.failure) or error from error
    if ended:
        raise RuntimeError("the query ended without an error")


def has_completed_trigger(running: StreamingQuery) -> bool:
    return running.lastProgress is not None or running.status["message"] == _IDLE


def is_in_trigger(running: StreamingQuery) -> bool:
    return bool(running.isActive and running.status["isTriggerActive"])


def warm_up(query: Query) -> None:
    """Run the transform on a few of the newest events and store nothing, so that Java and Python load before the first batch.

    Failures are left to the query. Blocking.
    """
    ranges = query.broker.newest_ranges(query.session, list(query.prepared.views), _WARM_UP_EVENTS)
    ends = [
        RecordOffset(part.topic, part.partition, offset_text(at)) for part in ranges for at in (part.start, part.end)
    ]
    begun = time.monotonic()
    for _ in range(WARM_UP_RUNS):
        query.check_not_stopping()
        before = time.monotonic()
        with query.watchdog.watching(query.writer, "the run before the first batch"):
            raw = query.broker.read_ranges(query.session, ranges)
            try_transform(query.prepared, query.broker, raw, ends)
        now = time.monotonic()
        if now - before < WARM_S or now - begun > WARM_UP_LIMIT_S:
            break
    log.info("warmed_up", pipe=query.pipe, seconds=round(time.monotonic() - begun, 1))
