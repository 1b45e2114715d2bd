"""Writing to Kinesis from Spark's tasks: each task puts its own records, and tells the driver their number.

At least once: Kinesis has no idempotent put. A task that Spark computes again puts its records again, with the same event ids.
All tasks of a worker process share its paces, and processes find their shares by throttles (`services.core.broker.kinesis.pace`).
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.taskcontext import TaskContext

from services.core.broker.kinesis.blocking import BlockingKinesis
from spark.records import OUT_SCHEMA, from_arrow
from spark.sources.kinesis import connection
from spark.sources.offsets import sync_before_commit
from spark.sources.writer import BY_TIME

HELD_BYTES = 16 << 20
"""A task holds so much of its output before it puts any. A transform that fails on an event of a usual batch stores nothing of
that task."""
PUT_ROW = "events BIGINT"
"""What a task returns: the number of records that it put."""
_BATCH_PROPERTY = "streaming.sql.batchId"
"""Spark's local property with the number of a stream's batch."""


def put_task(url: str, topic: str, batch: int, rows: Iterable[Any]) -> Iterator[Any]:
    """For `mapInArrow` over a frame with columns OUT: puts the rows of a task, and returns one PUT_ROW.

    Raises BrokerError kinds; then a part may be stored.
    """
    events = put_rows(connection(url), topic, batch + _task(), rows)
    yield pa.RecordBatch.from_pydict({"events": [events]})


def put_rows(kinesis: BlockingKinesis, topic: str, turn: int, rows: Iterable[Any], *, by_time: bool = False) -> int:
    """Put these record batches (columns OUT), in order or by their time; returns the number of records.

    Holds HELD_BYTES of them at most; all of them by time. turn: chooses the partition of records without a key.
    """
    held, size, count = list[Any](), 0, 0
    for row in rows:
        held.append(row)
        size += row.nbytes
        count += row.num_rows
        if size >= HELD_BYTES and not by_time:
            _put(kinesis, topic, turn, held)
            held, size = [], 0
    if by_time and count:
        table = pa.Table.from_batches(held, OUT_SCHEMA)
        held = table.take(pc.sort_indices(table, [("timestamp", "ascending")])).to_batches()
    _put(kinesis, topic, turn, held)
    return count


def _put(kinesis: BlockingKinesis, topic: str, turn: int, held: Iterable[Any]) -> None:
    for row in held:
        if row.num_rows:
            kinesis.send(topic, from_arrow(row), turn)


def _task() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


class Stored(WriterCommitMessage):
    """A task has put so many records."""

    def __init__(self, records: int) -> None:
        self.records = records


class KinesisStreamWriter(DataSourceStreamArrowWriter):
    """A stream's sink. By time, each task's records are put in the order of their times."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)

    def write(self, iterator: Iterator[Any]) -> Stored:
        """In a task. Raises BrokerError kinds: then Spark computes the batch again, and writes it again."""
        context = TaskContext.get()
        batch = context.getLocalProperty(_BATCH_PROPERTY) if context is not None else None
        turn = int(batch or 0) + _task()
        by_time = self._options.get(BY_TIME) == "true"
        rows = (columns.cast(OUT_SCHEMA) for columns in iterator)
        return Stored(
            put_rows(connection(self._options["broker"]), self._options["topic"], turn, rows, by_time=by_time)
        )

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - pyspark's name
        """In a process of the driver's host, after all tasks."""
        sync_before_commit(self._options, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - pyspark's name
        """What was put stays: the batch is computed again."""


def open_writer(options: Mapping[str, str]) -> KinesisStreamWriter:
    return KinesisStreamWriter(options)
