"""Spark's own figures: in our metrics, and in the pipe's reports."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
from prometheus_client import REGISTRY
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from services.core.broker.record import Record
from services.core.event import ID
from spark.figures import _SST_BYTES, QueryFigures, TaskFigures
from spark.java import jvm
from tests.spark.log_pipeline import LogPipeline, wait_for


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def phase(name: str) -> float:
    return metric("penstock_transform_batch_seconds_total", pipe="p", phase=name)


class OpenState(NamedTuple):
    """Memory of one part of a state in RocksDB. cache, buffers: hashes of the objects in Java. largest: bytes of the cache."""

    cache: int
    buffers: int
    largest: int


def open_states(spark: SparkSession) -> list[OpenState]:
    """Of all queries. Spark has no public way to them."""
    java = jvm(spark).java.lang

    def private(of: Any, name: str) -> Any:
        field = of.getClass().getDeclaredField(name)
        field.setAccessible(True)
        return field.get(of)

    store = java.Class.forName("org.apache.spark.sql.execution.streaming.state.StateStore$").getField("MODULE$")
    providers, found = private(store.get(None), "loadedProviders").values().iterator(), []
    while providers.hasNext():
        provider = providers.next()
        if provider.getClass().getSimpleName() != "RocksDBStateStoreProvider":
            continue
        rocksdb = provider.rocksDB()
        cache, buffers = (java.System.identityHashCode(private(rocksdb, n)) for n in ("lruCache", "writeBufferManager"))
        largest = int(private(rocksdb, "db").getProperty("rocksdb.block-cache-capacity"))
        found.append(OpenState(cache, buffers, largest))
    return found


def test_a_pipes_batches_and_state_are_measured(
    pipeline: LogPipeline, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, nobody can see where the time of a batch goes, or how much a transform keeps; or each part of a state takes
    memory of its own, and all together more than the host has."""
    monkeypatch.setattr("spark.reporter.HEARTBEAT_S", 0)
    record, states = QueryFigures.record, list[Mapping[str, Any]]()

    def keep(figures: QueryFigures, progress: Mapping[str, Any]) -> None:
        states.extend(progress["stateOperators"])
        record(figures, progress)

    monkeypatch.setattr(QueryFigures, "record", keep)
    before, spent = metric("penstock_transform_batches_total", pipe="p"), phase("addBatch")
    pipeline.send([Record(b"k", b"1", 1, ((ID, b"id-%d" % n),)) for n in range(30)])
    chosen = pipeline.pipe(sql="SELECT event, value FROM s", deduplicate_within="1h", max_events=10)
    pipeline.start(chosen)
    wait_for(lambda: metric("penstock_transform_state_rows", pipe="p") == 30, "the state of all batches")
    parts = open_states(spark)
    pipeline.stop()
    assert pipeline.problem is None
    assert metric("penstock_transform_batches_total", pipe="p") - before >= 3
    assert phase("addBatch") > spent
    assert metric("penstock_transform_state_bytes", pipe="p", where="memory") > 0
    assert len(parts) >= 2
    assert len(set(parts)) == 1, "they do not share their memory"
    assert parts[0].buffers, "what waits to be written is not bounded"
    assert parts[0].largest == (1 << 30) // 4  # the memory of the fixture `spark`
    named = [_SST_BYTES in state["customMetrics"] for state in states]
    assert named, "no state in what Spark reported"
    assert all(named), "Spark has another name for the bytes on disk"
    figures = [report.spark for report in pipeline.reports if report.spark is not None]
    assert sum(one.events for one in figures) == 30
    assert sum(one.batches for one in figures) >= 2  # the last one may end after the last report
    assert max(one.longest_ms for one in figures) > 0


def test_phases_add_up_and_an_idle_poll_is_no_batch() -> None:
    """If this fails, time is counted twice, or a query that waits for events seems to work."""
    figures = QueryFigures("phases")
    spent = {"triggerExecution": 100, "addBatch": 60, "walCommit": 10, "getBatch": 5}
    state = {"numRowsTotal": 4, "memoryUsedBytes": 1000, "customMetrics": {"rocksdbSstFileSize": 24}}
    figures.record({"durationMs": spent, "stateOperators": [state, state]})
    figures.record({"durationMs": {"triggerExecution": 7, "latestOffset": 7}, "stateOperators": []})
    name = "penstock_transform_batch_seconds_total"
    found = {
        each: metric(name, pipe="phases", phase=each) for each in ("addBatch", "walCommit", "latestOffset", "other")
    }
    assert found == {"addBatch": 0.06, "walCommit": 0.01, "latestOffset": 0, "other": 0.03}
    assert metric("penstock_transform_state_bytes", pipe="phases", where="disk") == 48
    taken = figures.take()
    assert (taken.batches, taken.batch_ms, taken.longest_ms, taken.state_rows, taken.state_bytes) == (
        1,
        100,
        100,
        8,
        2048,
    )
    taken = figures.take()
    assert (taken.batches, taken.longest_ms, taken.state_rows) == (0, 0, 8)


def test_tasks_are_counted(spark: SparkSession) -> None:
    """If this fails, a Spark that spills, or repeats tasks, looks like one that works."""
    figures, own = TaskFigures(spark), spark.newSession()
    before = figures_of_tasks()
    own.range(100_000, numPartitions=3).selectExpr("sum(hash(id))").collect()

    def counted(tasks: int) -> bool:
        figures.follow()
        now = figures_of_tasks()
        return sum(now[outcome] - before[outcome] for outcome in ("succeeded", "failed")) >= tasks

    wait_for(lambda: counted(4), "Spark's listener has seen all tasks")
    worked = figures_of_tasks()
    assert worked["run"] > before["run"]
    for name in ("failed", "memory", "disk"):
        assert worked[name] == before[name], name
    own.conf.set("spark.sql.windowExec.buffer.in.memory.threshold", "1")
    own.conf.set("spark.sql.windowExec.buffer.spill.threshold", "2")
    own.range(10, numPartitions=1).selectExpr("sum(id) OVER (PARTITION BY id % 1)").collect()
    with pytest.raises(PySparkException, match="on purpose"):
        own.range(1, numPartitions=1).selectExpr("raise_error('on purpose')").collect()
    wait_for(lambda: counted(6), "Spark's listener has seen the other tasks")
    now = figures_of_tasks()
    assert (now["succeeded"] - worked["succeeded"], now["failed"] - worked["failed"]) == (1, 1)
    spilled, stored = (now[name] - worked[name] for name in ("memory", "disk"))
    assert spilled > stored > 0, "whole pages of memory are freed, and a few rows are stored"


def figures_of_tasks() -> dict[str, float]:
    outcomes = {one: metric("penstock_spark_tasks_total", outcome=one) for one in ("succeeded", "failed")}
    spilled = {one: metric("penstock_spark_spilled_bytes_total", where=one) for one in ("memory", "disk")}
    return {**outcomes, **spilled, "run": metric("penstock_spark_task_seconds_total", kind="run")}
