"""Kinesis beyond the contract suite: shards that split and merge, that are full, and a service that fails in every way."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from services.core.audit import RESET, SKIP, Entry
from services.core.aws_emulator import AwsEmulator
from services.core.broker.connect import parse_kinesis_url
from services.core.broker.contract import Broker
from services.core.broker.kinesis.aws import open_clients
from services.core.broker.producer import Producer, SendResult
from services.core.broker.record import Record
from services.core.broker.retry import AppendPolicy
from services.fleet.positions.lanes import Lane
from services.fleet.positions.offsets import plan_moves, reset_offsets, skip_events
from tests.contract.harness_kinesis import KinesisHarness
from tests.contract.traffic import (
    DEADLINE,
    Ledger,
    Member,
    ignore_revoke,
    marks_of,
    numbers_of,
    poll,
    read_all,
    record,
    until,
    until_async,
)
from tests.support.kinesis_limits import PROVISIONED, Faults, KinesisLimits
from tests.support.kinesis_resharding import Resharding

_PATIENT = AppendPolicy(deadline=DEADLINE, patience=DEADLINE, append_timeout=5)
_KEYS = 12
_SLOWLY_SECONDS = 0.5
"""Between sends to who is pushed to. All that came between two looks is one event, and of an event of over 64 kB the emulator
sends 48 and never the rest: it does not heed the WINDOW_UPDATE with which the HTTP client begins."""


@pytest.fixture
def harness(kinesis_emulator: AwsEmulator, kinesis_limits: KinesisLimits) -> KinesisHarness:
    """The emulator behind the limits."""
    return KinesisHarness(kinesis_emulator, kinesis_limits)


@asynccontextmanager
async def _load(broker: Broker, topic: str, pause: float = 0.02) -> AsyncIterator[list[int]]:
    """Sends keyed records, each key's in order, until the context is left; the list has what was acknowledged.

    pause: seconds between two sends.
    """
    acked: list[int] = []
    stop = asyncio.Event()

    async def send() -> None:
        async with Producer(broker.appender, policy=_PATIENT) as producer:
            while not stop.is_set():
                numbers = range(len(acked), len(acked) + _KEYS)
                (await producer.send(topic, [record(n, b"key-%d" % (n % _KEYS)) for n in numbers])).raise_first()
                acked.extend(numbers)
                await asyncio.sleep(pause)

    async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
        tasks.create_task(send())
        try:
            yield acked
        finally:
            stop.set()


def _assert_order_per_key(numbers: Iterable[int]) -> None:
    first_seen = list(dict.fromkeys(numbers))
    for key in range(_KEYS):
        of_key = [number for number in first_seen if number % _KEYS == key]
        assert of_key == sorted(of_key)


async def test_order_and_everything_holds_through_splits_and_merges(harness: KinesisHarness) -> None:
    """If it fails, scaling a stream while it runs loses events, or delivers a key's new events before its old ones."""
    async with (
        harness.open() as writer,
        harness.open() as one,
        harness.open() as two,
        open_clients(parse_kinesis_url(harness.url), 10) as clients,
    ):
        topic = await harness.create_topic(writer, partitions=4)
        stream, group, ledger = Resharding(clients, topic), harness.fresh_name("g"), Ledger()
        async with Member(one, group, topic, "one", ledger), Member(two, group, topic, "two", ledger):
            async with _load(writer, topic) as acked:

                async def more() -> None:
                    goal = len(acked) + 5 * _KEYS
                    await until(lambda: len(ledger.processed) >= goal, "what was sent since is processed")

                await more()
                await stream.merge(0, 1)
                await more()
                await stream.split(2)
                await stream.split(4)
                await more()
                await stream.merge(7, 8)
                await more()
            assert sorted(await stream.shards()) == [3, 5, 6, 9]
            await until(lambda: len(ledger.processed) == len(acked), "everything was processed")

            async def settled() -> bool:
                return all(lag.records == 0 for lag in (await writer.admin.group_lag(group, topic)).values())

            await until_async(settled, "everything was committed")
        assert ledger.conflicts == []
        assert set(ledger.processed) == set(acked)
        _assert_order_per_key(ledger.processed)


async def test_a_group_is_pushed_to_through_a_split(
    kinesis_emulator: AwsEmulator, kinesis_limits: KinesisLimits
) -> None:
    """If it fails, enhanced fan-out loses or reorders events when a shard or a subscription ends, or polls after all."""
    harness = KinesisHarness(kinesis_emulator, kinesis_limits, fan_out=True)
    async with harness.open() as broker, open_clients(parse_kinesis_url(harness.url), 10) as clients:
        topic = await harness.create_topic(broker, partitions=2)
        stream, group, ledger = Resharding(clients, topic), harness.fresh_name("g"), Ledger()
        async with Member(broker, group, topic, "one", ledger):
            async with _load(broker, topic, _SLOWLY_SECONDS) as acked:
                await until(lambda: len(ledger.processed) >= _KEYS, "a shard is pushed")
                await stream.split(0)
                goal = len(acked) + _KEYS
                await until(lambda: len(ledger.processed) >= goal, "what was sent since is processed")
            await until(lambda: len(ledger.processed) == len(acked), "everything was processed")
        summary = (await clients.kinesis.describe_stream_summary(StreamName=topic))["StreamDescriptionSummary"]
        assert summary["ConsumerCount"] == 1
        assert set(ledger.processed) == set(acked)
        _assert_order_per_key(ledger.processed)


class _Patient:
    """A clock that stands still until the shard was full: it is however long a put takes on this machine."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.limits: KinesisLimits | None = None

    def __call__(self) -> float:
        is_full = self.limits is not None and self.limits.counts["entries refused"]
        return time.monotonic() if is_full else self._begun


async def test_two_writers_that_fill_a_shard_lose_nothing(kinesis_emulator: AwsEmulator) -> None:
    """If it fails, throttling loses events or turns them around, or writers never find their share of a shard."""
    clock = _Patient()
    limits = clock.limits = KinesisLimits(kinesis_emulator.endpoint, clock)
    async with AsyncExitStack() as stack:
        stack.enter_context(limits.serve_in_thread())
        harness = KinesisHarness(kinesis_emulator, limits)
        one, two = [await stack.enter_async_context(harness.open()) for _ in range(2)]
        topic = await harness.create_topic(one)

        async def fill(broker: Broker, first: int) -> None:
            async with Producer(broker.appender, policy=_PATIENT) as producer:
                for number in range(first, first + 20, 5):
                    batch = [record(n, b"k", size=100_000) for n in range(number, number + 5)]
                    (await producer.send_to(topic, {0: batch})).raise_first()

        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(fill(one, 0), fill(two, 100))
        assert limits.counts["entries refused"] > 0, "the shard was never full"
        numbers = numbers_of(await read_all(one, topic, harness.fresh_name("g")))
        assert sorted(set(numbers)) == [*range(20), *range(100, 120)]
        for writer in (0, 1):
            mine = list(dict.fromkeys(n for n in numbers if n // 100 == writer))
            assert mine == sorted(mine)


async def test_a_service_that_fails_in_every_way_loses_nothing(
    harness: KinesisHarness, kinesis_limits: KinesisLimits
) -> None:
    """If it fails, refused entries, throttles, expired iterators, 5xx or slow answers lose events or their order."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with harness.open() as writer, harness.open() as reader:
        topic = await harness.create_topic(writer, partitions=3)
        group, ledger = harness.fresh_name("g"), Ledger()
        errors = {
            "PutRecords": [PROVISIONED, "InternalFailure"] * 5,
            "GetRecords": [PROVISIONED, "ExpiredIteratorException", "InternalFailure"] * 4,
            "GetShardIterator": [PROVISIONED, "InternalFailure"],
            "ListShards": ["LimitExceededException", "InternalFailure"],
        }
        async with Member(reader, group, topic, "one", ledger):
            try:
                async with _load(writer, topic) as acked:
                    await until(lambda: len(ledger.processed) >= _KEYS, "the member has joined")
                    kinesis_limits.faults = Faults(
                        errors=errors,
                        refuse=lambda stream, _index: stream == topic and chance.random() < 0.3,
                        latency=0.02,
                    )
                    await until(lambda: not any(errors.values()), "every fault was met")
                    goal = len(acked) + 10 * _KEYS
                    await until(lambda: len(acked) >= goal, "acknowledged in spite of it all")
            finally:
                kinesis_limits.faults = Faults()
            await until(lambda: set(ledger.processed) >= set(acked), "everything was processed")
        _assert_order_per_key(ledger.processed)


class _Sent:
    """In place of a producer; takes what is sent to any topic. Records by topic."""

    def __init__(self) -> None:
        self.records: dict[str, list[Record]] = {}

    async def send_to(self, topic: str, partitions: Mapping[int, Sequence[Record]]) -> SendResult:
        for records in partitions.values():
            self.records.setdefault(topic, []).extend(records)
        return SendResult(())


async def test_a_destination_goes_back_and_forward_over_a_split(
    harness: KinesisHarness, kinesis_emulator: AwsEmulator
) -> None:
    """If it fails, `penstock group reset` to before a split brings some events only, or `skip` leaves a shard behind."""
    pipe = harness.fresh_name("p")
    async with harness.open() as broker, open_clients(parse_kinesis_url(kinesis_emulator.url), 30.0) as clients:
        topic = await harness.create_topic(broker, partitions=2)
        resharding = Resharding(clients, topic)
        lane = Lane(pipe, "d", (topic,), retries=False)
        sent: Any = _Sent()

        async def send(numbers: Iterable[int]) -> None:
            async with Producer(broker.appender, policy=_PATIENT) as producer:
                (await producer.send(topic, [record(n, b"key-%d" % (n % _KEYS)) for n in numbers])).raise_first()

        async def deliver(wanted: Iterable[int]) -> None:
            """A member reads and commits until it has these, in any order, and leaves."""
            left = set(wanted)
            async with broker.consumer(lane.group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
                async with asyncio.timeout(DEADLINE):
                    while left:
                        batches = await poll(consumer)
                        assert set(numbers_of(batches)) <= left, "delivered although it was skipped, or twice"
                        left -= set(numbers_of(batches))
                        await consumer.commit(marks_of(batches))

        await send(range(60))
        await resharding.split(0)
        await send(range(60, 120))
        await deliver(range(120))
        moves = await plan_moves(broker, lane, "earliest", RESET)
        assert sum(move.count for move in moves) == 120
        await reset_offsets(broker, sent, lane, moves, "me@here")
        await deliver(range(120))
        moves = await plan_moves(broker, lane, "earliest", RESET)
        await reset_offsets(broker, sent, lane, moves, "me@here")
        moves = await plan_moves(broker, lane, "end", SKIP)
        done = await skip_events(broker, sent, lane, moves, "me@here", "why")
        assert sum(move.count for move in done) == 120
        await send(range(120, 150))
        await deliver(range(120, 150))
        assert await plan_moves(broker, lane, "end", SKIP) == []
        entries = [msgspec.json.decode(one.value or b"", type=Entry) for one in sent.records["penstock.audit"]]
        assert [sum(one.count for one in entries if one.action == action) for action in (RESET, SKIP)] == [240, 120]
        assert all(one.ranges for one in entries)
