"""Kafka, by Spark's own connector. Writing is at least once: a batch that is computed again after a crash writes its
events again, with the same ids.
"""

import json
import threading
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.readwriter import DataStreamWriter

from services.core import event as names
from services.core.broker.errors import OffsetOutOfRange, Unavailable, UnknownTopic
from services.core.broker.record import Batch, Record
from services.core.pipe_file.stream import Stream
from spark.brokers.contract import (
    BatchName,
    ObservedWrite,
    SparkBroker,
    WantedOrigins,
    Written,
    limit_rows,
    open_stream,
    try_in_tasks,
)
from spark.brokers.existing import ReadTopic, run_of, translate
from spark.brokers.kafka_login import ClientLogin, needs_aws
from spark.errors import shorten
from spark.java import JAVA_ERRORS, jvm
from spark.records import (
    DIGITS,
    HEADERS,
    LATEST_MS,
    NO_BEGINS,
    OUT,
    OUT_SCHEMA,
    RAW_NAMES,
    Begins,
    OffsetRange,
    Offsets,
    to_arrow,
)
from spark.sources.offsets import check_incarnation

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
    "kafka.isolation.level": "read_committed",  # records of an aborted transaction are no events
    "failOnDataLoss": "true",  # the query stops when retention took records that it has not read
    "kafkaConsumer.pollTimeoutMs": str(REQUEST_MS),
    "kafka.request.timeout.ms": str(REQUEST_MS),
    "kafka.default.api.timeout.ms": str(REQUEST_MS),
}
_PRODUCER = {
    "acks": "all",
    "enable.idempotence": "true",
    "linger.ms": "0",
    "max.request.size": str(2 << 20),
    "buffer.memory": str(4 << 20),
    "max.block.ms": str(REQUEST_MS),
    "request.timeout.ms": str(REQUEST_MS),
    "delivery.timeout.ms": str(REQUEST_MS),
}


class KafkaSparkBroker(SparkBroker):
    """The cluster behind these bootstrap servers. prefix: of the fleet's names there, as in `services.core.broker.prefix`.
    security: the file with TLS and the login; each query and each client that begins reads it again, and each new connection the
    secrets that it names. others: the streams whose
    topics are others', by name.

    Checkpoints have the cluster's names.
    """

    needs_kafka_jars = True
    real_time = True
    max_record_bytes = 1_040_000
    """Below max.message.bytes of our topics, with room for the framing of a batch and a record."""

    def __init__(
        self,
        servers: str,
        prefix: str = "",
        security: Path | None = None,
        others: Mapping[str, Stream] | None = None,
    ) -> None:
        self._servers, self._prefix, self._login = servers, prefix, ClientLogin(security)
        self._others = {name: stream for name, stream in (others or {}).items() if stream.topic is not None}
        self._fleets = {stream.topic: name for name, stream in self._others.items()}
        self._runs: dict[str, str] = {}
        """The streams of topics of others, by the beginning of their incarnations; of those that a query reads."""
        self.needs_kafka_login = security is not None
        self.needs_aws_jars = security is not None and needs_aws(security)
        self._opening = threading.Lock()
        self._producer: Any = None
        self._close_within: Any = None

    def identify(self, session: SparkSession, topics: Sequence[str]) -> dict[str, str]:
        """The topics' ids. Raises UnknownTopic, Unavailable."""
        with self._admin(session) as admin:
            found = admin.describe(self._full(topics))
            return {name: str(found[self._full_name(name)].topicId()) for name in topics}

    def identity_of(self, incarnation: str) -> str:
        """Java writes the bits of the id in base 64."""
        return urlsafe_b64encode(UUID(incarnation).bytes).decode().rstrip("=")

    def stored_ranges(self, session: SparkSession, topics: Sequence[str]) -> list[OffsetRange]:
        with self._admin(session) as admin:
            partitions = admin.partitions(self._full(topics))
            starts, ends = (admin.offsets(partitions, which) for which in ("earliest", "latest"))
        return [
            OffsetRange(self._short(topic), partition, start, end)
            for (topic, partition), start, end in zip(partitions, starts, ends, strict=True)
        ]

    def parse_offsets(self, line: str, checkpoint: str) -> Offsets:
        found = {self._short(topic): part for topic, part in json.loads(line).items()}
        return {(topic, int(p)): n for topic, part in found.items() for p, n in part.items()}

    def with_topics(self, session: SparkSession, offset: str, topics: Sequence[str]) -> str:
        known: dict[str, dict[str, int]] = json.loads(offset)
        found = {topic: known[topic] for topic in self._full(topics) if topic in known}
        added = [topic for topic in topics if self._full_name(topic) not in known]
        for part in self.stored_ranges(session, added) if added else ():
            found.setdefault(self._full_name(part.topic), {})[str(part.partition)] = part.start
        return json.dumps(found, separators=(",", ":"))

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
        options = _SOURCE | {"subscribe": ",".join(self._full(topics)), "startingOffsets": "earliest"}
        if any(topic in begins for topic in topics):
            options["startingOffsets"] = self._starting(session, topics, begins)
        if max_events is not None:
            options["maxOffsetsPerTrigger"] = str(max_events)
        options = self._with_servers(options)
        read = self._read_topics(session, topics)
        return self._to_raw(open_stream(session, name).format("kafka").options(**options).load(), read)

    def _starting(self, session: SparkSession, topics: Sequence[str], begins: Begins) -> str:
        """Spark wants all partitions. Raises OffsetOutOfRange, TopicRecreated, UnknownTopic, Unavailable."""
        for topic, identity in self.identify(session, topics).items():
            check_incarnation(topic, identity, begins.get(topic, ("", {}))[0])
        found: dict[str, dict[str, int]] = {}
        for topic, partition, start, end in self.stored_ranges(session, topics):
            wanted = begins.get(topic, ("", {}))[1].get(partition, start)
            if not start <= wanted <= end:
                raise OffsetOutOfRange(topic, partition, wanted, start, end)
            found.setdefault(self._full_name(topic), {})[str(partition)] = wanted
        return json.dumps(found)

    def read_ranges(self, session: SparkSession, ranges: Sequence[OffsetRange]) -> DataFrame:
        starts: dict[str, dict[str, int]] = {}
        ends: dict[str, dict[str, int]] = {}
        for part in ranges:
            topic = self._full_name(part.topic)
            starts.setdefault(topic, {})[str(part.partition)] = part.start
            ends.setdefault(topic, {})[str(part.partition)] = part.end
        assign = {topic: [int(partition) for partition in part] for topic, part in starts.items()}
        offsets = {"startingOffsets": json.dumps(starts), "endingOffsets": json.dumps(ends)}
        options = _SOURCE | {"assign": json.dumps(assign)} | offsets
        read = self._read_topics(session, list({part.topic: None for part in ranges}))
        return self._to_raw(session.read.format("kafka").options(**self._with_servers(options)).load(), read)

    def write_stream(self, frame: DataFrame, topic: str, writer: str, *, by_time: bool) -> DataStreamWriter:
        options = self._with_servers(_SINK | {"topic": self._prefix + topic})
        return for_sink(frame).writeStream.format("kafka").options(**options)

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
        self._save(observed.frame, topic)
        settle()
        return observed.result()

    def try_write(self, frame: DataFrame) -> None:
        """In the tasks, as `write`."""
        try_in_tasks(for_sink(limit_rows(frame)))

    def write_records(self, session: SparkSession, records: Sequence[Record], topic: str, batch: BatchName) -> bool:
        if records:
            table = pa.Table.from_batches([to_arrow(Batch(topic, 0, range(len(records)), records), OUT_SCHEMA)])
            self._save(session.createDataFrame(table, OUT), topic)
        return True

    def append(self, session: SparkSession, topic: str, records: Sequence[Record]) -> None:
        """By Kafka's own producer, in Spark's Java."""
        classes = jvm(session)
        make = classes.org.apache.kafka.clients.producer.ProducerRecord
        producer = None
        try:
            producer = self._open_producer(classes)
            name = self._prefix + topic
            sent = [producer.send(make(name, 0, record.timestamp, record.key, record.value)) for record in records]
            for each in sent:
                each.get()
        except JAVA_ERRORS as error:
            self._discard(producer)  # a producer that failed may never work again
            raise Unavailable(
                f"Kafka at {self._servers} did not store {self._prefix}{topic}: {shorten(error)}"
            ) from error

    def _open_producer(self, classes: Any) -> Any:
        with self._opening:
            if self._producer is None:
                properties = _properties(classes, self._client() | _PRODUCER)
                serializer = classes.org.apache.kafka.common.serialization.ByteArraySerializer
                open_producer = classes.org.apache.kafka.clients.producer.KafkaProducer
                self._producer = open_producer(properties, serializer(), serializer())
                self._close_within = classes.java.time.Duration.ofSeconds(5)
            return self._producer

    def close(self) -> None:
        self._discard(self._producer)

    def _discard(self, producer: Any) -> None:
        """Close it. Pipes that still wait for its answers get an error then, and append again with the next one."""
        with self._opening:
            if self._producer is producer:
                self._producer = None
        if producer is not None:
            with suppress(*JAVA_ERRORS):
                producer.close(self._close_within)

    def _save(self, frame: DataFrame, topic: str) -> None:
        options = self._with_servers(_SINK | {"topic": self._prefix + topic})
        for_sink(frame).write.format("kafka").mode("append").options(**options).save()

    def _full(self, topics: Sequence[str]) -> list[str]:
        """The topics' names on the cluster."""
        return [self._full_name(topic) for topic in topics]

    def _full_name(self, topic: str) -> str:
        other = self._others.get(topic)
        return self._prefix + topic if other is None or other.topic is None else other.topic

    def _short(self, topic: str) -> str:
        """The fleet's name of a topic on the cluster."""
        return self._fleets.get(topic) or topic.removeprefix(self._prefix)

    def _read_topics(self, session: SparkSession, topics: Sequence[str]) -> list[ReadTopic]:
        """Those of these topics that are others'. Raises UnknownTopic, Unavailable."""
        names = [topic for topic in topics if topic in self._others]
        found = self.identify(session, names) if names else {}
        read = [ReadTopic(name, self._full_name(name), run_of(found[name]), self._others[name]) for name in names]
        self._runs |= {one.run: one.name for one in read}
        return read

    def stream_of(self, incarnation: str) -> str | None:
        return self._runs.get(incarnation.rpartition("e")[0])

    def _to_raw(self, frame: DataFrame, read: Sequence[ReadTopic]) -> DataFrame:
        for one in read:
            frame = translate(frame, one)
        columns = {name: f.col(name) for name in RAW_NAMES} | {
            "offset": f.lpad(f.col("offset").cast("string"), DIGITS, "0"),
            **restored_time(),
        }
        own = f.substr(f.col("topic"), f.lit(len(self._prefix) + 1)) if self._prefix else f.col("topic")
        for one in read:
            own = f.when(f.col("topic") == one.topic, f.lit(one.name)).otherwise(own)
        columns["topic"] = own
        return frame.select(*[column.alias(name) for name, column in columns.items()])

    def _with_servers(self, options: Mapping[str, str]) -> dict[str, Any]:
        return {f"kafka.{name}": value for name, value in self._client().items()} | dict(options)

    def _client(self) -> dict[str, str]:
        """Properties of each client of the cluster."""
        return {"bootstrap.servers": self._servers} | self._login.properties()

    @contextmanager
    def _admin(self, session: SparkSession) -> Iterator["_Admin"]:
        """Kafka's own admin client in Spark's Java. Inside, its failures become Unavailable or UnknownTopic."""
        classes = jvm(session)
        timeout = str(REQUEST_MS)
        settings = self._client() | {
            "default.api.timeout.ms": timeout,
            "request.timeout.ms": timeout,
        }
        client = classes.org.apache.kafka.clients.admin.Admin.create(_properties(classes, settings))
        try:
            yield _Admin(client, classes)
        except JAVA_ERRORS as error:
            if "UnknownTopicOrPartition" in str(error):
                raise UnknownTopic(
                    "a topic does not exist. Try: declaring it under `streams:`, and penstock apply"
                ) from error
            raise Unavailable(f"Kafka at {self._servers} does not answer: {shorten(error)}") from error
        finally:
            client.close()


class _Admin:
    """The few calls that we need, with Python's types."""

    def __init__(self, client: Any, classes: Any) -> None:
        self._client, self._classes = client, classes

    def describe(self, topics: Sequence[str]) -> dict[str, Any]:
        """Kafka's TopicDescription by topic."""
        wanted = self._classes.java.util.ArrayList()
        for topic in topics:
            wanted.add(topic)
        found = self._client.describeTopics(wanted).allTopicNames().get()
        return {topic: found.get(topic) for topic in topics}

    def partitions(self, topics: Sequence[str]) -> list[tuple[str, int]]:
        return [
            (topic, info.partition()) for topic, found in self.describe(topics).items() for info in found.partitions()
        ]

    def offsets(self, partitions: Sequence[tuple[str, int]], which: str) -> list[int]:
        """The `earliest` or `latest` offset of each partition; `latest` is before the records of an open transaction."""
        common = self._classes.org.apache.kafka.common
        admin = self._classes.org.apache.kafka.clients.admin
        spec = getattr(admin.OffsetSpec, which)()
        wanted = self._classes.java.util.HashMap()
        for topic, partition in partitions:
            wanted.put(common.TopicPartition(topic, partition), spec)
        options = admin.ListOffsetsOptions(common.IsolationLevel.READ_COMMITTED)
        found = self._client.listOffsets(wanted, options).all().get()
        return [found.get(common.TopicPartition(topic, partition)).offset() for topic, partition in partitions]


def _properties(classes: Any, settings: Mapping[str, str]) -> Any:
    properties = classes.java.util.Properties()
    for name, value in settings.items():
        properties.setProperty(name, value)
    return properties


def restored_time() -> dict[str, Column]:
    """The columns `timestamp` and `headers` of a record of the connector: as `services.core.event.restore_time`."""
    headers = f.col("headers")
    last = f.try_element_at(headers, f.lit(-1))
    millis = last["value"].cast("string").try_cast("long")
    is_time = (last["key"] == names.TIME) & millis.between(0, LATEST_MS)
    return {
        "timestamp": f.when(is_time, f.timestamp_millis(millis)).otherwise(f.col("timestamp")),
        "headers": f.when(is_time, f.slice(headers, f.lit(1), f.size(headers) - 1)).otherwise(headers),
    }


def for_sink(frame: DataFrame) -> DataFrame:
    """The connector's columns. It sets no timestamps, so event time travels in a header, which is the last one."""
    millis = f.unix_millis(f.col("timestamp")).cast("string").cast("binary")
    time = f.array(f.struct(f.lit(names.TIME).alias("key"), millis.alias("value"))).cast(HEADERS)
    # Only the first header of a name counts. A lambda (filter) would take the whole projection out of generated code.
    at = f.array_position("headers.key", names.TIME).cast("int")
    after = f.slice("headers", at + 1, f.size("headers"))
    others = f.when(at > 0, f.concat(f.slice("headers", f.lit(1), at - 1), after)).otherwise(f.col("headers"))
    return frame.select("key", "value", f.concat(others, time).alias("headers"))
