"""A live stream moves by the real command while processes of the fleet, and the command, are killed."""

from pathlib import Path

import pytest

from services.core.aws_emulator import AwsEmulator
from services.core.jvm.kafka import KafkaCluster
from tests.faults.conftest import Report
from tests.faults.moves import run_history
from tests.support.kafka import unique_name


async def test_from_log_to_log(log_url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, somebody who moves a stream to another disk loses acknowledged events, or their order."""
    brokers = {"second": f"log://{tmp_path / 'second'}"}
    report((await run_history("24 a stream moves, all is killed", log_url, brokers, tmp_path, kills=2)).row)


@pytest.mark.kafka
@pytest.mark.parametrize("own", ["log", "kafka"])
async def test_to_kafka(own: str, kafka_cluster: KafkaCluster, log_url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, somebody who moves to Kafka, or to another cluster, loses acknowledged events, or their order."""
    kafka = f"kafka://{kafka_cluster.bootstrap}"
    brokers = {
        "second": f"{kafka}?prefix={unique_name('second')}."
    }  # as another cluster: it shares no topic and no group
    url = log_url if own == "log" else kafka
    report((await run_history(f"24 a stream moves, {own} to Kafka", url, brokers, tmp_path, kills=2)).row)


async def test_to_kinesis(kinesis_emulator: AwsEmulator, log_url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, somebody who moves to Kinesis, or back, loses acknowledged events, or their order."""
    brokers = {"second": f"{kinesis_emulator.url}&prefix={unique_name('second')}."}
    report((await run_history("24 a stream moves, log to Kinesis", log_url, brokers, tmp_path, kills=2)).row)
