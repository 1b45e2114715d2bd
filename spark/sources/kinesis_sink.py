"""Writing to Kinesis: each batch at least once, by one process, after all of it was computed.

Kinesis has no idempotent put and no transactions. A batch that is computed again after a crash is written again, with the same
event ids. A task that Spark tries again, or computes twice, writes nothing twice.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.taskcontext import TaskContext

from spark.durable import sync_batch
from spark.sources.kinesis_tasks import connection
from spark.sources.record_batches import OUT_SCHEMA, from_arrow


class Computed(WriterCommitMessage):
    """The records of one task, as an Arrow stream."""

    def __init__(self, task: int, data: bytes) -> None:
        self.task, self.data = task, data


class KinesisStreamWriter(DataSourceStreamArrowWriter):
    """`write` runs in task workers, `commit` and `abort` in a process of the driver's host, through which the batch passes."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._url, self._topic = options["broker"], options["topic"]
        self._checkpoint = options.get("checkpointlocation", "")

    def write(self, iterator: Iterator[Any]) -> Computed:
        """Hand the task's records over; nothing is stored yet."""
        context = TaskContext.get()
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, OUT_SCHEMA) as writer:
            for columns in iterator:
                writer.write_batch(columns.cast(OUT_SCHEMA))
        return Computed(0 if context is None else context.partitionId(), sink.getvalue().to_pybytes())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - pyspark's name
        """Store the batch durably. Raises BrokerError kinds: then a part may be stored, and Spark computes it all again."""
        if self._checkpoint.startswith("file://"):
            sync_batch(Path(self._checkpoint.removeprefix("file://")), batchId)
        computed = sorted((m for m in messages if isinstance(m, Computed)), key=lambda message: message.task)
        records = [record for message in computed for record in from_arrow(pa.ipc.open_stream(message.data).read_all())]
        if records:
            connection(self._url).send(self._topic, records, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - pyspark's name
        """Nothing was stored."""
