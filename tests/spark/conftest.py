"""One Spark session for all of these tests: starting one takes seconds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from services.core.aws_emulator import CREDENTIALS
from spark.session import open_session
from tests.spark.river import River


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder that uses the session is a Spark test."""
    for item in items:
        if "spark" in getattr(item, "fixturenames", ()):
            item.add_marker("spark")


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """The session that the service would have, with Kafka's jars, and credentials for the Kinesis emulator."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in CREDENTIALS.items():  # Java hands on to Spark's Python processes what it was started with
            environment.setenv(name, value)
        session = open_session(master="local[2]", memory=1 << 30, kafka=True)
    yield session
    session.stop()


@pytest.fixture
def river(spark: SparkSession, tmp_path: Path) -> Iterator[River]:
    """A log, a pipe file and the jobs of its pipes; jobs are stopped at the end."""
    with River(spark, tmp_path) as river:
        yield river
