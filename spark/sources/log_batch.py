"""Batch reads of the log: backfill, and computing a batch again to find what made it fail."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from services.core.broker.log.blocking import ends, offsets_at
from spark.sources.batch_ranges import wanted_ranges
from spark.sources.log_read import LogTask, path_of, plan_tasks, read_task


class LogBatchReader(DataSourceReader):
    """Reads what `batch_ranges` says. A range that is gone raises."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        self._path = path_of(options)

    def partitions(self) -> list[InputPartition]:
        """One task per some thousand records."""
        return list(
            plan_tasks(wanted_ranges(self._options, partial(ends, self._path), partial(offsets_at, self._path)))
        )

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one task; an empty read has one task without a value."""
        if not isinstance(partition, LogTask):
            return iter(())
        return read_task(self._path, partition)
