"""The shard autoscaler on real streams: the load rises fourfold, and nobody does anything."""

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.autoscaler.shards.figures import Rules, StreamDecision
from services.autoscaler.shards.layout import uniform
from services.autoscaler.shards.resharding import apply_layout
from services.autoscaler.shards.scaler import ShardScaler
from services.core.aws_emulator import AwsEmulator
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import BrokerError
from services.core.broker.kinesis import pace
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.broker.resharding import Resharding
from services.core.broker.retry import AppendPolicy
from services.fleet.cost import read_sample
from tests.contract.harness_kinesis import KinesisHarness
from tests.contract.traffic import DEADLINE, Ledger, Member, record, until, until_async
from tests.support.kinesis_limits import KinesisLimits
from tests.support.metrics_port import serve_metrics
from tests.support.paced_writers import TICK, PacedWriters

_SCALE = 0.1
"""Of a shard's published write limits, for the proxy and for our pace: an emulator takes only so much."""

_FAMILIES = [
    "penstock_broker_partition_bytes_total",
    "penstock_broker_partition_entries_total",
    "penstock_broker_shard_throttles_total",
    "penstock_broker_shard_wait_seconds_total",
]
_RULES = Rules(lead=10.0, size_for=20.0, cover=2.0)
_PARTITIONS, _KEYS, _WRITERS = 12, 48, 2
_EVENT_BYTES, _TOGETHER = 2_000, 20
"""So many events in a request: one entry, stored whole or not at all."""

_NORMAL = 0.6 * _SCALE * pace.BYTES_PER_SECOND / _EVENT_BYTES
"""Events a second: 0.6 of a shard."""

_WINDOW = 5 * 4 * _NORMAL
"""Events after which, none refused meanwhile, throttling is over: five seconds of the high load."""


class _Load(PacedWriters):
    """Each writer has keys of its own, and sends one request after the other in each partition.

    What is refused is sent again, as a client would. acked: numbers of events that are stored.
    """

    def __init__(self, topic: str) -> None:
        super().__init__(_NORMAL)
        self._topic = topic
        self.acked: list[int] = []

    async def write(self, broker: Broker, due: AsyncIterator[list[int]]) -> None:
        waiting: list[deque[int]] = [deque() for _ in range(_PARTITIONS)]
        over = asyncio.Event()
        policy = AppendPolicy(deadline=2.0, append_timeout=5.0)
        async with Producer(broker.appender, policy=policy) as producer, asyncio.TaskGroup() as lanes:
            for partition, lane in enumerate(waiting):
                lanes.create_task(self._send(producer, partition, lane, over))
            async for numbers in due:
                for number in numbers:
                    waiting[number % _KEYS % _PARTITIONS].append(number)
            over.set()

    async def _send(self, producer: Producer, partition: int, waiting: deque[int], over: asyncio.Event) -> None:
        while waiting or not over.is_set():
            numbers = [waiting[at] for at in range(min(len(waiting), _TOGETHER))]
            records = [record(n, b"key-%d" % (n % _KEYS), size=_EVENT_BYTES) for n in numbers]
            try:
                if records:
                    (await producer.send_to(self._topic, {partition: records})).raise_first()
            except BrokerError as error:
                if not error.retriable:
                    raise
                numbers = []
            for number in numbers:
                assert waiting.popleft() == number
            self.acked.extend(numbers)
            await asyncio.sleep(0 if numbers else TICK)


def _resharding(broker: Broker) -> Resharding:
    assert broker.resharding is not None
    return broker.resharding


async def test_shards_follow_a_load_that_rises_fourfold(
    kinesis_emulator: AwsEmulator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If it fails, a stream that is full stays full, or following the load costs events or their order."""
    monkeypatch.setattr(pace, "BYTES_PER_SECOND", pace.BYTES_PER_SECOND * _SCALE)
    monkeypatch.setattr(pace, "ENTRIES_PER_SECOND", pace.ENTRIES_PER_SECOND * _SCALE)
    limits = KinesisLimits(kinesis_emulator.endpoint, write_scale=_SCALE)
    async with AsyncExitStack() as stack:
        stack.enter_context(limits.serve_in_thread())
        harness = KinesisHarness(kinesis_emulator, limits)
        brokers = [await stack.enter_async_context(harness.open()) for _ in range(_WRITERS + 3)]
        own, topic, group = brokers[-3], harness.fresh_name("topic"), harness.fresh_name("g")
        await own.admin.create_topic(TopicSpec(topic, _PARTITIONS, shards=1))
        resharding = _resharding(own)
        assert (await resharding.shards(topic)).layout == (0,)

        management = await stack.enter_async_context(serve_metrics(_FAMILIES))
        targets = tmp_path / "targets.json"
        targets.write_text(json.dumps([{"targets": [management]}]))
        stopping, load, ledger = asyncio.Event(), _Load(topic), Ledger()
        scaler = ShardScaler([topic], resharding, str(targets), dry_run=False, rules=_RULES, every=1.0)

        async def has_room() -> bool:
            return len((await resharding.shards(topic)).layout) >= 3

        with capture_logs() as logs:
            async with (
                Member(brokers[-2], group, topic, "one", ledger),
                Member(brokers[-1], group, topic, "two", ledger),
                asyncio.TaskGroup() as tasks,
            ):
                tasks.create_task(scaler.run(stopping))
                async with load.running(brokers[:_WRITERS]):
                    await until(lambda: len(ledger.processed) >= 5 * _NORMAL, "the usual load arrives")
                    load.rate, rose = 4 * _NORMAL, time.monotonic()
                    await until_async(has_room, "shards followed the load")
                    await _until_unthrottled(limits, load)
                    shards = len((await resharding.shards(topic)).layout)
                    print(
                        f"{shards} shards; {time.monotonic() - rose:.1f} s after the load rose, 5 s without a refusal"
                    )
                await until(lambda: len(ledger.processed) >= len(load.acked), "everything was processed")
                stopping.set()
        assert ledger.conflicts == []
        assert set(ledger.processed) == set(load.acked)
        for key in range(_KEYS):
            of_key = [number for number in ledger.processed if number % _KEYS == key]
            assert of_key == sorted(of_key)
        ups = [one for one in logs if one["event"] == "shards_decided" and one["decision"] == "up"]
        assert len(ups) >= 2, logs
        assert all(one["reason"] and one["loads"] for one in ups)
        noted = (await resharding.tags.read(topic))["updates"].split()
        assert 2 <= [word[0] for word in noted].count("u") <= len(ups), "a restart forgets how many of ten are used"


async def _until_unthrottled(limits: KinesisLimits, load: _Load) -> None:
    """Until `_WINDOW` events in a row were stored without a single refusal."""
    refused, since = -1, 0

    def is_over() -> bool:
        nonlocal refused, since
        if limits.counts["entries refused"] != refused:
            refused, since = limits.counts["entries refused"], len(load.acked)
        return len(load.acked) - since >= _WINDOW

    await until(is_over, "throttling ends")


async def test_the_service_looks_and_a_dry_run_leaves_alone(
    kinesis_emulator: AwsEmulator, kinesis_limits: KinesisLimits, tmp_path: Path
) -> None:
    """If it fails, the service does not find its figures, does not say what it thinks, or does not stop; or cost is wrong."""
    harness = KinesisHarness(kinesis_emulator, kinesis_limits)
    topic = harness.fresh_name("stream").replace(".", "-").lower()
    async with harness.open() as broker, serve_metrics(_FAMILIES) as management:
        await broker.admin.create_topic(TopicSpec(topic, _PARTITIONS, shards=2))
        (tmp_path / "pipes.yaml").write_text(f"streams: {{{topic}: {{partitions: {_PARTITIONS}, shards: 2}}}}\n")
        (tmp_path / "targets.json").write_text(json.dumps([{"targets": [management]}]))
        now = round(time.time() * 1000)
        records = [Record(b"k", b"x" * 100, now, (("ce_type", b"order.paid"),)) for _ in range(50)]
        async with Producer(broker.appender) as producer:
            (await producer.send_to(topic, {3: records})).raise_first()
        sample = await read_sample(broker.reader, topic, 5, aggregated=True)
        assert sample.load.per_entry == pytest.approx(50)
        assert 300 * sample.types["order.paid"].events == pytest.approx(50, rel=0.05)
        flags = {"broker": harness.url, "pipes": tmp_path / "pipes.yaml", "targets": tmp_path / "targets.json"}
        flags |= {"dry-run": "true", "stream-every": "1s", "drain": "300s"}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.autoscaler",
            *(word for name, value in flags.items() for word in (f"--{name}", str(value))),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stderr is not None
            async with asyncio.timeout(DEADLINE):
                said = ""
                while "shards_decided" not in said:
                    said = (await process.stderr.readline()).decode()
                    assert said, "it ended"
            told = json.loads(said)
            assert (told["stream"], told["decision"], told["loads"]) == (topic, "hold", [0.0, 0.0])
            process.terminate()
            rest = await asyncio.wait_for(process.communicate(), DEADLINE)
            assert process.returncode == 0, rest
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert "updates" not in await _resharding(broker).tags.read(topic)


async def test_each_change_on_a_stream(kinesis_emulator: AwsEmulator, kinesis_limits: KinesisLimits) -> None:
    """If it fails, a cut does not fall between partitions, or UpdateShardCount leaves another layout than was decided."""
    harness = KinesisHarness(kinesis_emulator, kinesis_limits)
    async with harness.open() as broker:
        topic, resharding = harness.fresh_name("topic"), _resharding(broker)
        await broker.admin.create_topic(TopicSpec(topic, _PARTITIONS, shards=2))
        assert await resharding.room() > 100
        await resharding.tags.write(topic, {"updates": "u1 d2"})
        await resharding.tags.write(topic, {"day": "x" * 192})
        assert await resharding.tags.read(topic) == {"partitions": "12", "updates": "u1 d2", "day": "x" * 192}

        async def layout() -> tuple[int, ...]:
            await resharding.settled(topic)
            shards = await resharding.shards(topic)
            assert shards.is_active
            return shards.layout

        first = (await resharding.shards(topic)).numbers[0]
        await resharding.split(topic, first, 5)
        assert await layout() == (0, 5, 6)
        numbers = (await resharding.shards(topic)).numbers
        await resharding.merge(topic, numbers[1], numbers[2])
        assert await layout() == (0, 5)
        await apply_layout(resharding, topic, (0, 5), StreamDecision((0, 6), ""))
        assert await layout() == (0, 6)
        # The emulator halves each shard, the service makes equal ranges: of equal shards both come to the same.
        await apply_layout(resharding, topic, (0, 6), StreamDecision(uniform(4, _PARTITIONS), "", at_once=True))
        assert await layout() == (0, 3, 6, 9)
        await apply_layout(resharding, topic, (0, 3, 6, 9), StreamDecision((0, 1, 7), ""))
        assert await layout() == (0, 1, 7)
        await broker.probe(topic, timeout=10)
