"""Batch reads of Kinesis: backfill, and computing a batch again to find what made it fail."""

from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from spark.sources.batch_ranges import wanted_ranges
from spark.sources.kinesis_tasks import SpanTask, connection


class KinesisBatchReader(DataSourceReader):
    """Reads what `batch_ranges` says, a task for each shard. A range that is gone raises.

    A child and its parent may be read at the same time: the order of a key holds within a shard only.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        self._url = options["broker"]

    def partitions(self) -> list[InputPartition]:
        """One task per shard."""
        kinesis = connection(self._url)
        spans = wanted_ranges(self._options, kinesis.ranges, kinesis.offsets_at)
        return [SpanTask(span) for span in spans if span.start < span.end]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one task; an empty read has one task without a value."""
        return partition.read(self._url) if isinstance(partition, SpanTask) else iter(())
