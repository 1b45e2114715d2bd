"""Writing to the log: each batch once, by writer and batch id, in one transaction per topic."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.taskcontext import TaskContext

from services.core.broker.log.blocking import abort_staged, commit_staged, ends, stage
from services.core.broker.partitioner import split_by_key
from services.core.broker.record import Record
from spark.durable import sync_batch
from spark.sources.log_read import path_of
from spark.sources.record_batches import from_arrow


def place(records: Sequence[Record], partitions: int, turn: int) -> dict[int, list[Record]]:
    """Records by partition: by key as everywhere; those without a key go to one partition, another each turn."""
    return split_by_key(records, partitions, keyless=turn % partitions)


class Staged(WriterCommitMessage):
    """What one task put aside; None when it had no records."""

    def __init__(self, task: int, token: str | None) -> None:
        self.task, self.token = task, token


class LogStreamWriter(DataSourceStreamArrowWriter):
    """`write` runs in task workers, `commit` and `abort` in a process of the driver's host."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._path, self._topic, self._writer = path_of(options), options["topic"], options["writer"]
        self._checkpoint = options.get("checkpointlocation", "")

    def write(self, iterator: Iterator[Any]) -> Staged:
        """Put the task's records aside, durably; nobody sees them yet."""
        context = TaskContext.get()
        task = 0 if context is None else context.partitionId()
        records = [record for columns in iterator for record in from_arrow(columns)]
        if not records:
            return Staged(task, None)
        parts = place(records, len(ends(self._path, self._topic)), task)
        return Staged(task, stage(self._path, self._topic, self._writer, _epoch(context), parts))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - pyspark's name
        """Make the batch visible in one transaction; a batch that was written before changes nothing."""
        if self._checkpoint.startswith("file://"):
            sync_batch(Path(self._checkpoint.removeprefix("file://")), batchId)
        commit_staged(self._path, self._topic, self._writer, batchId, _tokens(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - pyspark's name
        """Forget what was put aside."""
        abort_staged(self._path, self._topic, _tokens(messages))


def _tokens(messages: list[WriterCommitMessage | None]) -> list[str]:
    staged = sorted((m for m in messages if isinstance(m, Staged)), key=lambda message: message.task)
    return [message.token for message in staged if message.token is not None]


def _epoch(context: TaskContext | None) -> int:
    """The batch id, by which abandoned files are cleaned up; Spark hands it to tasks as a local property."""
    text = None if context is None else context.getLocalProperty("streaming.sql.batchId")
    return int(text) if text else 0
