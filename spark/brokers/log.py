"""The embedded log. Its driver is on the same host, so a batch's records are collected there and appended in one
transaction: no worker, no staging and one sync a batch. `sources.log_sink` writes from many tasks instead.
"""

import json
from collections.abc import Iterator, Sequence
from functools import partial

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from services.core.broker.log import blocking
from services.core.broker.log.frames import MAX_RECORD_BYTES
from services.core.broker.log.layout import DataFolder
from services.core.broker.log.reader import TopicReader
from services.core.broker.record import Record
from spark.brokers.appender import LogAppender
from spark.brokers.endpoint import BatchName
from spark.brokers.gauge import EndsGauge
from spark.collecting import collect
from spark.place import Position, Span, cut_evenly
from spark.sources.log_sink import place
from spark.sources.offsets import place_of
from spark.sources.record_batches import from_arrow
from spark.sources.source import NAME
from spark.written import Wanted, Written, of_records


class LogEndpoint:
    """The log in the folder `path`."""

    max_record_bytes = MAX_RECORD_BYTES
    needs_kafka_jars = False
    real_time = False
    packs_origins = True

    def __init__(self, path: str) -> None:
        self._path, self._url = path, f"log://{path}"

    def check(self, session: SparkSession, topics: Sequence[str]) -> dict[str, str]:
        """The topics' incarnations. Raises UnknownTopic, DataDamaged."""
        found = {}
        for topic in topics:
            with TopicReader(DataFolder.prepare(self._path), topic) as reader:
                found[topic] = reader.store.meta.incarnation.hex()
        return found

    def partition_count(self, session: SparkSession, topics: Sequence[str]) -> int:
        """See Endpoint."""
        return len(self.held(session, topics))

    def read_stream(
        self, session: SparkSession, topics: Sequence[str], max_events: int | None, *, origins: bool = False
    ) -> DataFrame:
        """See Endpoint; the query stops when records that it wants to read are gone or damaged."""
        options = {"broker": self._url, "topics": ",".join(topics), "max_events": str(max_events)}
        options |= {"origins": "read"} if origins else {}
        return session.readStream.format(NAME).options(**options).load()

    def held(self, session: SparkSession, topics: Sequence[str]) -> list[Span]:
        """See Endpoint."""
        return [Span(topic, p, *part) for topic in topics for p, part in self._ranges(topic)]

    def newest(self, session: SparkSession, topics: Sequence[str], events: int) -> list[Span]:
        """See Endpoint."""
        return [span._replace(start=max(span.start, span.end - events)) for span in self.held(session, topics)]

    def windows(self, spans: Sequence[Span], events: int) -> Iterator[list[Span]]:
        """See Endpoint."""
        return cut_evenly(spans, events)

    def open_gauge(self, session: SparkSession, topics: Sequence[str]) -> EndsGauge:
        """See Endpoint."""
        return EndsGauge(partial(self.held, session, topics))

    def read_spans(self, session: SparkSession, spans: Sequence[Span]) -> DataFrame:
        """See Endpoint."""
        return session.read.format(NAME).options(broker=self._url, ranges=json.dumps(spans)).load()

    def parse_position(self, line: str) -> Position:
        """See Endpoint."""
        offset = json.loads(line)
        return {(topic, p): n for topic in offset["topics"] for p, n in place_of(offset, topic)[1].items()}

    def write_stream(self, frame: DataFrame, topic: str, writer: str) -> DataStreamWriter:
        """See Endpoint; exactly once by Spark's batch number."""
        return frame.writeStream.format(NAME).options(broker=self._url, topic=topic, writer=writer)

    def write(self, frame: DataFrame, topic: str, batch: BatchName, wanted: Wanted) -> Written:
        """See Endpoint. Raises the frame's errors, or a BrokerError."""
        records = from_arrow(collect(frame))
        self._append(records, topic, batch)
        return of_records(records, wanted)

    def try_write(self, frame: DataFrame) -> None:
        """See Endpoint."""
        collect(frame)

    def write_records(self, session: SparkSession, records: Sequence[Record], topic: str, batch: BatchName) -> None:
        """See Endpoint."""
        self._append(records, topic, batch)

    def open_appender(self, session: SparkSession, topic: str) -> LogAppender:
        """See Endpoint."""
        return LogAppender(self._path, topic)

    def last_epoch(self, topic: str, writer: str) -> int | None:
        """See Endpoint."""
        return blocking.last_epoch(self._path, topic, writer)

    def close(self) -> None:
        """Nothing is held."""

    def _ranges(self, topic: str) -> list[tuple[int, tuple[int, int]]]:
        return [(p, (part.start, part.end)) for p, part in blocking.ends(self._path, topic).items()]

    def _append(self, records: Sequence[Record], topic: str, batch: BatchName) -> None:
        if records:
            parts = place(records, len(blocking.ends(self._path, topic)), batch.epoch)
            blocking.append_once(self._path, topic, batch.writer, batch.epoch, parts)
