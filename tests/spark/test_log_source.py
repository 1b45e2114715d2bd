"""The embedded log as a Spark source and sink: exact ranges, exact refusals, each batch once."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadMaxRows
from pyspark.sql.types import StructType

from services.core.broker.contract import PartitionRange, TopicSpec
from services.core.broker.errors import OffsetOutOfRange
from services.core.broker.log import blocking
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.retention import remove_before
from services.core.broker.log.topic_store import TopicStore
from services.core.broker.log.topics import create_topic
from services.core.broker.record import Batch, Record
from services.core.event import read_id
from spark.records import (
    OUT,
    OUT_SCHEMA,
    RAW,
    RAW_SCHEMA,
    OffsetRange,
    from_arrow,
    offset_text,
    to_arrow,
)
from spark.sources.log import TASK_EVENTS, LogStreamReader, partition_records, plan_tasks
from spark.sources.offsets import TopicRecreated, advance, check_stored, offsets_of, pack_offsets
from spark.sources.source import NAME
from tests.spark.log_pipeline import NOW, LogPipeline, event, run_query


def test_arrow_types_are_those_of_spark(spark: SparkSession) -> None:
    """If this fails, Spark refuses every batch that we read."""
    for ddl, schema in ((RAW, RAW_SCHEMA), (OUT, OUT_SCHEMA)):
        columns = StructType.fromDDL(ddl)
        assert isinstance(columns, StructType)
        assert to_arrow_schema(columns, timezone="UTC").equals(schema)


def test_records_survive_arrow() -> None:
    """If this fails, keys, nulls, times or headers change on their way through Spark."""
    records = [
        Record(b"k", b"v", NOW, (("a", b"1"), ("a", b"2"), ("b", b""))),
        Record(None, b"", -1, ()),
        Record(b"\xff", None, 253_402_300_799_999, (("\u00fc", b"\x00\xff"),)),
    ]
    batch = to_arrow(Batch("t", 3, [7, 9, 10], records), RAW_SCHEMA)
    assert from_arrow(batch) == records
    assert batch.column("offset").to_pylist() == [offset_text(n) for n in (7, 9, 10)]
    table = pa.Table.from_batches([batch.slice(1), batch.slice(0, 1)])
    assert from_arrow(table) == [records[1], records[2], records[0]]


def test_batches_share_the_backlog() -> None:
    """If this fails, one partition's backlog starves the others or a batch grows beyond its limit."""
    held = {0: PartitionRange(0, 1000), 1: PartitionRange(5, 10), 2: PartitionRange(0, 0), 3: PartitionRange(0, 400)}
    following = advance({0: 100}, held, 205)
    assert following == {0: 200, 1: 10, 2: 0, 3: 100}
    assert advance(following, held, 10_000) == {0: 1000, 1: 10, 2: 0, 3: 400}
    assert sum(advance({}, held, 1).values()) <= 5 + 1


def test_gone_records_are_named() -> None:
    """If this fails, a query jumps over records that retention took, or over a topic that was made again."""
    known = offsets_of(pack_offsets({"t": ("a", {0: 10, 1: 5})}), "t")
    check_stored("t", "a", known, {0: PartitionRange(10, 20), 1: PartitionRange(0, 5)})
    with pytest.raises(
        OffsetOutOfRange, match=r"t\[0\]: offset 10 is outside of the stored range 12 to 20; 2 records are gone"
    ):
        check_stored("t", "a", known, {0: PartitionRange(12, 20), 1: PartitionRange(0, 5)})
    with pytest.raises(OffsetOutOfRange, match="offset 5"):
        check_stored("t", "a", known, {0: PartitionRange(10, 20), 1: PartitionRange(0, 4)})
    with pytest.raises(TopicRecreated):
        check_stored("t", "b", known, {0: PartitionRange(10, 20), 1: PartitionRange(0, 5)})


def test_a_stream_whose_first_records_are_gone(tmp_path: Path) -> None:
    """If this fails, a source that is older than its retention stops its pipe for ever when it is added; or what retention takes
    between the plan of its first batch and a repeat is skipped without a word."""
    folder = DataFolder.prepare(tmp_path)
    for topic in ("s", "u"):
        create_topic(folder, TopicSpec(topic, 1))
        for first in range(0, 40, 10):
            blocking.append(tmp_path, topic, {0: [event(n, b"{}") for n in range(first, first + 10)]})

    def remove(before: int) -> None:
        with closing(TopicStore.open(folder, "u")) as store:
            remove_before(store, 0, before)

    def reader(topics: str) -> LogStreamReader:
        return LogStreamReader({"broker": f"log://{tmp_path}", "topics": topics, "max_events": "100"})

    remove(10)
    one, two, all_rows = reader("s"), reader("s,u"), ReadMaxRows(100)
    before = one.latestOffset(one.initialOffset(), all_rows)
    assert one.latestOffset(before, all_rows) == before
    for start in (before, two.initialOffset()):
        planned = two.latestOffset(start, all_rows)
        tasks: Any = two.partitions(start, planned)
        assert OffsetRange("u", 0, 10, 40) in [part for task in tasks for part in task.ranges]
        assert sum(batch.num_rows for task in tasks for batch in two.read(task)) == (30 if start == before else 70)
        assert two.latestOffset(planned, all_rows) == planned, "an empty batch"
    remove(30)
    (task,) = reader("s,u").partitions(before, planned)
    with pytest.raises(OffsetOutOfRange, match=r"u\[0\]: offset 10 is outside of the stored range 30 to 40"):
        list(two.read(task))


def test_a_new_checkpoint_begins_at_an_offset(tmp_path: Path) -> None:
    """If this fails, a transform that was reset to a time reads everything, skips events, or begins in the middle of another
    topic of that name."""
    folder = DataFolder.prepare(tmp_path)
    create_topic(folder, TopicSpec("s", 3))
    for first in range(0, 40, 10):
        records = [event(n, b"{}") for n in range(first, first + 10)]
        blocking.append(tmp_path, "s", dict.fromkeys(range(3), records))
    with closing(TopicStore.open(folder, "s")) as store:
        remove_before(store, 1, 20)
        incarnation = store.meta.incarnation.hex()
    options, all_rows = {"broker": f"log://{tmp_path}", "topics": "s", "max_events": "100"}, ReadMaxRows(1000)

    def reader(offsets: dict[int, int], known: str = incarnation) -> LogStreamReader:
        return LogStreamReader(options | {"begins": json.dumps(pack_offsets({"s": (known, offsets)}))})

    begun = reader({0: 35, 2: 40})
    planned = begun.latestOffset(begun.initialOffset(), all_rows)
    for again in (begun, reader({0: 35, 2: 40})):  # a batch that is computed again begins where it did
        tasks: Any = again.partitions(again.initialOffset(), planned)
        assert sorted(part for task in tasks for part in task.ranges) == [
            OffsetRange("s", 0, 35, 40),
            OffsetRange("s", 1, 20, 40),  # the oldest that is stored
        ]
    assert begun.latestOffset(planned, all_rows) == planned
    for wrong in ({0: 41}, {1: 19}):
        with pytest.raises(OffsetOutOfRange):
            reader(wrong).latestOffset(reader(wrong).initialOffset(), all_rows)
    with pytest.raises(TopicRecreated):
        reader({0: 35}, "0" * 32).latestOffset(reader({0: 35}, "0" * 32).initialOffset(), all_rows)


def test_small_ranges_share_a_task() -> None:
    """If this fails, a batch of a few events costs a task for each partition."""
    assert [task.ranges for task in plan_tasks([OffsetRange("t", p, 0, 10) for p in range(4)])] == [
        [OffsetRange("t", p, 0, 10) for p in range(4)]
    ]
    assert len(plan_tasks([OffsetRange("t", p, 0, TASK_EVENTS) for p in range(4)])) == 4
    assert plan_tasks([OffsetRange("t", 0, 5, 5)]) == []


def test_keyless_records_take_turns() -> None:
    """If this fails, all events without a key end in one partition for ever."""
    records = [Record(None, b"x", NOW)] * 3
    assert {tuple(partition_records(records, 4, turn)) for turn in range(4)} == {(0,), (1,), (2,), (3,)}


def test_reads_by_range(pipeline: LogPipeline, spark: SparkSession) -> None:
    """If this fails, a batch that is read again to find the cause of its failure has too many events, or too few."""
    pipeline.send([event(n, b"{}", key=b"same") for n in range(10)])
    (partition,) = [p for p, held in blocking.ends(pipeline.log, "s").items() if held.end]
    options = {"broker": f"log://{pipeline.log}"}
    ranges = f'[["s", {partition}, 3, 5]]'
    some = spark.read.format(NAME).options(**options, ranges=ranges).load().orderBy("offset").collect()
    assert [(row.topic, row.partition, row.offset, row.key) for row in some] == [
        ("s", partition, offset_text(n), b"same") for n in (3, 4)
    ]
    assert spark.read.format(NAME).options(**options, ranges="[]").load().count() == 0
    with pytest.raises(PySparkException, match="OffsetOutOfRange"):
        spark.read.format(NAME).options(**options, ranges=f'[["s", {partition}, 3, 50]]').load().count()


def test_streaming_sink_stores_a_batch_once(pipeline: LogPipeline, spark: SparkSession, tmp_path: Path) -> None:
    """If this fails, a stream into the log doubles a batch after a crash, or breaks the order of a key."""
    pipeline.send([event(n, b"%d" % n) for n in range(300)])
    checkpoint = tmp_path / "sink"

    def run() -> None:
        source = (
            spark.readStream.format(NAME).options(broker=f"log://{pipeline.log}", topics="s", max_events="100").load()
        )
        out = source.select("key", "value", "timestamp", "headers")
        writer = out.writeStream.format(NAME).options(broker=f"log://{pipeline.log}", topic="p.out", writer="w")
        run_query(writer.option("checkpointLocation", str(checkpoint)), lambda: len(pipeline.out) >= 300, "300 records")

    run()
    newest = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())
    (checkpoint / "commits" / str(newest)).unlink()
    (checkpoint / "commits" / f".{newest}.crc").unlink()
    run()
    out = pipeline.out
    assert sorted(read_id(r) or "" for r in out) == sorted(f"id-{n}" for n in range(300))
    by_key: dict[bytes | None, list[int]] = {}
    for record in out:
        by_key.setdefault(record.key, []).append(record.timestamp)
    assert all(times == sorted(times) for times in by_key.values())
