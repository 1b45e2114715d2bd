"""The transform service on a Spark standalone cluster: a master and two workers, each a process of its own, and a real Kafka."""

import asyncio
import socket
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from pyarrow.parquet import write_table

from services.core.aws_emulator import CREDENTIALS
from services.core.broker.errors import OutcomeUnknown, Unavailable
from services.core.broker.record import Record
from services.core.event import read_id
from services.core.jvm.kafka import KafkaCluster
from tests.spark.broker_pipeline import BrokerPipeline
from tests.spark.log_pipeline import event, numbers, wait_for
from tests.spark.service_process import ServiceProcess
from tests.support.kafka import describe_partitions, wait_until_all_are_known
from tests.support.object_store import BUCKET, ObjectStoreServer
from tests.support.secured_kafka import OPERATOR, SecuredKafka
from tests.support.spark_cluster import SparkCluster

pytestmark = [pytest.mark.kafka, pytest.mark.spark]

COLUMNS = "n INT"
START_S = 600.0
_MODULE = """
import services
import spark.records
from pyspark.sql import DataFrame
from pyspark.sql.functions import udf


@udf("string")
def shipped(n: int) -> str:
    return spark.records.__file__


def run(events: DataFrame, names: DataFrame) -> DataFrame:
    return events.join(names, "n", "left").select("event", "n", "name", shipped("n").alias("place"))
"""


@pytest.fixture(scope="module")
def spark_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("cluster"), environment=CREDENTIALS) as cluster:
        yield cluster


@pytest.fixture
def s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStoreServer]:
    """The service gets its credentials."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with ObjectStoreServer(tmp_path) as server:
        yield server


@pytest.fixture
def kafka_cluster(tmp_path: Path) -> Iterator[KafkaCluster]:
    """Three brokers, of which one may die: topics have three replicas, and two of them must have a record."""
    cluster = KafkaCluster(tmp_path / "kafka")
    try:
        cluster.start(timeout_s=START_S)
        asyncio.run(wait_until_all_are_known(cluster.bootstrap))
        yield cluster
    finally:
        cluster.stop(grace_s=0)


@pytest.fixture
def pipeline(kafka_cluster: KafkaCluster, tmp_path: Path) -> Iterator[BrokerPipeline]:
    """Without a Spark in this process."""
    no_session: Any = None
    with BrokerPipeline(no_session, f"kafka://{kafka_cluster.bootstrap}", tmp_path, partitions=4) as pipeline:
        yield pipeline


def sample(number: int) -> Record:
    return event(number, orjson.dumps({"n": number}))


def send(pipeline: BrokerPipeline, first: int, end: int) -> None:
    """These events, over all partitions. Again, as a client does, when nobody knows whether they are stored."""
    for partition in range(4):
        is_stored = False
        while not is_stored:
            with suppress(OutcomeUnknown):
                pipeline.send([sample(n) for n in range(first + partition, end, 4)], partition)
                is_stored = True


def on(cluster: SparkCluster) -> list[str]:
    """The settings of a service on this cluster."""
    driver = ["--driver-host", "127.0.0.1"]
    executors = ["--executors", "2", "--executor-cores", "1", "--executor-memory", "480MiB"]
    return ["--master", cluster.url, *driver, *executors, "--memory", "512MiB"]


@pytest.fixture
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    with SecuredKafka(tmp_path_factory.mktemp("secured")) as kafka:
        yield kafka


def test_pipe_on_two_workers(
    secured: SecuredKafka,
    spark_cluster: SparkCluster,
    s3: ObjectStoreServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If this fails, a pipe does not run on a cluster: its executors lack the connector, our packages, the login at Kafka or the
    operator's own module; or they cannot read a table, or keep state, in an object store; or the ledger does not have what they
    did; or nobody learns that a secret is not on their hosts."""
    monkeypatch.setenv("OF_DRIVER", secured.passwords[OPERATOR])
    path = secured.write(tmp_path / "login")
    security = path.read_text()
    no_session: Any = None
    with BrokerPipeline(no_session, secured.url("scram", path), tmp_path, partitions=4) as pipeline:
        path.write_text(security.replace('{"file": "password"}', '{"env": "OF_DRIVER"}'))
        _run_on_two_workers(pipeline, spark_cluster, s3, tmp_path, lambda: path.write_text(security))


def _run_on_two_workers(
    pipeline: BrokerPipeline,
    spark_cluster: SparkCluster,
    s3: ObjectStoreServer,
    tmp_path: Path,
    give_secret: Callable[[], object],
) -> None:
    (tmp_path / "own.py").write_text(_MODULE)
    names = tmp_path / "names.parquet"
    write_table(pa.table({"n": pa.array(range(400), pa.int32()), "name": [f"name {n}" for n in range(400)]}), names)
    s3.client().put_object(Bucket=BUCKET, Key="tables/names", Body=names.read_bytes())
    known = {"names": {"parquet": f"s3a://{BUCKET}/tables/names", "columns": "n INT, name STRING"}}
    pipeline.chosen(columns=COLUMNS, python="own.py:run", known=known, deduplicate_within="1h")
    send(pipeline, 0, 200)
    with ServiceProcess(tmp_path, pipeline.url, *on(spark_cluster), *s3.options("fleet")) as service:
        process = service.start()
        lacking = f"the variable OF_DRIVER is not on {socket.gethostname()}. Try: the same files"
        wait_for(lambda: lacking in service.output.read_text(), "the executors say what they lack")
        give_secret()
        pipeline.records("out", 200)
        pipeline.send([event(1000, b"no json")])
        send(pipeline, 0, 200)
        send(pipeline, 200, 400)
        out = pipeline.records("out", 400)
        assert {read_id(record) for record in pipeline.records("dead", 1)} == {"id-1000"}
        process.terminate()
        assert process.wait(600) == 0, service.output.read_text()[-3000:]
    assert Counter(read_id(record) for record in out) == Counter(f"id-{n}" for n in range(400))
    payloads = [orjson.loads(record.value or b"") for record in out]
    assert all("penstock.zip" in payload["place"] for payload in payloads), (
        "executors import our packages from where they happen to lie"
    )
    assert all(payload["name"] == f"name {payload['n']}" for payload in payloads)
    reports = pipeline.reports()
    assert numbers(reports, "passed") == set(range(400))
    assert numbers(reports, "dead") == {1000}


def test_workers_master_broker_and_driver_come_and_go(
    pipeline: BrokerPipeline, kafka_cluster: KafkaCluster, spark_cluster: SparkCluster, tmp_path: Path
) -> None:
    """If this fails, the end of a worker, of an executor, of the master, of one of three brokers or of a driver loses events or
    state, or stops a pipe for good; or a driver whose application the master ended lives on uselessly."""
    total, batch = 1000, 40
    first_broker = min(kafka_cluster.brokers)  # a new client asks it before the others
    for topic in (pipeline.stream, f"{pipeline.pipe}.out"):
        partitions = asyncio.run(describe_partitions(kafka_cluster.bootstrap, topic))
        assert all(len(one["replicas"]) == 3 for one in partitions)
        assert first_broker in {one["leader"] for one in partitions}, "its end would stop nobody"

    def have_come(events: int) -> bool:
        try:
            return len(set(pipeline.ids_so_far())) >= events
        except Unavailable:
            return False  # the broker is gone, and nobody leads its partitions yet

    def wait_until_all_came(events: int) -> None:
        wait_for(lambda: have_come(events), f"{events} events")

    pipeline.chosen(
        columns=COLUMNS, sql="SELECT event, n FROM {s}", max_events=batch, interval="50ms", deduplicate_within="1h"
    )
    send(pipeline, 0, 400)
    known = len(spark_cluster.applications())
    shared = ["--checkpoints", str(tmp_path / "checkpoints")]
    first, second = (ServiceProcess(tmp_path, pipeline.url, *on(spark_cluster), *shared) for _ in range(2))
    with first, second:
        driver = first.start()
        pipeline.records("out", 1)
        standby = second.start()
        (application, *_) = spark_cluster.applications()[known:]
        spark_cluster.kill_worker(0)
        spark_cluster.start_worker(0)
        wait_until_all_came(400)
        send(pipeline, 400, 500)
        kafka_cluster.kill(first_broker)
        send(pipeline, 500, 600)
        spark_cluster.executors()[0].kill()
        wait_until_all_came(600)
        spark_cluster.kill_master()
        spark_cluster.start_master()
        wait_for(lambda: "pipe_on_standby" in second.output.read_text(), "a driver on standby")
        send(pipeline, 600, 800)
        kafka_cluster.restart(first_broker, timeout_s=START_S)
        spark_cluster.end_application(application)
        send(pipeline, 800, total)
        assert driver.wait(600) == 1, "the driver lives on without an application"
        assert f"{spark_cluster.url} has ended the application" in first.output.read_text()
        wait_for(lambda: "pipe_taken_over" in second.output.read_text(), "the other driver takes over")
        wait_until_all_came(total)
        send(pipeline, 0, 400)  # again: a state that was lost on the way would let them through
        send(pipeline, total, total + 4)
        wait_until_all_came(total + 4)
        standby.terminate()
        assert standby.wait(600) == 0, second.output.read_text()[-3000:]
    assert "executors_lost" in first.output.read_text()
    counts = Counter(pipeline.ids_so_far())
    assert counts.keys() == {f"id-{n}" for n in range(total + 4)}
    assert counts.total() - total - 4 <= 4 * batch, "more again than the batches at work"
    assert not asyncio.run(pipeline.read_now("dead")), "an innocent event was rejected"
    assert numbers(pipeline.reports(), "passed") == set(range(total + 4))


def test_one_event_ends_its_executor_each_time(
    pipeline: BrokerPipeline, spark_cluster: SparkCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this fails, one event that takes all memory of an executor stops its pipe for good, or takes others with it."""
    (tmp_path / "spark-defaults.conf").write_text(
        "spark.task.maxFailures 1\n"
    )  # four by default: as many executors end
    monkeypatch.setenv("SPARK_CONF_DIR", str(tmp_path))
    healthy, poison = {0, 1, 3}, 2
    sql = f"SELECT event, length(repeat('x', IF(n = {poison}, 2000000000, 1))) AS size FROM {{s}}"
    pipeline.chosen(columns=COLUMNS, sql=sql, mode="micro-batch")
    send(pipeline, 0, 4)
    with ServiceProcess(tmp_path, pipeline.url, *on(spark_cluster)) as service:
        service.start()
        all_healthy = {f"id-{n}" for n in healthy}
        wait_for(
            lambda: set(pipeline.ids_so_far()) >= all_healthy, "the others"
        )  # twice, if they were written before the end
        [letter] = pipeline.records("dead", 1)
        service.terminate()
    assert read_id(letter) == f"id-{poison}"
    assert set(pipeline.ids_so_far()) == all_healthy
    assert numbers(pipeline.reports(), "passed") == healthy
    assert numbers(pipeline.reports(), "dead") == {poison}
    assert "executors_lost" in service.output.read_text()


def test_real_time_mode_on_executors(kafka_cluster: KafkaCluster, spark_cluster: SparkCluster, tmp_path: Path) -> None:
    """If this fails, a pipe that asks for real-time mode on a cluster stands still, or does not go on after an executor's end."""
    no_session: Any = None
    with BrokerPipeline(no_session, f"kafka://{kafka_cluster.bootstrap}", tmp_path, partitions=1) as pipeline:
        pipeline.chosen(columns=COLUMNS, sql="SELECT event, n FROM {s}", mode="real-time")
        with ServiceProcess(tmp_path, pipeline.url, *on(spark_cluster)) as service:
            process = service.start()
            for first in (0, 20):
                pipeline.send([sample(n) for n in range(first, first + 20)])
                wait_for(lambda first=first: len(set(pipeline.ids_so_far())) == first + 20, "events")  # type: ignore[misc]
                for executor in spark_cluster.executors():
                    executor.kill()
            pipeline.send([sample(n) for n in range(40, 60)])
            wait_for(lambda: len(set(pipeline.ids_so_far())) == 60, "the events after the executors")
            address = orjson.loads(service.output.read_text().splitlines()[0])["address"]
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=300) as answer:
                assert f'penstock_transform_mode{{mode="real-time",pipe="{pipeline.pipe}"' in answer.read().decode()
            process.terminate()
            assert process.wait(600) == 0, service.output.read_text()[-3000:]
        assert not asyncio.run(pipeline.read_now("dead"))
        assert numbers(pipeline.reports(), "passed") == set(range(60))
