"""A stream that outgrows its shards: throttled at first, split and merged while everything runs, then in time again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from services.core.aws_emulator import AwsEmulator
from services.core.broker import producer
from services.core.broker.connect import parse_kinesis_url
from services.core.broker.contract import Broker
from services.core.broker.kinesis import pace
from services.core.broker.kinesis.aws import open_clients
from services.core.broker.kinesis.streams import PARTITIONS_TAG
from services.core.broker.retry import AppendPolicy
from tests.contract.harness_kinesis import KinesisHarness
from tests.contract.traffic import DEADLINE, Ledger, Member, record, until, until_async
from tests.support.kinesis_limits import KinesisLimits
from tests.support.kinesis_resharding import Resharding
from tests.support.paced_writers import PacedWriters

_SCALE = 0.1
"""Of a shard's published write limits, for the proxy, our pace and an append: the emulator takes some 750 entries a second."""

_EVENT_BYTES = 2_000
_PARTITIONS, _KEYS, _WRITERS = 8, 48, 2
"""Event n has key n % _KEYS, and the writer n % _WRITERS: as many keys in each partition, each written by one writer."""

_NORMAL = 0.6 * _SCALE * pace.BYTES_PER_SECOND / _EVENT_BYTES
"""Events a second: 0.6 of a shard. Four times as many are too much for two shards, and four have room for them."""

_WINDOW = 4 * 4 * _NORMAL
"""Events after which, none refused meanwhile, throttling is over: four seconds of the high load."""


class _Load(PacedWriters):
    """Each writer has keys of its own, and sends whatever the answers. acked: numbers of what is stored, as the answers came."""

    def __init__(self, topic: str) -> None:
        super().__init__(_NORMAL)
        self._topic = topic
        self.acked: list[int] = []

    async def write(self, broker: Broker, due: AsyncIterator[list[int]]) -> None:
        patient = AppendPolicy(deadline=DEADLINE, patience=DEADLINE, append_timeout=10)
        async with producer.Producer(broker.appender, policy=patient) as sending, asyncio.TaskGroup() as sends:
            async for numbers in due:
                for partition in range(_PARTITIONS):
                    if mine := [n for n in numbers if n % _KEYS % _PARTITIONS == partition]:
                        sends.create_task(self._send(sending, partition, mine))

    async def _send(self, sending: producer.Producer, partition: int, numbers: list[int]) -> None:
        records = [record(n, b"key-%d" % (n % _KEYS), size=_EVENT_BYTES) for n in numbers]
        (await sending.send_to(self._topic, {partition: records})).raise_first()
        self.acked.extend(numbers)


async def test_four_times_the_load_is_taken_after_splits_and_merges(
    kinesis_emulator: AwsEmulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a stream that is scaled under load loses or reorders events, or is throttled although it has room."""
    for module, name in ((pace, "BYTES_PER_SECOND"), (pace, "ENTRIES_PER_SECOND"), (producer, "MAX_APPEND_BYTES")):
        monkeypatch.setattr(module, name, getattr(module, name) * _SCALE)
    limits = KinesisLimits(kinesis_emulator.endpoint, write_scale=_SCALE)
    async with AsyncExitStack() as stack:
        stack.enter_context(limits.serve_in_thread())
        harness = KinesisHarness(kinesis_emulator, limits)
        brokers = [await stack.enter_async_context(harness.open()) for _ in range(_WRITERS + 2)]
        clients = await stack.enter_async_context(open_clients(parse_kinesis_url(harness.url), 10))
        topic, group = harness.fresh_name("topic"), harness.fresh_name("g")
        stream, load, ledger = Resharding(clients, topic), _Load(topic), Ledger()
        await clients.kinesis.create_stream(StreamName=topic, ShardCount=2)
        await until_async(lambda: _has_shards(stream, 2), "the stream is made")
        await clients.kinesis.add_tags_to_stream(StreamName=topic, Tags={PARTITIONS_TAG: str(_PARTITIONS)})
        async with (
            Member(brokers[-2], group, topic, "one", ledger),
            Member(brokers[-1], group, topic, "two", ledger),
        ):
            async with load.running(brokers[:_WRITERS]):
                await until(lambda: len(ledger.processed) >= 2 * _NORMAL, "the usual load arrives")
                load.rate = 4 * _NORMAL
                await until(lambda: limits.counts["entries refused"] >= 5, "the shards are full")
                await stream.split(0)
                await stream.split(1)
                await stream.split(2)
                await stream.merge(6, 7)
                await _until_unthrottled(limits, load)
            assert sorted(await stream.shards()) == [3, 4, 5, 8]
            await until(lambda: len(ledger.processed) >= len(load.acked), "everything was processed")
        assert ledger.conflicts == []
        assert set(ledger.processed) == set(load.acked)
        for key in range(_KEYS):
            of_key = [number for number in ledger.processed if number % _KEYS == key]
            assert of_key == sorted(of_key)


async def _has_shards(stream: Resharding, count: int) -> bool:
    return len(await stream.shards()) == count


async def _until_unthrottled(limits: KinesisLimits, load: _Load) -> None:
    """Until `_WINDOW` events in a row were stored without a refusal, and about no more were sent meanwhile."""
    refused = since = sent = -1

    def is_over() -> bool:
        nonlocal refused, since, sent
        if limits.counts["entries refused"] == refused and len(load.acked) - since < _WINDOW:
            return False
        kept_up = limits.counts["entries refused"] == refused and load.sent - sent <= 1.1 * _WINDOW
        refused, since, sent = limits.counts["entries refused"], len(load.acked), load.sent
        return kept_up

    await until(is_over, "throttling ends")
