"""Archives of the classes of Spark and Kafka, which Java then has at once. `make test` writes those that are missing.

A run of all tests starts some hundred JVMs. An archive has what ran while it was made: so here every part that most tests use
runs once.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from services.core.jvm.jars import KAFKA_SERVER, jar_set
from services.core.jvm.kafka import FAST_START, KafkaCluster
from services.core.jvm.kafka import class_archive as kafka_archive
from spark.java import java_process
from spark.session import class_archive as spark_archive
from spark.session import open_session
from tests.spark.log_pipeline import LogPipeline, event
from tests.support.kafka import make_topic

END_S = 300.0
_EVENTS = 20


def write_spark_archive(archive: Path, scratch: Path) -> None:
    """Run a pipe on the log and an aggregate in a Spark of its own. Blocking: half a minute."""
    session = open_session(
        master="local[2]", memory=1 << 30, kafka=False, scratch=scratch, compiler="quick", archive_to=archive
    )
    try:
        for name, transform in (("rows", {"sql": _ROWS}), ("counts", {"sql": _COUNTS, "watermark": "1m"})):
            folder = scratch / name
            folder.mkdir()
            with LogPipeline(session, folder) as pipeline:
                pipeline.send(event(number, b'{"n": %d}' % number) for number in range(_EVENTS))
                pipeline.run(pipeline.pipe(columns="n INT", **transform), _EVENTS)
        session.stop()
        java_process(session).stdin.close()  # Java ends, and writes
        java_process(session).wait(END_S)
    finally:
        java_process(session).kill()


_ROWS = "SELECT event, 10 / (n - 4) AS x FROM s WHERE n % 2 = 0"
_COUNTS = "SELECT '' AS id, count(*) AS n FROM s GROUP BY window(event_time, '1 minute')"


def write_kafka_archive(archive: Path, scratch: Path) -> None:
    """Start a broker, send and receive. Blocking: half a minute."""
    KafkaCluster(scratch, brokers=1).__enter__().stop()  # formats the folder, which is a Java of its own
    options = (*FAST_START, f"-XX:ArchiveClassesAtExit={archive}", "-Xlog:disable")
    cluster = KafkaCluster(scratch, brokers=1, java_options=options)
    try:
        cluster.start()
        asyncio.run(_send_and_receive(cluster.bootstrap))
    finally:
        cluster.stop(grace_s=END_S)


async def _send_and_receive(bootstrap: str) -> None:
    topic = await make_topic(bootstrap, "classes")
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True) as producer:
        await producer.send_and_wait(topic, b"value")
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=bootstrap, group_id="g", auto_offset_reset="earliest")
    async with consumer:
        await consumer.getone()
        await consumer.commit()


def main() -> None:
    kafka = kafka_archive(jar_set(KAFKA_SERVER))
    for archive, write in ((spark_archive(), write_spark_archive), (kafka, write_kafka_archive)):
        if not archive.exists():
            print(f"Writing {archive.name}, once ...", file=sys.stderr)
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
                written = archive.with_suffix(".new")
                write(written, Path(scratch))
                written.replace(archive)


if __name__ == "__main__":
    main()
