"""Transforms on Kinesis whose tasks run on two workers: the emulator, without its limits."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.core.aws_emulator import CREDENTIALS, AwsEmulator
from services.core.event import read_id
from tests.spark.broker_pipeline import BrokerPipeline
from tests.spark.log_pipeline import event, numbers, wait_for
from tests.spark.service_process import ServiceProcess
from tests.spark.test_cluster import on
from tests.support.spark_cluster import SparkCluster

pytestmark = [pytest.mark.spark]


@pytest.fixture
def spark_cluster(tmp_path: Path) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path / "cluster", environment=CREDENTIALS) as cluster:
        yield cluster


@pytest.fixture
def pipeline(
    kinesis_emulator: AwsEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[BrokerPipeline]:
    """Without a Spark in this process. The service gets the emulator's credentials."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    no_session: Any = None
    with BrokerPipeline(no_session, kinesis_emulator.url, tmp_path, partitions=4) as pipeline:
        yield pipeline


def send(pipeline: BrokerPipeline, first: int, end: int) -> None:
    for partition in range(4):
        for start in range(first + partition, end, 80):  # several entries in each shard
            chosen = range(start, min(start + 80, end), 4)
            pipeline.send([event(n, orjson.dumps({"n": n}), key=b"key-%d" % partition) for n in chosen], partition)


def test_executors_and_drivers_die(pipeline: BrokerPipeline, spark_cluster: SparkCluster, tmp_path: Path) -> None:
    """If this fails, a task that dies between its note and its output, or a driver between two batches, loses events; or
    executors need the driver to read or to write."""
    total = 640
    pipeline.chosen(columns="n INT", sql="SELECT event, n FROM {s}", max_events=80, interval="50ms")
    send(pipeline, 0, total // 2)

    def progress(events: int) -> None:
        wait_for(lambda: len(set(pipeline.ids_so_far())) >= events, f"{events} events")

    options = [*on(spark_cluster), "--checkpoints", str(tmp_path / "checkpoints")]
    with ServiceProcess(tmp_path, pipeline.url, *options) as service:
        service.start()
        progress(160)
        service.kill()
        send(pipeline, total // 2, total)
        process = service.start()
        progress(total * 2 // 3)
        spark_cluster.executors()[0].kill()
        progress(total)
        process.terminate()
        assert process.wait(600) == 0, service.output.read_text()[-3000:]
    counts = Counter(pipeline.ids_so_far())
    assert counts.keys() == {f"id-{n}" for n in range(total)}
    assert counts.total() - total <= 4 * 80, "more again than the batches at work"
    assert not asyncio.run(pipeline.read_now("dead")), "an innocent event was rejected"
    assert numbers(pipeline.reports(), "passed") == set(range(total))
    for partition in range(4):
        first = dict.fromkeys(
            read_id(r) for r in asyncio.run(pipeline.read_now("out")) if r.key == b"key-%d" % partition
        )
        assert [int((name or "").removeprefix("id-")) for name in first] == list(range(partition, total, 4))
