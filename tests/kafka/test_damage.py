"""Damage in the files of real brokers: named, kept as it is stored, and passed over only where that is certain."""

import asyncio
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import DataDamaged
from services.core.broker.kafka import KafkaBroker, Timing
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.jvm.kafka import KafkaCluster
from services.core.undelivered import dead_letter
from services.expel.dispatcher import Dispatcher
from services.expel.lane import Lane
from services.expel.metrics import LaneMetrics
from services.expel.throttle import SendThrottle
from tests.contract.traffic import (
    DEADLINE,
    append,
    ignore_revoke,
    marks_of,
    numbered,
    numbers_of,
    poll,
    read,
    read_all,
    record,
    records_of,
    until,
)
from tests.support.kafka import describe_partitions, unique_name
from tests.unit.expel.fake_sender import FakeSender, make_record, make_shape

pytestmark = pytest.mark.kafka

_TIMING = Timing(session=2.0, heartbeat=0.3, drain=10.0, request=4.0, metadata=1.0)
_UNLUCKY = Record(b"k", b"unlucky", 0)


_originals: list[tuple[Path, bytes]] = []
"""What the damaged files were."""


@pytest.fixture(autouse=True)
def mended() -> Iterator[None]:
    """Tests share the brokers, and a broker does not start again on a batch without length. Records behind the damage stay."""
    yield
    while _originals:
        path, content = _originals.pop()
        with path.open("r+b") as file:
            file.write(content)


async def _damage(cluster: KafkaCluster, topic: str, alter: Callable[[bytearray], None], partition: int = 0) -> None:
    """Alter the file of the partition's leader beneath it; all batches lie in its first segment."""
    found = {one["partition"]: one["leader"] for one in await describe_partitions(cluster.bootstrap, topic)}
    folder = cluster.brokers[found[partition]].data / f"{topic}-{partition}"
    await asyncio.to_thread(_rewrite, folder / "00000000000000000000.log", alter)


def _rewrite(path: Path, alter: Callable[[bytearray], None]) -> None:
    content = bytearray(path.read_bytes())
    _originals.append((path, bytes(content)))
    alter(content)
    with path.open("r+b") as file:
        file.write(content)


def _flip_value(content: bytearray) -> None:
    content[content.index(b"unlucky") + 3] ^= 1


async def _read_past(broker: KafkaBroker, topic: str, group: str, count: int) -> tuple[list[int], list[Batch]]:
    """(numbers of the readable records, what stood for the others), committed; until `count` were read."""
    numbers: list[int] = []
    damaged: list[Batch] = []
    async with (
        asyncio.timeout(DEADLINE),
        broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer,
    ):
        while len(numbers) < count or not damaged:
            batches = await poll(consumer)
            damaged += [batch for batch in batches if batch.damage is not None]
            numbers += numbers_of(batch for batch in batches if batch.damage is None)
            await consumer.commit(marks_of(batches))
    return numbers, damaged


async def test_a_flipped_bit_is_kept_as_stored_and_the_rest_goes_on(kafka_cluster: KafkaCluster) -> None:
    """If it fails, damage is skipped in silence, stops its lane, or takes with it what other partitions had delivered."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic, group = unique_name("topic"), unique_name("g")
        await broker.admin.create_topic(TopicSpec(topic, partitions=2))
        await append(broker, topic, numbered(range(10)), 0)
        await append(broker, topic, [record(10), _UNLUCKY, record(12)], 0)
        await append(broker, topic, numbered(range(13, 20)), 0)
        await append(broker, topic, numbered(range(100, 120)), 1)
        await _damage(kafka_cluster, topic, _flip_value)
        numbers, (damaged,) = await _read_past(broker, topic, group, 37)
        assert sorted(numbers) == [*range(10), *range(13, 20), *range(100, 120)]
        assert damaged.damage is not None
        assert (damaged.damage.first, damaged.damage.last, list(damaged.offsets)) == (10, 12, [12])
        (stored,) = damaged.records
        assert stored.value is not None
        assert b"unl" in stored.value
        assert await broker.admin.committed(group, topic) == {0: 19, 1: 19}


async def test_damage_met_without_a_group(kafka_cluster: KafkaCluster) -> None:
    """If it fails, an operator's look stops at damage, or shows records that are not what was written."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic = unique_name("topic")
        await broker.admin.create_topic(TopicSpec(topic, partitions=1))
        await append(broker, topic, numbered(range(3)))
        await append(broker, topic, [_UNLUCKY, record(4)])
        await append(broker, topic, numbered(range(5, 8)))
        await _damage(kafka_cluster, topic, _flip_value)
        before = await broker.reader.read(topic, 0, 0, max_records=100)
        assert before is not None
        assert numbers_of([before]) == [0, 1, 2]
        damaged = await broker.reader.read(topic, 0, 3, max_records=100)
        assert damaged is not None
        assert damaged.damage is not None
        assert (damaged.damage.first, damaged.damage.last, list(damaged.offsets)) == (3, 4, [4])
        behind = await broker.reader.read(topic, 0, 5, max_records=100)
        assert behind is not None
        assert numbers_of([behind]) == [5, 6, 7]


async def test_damage_at_the_end_and_what_is_written_behind_it_later(kafka_cluster: KafkaCluster) -> None:
    """If it fails, damage in the newest batch stops its lane, or what is written behind it is skipped."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic = unique_name("topic")
        await broker.admin.create_topic(TopicSpec(topic, partitions=1))
        await append(broker, topic, numbered(range(3)))
        await append(broker, topic, [_UNLUCKY, record(4)])
        await _damage(kafka_cluster, topic, _flip_value)
        group = unique_name("g")
        numbers, (damaged,) = await _read_past(broker, topic, group, 3)
        assert numbers == [0, 1, 2]
        assert damaged.damage is not None
        assert (damaged.damage.first, damaged.damage.last) == (3, 4)
        await append(broker, topic, numbered(range(5, 8)))
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            assert numbers_of(await read(consumer, 3)) == [5, 6, 7]
        numbers, (damaged,) = await _read_past(broker, topic, unique_name("g"), 6)
        assert numbers == [0, 1, 2, 5, 6, 7]


async def test_the_end_of_a_segment(kafka_cluster: KafkaCluster) -> None:
    """If it fails, damage that ends a file makes reading go on somewhere in the next file, or nowhere."""
    topic = unique_name("topic")
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        await _create_with_small_segments(kafka_cluster, topic)
        await append(broker, topic, [record(0, size=700_000)])
        await append(broker, topic, [_UNLUCKY])
        await append(broker, topic, [record(2, size=700_000)])
        await append(broker, topic, [record(3)])
        await _damage(kafka_cluster, topic, _flip_value)
        numbers, (damaged,) = await _read_past(broker, topic, unique_name("g"), 3)
        assert numbers == [0, 2, 3]
        assert damaged.damage is not None
        assert (damaged.damage.first, damaged.damage.last) == (1, 1)


async def _create_with_small_segments(cluster: KafkaCluster, topic: str) -> None:
    from aiokafka.admin import NewTopic

    from tests.support.kafka import open_admin

    async with open_admin(cluster.bootstrap) as admin:
        settings = {"segment.bytes": "1048576", "retention.ms": "-1"}
        await admin.create_topics([NewTopic(topic, 1, 3, topic_configs=settings)])


@pytest.mark.parametrize(("at", "value"), [(23, 9), (8, 0)], ids=["last offset, from the first", "length"])
async def test_where_it_ends_is_not_certain(kafka_cluster: KafkaCluster, at: int, value: int) -> None:
    """If it fails, intact records are skipped because a header that is itself altered says so; or nobody hears of it."""

    def alter(content: bytearray) -> None:
        second = 12 + struct.unpack_from(">i", content, 8)[0]
        assert struct.unpack_from(">q", content, second)[0] == 3
        struct.pack_into(">i", content, second + at, value)

    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic = unique_name("topic")
        await broker.admin.create_topic(TopicSpec(topic, partitions=1))
        await append(broker, topic, numbered(range(3)))
        await append(broker, topic, [_UNLUCKY])
        await _damage(kafka_cluster, topic, alter)
        async with broker.consumer(unique_name("g"), [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            assert numbers_of(await read(consumer, 3)) == [0, 1, 2]
            for _ in range(2):
                with pytest.raises(DataDamaged, match="Try:") as damaged:
                    await read(consumer, 1)
                assert damaged.value.ranges[0][:2] == (0, 3)
            consumer.pause([TopicPartition(topic, 0)])
            assert await poll(consumer) == []


async def test_a_lane_buries_damage_and_delivers_the_rest(kafka_cluster: KafkaCluster) -> None:
    """If it fails, events behind a damaged batch wait for a person, or nobody learns how many were damaged, and where."""
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        topic, pipe = unique_name("topic"), unique_name("pipe")
        for name in (topic, f"{pipe}.dead"):
            await broker.admin.create_topic(TopicSpec(name, partitions=1))
        await append(broker, topic, [make_record(0), make_record(1)])
        await append(broker, topic, [make_record(2), make_record(3, value=b"unlucky"), make_record(4)])
        await append(broker, topic, [make_record(5), Record(b"k", None, 0), make_record(7)])
        await _damage(kafka_cluster, topic, _flip_value)
        sender, stopping = FakeSender(), asyncio.Event()
        async with Producer(broker.appender) as producer:
            meter, shape = LaneMetrics(pipe, "hook"), make_shape(pipe=pipe)
            lane = Lane(
                broker,
                pipe,
                "hook",
                [topic],
                "earliest",
                meter,
                lambda: Dispatcher(shape, sender, broker, producer, meter, SendThrottle(pipe, "hook")),
                0.1,
            )
            running = asyncio.create_task(lane.run(stopping, 10.0))
            try:
                await until(lambda: sorted(sender.taken) == ["e0", "e1", "e5", "e7"], "what can be read is delivered")
                await until(
                    lambda: _metric("penstock_expel_events_dead_total", pipe=pipe, reason="bad_record") == 1, ""
                )
            finally:
                stopping.set()
                await running
        dead = records_of(await read_all(broker, f"{pipe}.dead", unique_name("g")))
        letters = {letter.header(dead_letter.REASON): letter for letter in dead}
        assert letters.keys() == {b"damaged_batch", b"bad_record"}
        letter = letters[b"damaged_batch"]
        assert letter.value is not None
        assert b"unl" in letter.value
        assert b"offsets 2 to 4" in (letter.header(dead_letter.DETAIL) or b"")
        assert letter.header(dead_letter.SOURCE) == f"{topic}:0:4".encode()
        labels = {"pipe": pipe, "destination": "hook", "reason": "damaged_batch"}
        assert REGISTRY.get_sample_value("penstock_expel_events_dead_total", labels) == 3
        group = {"group": f"{pipe}.hook", "topic": topic}
        assert REGISTRY.get_sample_value("penstock_broker_damaged_records_total", group) == 3
        assert await broker.admin.committed(f"{pipe}.hook", topic) == {0: 7}


def _metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, {"destination": "hook", **labels}) or 0.0
