"""A query that runs: starting it, watching it, and ending it without leaving a batch half done."""

import time
from typing import Protocol

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame
from pyspark.sql.streaming.query import StreamingQuery

from spark.deduplication import drop_duplicates
from spark.jobs.handler import Handler
from spark.jobs.per_batch import BatchHandler
from spark.jobs.query import Query

POLL_S = 0.25
_SETTLE_S = 0.02
_IDLE = "Waiting for data to arrive"
"""Spark's status of a query that has looked, found nothing new, and has nothing left to do."""


class Run(Protocol):
    """One run of a pipe's query or queries."""

    def watch(self) -> None:
        """Wait up to POLL_S. Raises what ended a query."""

    def works(self) -> bool:
        """Whether a trigger was completed since the start: a batch, or a look that found nothing."""

    def end(self, limit: float) -> None:
        """Finish the batch at work within `limit` seconds, or leave it: it comes again. Blocking."""


class PerBatchRun:
    """A query whose micro-batches a handler computes."""

    def __init__(self, query: Query, source: DataFrame, handler: Handler, *, name: str, interval: float) -> None:
        """Starts it. interval: at most one batch in so many seconds."""
        self._handler = handler
        writer = source.writeStream.foreachBatch(handler).queryName(name)
        writer = writer.option("checkpointLocation", query.checkpoint.place)
        self._running = writer.trigger(processingTime=f"{round(interval * 1000)} milliseconds").start()

    def watch(self) -> None:
        """See Run; the error is the handler's, if it was one."""
        wait_for_end(self._running, self._handler)

    def works(self) -> bool:
        """See Run."""
        return has_worked(self._running)

    def end(self, limit: float) -> None:
        """See Run."""
        deadline = time.monotonic() + limit
        self._handler.finish(limit)
        settle(self._running, deadline)
        self._running.stop()


def start_per_batch(query: Query) -> PerBatchRun:
    """Run a row-by-row transform on each micro-batch."""
    transform, deduplicates = query.prepared.transform, query.prepared.deduplicates
    source = query.source(origins=query.ledger and not deduplicates)  # of a row that is left out, they would be, too
    if transform.deduplicate_within is not None:
        # Ids are forgotten with the next data; a batch only for that would delay it.
        query.session.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        source = drop_duplicates(source, transform.deduplicate_within)
    return PerBatchRun(query, source, BatchHandler(query), name=query.pipe, interval=transform.interval)


def wait_for_end(running: StreamingQuery, handler: Handler | None = None) -> None:
    """Wait up to POLL_S for the query to end; raises why it did."""
    try:
        ended = running.awaitTermination(POLL_S)  # type: ignore[arg-type]  # a float is fine: it is passed on in ms
    except StreamingQueryException as error:
        raise (handler and handler.failure) or error from error
    if ended:
        raise RuntimeError("the query ended without an error")


def has_worked(running: StreamingQuery) -> bool:
    """See Run.works."""
    return running.lastProgress is not None or running.status["message"] == _IDLE


def settle(running: StreamingQuery, deadline: float) -> None:
    """Wait until Spark has noted the batch at work as done."""
    while running.isActive and running.status["isTriggerActive"] and time.monotonic() < deadline:
        time.sleep(_SETTLE_S)
