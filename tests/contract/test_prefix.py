"""Two fleets with the same pipe file on one cluster or account, and one without a prefix: none sees anything of another's."""

import asyncio
import time
from uuid import uuid4

import pytest

from services.core.audit import MovedGroup, write_moves
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import NotOwner
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.control.pauses import Pause, list_paused, write_pause
from services.core.ledger.report import TELEMETRY
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import AUDIT
from services.core.provision import ensure_topics
from services.core.undelivered.waiting import Bookmark, find_waiting
from tests.contract.harness_kafka import KafkaHarness
from tests.contract.harness_kinesis import KinesisHarness
from tests.contract.traffic import (
    DEADLINE,
    append,
    ignore_revoke,
    marks_of,
    numbers_of,
    read,
    until_async,
)
from tests.support.waiting_events import waiting_event

_HOOK = {"url": "https://example.org/", "schedule": []}
_PIPES = PipeFile.model_validate(
    {
        "streams": {"orders": {"partitions": 1}},
        "pipes": {"billing": {"sources": ["orders"], "destinations": [{"name": "shop", "webhook": _HOOK}]}},
    }
)
_GROUP = "billing.shop"
_WITHOUT_GROUPS = {"billing.dead", "billing.retry", "billing.parked"}


async def _is_empty(broker: Broker, topic: str) -> bool:
    return all(held.start == held.end for held in (await broker.reader.describe(topic)).values())


async def _read_all(broker: Broker, topic: str, group: str, count: int) -> list[int]:
    async with broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
        batches = await read(consumer, count)
        assert {batch.topic for batch in batches} == {topic}
        assert consumer.assignment() <= {TopicPartition(topic, number) for number in range(16)}
        await consumer.commit(marks_of(batches))
        with pytest.raises(NotOwner) as refused:
            await consumer.commit({TopicPartition("elsewhere", 0): 5})
        assert refused.value.partitions == {TopicPartition("elsewhere", 0)}
        return numbers_of(batches)


@pytest.mark.parametrize(
    "harness",
    [pytest.param("kafka", marks=pytest.mark.kafka), pytest.param("kinesis", marks=pytest.mark.kinesis)],
    indirect=True,
)
async def test_fleets_beside_each_other(harness: KafkaHarness | KinesisHarness) -> None:
    """Broken: two fleets of one company deliver each other's events, end each other's pauses, or remove each other's topics."""
    run = uuid4().hex[:6]
    first, second, inner = (harness.other_fleet(prefix) for prefix in (f"a{run}.", f"b{run}.", f"a{run}.eu."))
    async with first.open() as one, second.open() as other, harness.other_fleet("").open() as bare:
        for fleet in (one, other):
            made = await ensure_topics(fleet.admin, _PIPES)
            assert "orders" in made.created, "the other fleet's stream was taken for this one's"
        topics = await one.admin.topics()
        assert topics == await other.admin.topics()
        assert {"orders", TELEMETRY, AUDIT, *_WITHOUT_GROUPS} <= topics.keys()
        assert not [name for name in await bare.admin.topics() if run in name], "a fleet without a prefix sees others"
        async with inner.open() as nested:
            await nested.admin.create_topic(TopicSpec("orders", 1))
            await nested.admin.create_topic(TopicSpec(TELEMETRY, 1))
            assert await one.admin.topics() == topics, "a fleet sees another one whose prefix begins with its own"

        now = time.time_ns() // 1_000_000  # the topic keeps a day, and Kafka counts from the records' times
        await append(one, TELEMETRY, [Record(b"k", b"%d" % number, now) for number in range(3)])
        assert await _is_empty(other, TELEMETRY)
        assert await _read_all(one, TELEMETRY, _GROUP, 3) == [0, 1, 2], (
            "its first records were skipped: start is latest"
        )
        assert not await other.admin.has_begun(_GROUP, TELEMETRY)
        assert await one.admin.has_begun(_GROUP, TELEMETRY)

        async with Producer(one.appender) as producer:
            await write_pause(producer, "billing/shop", Pause("paused", "operator", "ann", 5))
            await write_moves(producer, "skip", "ann", {}, [MovedGroup("orders", 0, 0, 1, 1, 0, 0)])
        await append(one, "billing.parked", [waiting_event("billing/gone", 1, at=5)])
        assert list(await list_paused(one.reader, {})) == ["billing/shop"]
        assert not await list_paused(other.reader, {})
        for topic in (AUDIT, "billing.parked"):
            assert await _is_empty(other, topic)
        assert "billing/gone" in (await find_waiting(one, {"billing/shop"}, Bookmark())).unclaimed
        assert not (await find_waiting(other, {"billing/shop"}, Bookmark())).unclaimed

        names = await harness.names()
        assert {f"a{run}.orders", f"b{run}.orders"} <= names
        table = f"a{run}.penstock-{_GROUP}" if isinstance(harness, KinesisHarness) else f"a{run}.{_GROUP}"
        assert table in names, "the group has no name that begins with the prefix"
        assert not [name for name in names if run in name and not name.startswith((f"a{run}.", f"b{run}."))]

        await one.admin.delete_topic("orders")

        async def is_gone() -> bool:
            return "orders" not in await one.admin.topics()

        async with asyncio.timeout(DEADLINE):
            await until_async(is_gone, "the first fleet's stream is gone")
        assert "orders" in await other.admin.topics()
