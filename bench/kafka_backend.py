"""What the Kafka backend costs beside bare aiokafka, on a Kafka of its own.

    python -m bench.kafka_backend [MILLIONS_OF_EVENTS]

Prints CPU-seconds of this process per million events (300 B, three headers, 100 a batch, four partitions side by side),
each figure the lowest of three interleaved rounds.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import uuid4

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from services.core.broker.contract import TopicSpec
from services.core.broker.kafka import KafkaBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.jvm.kafka_server import KafkaCluster

_PARTITIONS, _BATCH, _ROUNDS = 4, 100, 3
_HEADERS = (("ce_id", b"i" * 36), ("arrival", b"1700000000000"), ("origin", b"abcdefgh:0:123456"))
_RECORDS = [Record(b"key-%d" % number, b"v" * 300, 1_700_000_000_000 + number, _HEADERS) for number in range(_BATCH)]


async def _cpu_per_million(work: Callable[[int], Awaitable[None]], events: int) -> float:
    used = time.process_time()
    await work(events)
    return (time.process_time() - used) / events * 1e6


async def _ours_send(broker: KafkaBroker, topic: str, events: int) -> None:
    async def lane(partition: int) -> None:
        for _ in range(events // _BATCH // _PARTITIONS):
            await broker.driver.append(topic, partition, list(_RECORDS), timeout=30)

    await asyncio.gather(*map(lane, range(_PARTITIONS)))


async def _bare_send(producer: AIOKafkaProducer, topic: str, events: int) -> None:
    async def lane(partition: int) -> None:
        for _ in range(events // _BATCH // _PARTITIONS):
            batch = producer.create_batch()
            for r in _RECORDS:
                batch.append(timestamp=r.timestamp, key=r.key, value=r.value, headers=list(r.headers))
            await (await producer.send_batch(batch, topic, partition=partition))

    await asyncio.gather(*map(lane, range(_PARTITIONS)))


async def _ours_read(broker: KafkaBroker, topic: str, events: int) -> None:
    async def drain(_: frozenset[TopicPartition]) -> None:
        return

    async with broker.consumer(f"g-{uuid4().hex}", [topic], start="earliest", on_revoke=drain) as consumer:
        read = 0
        while read < events:
            for batch in await consumer.poll(max_records=1000, max_wait=1):
                read += len(batch.records)


async def _bare_read(bootstrap: str, topic: str, events: int) -> None:
    async with AIOKafkaConsumer(
        topic,
        bootstrap_servers=bootstrap,
        group_id=f"g-{uuid4().hex}",
        enable_auto_commit=False,
        auto_offset_reset="earliest",
    ) as consumer:
        read = 0
        while read < events:
            for rows in (await consumer.getmany(timeout_ms=1000, max_records=1000)).values():
                read += len(rows)


async def _measure(bootstrap: str, events: int) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all", max_batch_size=1 << 20)
    await producer.start()
    try:
        async with KafkaBroker.open(bootstrap) as broker:
            topic = f"bench-{uuid4().hex}"
            await broker.admin.create_topic(TopicSpec(topic, partitions=_PARTITIONS))
            async with Producer(broker.driver) as warming:  # a new cluster has no producer ids for a moment
                (await warming.send(topic, _RECORDS)).raise_first()
            kinds: dict[str, Callable[[int], Awaitable[None]]] = {
                "driver.append": lambda n: _ours_send(broker, topic, n),
                "send_batch": lambda n: _bare_send(producer, topic, n),
                "poll": lambda n: _ours_read(broker, topic, n),
                "getmany": lambda n: _bare_read(bootstrap, topic, n),
            }
            best = dict.fromkeys(kinds, float("inf"))
            for _ in range(_ROUNDS):
                for kind, work in kinds.items():
                    best[kind] = min(best[kind], await _cpu_per_million(work, events))
            for kind, seconds in best.items():
                print(f"{kind:14} {seconds:6.2f} CPU-s per million events")
            print(f"append/send_batch {best['driver.append'] / best['send_batch']:.2f}, ", end="")
            print(f"poll/getmany {best['poll'] / best['getmany']:.2f}")
    finally:
        await producer.stop()


if __name__ == "__main__":
    amount = float(sys.argv[1]) if len(sys.argv) > 1 else 0.3
    with tempfile.TemporaryDirectory() as folder, KafkaCluster(Path(folder), brokers=1) as cluster:
        uvloop.run(_measure(cluster.bootstrap, round(amount * 1e6)))
