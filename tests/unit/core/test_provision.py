"""Provisioning: what a pipe file implies exists afterwards, whoever else is at it, and nothing changes silently."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker
from services.core.ledger.report import SNAPSHOTS, TELEMETRY
from services.core.pipes import AUDIT, CONTROL, DELAYS_S, RETRIER_DEAD, RETRY_IN, SCHEDULE, PipeFile, delay_topic
from services.core.provision import PartitionsDiffer, ensure_topics, wanted_topics

PIPES = PipeFile.model_validate(
    {
        "streams": {"a": {"partitions": 2, "retention": "1d"}, "b": {"partitions": 6, "retention": "3d"}},
        "pipes": {
            "plain": {"sources": ["a"], "destinations": [{"name": "d", "stream": "b"}]},
            "joined": {
                "sources": ["a", "b"],
                "transform": {"sql": "SELECT 1"},
                "destinations": [{"name": "d", "webhook": {"url": "https://example.org"}}],
            },
        },
    }
)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with open_broker(f"log://{tmp_path}/log") as opened:
        yield opened


def test_what_a_pipe_file_implies() -> None:
    """Broken: an output has fewer partitions than its source and becomes the bottleneck, or forgets before its source."""
    specs = {spec.name: (spec.partitions, spec.retention_ms) for spec in wanted_topics(PIPES)}
    day, schedule = 86_400_000, int(sum(SCHEDULE) * 1000)
    assert {name: spec for name, spec in specs.items() if not name.startswith("penstock.")} == {
        "a": (2, day),
        "b": (6, 3 * day),
        "plain.dead": (1, (1 + 30) * day),
        "joined.out": (6, 3 * day),
        "joined.dead": (1, (3 + 30) * day + schedule),
        "joined.retry": (1, 14 * day),
        "joined.parked": (1, None),
    }


def test_the_retriers_topics() -> None:
    """Broken: what waits a day is gone when the retrier comes back after a week, or fleets without retries pay for topics."""
    day = 86_400_000
    found = {spec.name: (spec.partitions, spec.retention_ms) for spec in wanted_topics(PIPES)}
    retriers = {name: spec for name, spec in found.items() if name.startswith("penstock.")}
    delays = {delay_topic(seconds): (1, seconds * 1000 + 14 * day) for seconds in DELAYS_S}
    ours = {AUDIT: (1, None), CONTROL: (1, None), TELEMETRY: (1, day), SNAPSHOTS: (1, 2 * day)}
    assert retriers == {RETRY_IN: (1, 14 * day), RETRIER_DEAD: found["joined.dead"], **ours, **delays}
    unretried: list[dict[str, object]] = [{"schedule": []}, {"order": "key"}]
    for webhook in unretried:
        destination = {"name": "d", "webhook": {"url": "https://example.org", **webhook}}
        data = {"streams": {"a": {}}, "pipes": {"p": {"sources": ["a"], "destinations": [destination]}}}
        names = {spec.name for spec in wanted_topics(PipeFile.model_validate(data))}
        assert {name for name in names if name.startswith("penstock.")} == ours.keys()


async def test_idempotent_and_at_the_same_time(broker: Broker) -> None:
    """Broken: two starts at once fail each other, or a second one fails on what the first made."""
    both = await asyncio.gather(*(ensure_topics(broker.admin, PIPES) for _ in range(2)))
    names = sorted(spec.name for spec in wanted_topics(PIPES))
    assert sorted(topic for done in both for topic in done.created) == names
    again = await ensure_topics(broker.admin, PIPES)
    assert (again.created, again.grown, len(again.kept)) == ((), (), len(names))
    assert await broker.admin.topics() == {spec.name: spec.partitions for spec in wanted_topics(PIPES)}


async def test_partitions_never_change_silently(broker: Broker) -> None:
    """Broken: keys move to other partitions, and their order is lost without anybody having decided it."""
    await ensure_topics(broker.admin, PIPES)
    data = PIPES.model_dump(include={"streams": {"a": {"id"}, "b": {"id"}}})
    wider = PipeFile.model_validate({**data, "streams": {"a": {"partitions": 3}, "b": {"partitions": 6}, "c": {}}})
    with pytest.raises(PartitionsDiffer, match="topic a has 2 partitions, the pipe file has 3"):
        await ensure_topics(broker.admin, wider)
    assert "c" not in await broker.admin.topics()
    done = await ensure_topics(broker.admin, wider, grow=True)
    assert (done.created, done.grown) == (("c",), ("a",))
    assert set(done.kept) == {"b", TELEMETRY, SNAPSHOTS, RETRY_IN, RETRIER_DEAD, *map(delay_topic, DELAYS_S)}
    assert (await broker.admin.topics())["a"] == 3
    narrower = PipeFile.model_validate({"streams": {"b": {"partitions": 1}}})
    with pytest.raises(PartitionsDiffer, match="Try: partitions: 6"):
        await ensure_topics(broker.admin, narrower, grow=True)
