"""The brokers that the trials run on, and how their rows come into the table."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from services.core.jvm.kafka import KafkaCluster
from tests.support.fault_table import Row

Report = Callable[[Row], None]


@pytest.fixture(params=["log", pytest.param("kafka", marks=pytest.mark.kafka)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Each broker in turn: an embedded log of its own, the three Kafka brokers of the session."""
    if request.param == "log":
        return f"log://{tmp_path / 'data'}"
    cluster = cast("KafkaCluster", request.getfixturevalue("kafka_cluster"))
    return f"kafka://{cluster.bootstrap}"


@pytest.fixture
def log_url(tmp_path: Path) -> str:
    """An embedded log of its own."""
    return f"log://{tmp_path / 'data'}"


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Report:
    """Puts a trial's row into the table at the end of the run."""
    return lambda row: record_property(*row.as_property())
