"""Batch reads of the log: backfill, and computing a batch again to find what made it fail."""

import json
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from pyspark.sql.datasource import DataSourceReader, InputPartition

from services.core.broker.log.blocking import ends, offsets_at
from spark.place import Span
from spark.sources.log_read import LogTask, plan_tasks, read_task


class LogBatchReader(DataSourceReader):
    """Reads `topics` as they are now, or a part of them.

    Options: `ranges`, JSON `[[topic, partition, start, end], …]`; or `since` and `until`, ISO dates with a time zone
    (from the first record that is not older, up to the first that is not older). A range that is gone raises.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._options = dict(options)
        self._path = options["path"]

    def partitions(self) -> list[InputPartition]:
        """One task per some thousand records."""
        given = self._options.get("ranges")
        ranges = [Span(*item) for item in json.loads(given)] if given else list(self._ranges())
        return list(plan_tasks(ranges))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one task; an empty read has one task without a value."""
        if not isinstance(partition, LogTask):
            return iter(())
        return read_task(self._path, partition)

    def _ranges(self) -> Iterable[Span]:
        for topic in self._options["topics"].split(","):
            starts = self._at(topic, "since")
            stops = self._at(topic, "until")
            for partition, held in ends(self._path, topic).items():
                start = starts.get(partition, held.start) if starts else held.start
                yield Span(topic, partition, start, stops.get(partition, held.end) if stops else held.end)

    def _at(self, topic: str, option: str) -> dict[int, int]:
        text = self._options.get(option)
        return offsets_at(self._path, topic, datetime.fromisoformat(text)) if text else {}
