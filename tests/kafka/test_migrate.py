"""Migrations of a live stream between the embedded log and a real Kafka, and between two Kafkas, killed on their way."""

from pathlib import Path

import pytest

from services.core.jvm.kafka import KafkaCluster
from tests.support.kafka import unique_name
from tests.support.migrations import KEYS, World, run_history, shorten_times

pytestmark = pytest.mark.kafka


@pytest.mark.parametrize(
    ("own", "second", "seed"), [("log", "kafka", 11), ("kafka", "log", 12), ("kafka", "kafka", 13)]
)
async def test_a_stream_moves_there_and_back(
    kafka_cluster: KafkaCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, second: str, seed: int
) -> None:
    """Records, offsets and positions are the same there; Kafka keeps times and groups in its own way."""
    shorten_times(monkeypatch)

    def url(kind: str, name: str) -> str:
        if kind == "log":
            return f"log://{tmp_path / name}"
        # As another cluster: it shares no topic and no group.
        return f"kafka://{kafka_cluster.bootstrap}?prefix={unique_name(name)}."

    world = World(url(own, "own"), url(second, "second"))
    await world.set_up()
    assert await run_history(world, seed, kills=3) <= 2 * KEYS * 8
