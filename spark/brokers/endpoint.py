"""Where pipes read and write: what a job needs of a broker, whichever it is."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from services.core.broker.record import Record
from spark.brokers.appender import Appender
from spark.brokers.gauge import Gauge
from spark.place import Position, Span
from spark.written import Wanted, Written


class BatchName(NamedTuple):
    """Names one write of one batch of one query: a broker that can stores it once. writer: the query; epoch: the batch."""

    writer: str
    epoch: int


class Endpoint(Protocol):
    """One broker, as Spark reaches it. Methods block; they raise `services.core.broker.errors` kinds or Spark's errors."""

    max_record_bytes: int
    needs_kafka_jars: bool
    real_time: bool
    """Whether Spark's real-time mode can read it."""
    packs_origins: bool
    """Whether one row of ORIGINS_READ speaks for several."""

    def check(self, session: SparkSession, topics: Sequence[str]) -> dict[str, str]:
        """An identity per topic, which differs when a topic was deleted and made again. Raises UnknownTopic."""

    def partition_count(self, session: SparkSession, topics: Sequence[str]) -> int:
        """Partitions of all these topics together. Raises UnknownTopic."""

    def read_stream(
        self, session: SparkSession, topics: Sequence[str], max_events: int | None, *, origins: bool = False
    ) -> DataFrame:
        """Raw records as a stream, from the topics' starts, at most about max_events a micro-batch (None: real-time).

        origins: with the column ORIGINS_READ.
        """

    def held(self, session: SparkSession, topics: Sequence[str]) -> list[Span]:
        """What is stored now, by topic and partition."""

    def newest(self, session: SparkSession, topics: Sequence[str], events: int) -> list[Span]:
        """About the newest `events` of each partition that are stored now."""

    def windows(self, spans: Sequence[Span], events: int) -> Iterator[list[Span]]:
        """These spans in parts of about so many events."""

    def open_gauge(self, session: SparkSession, topics: Sequence[str]) -> Gauge:
        """Tells how far a query over these topics is behind."""

    def read_spans(self, session: SparkSession, spans: Sequence[Span]) -> DataFrame:
        """These raw records, a micro-batch of them or two, as a batch. This, or executing it, raises when some are gone."""

    def parse_position(self, line: str) -> Position:
        """The offset of one source as Spark's checkpoint keeps it."""

    def write_stream(self, frame: DataFrame, topic: str, writer: str) -> DataStreamWriter:
        """A streaming sink for a frame with columns OUT."""

    def write(self, frame: DataFrame, topic: str, batch: BatchName, wanted: Wanted) -> Written:
        """Execute the frame (columns OUT) and store its records durably; nothing of it if executing it fails.

        Gives what was in the frame, also when this batch was stored before.
        """

    def try_write(self, frame: DataFrame) -> None:
        """Execute the frame as `write` does, and store nothing. Raises the frame's errors."""

    def write_records(self, session: SparkSession, records: Sequence[Record], topic: str, batch: BatchName) -> None:
        """Store these records durably."""

    def open_appender(self, session: SparkSession, topic: str) -> Appender:
        """For small records, often."""

    def last_epoch(self, topic: str, writer: str) -> int | None:
        """The newest batch that this writer stored; None without one, or where the broker does not know."""

    def close(self) -> None:
        """Let go of connections. What is asked later opens them again."""
