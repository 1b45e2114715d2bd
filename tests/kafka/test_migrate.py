"""Migrations of a live stream between the embedded log and a real Kafka, and between two Kafkas, killed on their way."""

from pathlib import Path

import pytest

from services.core.aws_emulator import AwsEmulator
from services.core.jvm.kafka import KafkaCluster
from services.fleet.migrate.steps import Migration
from services.fleet.problem import CommandFailed
from tests.support.kafka import delete_group, unique_name
from tests.support.migrations import GROUP, KEYS, STREAM, World, run_history, shorten_times

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


async def test_a_stream_moves_between_kafka_and_kinesis(
    kafka_cluster: KafkaCluster, kinesis_emulator: AwsEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There and back: Kafka's times, and positions that are translated."""
    shorten_times(monkeypatch)
    world = World(
        f"kafka://{kafka_cluster.bootstrap}?prefix={unique_name('own')}.",
        f"{kinesis_emulator.url}&prefix={unique_name('kin')}.",
    )
    await world.set_up()
    assert await run_history(world, 14, kills=3, back=True) <= 2 * KEYS * 16


async def test_a_group_whose_position_kafka_has_dropped_is_no_new_group(
    kafka_cluster: KafkaCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a destination that was away for a week skips what waits for it, or gets everything again."""
    shorten_times(monkeypatch)
    prefix = unique_name("own")
    world = World(f"kafka://{kafka_cluster.bootstrap}?prefix={prefix}.", f"log://{tmp_path / 'second'}")
    await world.set_up()
    async with world.process() as (broker, places):
        await broker.admin.set_committed(GROUP, STREAM, {0: -1, 1: -1})
        await delete_group(kafka_cluster.bootstrap, f"{prefix}.{GROUP}")
        migration = Migration(broker, places, world.load, STREAM, "test")
        with pytest.raises(CommandFailed, match=f"no longer has the position of group {GROUP}"):
            await migration.run("second")
        assert places.home(STREAM).state == "copying"
        await migration.undo()
