"""One Spark session for all of these tests: starting one takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from services.core.aws_emulator import CREDENTIALS, REGION
from services.core.jvm.kafka import KafkaCluster
from spark.object_store import ObjectStore
from spark.session import _SETTINGS, open_session
from tests.spark.log_pipeline import LogPipeline

START_S = 600.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder that uses the session is a Spark test."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("spark")


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session that the service would have, with all jars, and credentials for the emulators."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in CREDENTIALS.items():  # Java hands on to Spark's Python processes what it was started with
            environment.setenv(name, value)
        environment.setenv("TMPDIR", "")  # open_session sets it; the tests get the former one back
        environment.setitem(_SETTINGS, "spark.sql.streaming.stopTimeout", "600s")
        scratch = tmp_path_factory.mktemp("scratch")
        store = ObjectStore(region=REGION, path_style=True)  # its URL is set where a test has one
        session = open_session(
            master="local[2]",
            memory=1 << 30,
            kafka=True,
            kafka_login=True,
            databases=True,
            scratch=scratch,
            store=store,
            compiler="quick",
        )
    yield session
    session.stop()


@pytest.fixture(scope="session")
def kafka_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """One broker: test_cluster.py, which kills one, has its own. It runs in Spark's worker: a second Spark costs more."""
    cluster = KafkaCluster(tmp_path_factory.mktemp("kafka"), brokers=1)
    try:
        cluster.start(timeout_s=START_S)
        yield cluster
    finally:
        cluster.stop(grace_s=0)


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs in this process start without a run before their first batch: it takes as long as the batch. Services do it."""
    monkeypatch.setattr("spark.jobs.query.WARM_UP_RUNS", 0)


@pytest.fixture
def pipeline(spark: SparkSession, tmp_path: Path) -> Iterator[LogPipeline]:
    """A log, a pipe file and the jobs of its pipes; jobs are stopped at the end."""
    with LogPipeline(spark, tmp_path) as pipeline:
        yield pipeline
