"""A migration of a live stream from the embedded log to a real Kafka, and back."""

from pathlib import Path

import pytest

from services.core.jvm.kafka import KafkaCluster
from tests.support.kafka import unique_name
from tests.support.migrations import KEYS, World, run_history, shorten_times

pytestmark = pytest.mark.kafka


async def test_from_the_log_to_kafka(
    kafka_cluster: KafkaCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed on its way. Records, offsets and positions are the same there; Kafka keeps times and groups in its own way."""
    shorten_times(monkeypatch)
    world = World(f"log://{tmp_path / 'own'}", f"kafka://{kafka_cluster.bootstrap}?prefix={unique_name('move')}.")
    await world.set_up()
    assert await run_history(world, seed=11, kills=3) <= 2 * KEYS * 8
