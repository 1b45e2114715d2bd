"""Writing to Kinesis from Spark's tasks: each task puts its own records, and tells the driver their number.

At least once: Kinesis has no idempotent put. A task that Spark computes again puts its records again, with the same event ids,
and where its output is the same as before, in entries of the same bytes: members of groups skip these (docs/adr/0015). All tasks
of a worker process share its paces, and processes find their shares by throttles (`services.core.broker.kinesis.pace`).
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.taskcontext import TaskContext

from services.core import metrics
from services.core.broker.kinesis.blocking import BlockingKinesis
from spark.records import OUT_SCHEMA, from_arrow
from spark.sources.kinesis import connection
from spark.sources.offsets import sync_before_commit
from spark.sources.writer import BY_TIME

HELD_BYTES = 16 << 20
"""A task holds so much of its output before it puts any. A transform that fails on an event of a usual batch stores nothing of
that task."""
PUT_ROW = "events BIGINT, counters STRING"
"""What a task returns: the number of records that it put, and what its process counted meanwhile, for `add_counters`."""
_BATCH_PROPERTY = "streaming.sql.batchId"
"""Spark's local property with the number of a stream's batch."""


def put_task(url: str, topic: str, writer: str, batch: int, rows: Iterable[Any]) -> Iterator[Any]:
    """For `mapInArrow` over a frame with columns OUT: puts the rows of a task, and returns one PUT_ROW.

    writer, batch: as in `BatchName`. Raises BrokerError kinds; then a part may be stored.
    """
    before = _read_counters(topic)
    events = put_rows(Put(connection(url), topic, writer, batch, _task()), rows)
    counted = orjson.dumps(list((_read_counters(topic) - before).items())).decode()
    yield pa.RecordBatch.from_pydict({"events": [events], "counters": [counted]})


class Put(NamedTuple):
    """What one task of a batch puts. The pieces of its output have names, so a repeat of the same output has the same bytes.

    Its records without a key go to one partition, those of another batch or task to another one.
    """

    kinesis: BlockingKinesis
    topic: str
    writer: str
    batch: int
    task: int

    def rows(self, held: Iterable[Any], pieces: Iterator[int]) -> None:
        for row in held:
            if row.num_rows:
                name = f"{self.writer}:{self.batch}:{self.task}:{next(pieces)}"
                self.kinesis.put(self.topic, from_arrow(row), self.batch + self.task, name)


def put_rows(put: Put, rows: Iterable[Any], *, by_time: bool = False) -> int:
    """Put these record batches (columns OUT), in order or by their time; returns the number of records.

    Holds HELD_BYTES of them at most; all of them by time.
    """
    held, size, count, pieces = list[Any](), 0, 0, itertools.count()
    for row in rows:
        held.append(row)
        size += row.nbytes
        count += row.num_rows
        if size >= HELD_BYTES and not by_time:
            put.rows(held, pieces)
            held, size = [], 0
    if by_time and count:
        table = pa.Table.from_batches(held, OUT_SCHEMA)
        held = table.take(pc.sort_indices(table, [("timestamp", "ascending")])).to_batches()
    put.rows(held, pieces)
    return count


def _task() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


_COUNTERS = {
    "bytes": metrics.BROKER_PARTITION_BYTES,
    "entries": metrics.BROKER_PARTITION_ENTRIES,
    "throttles": metrics.BROKER_THROTTLES,
    "waits": metrics.BROKER_PACE_WAIT,
    "retries": metrics.BROKER_RETRIES,
}
"""The metrics of writing. A worker shows nobody its own; the autoscaler reads those of the service."""
_Sample = tuple[str, tuple[tuple[str, str], ...]]
"""A name from _COUNTERS, and labels."""


def _read_counters(topic: str) -> Counter[_Sample]:
    found: Counter[_Sample] = Counter()
    for name, counter in _COUNTERS.items():
        for sample in next(iter(counter.collect())).samples:
            if sample.name.endswith("_total") and sample.labels["topic"] == topic:
                found[name, tuple(sample.labels.items())] = sample.value  # type: ignore[assignment]  # waits are seconds
    return found


def add_counters(counters: str) -> None:
    """Add what a task's worker counted to the metrics of this process."""
    for (name, labels), more in orjson.loads(counters):
        _COUNTERS[name].labels(**dict(labels)).inc(more)


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
        options = self._options
        put = Put(connection(options["broker"]), options["topic"], options["writer"], int(batch or 0), _task())
        rows = (columns.cast(OUT_SCHEMA) for columns in iterator)
        return Stored(put_rows(put, rows, by_time=options.get(BY_TIME) == "true"))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - pyspark's name
        """In a process of the driver's host, after all tasks."""
        sync_before_commit(self._options, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - pyspark's name
        """What was put stays: the batch is computed again."""


def open_writer(options: Mapping[str, str]) -> KinesisStreamWriter:
    return KinesisStreamWriter(options)
