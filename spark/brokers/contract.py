"""A broker as Spark's jobs use it: reading and writing records, and measuring how far a pipe is behind."""

import json
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.readwriter import DataStreamReader, DataStreamWriter

from services.core.broker.connect import parse_kafka_url, parse_kinesis_url
from services.core.broker.record import Record
from services.core.ledger.age import Age
from services.core.pipe_file.pipes import PipeFile
from services.core.yaml_source import BadConfiguration, Problem
from spark.batch_report import (
    NO_ORIGINS,
    ORIGINS,
    Gathered,
    age,
    began,
    count_by_lag,
    gather_origins,
    minute_at,
    origins_of,
    read_lags,
    read_observed,
    read_origins,
)
from spark.records import NO_BEGINS, Begins, OffsetRange, Offsets, cut_evenly, from_arrow
from spark.sources.offsets import offsets_of, pack_offsets
from spark.sources.source import NAME
from spark.sources.writer import BY_TIME


class BatchName(NamedTuple):
    """Names one write of one batch. writer: the query; epoch: the batch. The log stores each name once."""

    writer: str
    epoch: int


class WantedOrigins(NamedTuple):
    """What a write returns for the ledger. arrival: of new events, in ms: their origins by minute; None: without minutes.

    since: where a batch is stored once: the ranges of the topic before its first attempt. A batch that was stored before is then
    described as it was stored, not as it is now; empty: as it is now.
    """

    arrival: int | None = None
    since: Sequence[OffsetRange] = ()


class Written(NamedTuple):
    """times: events by their time, ms. origins: none when none are wanted."""

    times: Counter[int]
    origins: Gathered


class ObservedWrite:
    """A frame with columns OUT that counts what is written of it, in the tasks."""

    def __init__(self, frame: DataFrame, wanted: WantedOrigins | None) -> None:
        self._observation, self._wanted = Observation(), wanted
        observed = [count_by_lag(age(f.col("timestamp"))).alias("lags"), began()]
        if wanted is not None:
            minute = None if wanted.arrival is None else minute_at(f.col("timestamp"), wanted.arrival)
            observed.append(gather_origins(minute=minute).alias(ORIGINS))
        self.frame = frame.observe(self._observation, *observed)

    def result(self) -> Written:
        """Call it after the action. Times are within 0.26 % of their age. Raises NothingObserved."""
        values = read_observed(self._observation)
        times = Counter({values["began"] - lag: events for lag, events in read_lags(values["lags"]).items()})
        return Written(times, NO_ORIGINS if self._wanted is None else read_origins(values[ORIGINS]))


Backlog = dict[tuple[str, int], int]
"""Records by topic and partition."""


class Measurement(NamedTuple):
    """backlog: records that are not done. settled_up_to: records stored before this time (ms) are reported; None: not known."""

    backlog: Backlog
    settled_up_to: int | None


class BacklogMeter(Protocol):
    """Measures one pipe's sources, also while the query is down."""

    def measure(self, done: Offsets, reported: Offsets) -> Measurement:
        """done, reported: of the query, of its reports. Raises BrokerError kinds, Spark's errors. One thread at a time."""


class OffsetBacklogMeter:
    """For brokers whose offsets count records, and that know the end of a partition."""

    def __init__(self, stored: Callable[[], Sequence[OffsetRange]]) -> None:
        self._stored, self._age = stored, Age()

    def measure(self, done: Offsets, reported: Offsets) -> Measurement:
        begun = time.time_ns() // 1_000_000
        stored = self._stored()
        starts = {(part.topic, part.partition): part.start for part in stored}
        ends = {(part.topic, part.partition): part.end for part in stored}
        return Measurement(measure_backlog(stored, done), self._age.done_up_to(begun, starts, ends, reported))


def measure_backlog(stored: Iterable[OffsetRange], done: Offsets) -> Backlog:
    """The records from these offsets to the present ends."""
    return {
        (topic, partition): max(0, end - max(start, done.get((topic, partition), start)))
        for topic, partition, start, end in stored
    }


class SparkBroker(ABC):
    """One broker. Methods block; they raise `services.core.broker.errors` kinds or Spark's errors."""

    stores_once: bool = False
    """Whether a batch that was stored before is not stored again."""

    max_record_bytes: int
    needs_kafka_jars: bool = False
    needs_kafka_login: bool = False
    """Whether Kafka's clients in Java need our classes for a login."""
    needs_aws_jars: bool = False
    """Whether they need AWS's SDK for it."""
    real_time: bool = False
    """Whether Spark's real-time mode can read it."""

    @abstractmethod
    def identify(self, session: SparkSession, topics: Sequence[str]) -> dict[str, str]:
        """An identity per topic; a topic that was deleted and created again has another one. Raises UnknownTopic."""

    def identity_of(self, incarnation: str) -> str:
        """As `identify` gives the topic of this incarnation, as of `Admin.incarnation`."""
        return incarnation

    def count_partitions(self, session: SparkSession, topics: Sequence[str]) -> int:
        """Partitions of all these topics together. Raises UnknownTopic."""
        return len(self.stored_ranges(session, topics))

    @abstractmethod
    def stored_ranges(self, session: SparkSession, topics: Sequence[str]) -> list[OffsetRange]:
        """The records that are stored now, by topic and partition."""

    def newest_ranges(self, session: SparkSession, topics: Sequence[str], events: int) -> list[OffsetRange]:
        """About the newest `events` of each partition that are stored now."""
        return [part._replace(start=max(part.start, part.end - events)) for part in self.stored_ranges(session, topics)]

    def split_ranges(self, ranges: Sequence[OffsetRange], events: int) -> Iterator[list[OffsetRange]]:
        """These ranges in parts of about this number of events."""
        return cut_evenly(ranges, events)

    def open_meter(self, session: SparkSession, topics: Sequence[str]) -> BacklogMeter:
        return OffsetBacklogMeter(partial(self.stored_ranges, session, topics))

    def checkpoint_version(self, per_batch: bool) -> int:
        """The format of a checkpoint, see `jobs.checkpoint`. per_batch: of a query that keeps no state over batches."""
        return 1

    @abstractmethod
    def parse_offsets(self, line: str, checkpoint: str) -> Offsets:
        """Where a batch ends, by the offset of one source in Spark's checkpoint. On Kinesis, as far as the batch was read.

        checkpoint: the URI of the folder that it is in.
        """

    def with_topics(self, session: SparkSession, offset: str, topics: Sequence[str]) -> str:
        """This offset of a checkpoint for a query over these topics, where Spark's source needs all of them there, and no others.

        Topics that it does not know begin at their first stored record. Raises UnknownTopic, Unavailable.
        """
        return offset

    @abstractmethod
    def read_stream(
        self,
        session: SparkSession,
        topics: Sequence[str],
        max_events: int | None,
        *,
        checkpoint: str,
        name: str | None = None,
        begins: Begins = NO_BEGINS,
    ) -> DataFrame:
        """Raw records as a stream, from the topics' starts, at most about max_events a micro-batch (None: real-time).

        checkpoint: of the query that will run, a URI; empty for a frame that never runs. name: of the source in the checkpoint;
        letters, digits and _. begins: for a checkpoint without a finished batch: where some partitions begin. The query fails
        when the next records, also those there, are missing or damaged, or their topic was made anew; or this call raises.
        """

    @abstractmethod
    def read_ranges(self, session: SparkSession, ranges: Sequence[OffsetRange]) -> DataFrame:
        """These raw records as a batch; at most two micro-batches. This, or executing the frame, raises when some are missing."""

    @abstractmethod
    def write_stream(self, frame: DataFrame, topic: str, writer: str, *, by_time: bool) -> DataStreamWriter:
        """A streaming sink for a frame with columns OUT.

        by_time: the records of a batch are stored in the order of their time; on Kinesis those of a key, on Kafka none.
        """

    @abstractmethod
    def write(
        self,
        frame: DataFrame,
        topic: str,
        batch: BatchName,
        wanted: WantedOrigins | None,
        settle: Callable[[], None] = lambda: None,
    ) -> Written:
        """Execute the frame (columns OUT) and store its records durably.

        Returns the events of the frame; when this batch was stored before, see `WantedOrigins`. wanted: None without a ledger.
        settle: called once the frame was executed; where a batch is stored once, before its records are.
        """

    @abstractmethod
    def try_write(self, frame: DataFrame) -> None:
        """Execute the frame as `write` does, and store nothing. Raises the frame's errors.

        Raises TooMuch where a task has more rows than MAX_ROWS, and the write would not fail for that.
        """

    @abstractmethod
    def write_records(self, session: SparkSession, records: Sequence[Record], topic: str, batch: BatchName) -> bool:
        """Store these records durably. Returns whether they are stored: False when this batch was stored before."""

    @abstractmethod
    def append(self, session: SparkSession, topic: str, records: Sequence[Record]) -> None:
        """Store small records in partition 0 of a topic, durably, without a Spark job. After BrokerErrors some may be stored.

        Several threads may call it at once.
        """

    def stream_of(self, incarnation: str) -> str | None:
        """The stream whose topic is others' and has origins of this incarnation; None for events of ours."""
        return None

    def last_epoch(self, topic: str, writer: str) -> int | None:
        """The newest batch that this writer stored; None without one, or where the broker does not know."""
        return None

    def close(self) -> None:  # noqa: B027  most brokers hold nothing
        """Close connections. Later calls open them again."""


def open_stream(session: SparkSession, name: str | None) -> DataStreamReader:
    """For a source of this name in the checkpoint, or without one."""
    return session.readStream if name is None else session.readStream.name(name)


class DataSourceBroker(SparkBroker):
    """A broker that Spark reads through our data source. Its batches pass through the driver, which writes them."""

    def __init__(self, url: str) -> None:
        self._url = url

    def read_stream(
        self,
        session: SparkSession,
        topics: Sequence[str],
        max_events: int | None,
        *,
        checkpoint: str,
        name: str | None = None,
        begins: Begins = NO_BEGINS,
    ) -> DataFrame:
        options = {"broker": self._url, "topics": ",".join(topics), "max_events": str(max_events)}
        options["begins"] = json.dumps(pack_offsets({topic: begins[topic] for topic in topics if topic in begins}))
        return open_stream(session, name).format(NAME).options(**options).load()

    def read_ranges(self, session: SparkSession, ranges: Sequence[OffsetRange]) -> DataFrame:
        return session.read.format(NAME).options(broker=self._url, ranges=json.dumps(ranges)).load()

    def parse_offsets(self, line: str, checkpoint: str) -> Offsets:
        found = json.loads(line)
        return {(topic, p): n for topic in found["topics"] for p, n in offsets_of(found, topic)[1].items()}

    def write_stream(self, frame: DataFrame, topic: str, writer: str, *, by_time: bool) -> DataStreamWriter:
        sink = frame.writeStream.format(NAME).options(broker=self._url, topic=topic, writer=writer)
        return sink.option(BY_TIME, by_time)

    def write(
        self,
        frame: DataFrame,
        topic: str,
        batch: BatchName,
        wanted: WantedOrigins | None,
        settle: Callable[[], None] = lambda: None,
    ) -> Written:
        """Nothing of the frame is stored when executing it fails."""
        records = from_arrow(collect_bounded(frame))
        settle()
        stored = self.write_records(frame.sparkSession, records, topic, batch)
        if not stored and wanted is not None and wanted.since:
            records = self.read_since(topic, wanted.since)
        return describe_records(records, wanted)

    def read_since(self, topic: str, since: Sequence[OffsetRange]) -> list[Record]:
        """The records behind these ranges of a topic; only where `stores_once`."""
        raise NotImplementedError

    def try_write(self, frame: DataFrame) -> None:
        collect_bounded(frame)


def describe_records(records: Sequence[Record], wanted: WantedOrigins | None) -> Written:
    times = Counter([record.timestamp for record in records])
    return Written(times, NO_ORIGINS if wanted is None else origins_of(records, arrival=wanted.arrival))


# A batch is collected at the driver within bounds, since neither Java nor Python survives without memory. A task counts its rows
# and fails beyond MAX_ROWS; Spark adds up the bytes (`spark.driver.maxResultSize`). After either failure the batch is processed
# in parts.
#
# On Kafka and Kinesis a task stores its rows while it computes them. A write there has no limit: a batch may have any number of
# rows, and one that failed half-way would be stored twice. But Spark holds all rows of one event: its generated code leaves the
# loop of a generator (`explode`) only at its end. So one event may end Java. Trials, and parts of a batch that was too much once,
# therefore have the limit everywhere, and find that event without another end of the process.
MAX_ROWS = 500_000
"""Of one task: 25 rows for each event of a batch of 20,000 that one task reads."""
_TOO_MANY = f"more than {MAX_ROWS} rows come out of one task"
_TOO_MUCH = (_TOO_MANY, "spark.driver.maxResultSize", "SparkOutOfMemoryError", "UNABLE_TO_ACQUIRE_MEMORY")


def limit_rows(frame: DataFrame) -> DataFrame:
    """The frame (columns OUT), such that executing it raises when a task has too many rows."""
    row = f.monotonically_increasing_id().bitwiseAND((1 << 33) - 1)
    value = f.when(row < MAX_ROWS, f.col("value")).otherwise(f.raise_error(f.lit(_TOO_MANY)).cast("binary"))
    return frame.withColumn("value", value)


def collect_bounded(frame: DataFrame) -> Any:
    """An Arrow table of the frame (columns OUT). Raises the errors of executing it."""
    return limit_rows(frame).toArrow()


class TooMuch(Exception):
    """The output is larger than that of a batch may be. Where a write has limits, nothing of it was written."""


def try_in_tasks(frame: DataFrame) -> None:
    """Execute a frame that has `limit_rows`, and store nothing. Raises TooMuch, the frame's errors."""
    try:
        frame.write.format("noop").mode("overwrite").save()
    except Exception as error:
        if _TOO_MANY in str(error):
            raise TooMuch(_TOO_MANY) from error
        raise


def is_too_much(error: BaseException) -> bool:
    """Whether the output was too large, rather than wrong."""
    return isinstance(error, TooMuch) or any(text in str(error) for text in _TOO_MUCH)


def open_spark_broker(url: str, pipes: PipeFile | None = None) -> SparkBroker:
    """The broker of this URL. Connects to nothing yet, and loads only its modules. pipes: names the topics of others.

    Raises BadConfiguration.
    """
    parts = urlsplit(url)
    others = {} if pipes is None else {name: one for name, one in pipes.streams.items() if one.topic is not None}
    if parts.scheme == "log" and not parts.netloc and parts.path.startswith("/") and not parts.query:
        from spark.brokers.log import LogSparkBroker

        return LogSparkBroker(parts.path)
    if parts.scheme == "kafka" and "@" not in parts.netloc:
        from spark.brokers.kafka import KafkaSparkBroker

        try:
            return KafkaSparkBroker(*parse_kafka_url(url), others)
        except ValueError as error:
            raise BadConfiguration([Problem("broker", "", str(error))]) from error
    if parts.scheme == "kinesis":
        from spark.brokers.kinesis import KinesisSparkBroker

        try:
            parse_kinesis_url(url)
        except ValueError as error:
            raise BadConfiguration([Problem("broker", "", str(error))]) from error
        return KinesisSparkBroker(url)
    raise BadConfiguration(
        [Problem("broker", "", f"{url!r} cannot be used. Try: log:///path, kafka://host:9092 or kinesis://eu-west-1")]
    )
