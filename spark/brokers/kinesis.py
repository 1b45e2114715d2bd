"""Kinesis. Tasks read and put the records; the driver has counts, positions and origins. Writing is at least once, for Kinesis
has no idempotent put: a batch that is computed again after a crash writes its events again, with the same ids.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from services.core import metrics
from services.core.broker.connect import parse_kinesis_url
from services.core.broker.kinesis.blocking import BlockingKinesis
from services.core.broker.kinesis.bucket import Store
from services.core.broker.kinesis.record_format import MAX_RECORD_BYTES, offset_of, split_offset
from services.core.broker.record import Batch, Record
from services.core.event import read_arrival
from spark.brokers.contract import (
    BatchName,
    DataSourceBroker,
    Measurement,
    ObservedWrite,
    WantedOrigins,
    Written,
    limit_rows,
    open_stream,
    try_in_tasks,
)
from spark.java import hadoop_setting
from spark.records import NO_BEGINS, Begins, OffsetRange, Offsets
from spark.sources.ends import Place, ShardEnd, ends_of, open_notes, plan_of
from spark.sources.offsets import offsets_of
from spark.sources.puts import PUT_ROW, add_counters, put_task
from spark.sources.source import NAME

_COUNTED = 100
"""The most records of a shard that one measurement of the backlog reads and counts."""


class KinesisSparkBroker(DataSourceBroker):
    """The streams behind this URL. The partitions of other brokers are shards here."""

    max_record_bytes = MAX_RECORD_BYTES

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._opened: BlockingKinesis | None = None
        self._opening = threading.Lock()
        self._store = Store()
        self._refused: dict[tuple[str, str, int], int] = {}
        """By checkpoint and shard: how many reads of tasks are in the metric, or were refused before this process began."""

    @property
    def _kinesis(self) -> BlockingKinesis:
        with self._opening:
            if self._opened is None:
                self._opened = BlockingKinesis(self._url)
            return self._opened

    def identify(self, session: SparkSession, topics: Sequence[str]) -> dict[str, str]:
        """The streams' names with the time of their creation. Raises UnknownTopic, Unavailable."""
        self._store = _store_of(session, self._url)
        return {topic: self._kinesis.stream(topic).name for topic in topics}

    def count_partitions(self, session: SparkSession, topics: Sequence[str]) -> int:
        return sum(len(self._kinesis.stream(topic).shards) for topic in topics)

    def stored_ranges(self, session: SparkSession, topics: Sequence[str]) -> list[OffsetRange]:
        """Reads the ends of the shards: seconds."""
        return [
            OffsetRange(topic, shard, part.start, part.end)
            for topic in topics
            for shard, part in self._kinesis.ranges(topic).items()
        ]

    def newest_ranges(self, session: SparkSession, topics: Sequence[str], events: int) -> list[OffsetRange]:
        """The last Kinesis record of each shard; it may hold several events."""
        found = []
        for part in self.stored_ranges(session, topics):
            entry = offset_of(split_offset(max(0, part.end - 1))[0])
            found.append(part._replace(start=max(part.start, entry, part.end - events)))
        return found

    def split_ranges(self, ranges: Sequence[OffsetRange], events: int) -> Iterator[list[OffsetRange]]:
        """Found by reading, shard by shard, since offsets count nothing."""
        for part in ranges:
            start, count = part.start, 0
            for batch in self._kinesis.read_range(*part):
                count += len(batch.records)
                if count >= events:
                    yield [part._replace(start=start, end=batch.offsets[-1] + 1)]
                    start, count = batch.offsets[-1] + 1, 0
            if count:
                yield [part._replace(start=start)]

    def open_meter(self, session: SparkSession, topics: Sequence[str]) -> "KinesisBacklogMeter":
        self._store = _store_of(session, self._url)
        return KinesisBacklogMeter(self._kinesis, topics)

    def read_stream(
        self,
        session: SparkSession,
        topics: Sequence[str],
        max_events: int | None,
        *,
        checkpoint: str,
        name: str | None = None,
        begins: Begins = NO_BEGINS,  # penstock group reset refuses it here
    ) -> DataFrame:
        options = {"broker": self._url, "topics": ",".join(topics), "max_events": str(max_events)}
        options |= {"checkpoint": checkpoint, "store": json.dumps(_store_of(session, self._url))}
        options |= {"tasks": str(session.sparkContext.defaultParallelism)}
        return open_stream(session, name).format(NAME).options(**options).load()

    def checkpoint_version(self, per_batch: bool) -> int:
        return 1 if per_batch else 2

    def parse_offsets(self, line: str, checkpoint: str) -> Offsets:
        """Raises EndsDamaged. What a batch has not read yet counts as not done."""
        found = json.loads(line)
        places = {(topic, shard): n for topic in found["topics"] for shard, n in offsets_of(found, topic)[1].items()}
        if (plan := plan_of(found)) is not None:
            ends = ends_of(plan, open_notes(Place(checkpoint, self._store), plan.folder))
            places |= {place: int(end.next) for place, end in ends.items()}
            for end in ends.values():
                self._count_refused(checkpoint, end)
        return places

    def _count_refused(self, checkpoint: str, end: ShardEnd) -> None:
        """Tasks run in processes that show nobody their metrics. Less than all: those before a shard's first note, and those of
        attempts that failed, are in no note."""
        place = checkpoint, end.topic, end.shard
        more = end.refused - self._refused.setdefault(place, end.refused)
        if more > 0:  # not from a note of an earlier batch
            metrics.BROKER_READ_THROTTLES.labels(end.topic, str(end.shard)).inc(more)
            self._refused[place] = end.refused

    def write_stream(self, frame: DataFrame, topic: str, writer: str, *, by_time: bool) -> DataStreamWriter:
        return super().write_stream(frame.repartition("key") if by_time else frame, topic, writer, by_time=by_time)

    def write(
        self,
        frame: DataFrame,
        topic: str,
        batch: BatchName,
        wanted: WantedOrigins | None,
        settle: Callable[[], None] = lambda: None,
    ) -> Written:
        """When executing the frame fails, some of its records may have been written. Times are within 0.26 % of their age."""
        observed = ObservedWrite(frame, wanted)
        put = partial(put_task, self._url, topic, batch.writer, batch.epoch)
        for row in observed.frame.mapInArrow(put, PUT_ROW).collect():
            add_counters(row.counters)
        settle()
        return observed.result()

    def try_write(self, frame: DataFrame) -> None:
        """In the tasks, as `write`."""
        try_in_tasks(limit_rows(frame))

    def write_records(self, session: SparkSession, records: Sequence[Record], topic: str, batch: BatchName) -> bool:
        if records:
            self._kinesis.send(topic, records, batch.epoch)
        return True

    def append(self, session: SparkSession, topic: str, records: Sequence[Record]) -> None:
        self._kinesis.send(topic, records)

    def close(self) -> None:
        with self._opening:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


def _store_of(session: SparkSession, url: str) -> Store:
    """The object store of checkpoints, from the settings of Hadoop's client for it; its region by default that of the broker."""
    region, endpoint, style = (
        hadoop_setting(session, f"fs.s3a.{name}") for name in ("endpoint.region", "endpoint", "path.style.access")
    )
    if endpoint and "://" not in endpoint:
        endpoint = f"https://{endpoint}"
    return Store(region or parse_kinesis_url(url).region, endpoint, style == "true")


class KinesisBacklogMeter:
    """Reads the first records of each shard that are not done, once.

    So a backlog is a lower bound: of each shard it counts no more records than one read returns.
    """

    def __init__(self, kinesis: BlockingKinesis, topics: Sequence[str]) -> None:
        self._kinesis, self._topics = kinesis, topics

    def measure(self, done: Offsets, reported: Offsets) -> Measurement:
        """Unreported records are as old as the first of them, by its arrival at ingest: that was before it was stored."""
        begun = time.time_ns() // 1_000_000
        waiting = self._kinesis.wait(self._read(done))
        unreported = waiting if reported == done else self._kinesis.wait(self._read(reported))
        backlog = {place: len(batch.records) if batch else 0 for place, batch in waiting.items()}
        return Measurement(
            backlog, min([begun, *(_arrival(batch.records[0]) for batch in unreported.values() if batch)])
        )

    async def _read(self, offsets: Offsets) -> dict[tuple[str, int], Batch | None]:
        broker = self._kinesis.broker
        streams = {topic: await broker.stream(topic) for topic in self._topics}
        places = [(topic, shard.number) for topic, stream in streams.items() for shard in stream.shards]
        found = await asyncio.gather(
            *(broker.reader.read(*place, offsets.get(place, 0), max_records=_COUNTED) for place in places)
        )
        return dict(zip(places, found, strict=True))


def _arrival(record: Record) -> int:
    arrival = read_arrival(record)
    return record.timestamp if arrival is None else arrival
