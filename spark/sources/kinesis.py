"""Kinesis as a source and sink of Spark's streams. Runs in Spark's Python workers."""

import atexit
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

from services.core.broker.kinesis.blocking import BlockingKinesis
from services.core.broker.kinesis.incarnation import Stream
from services.core.broker.record import Batch, Record
from spark.records import Schema, raw_schema, to_arrow
from spark.sources.offsets import UNBOUNDED, Offset, check_incarnation
from spark.sources.shards import (
    Planned,
    ShardPosition,
    Shards,
    check_beginning,
    list_shards,
    pack_shards,
    read_shards,
    shards_of,
)
from spark.sources.writer import BatchWriter, write_arrow

POLL_EVERY_S = 0.5
"""The interval of polls of an idle stream: a shard allows five reads a second, for all its readers together."""
TASK_EVENTS = 5_000
"""A task gets at least this number of records, if there are enough."""


@cache
def connection(url: str) -> BlockingKinesis:
    """One per process, for its whole life: opening one takes a second."""
    opened = BlockingKinesis(url)
    atexit.register(opened.close)
    return opened


class ArrowTask(InputPartition):
    """Records as an Arrow stream: only the process that plans reads from Kinesis, so that a record is read once."""

    def __init__(self, batches: Iterable[Batch], schema: Schema) -> None:
        self.data = write_arrow((to_arrow(batch, schema) for batch in batches), schema)
        super().__init__(None)


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


class KinesisStreamReader(DataSourceStreamReader):
    """At most `max_events` a micro-batch.

    Lives in a Python process of its own beside the query, and reads there; `read` runs in task workers and uses no state. Keeps
    the records of the last planned batch. A batch that is computed again after a crash is read again, by its offsets.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._url = options["broker"]
        self._topics = options["topics"].split(",")
        self._max_events = int(options["max_events"])
        self._schema = raw_schema(options)
        self._planned: dict[tuple[str, int], Planned] = {}
        self._idle_since = -POLL_EVERY_S

    def initialOffset(self) -> Offset:  # noqa: N802 - pyspark's name
        """The beginning of every shard."""
        streams = {topic: connection(self._url).stream(topic) for topic in self._topics}
        return pack_shards(
            {topic: (found.name, list_shards(topic, found, {}, _now_ms())) for topic, found in streams.items()}
        )

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - pyspark's name
        return ReadMaxRows(self._max_events)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - pyspark's name
        """Read the next micro-batch; returns its end.

        Raises OffsetOutOfRange, TopicRecreated: the query stops, nothing is skipped.
        """
        if time.monotonic() - self._idle_since < POLL_EVERY_S:
            return start
        room = limit.max_rows if isinstance(limit, ReadMaxRows) else UNBOUNDED
        topics, planned = dict[str, tuple[str, Shards]](), dict[tuple[str, int], Planned]()
        for number, topic in enumerate(self._topics):
            stream = self._stream(topic, start)
            before = shards_of(start, topic)[1]
            share = -(-room // (len(self._topics) - number))
            kinesis = connection(self._url)
            found = kinesis.wait(read_shards(kinesis.broker.reader, topic, stream, before, share))
            listed = list_shards(topic, stream, before, _now_ms())
            topics[topic] = stream.name, listed | {shard: one.position for shard, one in found.items()}
            planned |= {(topic, shard): one for shard, one in found.items() if one.batches}
            room -= sum(len(batch.records) for one in found.values() for batch in one.batches)
        if planned:
            self._planned = planned
        else:
            self._idle_since = time.monotonic()
        return pack_shards(topics)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """The tasks between two offsets."""
        shards = []
        for topic in self._topics:
            known = shards_of(start, topic)[1]
            for shard, position in shards_of(end, topic)[1].items():
                if shard in known and known[shard].next < position.next:
                    shards.append(self._batches(topic, shard, start, position))
        return list(make_tasks(shards, self._schema))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one task."""
        if isinstance(partition, ArrowTask):
            with pa.ipc.open_stream(partition.data) as reader:
                yield from reader

    def _batches(self, topic: str, shard: int, start: Offset, end: ShardPosition) -> list[Batch]:
        """The planned records, or the same read again. Raises OffsetOutOfRange, TopicRecreated when they are gone.

        They are read again from their first record on: the record before it may have expired long before they arrived.
        """
        known = shards_of(start, topic)[1][shard]
        kept = self._planned.get((topic, shard))
        if kept is not None and (kept.start, kept.position.next) == (known.next, end.next):
            return kept.batches
        stream = self._stream(topic, start)
        if not end.begun:  # an older checkpoint's
            check_beginning(topic, stream, shard, known, _now_ms())
        return list(connection(self._url).read_range(topic, shard, end.begun or known.next, end.next))

    def _stream(self, topic: str, offset: Offset) -> Stream:
        stream = connection(self._url).stream(topic)
        check_incarnation(topic, stream.name, shards_of(offset, topic)[0])
        return stream


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def store_batch(url: str, topic: str, records: list[Record], batch: int) -> None:
    """At least once: Kinesis has no idempotent put. After an error a part may be stored."""
    if records:
        connection(url).send(topic, records, batch)


def open_writer(options: Mapping[str, str]) -> BatchWriter:
    """A stream's sink. A batch that is computed again after a crash is written again, with the same event ids."""
    return BatchWriter(options, partial(store_batch, options["broker"], options["topic"]))
