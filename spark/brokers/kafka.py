"""Kafka, by Spark's own connector. Writing is at least once: a batch that is computed again after a crash writes its
events again, with the same ids.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa
from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, Observation, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.readwriter import DataStreamWriter

from services.core import event as names
from services.core.broker.errors import Unavailable, UnknownTopic
from services.core.broker.record import Batch, Record
from spark.brokers.appender import KafkaAppender
from spark.brokers.endpoint import BatchName
from spark.brokers.gauge import EndsGauge
from spark.errors import shorten
from spark.origins import with_origin
from spark.place import DIGITS, Position, Span, cut_evenly
from spark.shapes import HEADERS, OUT, RAW_NAMES
from spark.sources.record_batches import OUT_SCHEMA, to_arrow
from spark.written import Wanted, Written, observe, of_observation

REQUEST_MS = 30_000
_SINK = {
    "kafka.acks": "all",
    "kafka.enable.idempotence": "true",
    "kafka.linger.ms": "2",
    "kafka.batch.size": str(256 << 10),
    "kafka.max.request.size": str(2 << 20),
    "kafka.delivery.timeout.ms": str(2 * REQUEST_MS),
    "kafka.request.timeout.ms": str(REQUEST_MS),
    "kafka.max.block.ms": str(REQUEST_MS),
}
_SOURCE = {
    "includeHeaders": "true",
    "kafka.isolation.level": "read_committed",  # what its producer rolled back is no event
    "failOnDataLoss": "true",  # what retention took before we read it stops the query
    "kafkaConsumer.pollTimeoutMs": str(REQUEST_MS),
    "kafka.request.timeout.ms": str(REQUEST_MS),
    "kafka.default.api.timeout.ms": str(REQUEST_MS),
}


class KafkaEndpoint:
    """The cluster behind these bootstrap servers."""

    needs_kafka_jars = True
    real_time = True
    packs_origins = False
    max_record_bytes = 1_040_000
    """Below max.message.bytes of our topics, with room for a batch's and a record's framing."""

    def __init__(self, servers: str) -> None:
        self._servers = servers

    def check(self, session: SparkSession, topics: Sequence[str]) -> dict[str, str]:
        """The topics' ids. Raises UnknownTopic, Unavailable."""
        with self._admin(session) as admin:
            return {name: str(found.topicId()) for name, found in admin.describe(topics).items()}

    def partition_count(self, session: SparkSession, topics: Sequence[str]) -> int:
        """See Endpoint."""
        with self._admin(session) as admin:
            return len(admin.partitions(topics))

    def read_stream(
        self, session: SparkSession, topics: Sequence[str], max_events: int | None, *, origins: bool = False
    ) -> DataFrame:
        """See Endpoint."""
        options = _SOURCE | {"subscribe": ",".join(topics), "startingOffsets": "earliest"}
        if max_events is not None:
            options["maxOffsetsPerTrigger"] = str(max_events)
        raw = self._select(session.readStream.format("kafka").options(**self._with_servers(options)).load())
        return with_origin(raw) if origins else raw

    def held(self, session: SparkSession, topics: Sequence[str]) -> list[Span]:
        """See Endpoint."""
        with self._admin(session) as admin:
            partitions = admin.partitions(topics)
            starts, ends = (admin.offsets(partitions, which) for which in ("earliest", "latest"))
        return [Span(*each, start, end) for each, start, end in zip(partitions, starts, ends, strict=True)]

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
        starts: dict[str, dict[str, int]] = {}
        ends: dict[str, dict[str, int]] = {}
        for span in spans:
            starts.setdefault(span.topic, {})[str(span.partition)] = span.start
            ends.setdefault(span.topic, {})[str(span.partition)] = span.end
        assign = {topic: [int(partition) for partition in part] for topic, part in starts.items()}
        offsets = {"startingOffsets": json.dumps(starts), "endingOffsets": json.dumps(ends)}
        options = _SOURCE | {"assign": json.dumps(assign)} | offsets
        return self._select(session.read.format("kafka").options(**self._with_servers(options)).load())

    def parse_position(self, line: str) -> Position:
        """See Endpoint."""
        return {(topic, int(p)): n for topic, part in json.loads(line).items() for p, n in part.items()}

    def write_stream(self, frame: DataFrame, topic: str, writer: str) -> DataStreamWriter:
        """See Endpoint; at least once."""
        return _for_sink(frame).writeStream.format("kafka").options(**self._with_servers(_SINK | {"topic": topic}))

    def write(self, frame: DataFrame, topic: str, batch: BatchName, wanted: Wanted) -> Written:
        """See Endpoint. When executing the frame fails, some of its records may have been written."""
        seen = Observation()
        self._save(observe(frame, wanted, seen), topic)
        return of_observation(seen)

    def try_write(self, frame: DataFrame) -> None:
        """See Endpoint. Rows go from the tasks to Kafka one by one: nothing of them is kept."""
        _for_sink(frame).write.format("noop").mode("overwrite").save()

    def write_records(self, session: SparkSession, records: Sequence[Record], topic: str, batch: BatchName) -> None:
        """See Endpoint."""
        if records:
            columns = to_arrow(Batch(topic, 0, range(len(records)), records), OUT_SCHEMA)
            self._save(session.createDataFrame(pa.Table.from_batches([columns]), OUT), topic)

    def open_appender(self, session: SparkSession, topic: str) -> KafkaAppender:
        """See Endpoint."""
        return KafkaAppender(session, self._servers, topic)

    def last_epoch(self, topic: str, writer: str) -> int | None:
        """Kafka does not know."""
        return None

    def close(self) -> None:
        """Nothing is held."""

    def _save(self, frame: DataFrame, topic: str) -> None:
        options = self._with_servers(_SINK | {"topic": topic})
        _for_sink(frame).write.format("kafka").mode("append").options(**options).save()

    def _with_servers(self, options: Mapping[str, str]) -> dict[str, Any]:
        return {"kafka.bootstrap.servers": self._servers, **options}

    def _select(self, frame: DataFrame) -> DataFrame:
        columns = {name: f.col(name) for name in RAW_NAMES} | {
            "offset": f.lpad(f.col("offset").cast("string"), DIGITS, "0")
        }
        return frame.select(*[column.alias(name) for name, column in columns.items()])

    @contextmanager
    def _admin(self, session: SparkSession) -> Iterator["_Admin"]:
        """Kafka's own admin client in Spark's Java. Inside, its failures become Unavailable or UnknownTopic."""
        jvm: Any = session.sparkContext._jvm
        properties = jvm.java.util.Properties()
        properties.setProperty("bootstrap.servers", self._servers)
        properties.setProperty("default.api.timeout.ms", str(REQUEST_MS))
        properties.setProperty("request.timeout.ms", str(REQUEST_MS))
        client = jvm.org.apache.kafka.clients.admin.Admin.create(properties)
        try:
            yield _Admin(client, jvm)
        except (Py4JError, PySparkException) as error:
            if "UnknownTopicOrPartition" in str(error):
                raise UnknownTopic(
                    "a topic does not exist. Try: declaring it under `streams:`, and penstock apply"
                ) from error
            raise Unavailable(f"Kafka at {self._servers} does not answer: {shorten(error)}") from error
        finally:
            client.close()


class _Admin:
    """The few calls that we need, in Python's types."""

    def __init__(self, client: Any, jvm: Any) -> None:
        self._client, self._jvm = client, jvm

    def describe(self, topics: Sequence[str]) -> dict[str, Any]:
        """Kafka's TopicDescription by topic."""
        wanted = self._jvm.java.util.ArrayList()
        for topic in topics:
            wanted.add(topic)
        found = self._client.describeTopics(wanted).allTopicNames().get()
        return {topic: found.get(topic) for topic in topics}

    def partitions(self, topics: Sequence[str]) -> list[tuple[str, int]]:
        """(topic, partition) of each partition."""
        return [
            (topic, info.partition()) for topic, found in self.describe(topics).items() for info in found.partitions()
        ]

    def offsets(self, partitions: Sequence[tuple[str, int]], which: str) -> list[int]:
        """The `earliest` or `latest` offset of each partition; what is in a transaction that is still open comes behind."""
        place = self._jvm.org.apache.kafka.common.TopicPartition
        spec = getattr(self._jvm.org.apache.kafka.clients.admin.OffsetSpec, which)()
        wanted = self._jvm.java.util.HashMap()
        for topic, partition in partitions:
            wanted.put(place(topic, partition), spec)
        settled = self._jvm.org.apache.kafka.common.IsolationLevel.READ_COMMITTED
        options = self._jvm.org.apache.kafka.clients.admin.ListOffsetsOptions(settled)
        found = self._client.listOffsets(wanted, options).all().get()
        return [found.get(place(topic, partition)).offset() for topic, partition in partitions]


def _for_sink(frame: DataFrame) -> DataFrame:
    """The connector's columns. It sets no timestamps, so that event time travels in a header."""
    return frame.select("key", "value", _timed_headers().alias("headers"))


def _timed_headers() -> Column:
    other = f.filter("headers", lambda item: item["key"] != names.TIME)
    millis = f.unix_millis(f.col("timestamp")).cast("string").cast("binary")
    return f.concat(other, f.array(f.struct(f.lit(names.TIME).alias("key"), millis.alias("value")))).cast(HEADERS)
