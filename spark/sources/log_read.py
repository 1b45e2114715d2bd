"""What streaming and batch reads of the log share: which records one task reads, and reading them. Runs in Spark's
Python workers.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from pyspark.sql.datasource import InputPartition

from services.core.broker.log.blocking import read_range
from spark.place import Span
from spark.sources.record_batches import RAW_SCHEMA, Schema, to_arrow

TASK_EVENTS = 5_000
"""A task reads at least so many records, as long as there are any: starting one costs as much as reading hundreds."""


def path_of(options: Mapping[str, str]) -> str:
    """The log's folder, from the source's option `broker`."""
    return urlsplit(options["broker"]).path


class LogTask(InputPartition):
    """What one task reads, in this order."""

    def __init__(self, ranges: list[Span]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


def plan_tasks(ranges: Iterable[Span]) -> list[LogTask]:
    """Tasks for these ranges. A partition is never divided, so that its order survives."""
    tasks: list[LogTask] = []
    size = TASK_EVENTS
    for part in ranges:
        if part.end <= part.start:
            continue
        if size >= TASK_EVENTS:
            tasks.append(LogTask([]))
            size = 0
        tasks[-1].ranges.append(part)
        size += part.end - part.start
    return tasks


def read_task(path: str, task: LogTask, schema: Schema = RAW_SCHEMA) -> Iterator[Any]:
    """The task's records as Arrow batches of the schema. Raises OffsetOutOfRange, DataDamaged: Spark then fails the batch."""
    for part in task.ranges:
        for batch in read_range(path, part.topic, part.partition, part.start, part.end):
            yield to_arrow(batch, schema)
