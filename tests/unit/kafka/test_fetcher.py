"""aiokafka's fetcher as it runs: its own task, over a node that answers as it is told."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from aiokafka import errors as kafka
from aiokafka.consumer.subscription_state import SubscriptionState
from aiokafka.structs import TopicPartition as KafkaPartition

from services.core.broker.errors import DataDamaged
from services.core.broker.kafka import aiokafka_internals
from services.core.broker.kafka.aiokafka_internals import BoundedFetcher, FetchBudget
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.fetch_by_id import FetchById, FetchByIdResponse
from services.core.broker.kafka.leaders import fetch, time_of
from services.core.broker.record import TopicPartition
from tests.unit.kafka.test_scan import flip, make_batch

_ID = UUID(int=1)
_HERE = KafkaPartition("t", 0)
_CORRUPT = 2


class Node:
    """What of aiokafka's client a fetcher uses. It leads the partition."""

    def __init__(self) -> None:
        self._loop, self._metadata_max_age_ms = asyncio.get_running_loop(), 5000
        self._sync_task = self._loop.create_future()
        self.cluster = SimpleNamespace(leader_for_partition=lambda _: 1)
        self.code = 0
        self.max_version = 13

    def force_metadata_update(self) -> Any:
        return self._loop.create_future()

    async def send(self, _node: int, request: FetchById) -> FetchByIdResponse:
        request.prepare({1: (4, self.max_version)})
        await asyncio.sleep(0)
        return FetchByIdResponse(0, 0, 0, [(_ID, [(0, self.code, 9, 9, 0, None, -1, b"", {})], {})], {})


@asynccontextmanager
async def running(node: Node) -> AsyncIterator[BoundedFetcher]:
    """Reads the partition from offset 0."""
    subscriptions = SubscriptionState(loop=node._loop)
    fetcher = BoundedFetcher(node, subscriptions, FetchBudget(), auto_offset_reset="none")
    fetcher.find_id = lambda _source: _ID
    subscriptions.subscribe({"t"})
    subscriptions.assign_from_subscribed([_HERE])
    subscriptions.seek(_HERE, 0)
    try:
        yield fetcher
    finally:
        await fetcher.close()


@pytest.mark.parametrize("task", ["fetcher", "metadata"])
async def test_a_task_of_aiokafka_that_has_ended_is_an_error(task: str) -> None:
    """If it fails, a member stays in its group and reads nothing, for ever, and nobody hears of it."""
    node = Node()
    if task == "fetcher":
        node.max_version = 12
    else:
        node._sync_task.set_exception(RuntimeError("the handler is closed"))
    async with running(node) as fetcher:
        await asyncio.wait([fetcher._fetch_task if task == "fetcher" else node._sync_task])
        with pytest.raises(kafka.KafkaError, match=task):
            await fetcher.fetched_records([])


async def test_a_node_that_cannot_read_its_own_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a block of zeros in a segment stops its partition, and nobody hears of it."""
    monkeypatch.setattr(aiokafka_internals, "_PAUSE", 0)
    node = Node()
    node.code = _CORRUPT
    async with running(node) as fetcher:
        for _ in range(1000):
            if fetcher._records:
                break
            await asyncio.sleep(0)
        with pytest.raises(kafka.CorruptRecordException):
            await fetcher.fetched_records([])


class Stored:
    """What of a Cluster a look at stored batches uses."""

    def __init__(self, code: int, data: bytes) -> None:
        self._answer = SimpleNamespace(topics=[("t", [(0, code, 9, 9, 0, [], -1, data)])], API_VERSION=11)

    async def ask(self, *_: object) -> Any:
        return self._answer


async def test_a_look_at_damage_says_what_it_is() -> None:
    """If it fails, the lag of a damaged partition ends the membership, again and again, and with it the reading of the others."""
    source = TopicPartition("t", 0)
    with pytest.raises(DataDamaged, match="Try:"):
        await fetch(cast(Cluster, Stored(_CORRUPT, b"")), source, 1, 7)
    for at, bit in ((8, 7), (22, 0)):  # of the length, and of the compression
        bad = bytes(flip(make_batch(0), at, bit))
        with pytest.raises(DataDamaged, match="Try:"):
            await time_of(cast(Cluster, Stored(0, bad)), source, 1, 0)


async def test_a_close_after_a_failed_request_cancels_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a member that leaves while Kafka closes its connections is as if cancelled: it does not leave its group, keeps
    connections, and its lane ends without an error."""
    node, failed = Node(), asyncio.Event()

    async def send(*_: Any, **__: Any) -> Any:
        failed.set()
        raise kafka.KafkaConnectionError("closed")

    monkeypatch.setattr(node, "send", send)
    async with running(node) as fetcher:
        fetcher._retry_backoff = 3600.0
        async with asyncio.timeout(60):
            await failed.wait()
        await asyncio.sleep(0)  # it waits now, before its next attempt
        assert fetcher._pending_tasks
