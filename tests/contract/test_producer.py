"""The portable producer over a real appender that fails on purpose in between."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest

from services.core.broker.contract import Appended, Appender
from services.core.broker.errors import (
    BrokerClosed,
    BrokerError,
    OutcomeUnknown,
    Overloaded,
    RecordTooLarge,
    Throttled,
    Unavailable,
)
from services.core.broker.producer import TOPIC_SHARE, Producer
from services.core.broker.record import Record
from services.core.broker.retry import AppendPolicy
from tests.contract.harness import Harness
from tests.contract.traffic import BASE_TIME, DEADLINE, numbered, numbers_of, read_all, record, until

_QUICK = AppendPolicy(deadline=DEADLINE, append_timeout=DEADLINE, base_wait=0.001, max_wait=0.01)
_HASTY = AppendPolicy(deadline=0.05, append_timeout=5, base_wait=0.02, max_wait=0.05)


class FaultyAppender:
    """An appender that raises the given faults before (or, for OutcomeUnknown, after) it really appends."""

    def __init__(self, appender: Appender, faults: Sequence[Exception] = ()) -> None:
        self._appender = appender
        self.faults = list(faults)
        self.hold: asyncio.Event | None = None
        self.calls: list[int] = []
        self.active = self.most_active = 0

    async def partition_count(self, topic: str) -> int:
        return await self._appender.partition_count(topic)

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        try:
            self.calls.append(len(records))
            if self.hold is not None:
                await self.hold.wait()
            fault = self.faults.pop(0) if self.faults else None
            if fault is None:
                return await self._appender.append(topic, partition, records, timeout=timeout)
            if isinstance(fault, OutcomeUnknown):
                with suppress(BrokerError):
                    await self._appender.append(topic, partition, records, timeout=timeout)
            raise fault
        finally:
            self.active -= 1


async def test_refused_appends_are_tried_again_in_order(harness: Harness) -> None:
    """If it fails, a short outage or a rate limit loses events or turns their order around."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        faults = [Unavailable("no leader"), Throttled("slow down", retry_after=0.05), Unavailable("no leader")]
        async with Producer(FaultyAppender(broker.appender, faults), policy=_QUICK) as producer:
            for start in range(0, 30, 10):
                (await producer.send_to(topic, {0: numbered(range(start, start + 10))})).raise_first()
        assert numbers_of(await read_all(broker, topic, harness.fresh_name("g"))) == list(range(30))


async def test_an_unknown_outcome_is_tried_again_and_may_double(harness: Harness) -> None:
    """If it fails, an append whose answer was lost is either dropped or reported as not stored."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        async with Producer(FaultyAppender(broker.appender, [OutcomeUnknown("time-out")]), policy=_QUICK) as producer:
            result = await producer.send_to(topic, {0: numbered(range(5))})
        assert not result.failed
        numbers = numbers_of(await read_all(broker, topic, harness.fresh_name("g")))
        assert set(numbers) == set(range(5))


async def test_unknown_stays_unknown_when_the_deadline_passes(harness: Harness) -> None:
    """If it fails, a client is told "not stored" of events that were stored."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        faults = [OutcomeUnknown("time-out"), *(Unavailable("no leader") for _ in range(50))]
        async with Producer(FaultyAppender(broker.appender, faults), policy=_HASTY) as producer:
            result = await producer.send_to(topic, {0: [record(0)]})
        ((_, error),) = result.parts[0].failed
        assert isinstance(error, OutcomeUnknown)


async def test_giving_up_names_every_record(harness: Harness) -> None:
    """If it fails, a 2xx covers events that were never stored."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        faults = [Unavailable("no leader") for _ in range(50)]
        async with Producer(FaultyAppender(broker.appender, faults), policy=_HASTY) as producer:
            result = await producer.send_to(topic, {0: numbered(range(3))})
            assert [index for index, _ in result.parts[0].failed] == [0, 1, 2]
            with pytest.raises(Unavailable):
                result.raise_first()


async def test_what_arrives_together_travels_together(harness: Harness) -> None:
    """If it fails, each small request pays for a batch of its own, and throughput is that of the disk's syncs."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        faulty = FaultyAppender(broker.appender)
        async with Producer(faulty, policy=_QUICK) as producer:
            results = await asyncio.gather(*(producer.send_to(topic, {0: [record(n)]}) for n in range(40)))
        assert set(faulty.calls) == {40}
        firsts = [result.parts[0].first for result in results]
        assert firsts == sorted(firsts)
        assert numbers_of(await read_all(broker, topic, harness.fresh_name("g"))) == list(range(40))


async def test_one_append_per_partition_at_a_time(harness: Harness) -> None:
    """If it fails, batches of a partition can overtake each other."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        faulty = FaultyAppender(broker.appender)
        async with Producer(faulty, policy=_QUICK) as producer, asyncio.TaskGroup() as sends:
            for number in range(30):
                sends.create_task(producer.send_to(topic, {0: [record(number)]}))
                await asyncio.sleep(0.002)
        assert faulty.most_active == 1


async def test_a_full_queue_refuses_and_recovers(harness: Harness) -> None:
    """If it fails, memory grows without bound while the broker is away, or the producer stays shut afterwards."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        faulty = FaultyAppender(broker.appender)
        faulty.hold = asyncio.Event()
        async with Producer(faulty, max_pending_bytes=10_000 * TOPIC_SHARE, policy=_QUICK) as producer:
            waiting = [asyncio.create_task(producer.send_to(topic, {0: [record(n, size=3000)]})) for n in range(3)]
            await until(lambda: producer.pending_bytes > 9000, "three are queued")  # a topic may take half
            with pytest.raises(Overloaded):
                await producer.send_to(topic, {0: [record(3, size=3000)]})
            faulty.hold.set()
            for result in await asyncio.gather(*waiting):
                result.raise_first()
            assert producer.pending_bytes == 0
            (await producer.send_to(topic, {0: [record(4)]})).raise_first()
        assert numbers_of(await read_all(broker, topic, harness.fresh_name("g"))) == [0, 1, 2, 4]


async def test_close_drains(harness: Harness) -> None:
    """If it fails, an orderly stop drops what was accepted a moment before."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        producer = Producer(broker.appender, policy=_QUICK)
        sends = [asyncio.create_task(producer.send_to(topic, {0: [record(n)]})) for n in range(20)]
        await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE):
            await producer.close()
            for result in await asyncio.gather(*sends):
                result.raise_first()
        with pytest.raises(BrokerClosed):
            await producer.send_to(topic, {0: [record(99)]})
        assert numbers_of(await read_all(broker, topic, harness.fresh_name("g"))) == list(range(20))


async def test_neighbours_of_a_refused_record_go_through(harness: Harness) -> None:
    """If it fails, requests that shared a batch with a bad one fail with it."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        huge = Record(b"k", b"x" * (broker.features.max_record_bytes + 1), BASE_TIME)
        async with Producer(broker.appender, policy=_QUICK) as producer:
            good, bad, also_good = await asyncio.gather(
                producer.send_to(topic, {0: [record(0)]}),
                producer.send_to(topic, {0: [huge]}),
                producer.send_to(topic, {0: [record(1)]}),
            )
        assert not good.failed
        assert not also_good.failed
        ((_, error),) = bad.parts[0].failed
        assert isinstance(error, RecordTooLarge)
        assert numbers_of(await read_all(broker, topic, harness.fresh_name("g"))) == [0, 1]
