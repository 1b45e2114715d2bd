"""Kafka's partitions: added slowly, and never under a key."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.autoscaler import partitions
from services.autoscaler.partitions import (
    COOL_DOWN_S,
    WINDOW_S,
    TopicDecision,
    TopicFigures,
    TopicMemory,
    decide,
    has_keys,
)
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import Unavailable
from services.core.broker.log import LogBroker
from services.core.broker.record import Record
from services.core.metrics import INGEST_BYTES
from services.core.pipes import PipeFile
from tests.contract.traffic import append
from tests.support.metrics_port import serve_metrics

_INGESTED = "penstock_ingest_payload_bytes_total"
_FULL = TopicFigures(bytes=9.5e6, partitions=2, capacity=5e6, keyed=False)


def _course(
    figures: TopicFigures, seconds: float, memory: TopicMemory | None = None
) -> tuple[TopicDecision, TopicMemory]:
    """The first decision to act, or the last of all."""
    memory, now = memory or TopicMemory(), 1e9
    decision = TopicDecision(None, "")
    while now <= 1e9 + seconds and decision.partitions is None:
        decision, memory = decide(figures, memory, now)
        now += 60.0
    return decision, memory


def test_ten_full_minutes_add_partitions() -> None:
    """Broken: a stream outgrows its partitions, or a short peak makes some that never go away."""
    assert _course(_FULL, WINDOW_S - 60)[0].partitions is None
    decision, memory = _course(_FULL, WINDOW_S)
    assert decision.partitions == 3
    assert decide(_FULL, replace(memory, acted=memory.acted), 1e9 + COOL_DOWN_S)[0].partitions is None
    assert _course(replace(_FULL, bytes=99e6), WINDOW_S)[0].partitions == 4


def test_a_pause_in_the_load_begins_the_ten_minutes_anew() -> None:
    """Broken: two peaks with a quiet hour between count as one."""
    memory = _course(_FULL, WINDOW_S - 120)[1]
    _, memory = decide(replace(_FULL, bytes=1e6), memory, 1e9 + WINDOW_S - 60)
    decision, _ = decide(_FULL, memory, 1e9 + WINDOW_S)
    assert decision.partitions is None


def test_keys_are_left_where_they_are_and_it_says_so() -> None:
    """Broken: the autoscaler breaks the order of a stream's keys."""
    decision, _ = _course(replace(_FULL, keyed=True), 2 * WINDOW_S)
    assert decision.partitions is None
    assert "have keys" in decision.reason
    assert "--grow" in decision.reason


async def test_keys_that_clients_give_are_seen(tmp_path: object) -> None:
    """Broken: a stream counts as one without keys because the pipe file names no field for them."""
    async with LogBroker.open(str(tmp_path)) as broker:
        await _check_keys(broker)


async def _check_keys(broker: Broker) -> None:
    await broker.admin.create_topic(TopicSpec("plain", 2))
    assert not await has_keys(broker.reader, "plain")
    await append(broker, "plain", [Record(None, b"{}", 1_700_000_000_000)], 1)
    assert not await has_keys(broker.reader, "plain")
    await append(broker, "plain", [Record(b"k", b"{}", 1_700_000_000_000)], 0)
    assert await has_keys(broker.reader, "plain")


@pytest.mark.parametrize("dry_run", [False, True])
async def test_partitions_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry_run: bool) -> None:
    """Broken: what was decided is not done; or a dry run does it; or a keyed stream gets partitions, too."""
    monkeypatch.setattr(partitions, "WINDOW_S", 0.0)
    monkeypatch.setattr(partitions, "COOL_DOWN_S", 0.0)
    monkeypatch.setattr(partitions, "EVERY_S", 0.05)
    pipes = PipeFile.model_validate({"streams": {"plain": {"partitions": 2}, "keyed": {"partitions": 2, "key": "id"}}})
    stopping = asyncio.Event()
    async with LogBroker.open(str(tmp_path / "log")) as broker, serve_metrics([_INGESTED]) as address:
        for name in pipes.streams:
            await broker.admin.create_topic(TopicSpec(name, 2))
        scaling = partitions.PartitionScaler(pipes, broker, f"dns://{address}", 1_000.0, dry_run=dry_run)
        with capture_logs() as logs:
            running = asyncio.create_task(scaling.run(stopping))
            async with asyncio.timeout(30):
                while len({one["stream"] for one in logs if "needed" in one["reason"] or one["partitions"]}) < 2:
                    for name in pipes.streams:
                        INGEST_BYTES.labels(name).inc(1e9)
                    await asyncio.sleep(0.02)
            stopping.set()
            await running
        assert await broker.admin.topics() == {"plain": 2 if dry_run else 4, "keyed": 2}


async def test_a_restart_and_a_failure_add_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: each restart adds partitions that never go away; or none are added for an hour because an attempt failed."""
    monkeypatch.setattr(partitions, "WINDOW_S", 0.0)
    monkeypatch.setattr(partitions, "EVERY_S", 0.05)
    pipes = PipeFile.model_validate({"streams": {"plain": {"partitions": 2}}})
    targets, stopping, failures = tmp_path / "targets.json", asyncio.Event(), [Unavailable("no answer")]
    async with LogBroker.open(str(tmp_path / "log")) as broker, serve_metrics([_INGESTED]) as address:
        await broker.admin.create_topic(TopicSpec("plain", 2))
        targets.write_text(json.dumps([{"targets": [address]}]))
        true_add = broker.admin.add_partitions

        async def add(topic: str, total: int) -> None:
            if failures:
                raise failures.pop()
            await true_add(topic, total)

        monkeypatch.setattr(broker.admin, "add_partitions", add)
        with capture_logs() as logs:
            running = asyncio.create_task(
                partitions.PartitionScaler(pipes, broker, str(targets), 1_000.0, dry_run=False).run(stopping)
            )
            async with asyncio.timeout(30):
                while not any("autoscaler began" in one.get("reason", "") for one in logs):
                    INGEST_BYTES.labels("plain").inc(1e9)
                    await asyncio.sleep(0.02)
                assert await broker.admin.topics() == {"plain": 2}
                monkeypatch.setattr(partitions, "COOL_DOWN_S", 1e-9)
                while await broker.admin.topics() == {"plain": 2}:
                    INGEST_BYTES.labels("plain").inc(1e9)
                    await asyncio.sleep(0.02)
            stopping.set()
            await running
        assert failures == []
