"""The embedded log as a source of Spark's streams and batches, and as a sink. Runs in Spark's Python workers."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

from services.core.broker.contract import PartitionRange
from services.core.broker.log.blocking import append_once, ends, read_range
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.partitioner import split_by_key
from services.core.broker.record import Record
from spark.records import RAW_SCHEMA, OffsetRange, to_arrow
from spark.sources.offsets import UNBOUNDED, Offset, advance, begun_in, check_stored, offsets_of, pack_offsets
from spark.sources.writer import BatchWriter

TASK_EVENTS = 5_000
"""A task reads at least this number of records, if there are enough: starting one costs as much as reading hundreds."""


class LogTask(InputPartition):
    """The ranges that one task reads, in this order."""

    def __init__(self, ranges: list[OffsetRange]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


def plan_tasks(ranges: Iterable[OffsetRange]) -> list[LogTask]:
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


def read_task(path: str, task: InputPartition) -> Iterator[Any]:
    """The task's records as Arrow batches. Raises OffsetOutOfRange, DataDamaged: Spark then fails the batch.

    An empty read has one task without a value.
    """
    for part in task.ranges if isinstance(task, LogTask) else ():
        for batch in read_range(path, part.topic, part.partition, part.start, part.end):
            yield to_arrow(batch, RAW_SCHEMA)


def _path(options: Mapping[str, str]) -> str:
    return urlsplit(options["broker"]).path


class LogStreamReader(DataSourceStreamReader):
    """At most `max_events` a micro-batch, so that a backlog never becomes one giant batch.

    Lives in a Python process of its own beside the query; `read` runs in task workers and uses no state.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._path = _path(options)
        self._topics = options["topics"].split(",")
        self._max_events = int(options["max_events"])
        self._begins: Offset = json.loads(options["begins"]) if "begins" in options else pack_offsets({})
        self._readers: dict[str, TopicReader] = {}

    def initialOffset(self) -> Offset:  # noqa: N802 - pyspark's name
        """Where a reset to a time lets it begin; else None is read. The first batch of each other partition notes where it
        begins."""
        return self._begins

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - pyspark's name
        return ReadMaxRows(self._max_events)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - pyspark's name
        """The end of the next micro-batch, or `start` when there is nothing new. Raises OffsetOutOfRange, TopicRecreated: the
        query stops, nothing is skipped.
        """
        room = limit.max_rows if isinstance(limit, ReadMaxRows) else UNBOUNDED
        topics, begun, found = {}, {}, False
        for number, topic in enumerate(self._topics):
            incarnation, stored = self._stored(topic)
            known = offsets_of(start, topic)
            check_stored(topic, incarnation, known, stored)
            share = -(-room // (len(self._topics) - number))
            following = advance(known[1], stored, share)
            topics[topic] = (incarnation, following)
            begun[topic] = {p: part.start for p, part in stored.items() if p not in known[1]}
            read = sum(following[p] - known[1].get(p, part.start) for p, part in stored.items())
            room, found = room - read, found or read > 0
        return pack_offsets(topics, begun) if found else start

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """The tasks between two offsets. Raises TopicRecreated when the records are not those that were counted."""
        ranges = []
        for topic in self._topics:
            incarnation, stored = self._stored(topic)
            following = offsets_of(end, topic)
            check_stored(topic, incarnation, following, stored)
            starts = {p: part.start for p, part in stored.items()}  # of a batch that an earlier version planned
            starts |= begun_in(end, topic) | offsets_of(start, topic)[1]
            ranges += [OffsetRange(topic, p, starts[p], n) for p, n in following[1].items()]
        return list(plan_tasks(ranges))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_task(self._path, partition)

    def stop(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _stored(self, topic: str) -> tuple[str, dict[int, PartitionRange]]:
        """(incarnation, the stored range of each partition). The file stays open: Spark asks several times a second."""
        reader = self._readers.get(topic)
        if reader is None:
            reader = self._readers[topic] = TopicReader(DataFolder.prepare(self._path), topic)
        stored = reader.ranges()
        return reader.store.meta.incarnation.hex(), stored


class LogBatchReader(DataSourceReader):
    """Reads the ranges of the option `ranges`, JSON `[[topic, partition, start, end], …]`. A range that is gone raises."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._path = _path(options)
        self._ranges = [OffsetRange(*item) for item in json.loads(options["ranges"])]

    def partitions(self) -> list[InputPartition]:
        return list(plan_tasks(self._ranges))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_task(self._path, partition)


def partition_records(records: Sequence[Record], partitions: int, turn: int) -> dict[int, list[Record]]:
    """Records by partition: by key as everywhere; those without a key go to one partition, another each turn."""
    return split_by_key(records, partitions, keyless=turn % partitions)


def store_batch(path: str, topic: str, writer: str, records: Sequence[Record], batch: int) -> bool:
    """Store the batch in one transaction, unless this writer stored it before (False). An empty batch is stored, too."""
    parts = partition_records(records, len(ends(path, topic)), batch)
    return append_once(path, topic, writer, batch, parts)


def open_writer(options: Mapping[str, str]) -> BatchWriter:
    """A stream's sink, which stores each batch once, by writer and batch number."""
    return BatchWriter(options, partial(store_batch, _path(options), options["topic"], options["writer"]))
