"""The suite's one fixture: every test takes `harness` and so runs on every backend."""

from pathlib import Path

import pytest

from tests.contract.harness import Harness

PREFIX = "contract."
"""Kafka and Kinesis run the suite with a prefix. Without one they do the same without its translation; tests/kafka and
tests/integration use them so."""


@pytest.fixture(
    params=[
        "log",
        "several",
        pytest.param("kafka", marks=pytest.mark.kafka),
        pytest.param("kinesis", marks=pytest.mark.kinesis),
    ]
)
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    """The log in a fresh folder, two logs as one broker, the session's three Kafka brokers (RF 3, min ISR 2), or its Kinesis
    emulator."""
    if request.param == "log":
        from tests.contract.harness_log import LogHarness

        return LogHarness(tmp_path)
    if request.param == "several":
        from tests.contract.harness_several import SeveralHarness

        return SeveralHarness(tmp_path)
    if request.param == "kinesis":
        from tests.contract.harness_kinesis import KinesisHarness

        return KinesisHarness(
            request.getfixturevalue("kinesis_emulator"), request.getfixturevalue("kinesis_limits"), PREFIX
        )
    from tests.contract.harness_kafka import KafkaHarness

    return KafkaHarness(request.getfixturevalue("kafka_cluster"), PREFIX)
