"""Writers of topics as people have them, in a Java of their own: Kafka's producer, Connect's JSON converter, Debezium.

    python -m tests.support.java_writers BOOTSTRAP TOPIC JDBC_URL

Python calls the Java classes through py4j, which pyspark brings, so nothing is compiled. Debezium is its connector for
PostgreSQL, which reads the database's own log. There is no Connect worker: `follow_database` takes its place between the
connector's task, the converter and the producer.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from py4j.java_gateway import (  # type: ignore[import-untyped]
    CallbackServerParameters,
    GatewayParameters,
    JavaGateway,
    launch_gateway,
)

from services.core.jvm.jars import DATABASES, KAFKA_SERVER, KAFKA_WRITERS, jar_set
from services.core.jvm.java import NO_PERF_FILE, find_java
from spark.jvm.classes import pyspark_jars
from tests.support.postgres import PASSWORD, USER

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
DEADLINE_S = 300.0
Headers = dict[str, bytes]


@contextmanager
def open_java() -> Iterator[JavaGateway]:
    """A Java with the jars; ended at the end, and when this process ends."""
    jars = [path for name in (KAFKA_SERVER, KAFKA_WRITERS, DATABASES) for path in jar_set(name)]
    (py4j,) = pyspark_jars().glob("py4j-*.jar")
    port, process = launch_gateway(
        jarpath=str(py4j),
        classpath=os.pathsep.join(map(str, jars)),
        javaopts=[NO_PERF_FILE, "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"],
        java_path=str(find_java().executable),
        die_on_exit=True,
        return_proc=True,
        redirect_stdout=sys.stderr,
        redirect_stderr=sys.stderr,
    )
    gateway = JavaGateway(
        gateway_parameters=GatewayParameters(port=port, auto_convert=True),
        callback_server_parameters=CallbackServerParameters(port=0, daemonize=True, daemonize_connections=True),
    )
    server = gateway.get_callback_server()
    gateway.java_gateway_server.resetCallbackClient(
        gateway.java_gateway_server.getCallbackClient().getAddress(), server.get_listening_port()
    )
    try:
        yield gateway
    finally:
        gateway.shutdown()
        process.terminate()
        process.wait(timeout=60)


class Writer:
    """Kafka's Java producer. Its records are in one topic."""

    def __init__(self, java: JavaGateway, bootstrap: str, topic: str, **settings: str) -> None:
        self._jvm, self._topic, self._sent = java.jvm, topic, list[Any]()
        serializer = "org.apache.kafka.common.serialization.ByteArraySerializer"
        given = {"bootstrap.servers": bootstrap, "key.serializer": serializer, "value.serializer": serializer}
        given |= {name.replace("_", "."): value for name, value in settings.items()}
        self.producer = self._jvm.org.apache.kafka.clients.producer.KafkaProducer(given)

    def send(self, value: bytes | None, key: bytes | None = None, headers: Headers | None = None) -> None:
        """It may wait in the producer."""
        record = self._jvm.org.apache.kafka.clients.producer.ProducerRecord(self._topic, None, None, key, value, None)
        for name, content in (headers or {}).items():
            record.headers().add(name, content)
        self._sent.append(self.producer.send(record))

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        """Until all are stored. Raises Py4JJavaError when one is not."""
        self.producer.close()
        for answer in self._sent:
            answer.get()


def write_compressed(java: JavaGateway, bootstrap: str, topic: str) -> None:
    """Five records with each codec."""
    for codec in CODECS:
        with Writer(java, bootstrap, topic, compression_type=codec, linger_ms="1000") as writer:
            for number in range(5):
                writer.send(
                    b'{"codec": "%s", "n": %d}' % (codec.encode(), number), None if number % 2 else b"k%d" % number
                )


def write_transactions(java: JavaGateway, bootstrap: str, topic: str) -> None:
    """One that is committed, and one that is not."""
    with Writer(java, bootstrap, topic, transactional_id=f"writer-{os.getpid()}") as writer:
        writer.producer.initTransactions()
        writer.producer.beginTransaction()
        writer.send(b'{"n": 1}', headers={"invoice-id": b"committed"})
        writer.producer.commitTransaction()
        writer.producer.beginTransaction()
        writer.send(b'{"n": 2}', headers={"invoice-id": b"rolled-back"})
        writer.producer.flush()
        writer.producer.abortTransaction()


def json_converter(java: JavaGateway, *, schemas: bool, keys: bool = False) -> Any:
    converter = java.jvm.org.apache.kafka.connect.json.JsonConverter()
    converter.configure({"schemas.enable": str(schemas).lower()}, keys)
    return converter


def write_converted(java: JavaGateway, bootstrap: str, topic: str) -> None:
    """The same struct by Connect's converter, with its schema and without."""
    data = java.jvm.org.apache.kafka.connect.data
    schema = data.SchemaBuilder.struct().field("id", data.Schema.INT32_SCHEMA).build()
    with Writer(java, bootstrap, topic) as writer:
        for schemas, name in ((True, b"connect-7"), (False, b"connect-bare")):
            value = json_converter(java, schemas=schemas).fromConnectData(
                topic, schema, data.Struct(schema).put("id", 7)
            )
            writer.send(value, headers={"invoice-id": name})


class _Offsets:
    """Of a task that begins: there are none. Called from Java."""

    def __init__(self, none: Any) -> None:
        self._none = none

    def offset(self, partition: Any) -> None:
        return None

    def offsets(self, partitions: Any) -> Any:
        return self._none

    class Java:
        implements = ("org.apache.kafka.connect.storage.OffsetStorageReader",)


class _Worker:
    """What a task knows of its worker. Called from Java."""

    def __init__(self, offsets: _Offsets) -> None:
        self._offsets = offsets

    def offsetStorageReader(self) -> _Offsets:  # noqa: N802  Java's name
        return self._offsets

    class Java:
        implements = ("org.apache.kafka.connect.source.SourceTaskContext",)


def follow_database(java: JavaGateway, bootstrap: str, topic: str, url: str) -> list[str]:
    """Write what Debezium makes of an insert, an update and a delete. Returns the kind of each record, null: the tombstone."""
    properties = java.jvm.java.util.Properties()
    properties.putAll({"user": USER, "password": PASSWORD})
    database = java.jvm.org.postgresql.Driver().connect(url, properties)

    def execute(statements: str) -> None:
        database.createStatement().execute(statements)

    execute("CREATE TABLE invoices (id int PRIMARY KEY, amount int); ALTER TABLE invoices REPLICA IDENTITY FULL")
    host, _, port = urlsplit(url.removeprefix("jdbc:")).netloc.partition(":")
    address = {"database.hostname": host, "database.port": port, "database.dbname": "postgres"}
    login = {"database.user": USER, "database.password": PASSWORD}
    own = {"name": "writer", "task.id": "0", "connector.class": "io.debezium.connector.postgresql.PostgresConnector"}
    how = {"topic.prefix": "billing", "plugin.name": "pgoutput", "snapshot.mode": "no_data", "poll.interval.ms": "50"}
    settings = address | login | own | how
    keys, values = json_converter(java, schemas=False, keys=True), json_converter(java, schemas=False)
    task = java.jvm.io.debezium.connector.postgresql.PostgresConnectorTask()
    task.initialize(_Worker(_Offsets(java.jvm.java.util.HashMap())))
    task.start(settings)  # its slot is there when it has ended
    kinds: list[str] = []
    with Writer(java, bootstrap, topic) as writer:
        execute("INSERT INTO invoices VALUES (9, 1); UPDATE invoices SET amount = 2; DELETE FROM invoices")
        deadline = time.monotonic() + DEADLINE_S
        while len(kinds) < 4 and time.monotonic() < deadline:
            for record in task.poll() or ():
                key = keys.fromConnectData(record.topic(), record.keySchema(), record.key())
                value = values.fromConnectData(record.topic(), record.valueSchema(), record.value())
                writer.send(value, key)
                kinds.append("null" if value is None else json.loads(value)["op"])
    task.stop()
    return kinds


def main(bootstrap: str, topic: str, url: str) -> None:
    with open_java() as java:
        write_compressed(java, bootstrap, topic)
        write_converted(java, bootstrap, topic)
        write_transactions(java, bootstrap, topic)
        print(json.dumps(follow_database(java, bootstrap, topic, url)))


if __name__ == "__main__":
    main(*sys.argv[1:])
