"""Streaming reads of Kinesis, at most `max_events` a micro-batch."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

from services.core.broker.kinesis.membership import Stream
from services.core.broker.record import Batch
from spark.sources.kinesis_tasks import ArrowTask, connection, make_tasks
from spark.sources.offsets import Offset, check_incarnation
from spark.sources.record_batches import raw_schema
from spark.sources.shards import (
    Planned,
    ShardPosition,
    Shards,
    check_beginning,
    meet,
    pack_places,
    read_on,
    unpack_place,
)

LOOK_EVERY_S = 0.5
"""An idle stream is looked at so seldom: a shard answers five reads a second, to all its readers."""
UNBOUNDED = 1 << 62


class KinesisStreamReader(DataSourceStreamReader):
    """Lives in a Python process of its own beside the query, and reads there; `read` runs in task workers and uses no state.

    What the last batch was planned with is kept. A batch that is computed again after a crash is read again, by its offsets.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._url = options["broker"]
        self._topics = options["topics"].split(",")
        self._max_events = int(options["max_events"])
        self._schema = raw_schema(options)
        self._planned: dict[tuple[str, int], Planned] = {}
        self._idle_since = -LOOK_EVERY_S

    def initialOffset(self) -> Offset:  # noqa: N802 - pyspark's name
        """The beginning of every shard."""
        streams = {topic: connection(self._url).stream(topic) for topic in self._topics}
        return pack_places({topic: (found.name, meet(topic, found, {}, _now_ms())) for topic, found in streams.items()})

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - pyspark's name
        """What a micro-batch may hold."""
        return ReadMaxRows(self._max_events)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - pyspark's name
        """Read the next micro-batch, and give its end.

        Raises OffsetOutOfRange, TopicRecreated: the query stops, nothing is skipped.
        """
        if time.monotonic() - self._idle_since < LOOK_EVERY_S:
            return start
        room = limit.max_rows if isinstance(limit, ReadMaxRows) else UNBOUNDED
        places, planned = dict[str, tuple[str, Shards]](), dict[tuple[str, int], Planned]()
        for number, topic in enumerate(self._topics):
            stream = self._stream(topic, start)
            before = unpack_place(start, topic)[1]
            share = -(-room // (len(self._topics) - number))
            kinesis = connection(self._url)
            found = kinesis.wait(read_on(kinesis.broker.admin, topic, stream, before, share))
            met = meet(topic, stream, before, _now_ms())
            places[topic] = stream.name, met | {shard: one.position for shard, one in found.items()}
            planned |= {(topic, shard): one for shard, one in found.items() if one.batches}
            room -= sum(len(batch.records) for one in found.values() for batch in one.batches)
        if planned:
            self._planned = planned
        else:
            self._idle_since = time.monotonic()
        return pack_places(places)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """The tasks between two offsets."""
        shards = []
        for topic in self._topics:
            known = unpack_place(start, topic)[1]
            for shard, position in unpack_place(end, topic)[1].items():
                if shard in known and known[shard].next < position.next:
                    shards.append(self._batches(topic, shard, start, position))
        return list(make_tasks(shards, self._schema))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one task."""
        return partition.read() if isinstance(partition, ArrowTask) else iter(())

    def _batches(self, topic: str, shard: int, start: Offset, end: ShardPosition) -> list[Batch]:
        """As they were planned, or read again. Raises OffsetOutOfRange, TopicRecreated when they are not there any more.

        They are read again from their first record on: what stood right before it may have expired long before they came.
        """
        known = unpack_place(start, topic)[1][shard]
        kept = self._planned.get((topic, shard))
        if kept is not None and (kept.start, kept.position.next) == (known.next, end.next):
            return kept.batches
        stream = self._stream(topic, start)
        if not end.begun:  # an older checkpoint's
            check_beginning(topic, stream, shard, known, _now_ms())
        return list(connection(self._url).read_range(topic, shard, end.begun or known.next, end.next))

    def _stream(self, topic: str, offset: Offset) -> Stream:
        stream = connection(self._url).stream(topic)
        check_incarnation(topic, stream.name, unpack_place(offset, topic)[0])
        return stream


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
