"""Topics of others in a transform: the same rules as elsewhere, by Spark's expressions; on Kafka, written by Java's producer."""

import asyncio
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import orjson
import pytest
import yaml
from pyroaring import BitMap
from pyspark.sql import DataFrame, SparkSession

from services.core.broker.connect import open_broker
from services.core.broker.contract import TopicSpec
from services.core.broker.record import Batch, Headers, Record
from services.core.event import FAULT, ORIGIN, TOPIC_NUMBERS, Origin, is_of_topic, read_id
from services.core.jvm.kafka import KafkaCluster
from services.core.ledger.report import TELEMETRY, decode_report, unpack_numbers
from services.core.pipe_file.existing_topics import Translation
from services.core.pipe_file.stream import Stream
from services.core.undelivered.dead_letter import REASON
from spark.brokers.contract import open_spark_broker
from spark.brokers.existing import ReadTopic, run_of, translate
from spark.java import jvm
from spark.records import HEADERS
from spark.settings import TransformSettings, load_pipes
from tests.spark.broker_pipeline import BrokerPipeline, TopicReading
from tests.support.existing_cases import NUMBERS, ONLY_HEADERS, PAYLOADS, TIMES

TOPIC_ID = UUID("3d9c2b1e-0f4a-4c55-8f7e-3a5b6c7d8e9f")
NOW = 1_790_000_000_000
RAW = f"key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, headers {HEADERS}"
VALUES = [
    b'{"id": "a-1", "at": "2026-01-02T03:04:05.678Z"}',
    b'{"id": 12, "at": 1767323045}',
    b'{"id": null, "at": null}',
    b'{"id": {"x": 1}, "at": {}}',
    b'{"id": "", "at": "yesterday"}',
    b'{"id": true, "at": false}',
    b'{"id": 1.5, "at": 1767323045.5}',
    b'{"id": "a\\u0007", "at": "2026-01-02"}',
    b'{"id": "' + b"x" * 300 + b'", "at": -1}',
    b'{"at": "2026-01-02T04:04:05+01:00"}',
    b'{"at": 1e300}',
    b'["id"]',
    b"12",
    b"no json",
    b"\xff",
    b"",
    None,
]
CASES = [
    *PAYLOADS,
    *(orjson.dumps({"at": text}) for text in TIMES),
    *(f'{{"at": {number}}}'.encode() for number in NUMBERS),
]
HEADER_VALUES = [b"one", b"\xff", b"", b"1767323045678", b"2026-01-02T03:04:05Z", b"a\x07", b"x" * 300]
RULES: list[dict[str, Any]] = [
    {},
    {"id": "id"},
    {"key": "id", "type": "id"},
    {"time": "at"},
    {"id": {"header": "h"}, "tombstones": "deliver"},
    {"key": {"header": "h"}, "time": {"header": "h"}},
    {"type": {"header": "h"}, "format": "text"},
    {"format": "bytes", "tombstones": "deliver"},
]


def records() -> Iterator[Record]:
    theirs: Headers = (
        ("penstock_origin", b"x:0:1"),
        ("ce_id", b"t"),
        ("ce_type", b"old"),
        ("content-type", b"a/b"),
        ("z", b"1"),
    )
    for number, value in enumerate([*VALUES, *CASES]):
        yield Record(b"k%d" % number, value, NOW + number, theirs if number % 3 == 0 else ())
    for found in [*HEADER_VALUES, *(text.encode() for text in TIMES | NUMBERS | ONLY_HEADERS)]:
        yield Record(None, b"{}", NOW, (("h", found), ("h", b"second")))


def test_the_rules_are_those_of_the_backend(spark: SparkSession) -> None:
    """Broken: a transform sees other ids, times or faults than a destination that reads the same topic, or other origins."""
    given = list(records())
    offsets = [*range(len(given) - 1), TOPIC_NUMBERS + 3]
    expected: dict[tuple[int, int], Record] = {}
    frames = []
    for number, rules in enumerate(RULES):
        stream, topic = Stream.model_validate({"topic": f"T.{number}", **rules}), f"T.{number}"
        made = Translation(stream)(Batch(topic, 2, offsets, given), str(TOPIC_ID)).records
        expected |= {(number, offset): one for offset, one in zip(offsets, made, strict=True)}
        rows = [
            (
                one.key,
                one.value,
                topic,
                2,
                offset,
                datetime.fromtimestamp(0, UTC) + timedelta(milliseconds=one.timestamp),
                [{"key": name, "value": value} for name, value in one.headers] or None,
            )
            for offset, one in zip(offsets, given, strict=True)
        ]
        read = ReadTopic("s", topic, run_of(urlsafe_b64encode(TOPIC_ID.bytes).decode().rstrip("=")), stream)
        frames.append(translate(spark.createDataFrame(rows, RAW), read))
    found = {}
    for row in reduce(DataFrame.unionAll, frames).collect():
        headers = tuple((header["key"], bytes(header["value"])) for header in row["headers"])
        millis = round(row["timestamp"].timestamp() * 1000)
        key = None if row["key"] is None else bytes(row["key"])
        place = int(row["topic"].removeprefix("T.")), row["offset"]
        found[place] = Record(key, None if row["value"] is None else bytes(row["value"]), millis, headers)
    assert found.keys() == expected.keys()
    cases = dict(zip(offsets, given, strict=True))
    different = [
        f"{RULES[number]} {cases[offset].value!r} {cases[offset].headers}: {found[number, offset]} is not {one}"
        for (number, offset), one in expected.items()
        if found[number, offset] != one
    ]
    assert not different, "\n".join(different)


@pytest.mark.kafka
def test_a_topic_that_java_wrote(spark: SparkSession, kafka_cluster: KafkaCluster, tmp_path: Path) -> None:
    """Broken: a transform cannot read others' topics, or its events have no place in the loss table."""
    url = f"kafka://{kafka_cluster.bootstrap}?prefix=acme."
    topic = f"Billing.{uuid4().hex[:8]}"
    values = [
        b'{"meta": {"id": "a"}, "n": 1}',
        b'{"n": 2}',
        b'{"meta": {"id": {}}, "n": 3}',
        None,
        b"no json",
    ]
    with BrokerPipeline(spark, url, tmp_path, partitions=1) as pipeline:
        asyncio.run(_make(f"kafka://{kafka_cluster.bootstrap}", topic))
        classes = jvm(spark)
        producer = pipeline.broker._open_producer(classes)  # type: ignore[attr-defined]
        make, now = classes.org.apache.kafka.clients.producer.ProducerRecord, int(time.time() * 1000)
        for value in values:
            producer.send(make(topic, 0, now, b"k", value)).get()
        columns = "n INT, meta STRUCT<id: STRING>"
        pipes = {
            "streams": {"invoices": {"topic": topic, "id": "meta.id", "columns": columns}},
            "pipes": {
                pipeline.pipe: {
                    "sources": ["invoices"],
                    "transform": {"sql": "SELECT event, n FROM invoices"},
                    "destinations": [{"name": "d", "webhook": {"url": "https://example.com/"}}],
                }
            },
        }
        path = tmp_path / "pipes.yaml"
        path.write_text(yaml.safe_dump(pipes))
        chosen = load_pipes(TransformSettings(pipes=path))
        pipeline.broker = open_spark_broker(url, chosen.file)
        pipeline.start(chosen)
        out, dead = pipeline.records("out", 2), pipeline.records("dead", 1)
        pipeline.stop()
        assert pipeline.problem is None
        assert {read_id(one): orjson.loads(one.value or b"")["n"] for one in out} == {"a": 1, f"{topic}-0-1": 2}
        assert all(is_of_topic(Origin.unpack(one.header(ORIGIN) or b"").incarnation) for one in out)
        dead = pipeline.records("dead", 2)
        assert {read_id(one): one.header(REASON) for one in dead} == {
            f"{topic}-0-2": b"bad_record",
            f"{topic}-0-4": b"bad_record",
        }
        assert all(one.header(FAULT) for one in dead)
        assert asyncio.run(_accepted(url)) == BitMap(range(5))


async def _make(url: str, topic: str) -> None:
    async with open_broker(url) as broker:
        await broker.admin.create_topic(TopicSpec(topic, 1))


async def _accepted(url: str) -> BitMap:
    async with asyncio.timeout(300), open_broker(url) as broker:
        reading, found = TopicReading(broker, TELEMETRY), BitMap()
        await reading.go_on()
        for record in reading.found:
            report = decode_report(record.value)
            for one in report.sets if (report.node, report.pipe) == ("ingest", "invoices") else ():
                if one.outcome == "accepted":
                    found |= unpack_numbers(one.numbers)
        return found
