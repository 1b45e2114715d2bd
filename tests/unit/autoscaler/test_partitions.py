"""Kafka's partitions: added slowly, and never under a key."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from services.autoscaler import partitions
from services.autoscaler.partitions import (
    COOL_DOWN_S,
    WINDOW_S,
    TopicDecision,
    TopicFigures,
    TopicMemory,
    decide,
)
from services.core.audit import GROW, write_growth
from services.core.broker.errors import Unavailable
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.control.key_marks import write_key_marks
from services.core.metrics import INGEST_BYTES
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.stream import Stream
from services.core.pipe_file.topic_names import AUDIT
from services.core.provision import Recorder, ensure_topics
from services.fleet.dead.audit import read_audit
from tests.contract.traffic import append
from tests.support.metrics_port import serve_metrics

_INGESTED = "penstock_ingest_payload_bytes_total"
_REFUSED = "penstock_autoscaler_stream_refused"
_FULL = TopicFigures(bytes=9.5e6, partitions=2, capacity=5e6, most=8, keys=None)


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
    decision, _ = _course(replace(_FULL, keys="its events have keys"), 2 * WINDOW_S)
    assert decision.partitions is None
    assert decision.reason.startswith("3 partitions are needed, but its events have keys")
    assert "partitions: 3 in the pipe file, then penstock apply --grow" in decision.reason


def test_partitions_are_added_only_where_the_pipe_file_allows_it() -> None:
    """Broken: a stream gets partitions that can never be removed, and nobody asked for them; or more than anybody asked for."""
    decision, _ = _course(replace(_FULL, most=None), 2 * WINDOW_S)
    assert decision.partitions is None
    assert decision.reason.startswith("3 partitions are needed, but the stream has no max_partitions")
    assert decision.is_refused
    assert _course(replace(_FULL, bytes=99e6, most=3), WINDOW_S)[0].partitions == 3
    decision, _ = _course(replace(_FULL, most=2), 2 * WINDOW_S)
    assert decision.partitions is None
    assert "max_partitions: 2. Try: a higher one" in decision.reason


_STREAMS = {
    "plain": {"partitions": 2, "max_partitions": 4},
    "keyed": {"partitions": 2, "key": "id"},
    "marked": {"partitions": 2, "max_partitions": 4},
    "unknown": {"partitions": 2, "max_partitions": 4},
    "unasked": {"partitions": 2},
}
_PIPES = PipeFile.model_validate({"streams": _STREAMS})


@asynccontextmanager
async def _fleet(path: Path, pipes: PipeFile) -> AsyncIterator[LogBroker]:
    """The topics as `penstock apply` makes them; `unknown` is older than the marks, and `marked` got an event with a key."""
    async with LogBroker.open(str(path)) as broker, Producer(broker.appender) as producer:
        unmarked = pipes.model_copy(update={"streams": {"unknown": Stream(partitions=2)}})
        await ensure_topics(broker.admin, unmarked)
        await append(broker, "unknown", [Record(None, b"{}", 1_700_000_000_000)], 0)
        await ensure_topics(broker.admin, pipes, recorder=Recorder(broker, producer, "me@here"))
        await write_key_marks(producer, ["marked"], "seen", "ingest")
        yield broker


def _refused() -> set[str]:
    return {name for name in _STREAMS if REGISTRY.get_sample_value(_REFUSED, {"stream": name})}


@pytest.mark.parametrize("dry_run", [False, True])
async def test_partitions_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dry_run: bool) -> None:
    """Broken: what was decided is not done or not recorded; or a dry run does it; or a stream that may have keys gets partitions,
    one that nobody has looked at for a hundred records included."""
    monkeypatch.setattr(partitions, "WINDOW_S", 0.0)
    monkeypatch.setattr(partitions, "COOL_DOWN_S", 0.0)
    monkeypatch.setattr(partitions, "EVERY_S", 0.05)
    stopping = asyncio.Event()
    async with _fleet(tmp_path / "log", _PIPES) as broker, serve_metrics([_INGESTED]) as address:
        scaling = partitions.PartitionScaler(_PIPES, broker, f"dns://{address}", 1_000.0, dry_run=dry_run)
        with capture_logs() as logs:
            running = asyncio.create_task(scaling.run(stopping))
            async with asyncio.timeout(600):
                while len(
                    {one["stream"] for one in logs if "needed" in one["reason"] or one["partitions"]}
                ) < 5 or not _refused() >= {"keyed", "marked", "unknown", "unasked"}:
                    for name in _STREAMS:
                        INGEST_BYTES.labels(name).inc(1e9)
                    await asyncio.sleep(0.02)
            stopping.set()
            await running
        counts = await broker.admin.topics()
        assert {name: counts[name] for name in _STREAMS} == dict.fromkeys(_STREAMS, 2) | {"plain": 2 if dry_run else 4}
        why = {one["stream"]: one["reason"] for one in logs if "needed" in one["reason"]}
        assert "the stream has the key id" in why["keyed"]
        assert "its events have keys since 20" in why["marked"]
        assert "the stream is older than the record of its keys" in why["unknown"]
        assert "no max_partitions" in why["unasked"]
        found = [(one.action, one.who, one.topic, one.filters) async for one in read_audit(broker.reader)]
        grown = (GROW, "autoscaler", "plain", {"from": "2", "to": "4"})
        assert found == ([] if dry_run else [grown])


async def test_nothing_is_added_that_cannot_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a topic has partitions, and nobody knows since when and why."""
    monkeypatch.setattr(partitions, "WINDOW_S", 0.0)
    monkeypatch.setattr(partitions, "COOL_DOWN_S", 0.0)
    monkeypatch.setattr(partitions, "EVERY_S", 0.05)
    stopping = asyncio.Event()
    async with _fleet(tmp_path / "log", _PIPES) as broker, serve_metrics([_INGESTED]) as address:
        await broker.admin.delete_topic(AUDIT)
        scaling = partitions.PartitionScaler(_PIPES, broker, f"dns://{address}", 1_000.0, dry_run=False)
        with capture_logs() as logs:
            running = asyncio.create_task(scaling.run(stopping))
            async with asyncio.timeout(600):
                while not any(one["event"] == "partitions_unknown" for one in logs):
                    INGEST_BYTES.labels("plain").inc(1e9)
                    await asyncio.sleep(0.02)
            stopping.set()
            await running
        assert (await broker.admin.topics())["plain"] == 2
        (warning,) = {one["error"] for one in logs if one["event"] == "partitions_unknown"}
        assert "plain gets no partitions" in warning
        assert "penstock apply" in warning


@pytest.mark.parametrize("by", ["a key", "somebody else"])
async def test_what_happens_while_the_growth_is_recorded_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """Broken: the broker is slow, the stream gets its first event with a key meanwhile, and then partitions all the same; or a
    person adds some, and the autoscaler ends with an error."""
    monkeypatch.setattr(partitions, "WINDOW_S", 0.0)
    monkeypatch.setattr(partitions, "COOL_DOWN_S", 0.0)
    monkeypatch.setattr(partitions, "EVERY_S", 0.05)
    pipes = PipeFile.model_validate({"streams": {"plain": {"partitions": 2, "max_partitions": 4}}})
    stopping, recorded = asyncio.Event(), asyncio.Event()
    async with (
        _fleet(tmp_path / "log", pipes) as broker,
        Producer(broker.appender) as producer,
        serve_metrics([_INGESTED]) as address,
    ):

        async def record_slowly(*given: Any) -> None:
            await write_growth(*given)
            if not recorded.is_set():
                if by == "a key":
                    await write_key_marks(producer, ["plain"], "seen", "ingest")
                else:
                    await broker.admin.add_partitions("plain", 4)
            recorded.set()

        monkeypatch.setattr(partitions, "write_growth", record_slowly)
        scaling = partitions.PartitionScaler(pipes, broker, f"dns://{address}", 1_000.0, dry_run=False)
        with capture_logs() as logs:
            running = asyncio.create_task(scaling.run(stopping))
            async with asyncio.timeout(600):
                while not any("needed" in one.get("reason", "") for one in logs):
                    assert not running.done()
                    INGEST_BYTES.labels("plain").inc(1e9)
                    await asyncio.sleep(0.02)
            stopping.set()
            await running
        assert recorded.is_set()
        assert (await broker.admin.topics())["plain"] == (2 if by == "a key" else 4)


async def test_a_restart_and_a_failure_add_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: each restart adds partitions that never go away; or none are added for an hour because an attempt failed."""
    monkeypatch.setattr(partitions, "WINDOW_S", 0.0)
    monkeypatch.setattr(partitions, "EVERY_S", 0.05)
    pipes = PipeFile.model_validate({"streams": {"plain": {"partitions": 2, "max_partitions": 4}}})
    targets, stopping, failures = tmp_path / "targets.json", asyncio.Event(), [Unavailable("no answer")]
    async with _fleet(tmp_path / "log", pipes) as broker, serve_metrics([_INGESTED]) as address:
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
            async with asyncio.timeout(600):
                while not any("autoscaler began" in one.get("reason", "") for one in logs):
                    INGEST_BYTES.labels("plain").inc(1e9)
                    await asyncio.sleep(0.02)
                assert (await broker.admin.topics())["plain"] == 2
                monkeypatch.setattr(partitions, "COOL_DOWN_S", 1e-9)
                while (await broker.admin.topics())["plain"] == 2:
                    INGEST_BYTES.labels("plain").inc(1e9)
                    await asyncio.sleep(0.02)
            stopping.set()
            await running
        assert failures == []
