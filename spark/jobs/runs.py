"""A query that runs: starting it, watching it, and ending it without leaving a batch half done."""

import time
from collections.abc import Callable
from typing import Protocol

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from spark.brokers.endpoint import Endpoint
from spark.checkpoint import Checkpoint
from spark.deduplication import drop_duplicates
from spark.jobs.handler import Handler
from spark.jobs.per_batch import BatchHandler
from spark.observed import BatchReport
from spark.transforms.preparation import Prepared

POLL_S = 0.25
_SETTLE_S = 0.02


class Run(Protocol):
    """One run of a pipe's query or queries."""

    def watch(self) -> None:
        """Wait up to POLL_S. Raises what ended a query."""

    def end(self, limit: float) -> None:
        """Finish the batch at work within `limit` seconds, or leave it: it comes again. Blocking."""


class PerBatchRun:
    """A query whose micro-batches a handler computes."""

    def __init__(
        self, source: DataFrame, handler: Handler, checkpoint: Checkpoint, *, name: str, interval: float
    ) -> None:
        """Starts it. interval: at most one batch in so many seconds."""
        self._handler = handler
        writer = source.writeStream.foreachBatch(handler).queryName(name).option("checkpointLocation", checkpoint.place)
        self._query = writer.trigger(processingTime=f"{round(interval * 1000)} milliseconds").start()

    def watch(self) -> None:
        """See Run; the error is the handler's, if it was one."""
        wait_for_end(self._query, self._handler)

    def end(self, limit: float) -> None:
        """See Run."""
        deadline = time.monotonic() + limit
        self._handler.finish(limit)
        settle(self._query, deadline)
        self._query.stop()


def start_per_batch(
    session: SparkSession,
    prepared: Prepared,
    endpoint: Endpoint,
    checkpoint: Checkpoint,
    writer: str,
    report: Callable[[BatchReport], None],
) -> PerBatchRun:
    """Run a row-by-row transform on each micro-batch."""
    handler = BatchHandler(prepared, endpoint, checkpoint, writer, report)
    source = endpoint.read_stream(session, list(prepared.views), prepared.transform.max_events)
    if prepared.transform.deduplicate_within is not None:
        # Ids are forgotten with the next data; a batch only for that would delay it.
        session.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        source = drop_duplicates(source, prepared.transform.deduplicate_within)
    return PerBatchRun(source, handler, checkpoint, name=prepared.pipe, interval=prepared.transform.interval)


def wait_for_end(query: StreamingQuery, handler: Handler | None = None) -> None:
    """Wait up to POLL_S for the query to end; raises why it did."""
    try:
        ended = query.awaitTermination(POLL_S)  # type: ignore[arg-type]  # a float is fine: it is passed on in ms
    except StreamingQueryException as error:
        raise (handler and handler.failure) or error from error
    if ended:
        raise RuntimeError("the query ended without an error")


def settle(query: StreamingQuery, deadline: float) -> None:
    """Wait until Spark has noted the batch at work as done."""
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
        time.sleep(_SETTLE_S)
