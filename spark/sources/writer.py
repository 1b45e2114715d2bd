"""A stream's output: each task returns its records, and one process on the driver's host stores the batch."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.taskcontext import TaskContext

from services.core.broker.record import Record
from spark.records import OUT_SCHEMA, Schema, from_arrow
from spark.sources.offsets import sync_before_commit

BY_TIME = "by_time"
"""The option that sorts the records of a batch by their time. Spark sorts no stream."""
Store = Callable[[list[Record], int], object]
"""Stores the records of the batch with this number, durably. Raises BrokerError kinds: then Spark computes the batch again."""


def write_arrow(batches: Iterable[Any], schema: Schema) -> bytes:
    """An Arrow stream of these record batches."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


class Computed(WriterCommitMessage):
    """The records of one task, as an Arrow stream."""

    def __init__(self, task: int, data: bytes) -> None:
        self.task, self.data = task, data


class BatchWriter(DataSourceStreamArrowWriter):
    """Stores a batch after all of it was computed. So a task that Spark repeats, or computes twice, writes nothing twice.

    `write` runs in task workers, `commit` in a process of the driver's host.
    """

    def __init__(self, options: Mapping[str, str], store: Store) -> None:
        self._options, self._store = dict(options), store

    def write(self, iterator: Iterator[Any]) -> Computed:
        context = TaskContext.get()
        data = write_arrow((columns.cast(OUT_SCHEMA) for columns in iterator), OUT_SCHEMA)
        return Computed(0 if context is None else context.partitionId(), data)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - pyspark's name
        sync_before_commit(self._options, batchId)
        computed = sorted((m for m in messages if isinstance(m, Computed)), key=lambda message: message.task)
        records = [record for message in computed for record in from_arrow(pa.ipc.open_stream(message.data).read_all())]
        if self._options.get(BY_TIME) == "true":
            records.sort(key=lambda record: record.timestamp)
        self._store(records, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - pyspark's name
        """Nothing was stored."""
