"""Kinesis. A batch's records are collected at the driver and put from there. Writing is at least once, for Kinesis has no
idempotent put: a batch that is computed again after a crash writes its events again, with the same ids.
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from services.core.broker.kinesis.blocking import BlockingKinesis
from services.core.broker.kinesis.frames import MAX_RECORD_BYTES
from services.core.broker.kinesis.offsets import offset_of, split_offset
from services.core.broker.record import Batch, Record
from services.core.event import read_arrival
from spark.brokers.endpoint import BatchName
from spark.brokers.gauge import Look
from spark.collecting import collect
from spark.place import Position, Span
from spark.shapes import RAW
from spark.sources.offsets import place_of
from spark.sources.record_batches import RAW_SCHEMA, from_arrow, to_arrow
from spark.sources.source import NAME
from spark.written import Wanted, Written, of_records

_COUNTED = 100
"""Records of a shard that one look at the backlog reads and counts at most."""


class KinesisEndpoint:
    """The streams behind this URL. What other endpoints say of partitions, this one says of shards."""

    max_record_bytes = MAX_RECORD_BYTES
    needs_kafka_jars = False
    real_time = False
    packs_origins = True

    def __init__(self, url: str) -> None:
        self._url = url
        self._opened: BlockingKinesis | None = None
        self._opening = threading.Lock()

    @property
    def _kinesis(self) -> BlockingKinesis:
        with self._opening:
            if self._opened is None:
                self._opened = BlockingKinesis(self._url)
            return self._opened

    def check(self, session: SparkSession, topics: Sequence[str]) -> dict[str, str]:
        """The streams' names with the time of their making. Raises UnknownTopic, Unavailable."""
        return {topic: self._kinesis.stream(topic).name for topic in topics}

    def partition_count(self, session: SparkSession, topics: Sequence[str]) -> int:
        """See Endpoint."""
        return sum(len(self._kinesis.stream(topic).shards) for topic in topics)

    def read_stream(
        self, session: SparkSession, topics: Sequence[str], max_events: int | None, *, origins: bool = False
    ) -> DataFrame:
        """See Endpoint; the query stops when records that it wants to read are gone."""
        options = {"broker": self._url, "topics": ",".join(topics), "max_events": str(max_events)}
        options |= {"origins": "read"} if origins else {}
        return session.readStream.format(NAME).options(**options).load()

    def held(self, session: SparkSession, topics: Sequence[str]) -> list[Span]:
        """See Endpoint. Reads the ends: seconds."""
        return [
            Span(topic, shard, part.start, part.end)
            for topic in topics
            for shard, part in self._kinesis.ranges(topic).items()
        ]

    def newest(self, session: SparkSession, topics: Sequence[str], events: int) -> list[Span]:
        """See Endpoint: of each shard what it holds last, as it was put."""
        found = []
        for span in self.held(session, topics):
            entry = offset_of(split_offset(max(0, span.end - 1))[0])
            found.append(span._replace(start=max(span.start, entry, span.end - events)))
        return found

    def windows(self, spans: Sequence[Span], events: int) -> Iterator[list[Span]]:
        """See Endpoint: found by reading, shard by shard, since offsets count nothing."""
        for span in spans:
            start, count = span.start, 0
            for batch in self._kinesis.read_range(*span):
                count += len(batch.records)
                if count >= events:
                    yield [span._replace(start=start, end=batch.offsets[-1] + 1)]
                    start, count = batch.offsets[-1] + 1, 0
            if count:
                yield [span._replace(start=start)]

    def open_gauge(self, session: SparkSession, topics: Sequence[str]) -> "KinesisGauge":
        """See Endpoint."""
        return KinesisGauge(self._kinesis, topics)

    def read_spans(self, session: SparkSession, spans: Sequence[Span]) -> DataFrame:
        """See Endpoint. Reads them at the driver, whose connection is open: another process takes a second to open its own."""
        batches = [to_arrow(batch, RAW_SCHEMA) for span in spans for batch in self._kinesis.read_range(*span)]
        table = pa.Table.from_batches(batches) if batches else RAW_SCHEMA.empty_table()
        return session.createDataFrame(table, RAW)

    def parse_position(self, line: str) -> Position:
        """See Endpoint."""
        offset = json.loads(line)
        return {(topic, shard): n for topic in offset["topics"] for shard, n in place_of(offset, topic)[1].items()}

    def write_stream(self, frame: DataFrame, topic: str, writer: str) -> DataStreamWriter:
        """See Endpoint; at least once."""
        return frame.writeStream.format(NAME).options(broker=self._url, topic=topic, writer=writer)

    def write(self, frame: DataFrame, topic: str, batch: BatchName, wanted: Wanted) -> Written:
        """See Endpoint; at least once. Raises the frame's errors, or a BrokerError."""
        records = from_arrow(collect(frame))
        self.write_records(frame.sparkSession, records, topic, batch)
        return of_records(records, wanted)

    def try_write(self, frame: DataFrame) -> None:
        """See Endpoint."""
        collect(frame)

    def write_records(self, session: SparkSession, records: Sequence[Record], topic: str, batch: BatchName) -> None:
        """See Endpoint; at least once."""
        if records:
            self._kinesis.send(topic, records, batch.epoch)

    def open_appender(self, session: SparkSession, topic: str) -> "KinesisAppender":
        """See Endpoint."""
        return KinesisAppender(self._kinesis, topic)

    def last_epoch(self, topic: str, writer: str) -> int | None:
        """Kinesis does not know."""
        return None

    def close(self) -> None:
        """See Endpoint."""
        with self._opening:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()


class KinesisAppender:
    """To a stream of one partition; see Appender."""

    def __init__(self, kinesis: BlockingKinesis, topic: str) -> None:
        self._kinesis, self._topic = kinesis, topic

    def append(self, records: Sequence[Record]) -> None:
        """See Appender."""
        self._kinesis.send(self._topic, records)

    def close(self) -> None:
        """The connection is the endpoint's."""


class KinesisGauge:
    """Looks at the first records of each shard that are not done: one read, and at a shard's end nothing comes of it.

    So a backlog is a lower bound: of each shard no more is counted than a read gives.
    """

    def __init__(self, kinesis: BlockingKinesis, topics: Sequence[str]) -> None:
        self._kinesis, self._topics = kinesis, topics

    def look(self, done: Position, told: Position) -> Look:
        """See Gauge. What is not told of is as old as the first of it, by when it came to ingest: before it was stored."""
        begun = time.time_ns() // 1_000_000
        waiting = self._kinesis.wait(self._read(done))
        untold = waiting if told == done else self._kinesis.wait(self._read(told))
        backlog = {place: len(batch.records) if batch else 0 for place, batch in waiting.items()}
        return Look(backlog, min([begun, *(_arrival(batch.records[0]) for batch in untold.values() if batch)]))

    async def _read(self, position: Position) -> dict[tuple[str, int], Batch | None]:
        broker = self._kinesis.broker
        streams = {topic: await broker.stream(topic) for topic in self._topics}
        places = [(topic, shard.number) for topic, stream in streams.items() for shard in stream.shards]
        found = await asyncio.gather(
            *(broker.admin.read(*place, position.get(place, 0), max_records=_COUNTED) for place in places)
        )
        return dict(zip(places, found, strict=True))


def _arrival(record: Record) -> int:
    arrival = read_arrival(record)
    return record.timestamp if arrival is None else arrival
