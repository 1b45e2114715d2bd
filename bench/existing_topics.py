"""A topic of others beside a stream of ours with the same payloads: Kafka → expel → HTTP, batches of 100, in turn in one run."""

import asyncio
import statistics

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

from bench.delivery import OWN, measure_expel, receiver
from bench.figures import Figure
from bench.main_path import ingest
from bench.setup import CPU, Setup, send_load, tell
from services.core.broker.connect import open_broker
from services.core.broker.contract import TopicSpec

SIZE = 100
_PACKED = 1900
"""Records of a Kafka batch of ingest under this load."""
_TOPIC, _SMALL = "others.Plain", "others.Small"
"""The second one is as a client with the usual 16 KB for a batch writes it."""
_SOURCES = {
    "ours": OWN,
    "place as the id": f"{{topic: {_TOPIC}}}",
    "id and time from fields": f"{{topic: {_TOPIC}, id: id, time: time}}",
    "place as the id, small batches": f"{{topic: {_SMALL}}}",
    "id and time from fields, small batches": f"{{topic: {_SMALL}, id: id, time: time}}",
}


def existing_figures(setup: Setup) -> list[Figure]:
    """CPU of expel per event; the floor is our own stream. Goal: at most 15 % more."""
    events = setup.events
    with ingest(setup, setup.kafka, "ours") as (_, url):
        send_load(url, SIZE, events // SIZE)
    asyncio.run(_copy(setup, events))
    found: dict[str, list[float]] = {name: [] for name in _SOURCES}
    with receiver(setup) as sink:
        for number in range(setup.rounds):
            for kind, (name, source) in enumerate(_SOURCES.items()):
                stream = "ours" if source == OWN else f"others-{kind}"
                found[name].append(measure_expel(setup, stream, f"p{kind}-{number}", SIZE, events, sink, source))
            tell(f"round {number + 1}: " + ", ".join(f"{name} {values[-1]:.2f}" for name, values in found.items()))
    own = found.pop("ours")
    for name, values in found.items():
        ratios = sorted(value / floor for value, floor in zip(values, own, strict=True))
        tell(f"{name}: ratio {ratios[0]:.2f} to {ratios[-1]:.2f}, median {statistics.median(ratios):.2f}")
    return [
        Figure(f"topic of others → expel → HTTP, {name}", min(values), CPU, 1.15, min(own))
        for name, values in found.items()
    ]


async def _copy(setup: Setup, events: int) -> None:
    """The payloads of our stream, without headers, in the same partitions of two topics of others: in batches like those of
    ingest, and in small ones."""
    async with open_broker(setup.kafka) as broker:
        for topic in (_TOPIC, _SMALL):
            await broker.admin.create_topic(TopicSpec(topic, 4))
    consumer = AIOKafkaConsumer("ours", bootstrap_servers=setup.bootstrap, auto_offset_reset="earliest")
    packing = AIOKafkaProducer(bootstrap_servers=setup.bootstrap, max_batch_size=1 << 20)
    async with consumer, packing, AIOKafkaProducer(bootstrap_servers=setup.bootstrap, linger_ms=20) as producer:
        copied = 0
        while copied < events:
            for source, rows in (await consumer.getmany(timeout_ms=1000)).items():
                for start in range(0, len(rows), _PACKED):
                    batch = packing.create_batch()
                    for row in rows[start : start + _PACKED]:
                        batch.append(key=None, value=row.value, timestamp=row.timestamp)
                    batch.close()
                    await packing.send_batch(batch, _TOPIC, partition=source.partition)
                for row in rows:
                    await producer.send(_SMALL, row.value, partition=source.partition, timestamp_ms=row.timestamp)
                copied += len(rows)
        await packing.flush()
