"""Transforms on Kinesis: the emulator, without its limits; what is tested here is Spark's side."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import orjson
import pytest
from pyspark.sql import SparkSession

from services.core.aws_emulator import AwsEmulator
from services.core.broker.connect import parse_kinesis_url
from services.core.broker.kinesis.aws import open_clients
from services.core.broker.record import Record
from services.core.event import read_id
from services.core.undelivered import dead_letter
from spark.records import Offsets
from spark.sources.source import NAME
from tests.spark.broker_pipeline import BrokerPipeline
from tests.spark.log_pipeline import NOW, event, numbers, run_query, wait_for
from tests.support.kinesis_resharding import Resharding

START = NOW - NOW % 60_000
SQL = "SELECT event, upper(value) AS value FROM {s}"


@pytest.fixture
def pipeline(spark: SparkSession, kinesis_emulator: AwsEmulator, tmp_path: Path) -> Iterator[BrokerPipeline]:
    """A stream of two shards and a pipe; its jobs are stopped at the end."""
    with BrokerPipeline(spark, kinesis_emulator.url, tmp_path, partitions=2) as pipeline:
        yield pipeline


async def reshard(
    pipeline: BrokerPipeline, *, splits: Sequence[int] = (), merge: tuple[int, int] | None = None
) -> None:
    """Split these shards of the stream in the middle; merge these two neighbours."""
    async with open_clients(parse_kinesis_url(pipeline.url), 10.0) as clients:
        resharding = Resharding(clients, pipeline.stream)
        for number in splits:
            await resharding.split(number)
        if merge is not None:
            await resharding.merge(*merge)


def send(pipeline: BrokerPipeline, first: int, last: int) -> None:
    """Events with numbers from `first` to below `last`, each key in one partition."""
    for partition in (0, 1):
        pipeline.send(
            [event(n, b"v%d" % n, key=b"key-%d" % (n % 2)) for n in range(first, last) if n % 2 == partition], partition
        )


def written(pipeline: BrokerPipeline, count: int) -> list[Record]:
    """What the pipe wrote: each event once, and those of a key in their order."""
    out = pipeline.records("out", count)
    assert Counter(read_id(record) for record in out) == Counter(f"id-{n}" for n in range(count))
    for key in (b"key-0", b"key-1"):
        times = [record.timestamp for record in out if record.key == key]
        assert times == sorted(times)
    return out


def test_splits_merges_and_restarts_lose_nothing(pipeline: BrokerPipeline) -> None:
    """If this fails, a child shard is read before its parent, or a checkpoint forgets which shards were read."""
    send(pipeline, 0, 100)
    chosen = pipeline.chosen(sql=SQL)
    pipeline.start(chosen)
    assert {record.value for record in written(pipeline, 100)} == {b"V%d" % n for n in range(100)}
    asyncio.run(reshard(pipeline, splits=(0, 1)))
    send(pipeline, 100, 200)
    written(pipeline, 200)
    pipeline.stop()
    asyncio.run(reshard(pipeline, splits=(5,), merge=(3, 4)))  # 3 and 5 are those that partitions 0 and 1 go to
    send(pipeline, 200, 300)
    pipeline.send([Record(None, b"no id", 1)], 0)
    pipeline.start(chosen)
    written(pipeline, 300)
    (letter,) = pipeline.records("dead", 1)
    pipeline.stop()
    assert pipeline.problem is None
    assert letter.header(dead_letter.REASON) == b"bad_record"
    assert numbers(pipeline.reports(), "passed") == set(range(300))


def flight(number: int, minute: float, delay: int = 1) -> Record:
    """An event at so many minutes after START."""
    record = event(number, orjson.dumps({"delay": delay}), key=b"k")
    return msgspec.structs.replace(record, timestamp=START + round(minute * 60_000))


def reasons(pipeline: BrokerPipeline, count: int) -> set[tuple[str | None, bytes | None]]:
    """Why which events are among the dead letters; waits for so many."""
    return {(read_id(letter), letter.header(dead_letter.REASON)) for letter in pipeline.records("dead", count)}


def test_an_aggregate_keeps_what_it_leaves_out(pipeline: BrokerPipeline) -> None:
    """If this fails, an event on which a transform in the plan raises stops it for good, or a late one vanishes."""
    counts = """SELECT date_format(window.start, 'HH:mm') AS id, count(*) AS flights, sum(60 DIV delay) AS part
                FROM {s} GROUP BY window(event_time, '1 minute')"""
    pipeline.start(pipeline.chosen(columns="delay INT", sql=counts, watermark="1m", interval="50ms"))
    pipeline.send([flight(0, 0), flight(1, 0.5)])
    wait_for(lambda: sum(report.read for report in pipeline.batches) >= 2, "a batch")
    pipeline.send([flight(2, 10), flight(3, 10.1, delay=0)])
    assert reasons(pipeline, 1) == {("id-3", b"transform_error")}
    pipeline.send([flight(4, 20)])
    results = sorted(pipeline.records("out", 2), key=lambda record: read_id(record) or "")  # perhaps in two shards
    assert [orjson.loads(record.value or b"")["flights"] for record in results] == [2, 1]
    (note,) = (pipeline.folder / "checkpoints" / pipeline.pipe).rglob("penstock.json")
    identity = orjson.loads(note.read_bytes())
    assert (identity["version"], identity["kind"]) == (2, "in plan, from Penstock 0.2 on"), "0.1 would take it"
    pipeline.send([flight(5, 0.1)])
    assert reasons(pipeline, 2) == {("id-3", b"transform_error"), ("id-5", b"late")}


def undo_last_batch(pipeline: BrokerPipeline, checkpoint: Path) -> None:
    """Remove the commit of the last batch that read something, and the empty ones behind it."""
    newest = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())

    def end(batch: int) -> Offsets:
        line = (checkpoint / f"offsets/{batch}").read_text().splitlines()[2]
        return pipeline.broker.parse_offsets(line, f"file://{checkpoint}")

    while end(newest) == end(newest - 1):
        for name in (f"offsets/{newest}", f"offsets/.{newest}.crc", f"commits/{newest}", f"commits/.{newest}.crc"):
            (checkpoint / name).unlink()
        newest -= 1
    for name in (f"{newest}", f".{newest}.crc"):
        (checkpoint / "commits" / name).unlink()


def test_a_batch_without_its_commit_is_the_same_again(
    pipeline: BrokerPipeline, spark: SparkSession, tmp_path: Path
) -> None:
    """If this fails, what a crash interrupts is lost, or comes again as other events."""
    send(pipeline, 0, 100)
    checkpoint = tmp_path / "sink"

    def run(until: int) -> None:
        options = {"broker": pipeline.url, "topics": pipeline.stream, "max_events": "30"}
        source = spark.readStream.format(NAME).options(**options, checkpoint=f"file://{checkpoint}").load()
        out = source.select("key", "value", "timestamp", "headers")
        writer = out.writeStream.format(NAME).options(broker=pipeline.url, topic=f"{pipeline.pipe}.out", writer="w")
        writer = writer.option("checkpointLocation", str(checkpoint))
        run_query(writer, lambda: len(pipeline.records("out", 0)) >= until, f"{until} records")

    run(100)
    written(pipeline, 100)
    undo_last_batch(pipeline, checkpoint)
    run(101)
    counts = Counter(read_id(record) for record in pipeline.records("out", 101))
    assert set(counts) == {f"id-{n}" for n in range(100)}
    assert set(counts.values()) == {1, 2}


def test_reads_what_is_stored(pipeline: BrokerPipeline, spark: SparkSession) -> None:
    """If this fails, a batch cannot be computed again to find the events that make it fail."""
    nothing = pipeline.broker.newest_ranges(spark, [pipeline.stream], 20)
    assert pipeline.broker.read_ranges(spark, nothing).count() == 0
    send(pipeline, 0, 50)
    spans = pipeline.broker.stored_ranges(spark, [pipeline.stream])
    rows = pipeline.broker.read_ranges(spark, spans).orderBy("partition", "offset").collect()
    assert [row.timestamp for row in rows if row.partition == 0] == sorted(
        row.timestamp for row in rows if row.partition == 0
    )
    assert len(rows) == 50
    parts = list(pipeline.broker.split_ranges(spans, 10))
    assert sum(pipeline.broker.read_ranges(spark, part).count() for part in parts) == 50
    assert len(parts) >= 2
