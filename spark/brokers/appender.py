"""Appending a few records at a time from the driver, without a Spark job."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from services.core.broker.errors import Unavailable
from services.core.broker.log import blocking
from services.core.broker.record import Record
from spark.errors import shorten

WAIT_MS = 30_000


class Appender(Protocol):
    """Writes to partition 0 of one topic. One thread at a time."""

    def append(self, records: Sequence[Record]) -> None:
        """Store these records durably. Raises BrokerError kinds; then some may be stored. Blocking."""

    def close(self) -> None:
        """Let go of what it holds."""


class LogAppender:
    """On the embedded log."""

    def __init__(self, path: str, topic: str) -> None:
        self._path, self._topic = path, topic

    def append(self, records: Sequence[Record]) -> None:
        """See Appender."""
        blocking.append(self._path, self._topic, {0: records})

    def close(self) -> None:
        """Nothing is held."""


class KafkaAppender:
    """By Kafka's own producer, in Spark's Java."""

    def __init__(self, session: SparkSession, servers: str, topic: str) -> None:
        self._jvm: Any = session.sparkContext._jvm
        self._servers, self._topic = servers, topic
        self._producer: Any = None

    def _open(self) -> Any:
        properties = self._jvm.java.util.Properties()
        settings = {
            "bootstrap.servers": self._servers,
            "acks": "all",
            "enable.idempotence": "true",
            "linger.ms": "0",
            "max.request.size": str(2 << 20),
            "buffer.memory": str(4 << 20),
            "max.block.ms": str(WAIT_MS),
            "request.timeout.ms": str(WAIT_MS),
            "delivery.timeout.ms": str(WAIT_MS),
        }
        for name, value in settings.items():
            properties.setProperty(name, value)
        serializer = self._jvm.org.apache.kafka.common.serialization.ByteArraySerializer
        return self._jvm.org.apache.kafka.clients.producer.KafkaProducer(properties, serializer(), serializer())

    def append(self, records: Sequence[Record]) -> None:
        """See Appender."""
        make = self._jvm.org.apache.kafka.clients.producer.ProducerRecord
        try:
            self._producer = self._producer or self._open()
            sent = [
                self._producer.send(make(self._topic, 0, record.timestamp, record.key, record.value))
                for record in records
            ]
            for each in sent:
                each.get()
        except (Py4JError, PySparkException) as error:
            self.close()  # one that failed may never work again
            raise Unavailable(f"Kafka at {self._servers} did not store {self._topic}: {shorten(error)}") from error

    def close(self) -> None:
        """Let go of its connections."""
        producer, self._producer = self._producer, None
        if producer is not None:
            with suppress(Py4JError, PySparkException):  # everything it was given is stored, or known not to be
                producer.close(self._jvm.java.time.Duration.ofSeconds(5))
