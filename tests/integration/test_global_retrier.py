"""The global retrier as a process that is killed again and again: nothing lost, nothing early, hardly anything twice."""

import asyncio
import random
import signal
import time
from pathlib import Path

import pytest

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker
from services.core.jvm.kafka import KafkaCluster
from services.core.pipe_file.pipes import PipeFile
from services.core.provision import ensure_topics
from services.global_retrier.delay_queue import MOVE_EVENTS
from tests.integration.retrier_process import RetrierProcess, Waiters, kill_at_end
from tests.support.kafka import unique_name

RATE = 300
LONGEST_WAIT_MS = 10_000
LINES = 4
"""Topics in which such short waits are spent: retry-in, 1 s, 4 s; and one for luck."""


async def storm(broker: Broker, url: str, folder: Path, seconds: float, kills_at_least: int) -> tuple[Waiters, int]:
    """Write for so long while the retrier is killed over and over, each time once it has done something; then let it end."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    pipe = unique_name("late")
    destination = {"name": "ops", "webhook": {"url": "https://example.org/hook"}}
    pipes = {"streams": {pipe: {}}, "pipes": {pipe: {"sources": [pipe], "destinations": [destination]}}}
    await ensure_topics(broker.admin, PipeFile.model_validate(pipes))
    waiters, kills = Waiters(broker, pipe, chance), 0
    reading = asyncio.create_task(waiters.read())
    try:
        async with kill_at_end(RetrierProcess(folder, url)) as retrier:
            until = time.monotonic() + seconds

            def goes_on() -> bool:
                return time.monotonic() < until or kills < kills_at_least

            writing = asyncio.create_task(waiters.write(goes_on, RATE, LONGEST_WAIT_MS))
            while goes_on():
                await retrier.start()
                await retrier.wait_metric(1, "penstock_retrier_events_moved_total")
                await asyncio.sleep(chance.uniform(0.3, 1.5))
                await retrier.stop(signal.SIGKILL)
                kills += 1
            await writing
            await retrier.start()
            await waiters.wait_all()
            await retrier.wait_metric(1, "process_start_time_seconds")  # it may have had nothing to do, and just begun
            assert await retrier.stop(signal.SIGTERM) == 0, retrier.log
    finally:
        reading.cancel()
        await asyncio.wait([reading])
    return waiters, kills


def check(waiters: Waiters, kills: int) -> None:
    events, duplicates = len(waiters.states), waiters.duplicates()
    late = sorted(waiters.late_ms)
    print(f"{events} events, {kills} kills, {duplicates} duplicates ({duplicates / events:.2%})")
    print(f"late P50 {late[len(late) // 2]} ms, P99 {late[len(late) * 99 // 100]} ms, most {late[-1]} ms")
    assert not waiters.early, waiters.early[:10]
    assert not waiters.altered, waiters.altered[:10]
    assert duplicates <= kills * MOVE_EVENTS * LINES


async def test_killed_every_second_on_the_log(tmp_path: Path) -> None:
    """Broken: a crash of the retrier loses events, releases them early, restarts their counts, or repeats them at large."""
    url = f"log://{tmp_path}/log"
    async with open_broker(url) as broker:
        check(*await storm(broker, url, tmp_path, 20.0, kills_at_least=5))


@pytest.mark.kafka
async def test_killed_again_and_again_on_kafka(kafka_cluster: KafkaCluster, tmp_path: Path) -> None:
    """Broken: the same on Kafka, where a dead member keeps its partitions for the ten seconds of its session."""
    url = f"kafka://{kafka_cluster.bootstrap}"
    async with open_broker(url) as broker:
        check(*await storm(broker, url, tmp_path, 20.0, kills_at_least=3))
