"""Kinesis. A batch's records are collected at the driver and put from there. Writing is at least once, for Kinesis has no
idempotent put: a batch that is computed again after a crash writes its events again, with the same ids.
"""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from services.core.broker.kinesis.blocking import BlockingKinesis
from services.core.broker.kinesis.record_format import MAX_RECORD_BYTES, offset_of, split_offset
from services.core.broker.record import Batch, Record
from services.core.event import read_arrival
from spark.brokers.contract import BatchName, DataSourceBroker, Measurement
from spark.records import RAW, RAW_SCHEMA, OffsetRange, Offsets, to_arrow

_COUNTED = 100
"""The most records of a shard that one measurement of the backlog reads and counts."""


class KinesisSparkBroker(DataSourceBroker):
    """The streams behind this URL. The partitions of other brokers are shards here."""

    max_record_bytes = MAX_RECORD_BYTES

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._opened: BlockingKinesis | None = None
        self._opening = threading.Lock()

    @property
    def _kinesis(self) -> BlockingKinesis:
        with self._opening:
            if self._opened is None:
                self._opened = BlockingKinesis(self._url)
            return self._opened

    def identify(self, session: SparkSession, topics: Sequence[str]) -> dict[str, str]:
        """The streams' names with the time of their creation. Raises UnknownTopic, Unavailable."""
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
        return KinesisBacklogMeter(self._kinesis, topics)

    def read_ranges(self, session: SparkSession, ranges: Sequence[OffsetRange]) -> DataFrame:
        """Reads them at the driver, whose connection is open: another process takes a second to open its own."""
        batches = [to_arrow(batch, RAW_SCHEMA) for part in ranges for batch in self._kinesis.read_range(*part)]
        table = pa.Table.from_batches(batches) if batches else RAW_SCHEMA.empty_table()
        return session.createDataFrame(table, RAW)

    def write_records(self, session: SparkSession, records: Sequence[Record], topic: str, batch: BatchName) -> None:
        if records:
            self._kinesis.send(topic, records, batch.epoch)

    def append(self, session: SparkSession, topic: str, records: Sequence[Record]) -> None:
        self._kinesis.send(topic, records)

    def close(self) -> None:
        with self._opening:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


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
