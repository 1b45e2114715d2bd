"""What Spark's tasks get of Kinesis: records that were read already, as Arrow, or a span to read."""

import atexit
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from services.core.broker.kinesis.blocking import BlockingKinesis
from services.core.broker.record import Batch
from spark.place import Span
from spark.sources.record_batches import RAW_SCHEMA, Schema, to_arrow

TASK_EVENTS = 5_000
"""A task gets at least so many records, as long as there are any."""


@cache
def connection(url: str) -> BlockingKinesis:
    """One a process, as long as it lives: opening one takes a second."""
    opened = BlockingKinesis(url)
    atexit.register(opened.close)
    return opened


class ArrowTask(InputPartition):
    """Records as an Arrow stream: only the process that plans asks the service, so that a record is read once."""

    def __init__(self, batches: Iterable[Batch], schema: Schema) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(to_arrow(batch, schema))
        self.data: bytes = sink.getvalue().to_pybytes()
        super().__init__(None)

    def read(self) -> Iterator[Any]:
        """Its Arrow batches."""
        with pa.ipc.open_stream(self.data) as reader:
            yield from reader


class SpanTask(InputPartition):
    """One span of a shard."""

    def __init__(self, span: Span) -> None:
        super().__init__(span)
        self.span = span

    def read(self, url: str) -> Iterator[Any]:
        """Its records as Arrow batches. Raises OffsetOutOfRange, Unavailable: Spark then fails the batch."""
        for batch in connection(url).read_range(*self.span):
            yield to_arrow(batch, RAW_SCHEMA)


def make_tasks(shards: Iterable[list[Batch]], schema: Schema) -> list[ArrowTask]:
    """A shard is never divided, so that its order survives; small ones share a task."""
    tasks, waiting, size = list[ArrowTask](), list[Batch](), 0
    for batches in shards:
        waiting += batches
        size += sum(len(batch.records) for batch in batches)
        if size >= TASK_EVENTS:
            tasks.append(ArrowTask(waiting, schema))
            waiting, size = [], 0
    return [*tasks, ArrowTask(waiting, schema)] if waiting else tasks
