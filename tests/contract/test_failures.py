"""The backend dies in the middle of the stream; nothing that was acknowledged may be missing afterwards."""

import asyncio

from services.core.broker.errors import BrokerError
from services.core.broker.producer import Producer
from services.core.broker.retry import AppendPolicy
from tests.contract.harness import Harness
from tests.contract.traffic import (
    DEADLINE,
    append,
    ignore_revoke,
    marks_of,
    numbered,
    numbers_of,
    poll,
    read_all,
    record,
    until,
)

_PATIENT = AppendPolicy(deadline=DEADLINE, append_timeout=5)


async def test_producer_goes_on_when_the_broker_is_killed(harness: Harness) -> None:
    """If it fails, kill -9 of the broker under load loses acknowledged events, or the producer never recovers."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        acked: set[int] = set()
        unknown: set[int] = set()
        stop = asyncio.Event()

        async def send(producer: Producer, numbers: range) -> None:
            result = await producer.send_to(topic, {0: numbered(numbers)})
            (unknown if result.failed else acked).update(numbers)

        async def load() -> None:
            async with Producer(broker.appender, policy=_PATIENT) as producer, asyncio.TaskGroup() as sends:
                start = 0
                while not stop.is_set():
                    sends.create_task(send(producer, range(start, start + 5)))
                    start += 5
                    await asyncio.sleep(0.01)

        async with asyncio.timeout(3 * DEADLINE), asyncio.TaskGroup() as tasks:
            tasks.create_task(load())
            await until(lambda: len(acked) > 100, "acks before the fault")
            await harness.crash(topic)
            before = len(acked)
            await until(lambda: len(acked) > before + 100, "acks after the fault")
            stop.set()
        assert not unknown, "a patient producer outlasts an election"
        numbers = numbers_of(await read_all(broker, topic, harness.fresh_name("check")))
        assert not acked - set(numbers)
        first_seen = list(dict.fromkeys(numbers))
        assert first_seen == sorted(first_seen), "batches of one partition kept their order through the retries"


async def test_consumer_goes_on_when_the_broker_is_killed(harness: Harness) -> None:
    """If it fails, readers hang or skip after the leader changed, or lose their commits."""
    async with harness.open() as broker, harness.open() as writer:
        topic = await harness.create_topic(broker)
        group = harness.fresh_name("g")
        seen: list[int] = []
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:

            async def step() -> None:
                batches = await poll(consumer)
                seen.extend(numbers_of(batches))
                if batches:
                    try:
                        await consumer.commit(marks_of(batches))
                    except BrokerError as error:
                        if not error.retriable:
                            raise

            await append(writer, topic, numbered(range(20)))
            async with asyncio.timeout(DEADLINE):
                while len(set(seen)) < 20:
                    await step()
            await harness.crash(topic)
            await append(writer, topic, numbered(range(20, 40)))
            async with asyncio.timeout(DEADLINE):
                while len(set(seen)) < 40:
                    await step()
        assert list(dict.fromkeys(seen)) == list(range(40))


async def test_everything_survives_a_restart(harness: Harness) -> None:
    """If it fails, a clean restart loses records."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        await append(broker, topic, numbered(range(10)))
    await harness.restart()
    async with harness.open() as broker:
        await append(broker, topic, [record(10)])
        assert numbers_of(await read_all(broker, topic, harness.fresh_name("g"))) == list(range(11))
