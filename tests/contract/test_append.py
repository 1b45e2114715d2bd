"""Sending: what an acknowledged append means, and what is refused how."""

import asyncio
import time

import pytest

from services.core.broker.contract import MAX_APPEND_BYTES
from services.core.broker.errors import RecordTooLarge, UnknownTopic
from services.core.broker.partitioner import split_by_key
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record
from tests.contract.child import child
from tests.contract.harness import Harness
from tests.contract.traffic import (
    BASE_TIME,
    DEADLINE,
    append,
    number_of,
    numbered,
    numbers_of,
    read_all,
    record,
    records_of,
)


async def test_what_was_acked_survives_kill_9_at_once(harness: Harness) -> None:
    """If it fails, a 2xx can be lost: the ack came before the records were durable (fsync, or all in-sync replicas).

    A child prints each ack; it and whatever stores the partition are killed while it runs.
    """
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        async with child("append", harness.spec, topic) as appender:
            acked = [(await appender.say())["acked"] for _ in range(50)]
            await harness.crash(topic)
            await appender.kill()
            acked += [said["acked"] for said in await appender.rest()]
        stored = set(numbers_of(await read_all(broker, topic, harness.fresh_name("check"))))
        assert not set(acked) - stored


async def test_answer_says_where(harness: Harness) -> None:
    """If it fails, results name wrong offsets, and statuses per event go to the wrong events."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        one = await append(broker, topic, numbered(range(3)))
        two = await append(broker, topic, numbered(range(3, 5)))
        batches = await read_all(broker, topic, harness.fresh_name("g"))
        offsets = [offset for batch in batches for offset in batch.offsets]
        assert [offsets[0], offsets[2], offsets[3], offsets[4]] == [one.first, one.last, two.first, two.last]
        assert offsets == sorted(set(offsets))
        if broker.features.contiguous_offsets:
            assert offsets == list(range(5))


async def test_order_per_key_through_the_producer(harness: Harness) -> None:
    """If it fails, events of one key overtake each other under concurrency."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker, partitions=3)
        keys = [b"a", b"b", b"c", b"d"]
        async with Producer(broker.appender) as producer:
            sends = []
            for number in range(60):
                sends.append(asyncio.create_task(producer.send(topic, [record(number, keys[number % 4])])))
                if number % 7 == 0:
                    await asyncio.sleep(0)
            for result in await asyncio.gather(*sends):
                result.raise_first()
        read = records_of(await read_all(broker, topic, harness.fresh_name("g")))
        for index, key in enumerate(keys):
            assert [number_of(r) for r in read if r.key == key] == list(range(index, 60, 4))


async def test_every_byte_comes_back(harness: Harness) -> None:
    """If it fails, a payload, key, header or event time is altered on the way."""
    everything = bytes(range(256))
    in_two_days = int(time.time() * 1000) + 2 * 86_400_000
    sent = [
        Record(everything, everything * 4, BASE_TIME, (("ce_id", b"1"), ("binary", everything))),
        Record(b"k", b"", BASE_TIME + 1, ()),
        Record(None, b"no key", 0, (("empty", b""),)),
        Record(b"", b"empty key", BASE_TIME - 5, (("twice", b"1"), ("twice", b"2"))),
        Record("ключ".encode(), "значение ✓".encode(), in_two_days, (("имя", "ø".encode()),)),
        Record(b"k", None, BASE_TIME + 2, ()),
    ]
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        await append(broker, topic, sent)
        assert records_of(await read_all(broker, topic, harness.fresh_name("g"))) == sent


async def test_oversize_record_is_refused_and_the_next_goes_through(harness: Harness) -> None:
    """If it fails, one huge event blocks its partition for ever, or is dropped without a word."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        huge = Record(b"k", b"x" * (broker.features.max_record_bytes + 1), BASE_TIME)
        with pytest.raises(RecordTooLarge):
            await broker.appender.append(topic, 0, [huge], timeout=10)
        large = Record(b"k", b"y" * (broker.features.max_record_bytes - 100), BASE_TIME)
        await append(broker, topic, [large])
        await append(broker, topic, [record(1)])
        read = records_of(await read_all(broker, topic, harness.fresh_name("g")))
        assert read == [large, record(1)]


async def test_only_the_bad_record_of_a_batch_fails(harness: Harness) -> None:
    """If it fails, one bad event takes its neighbours' places: they are lost, doubled, or reported under its index."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        huge = Record(b"k", b"x" * (broker.features.max_record_bytes + 1), BASE_TIME)
        async with Producer(broker.appender) as producer:
            result = await producer.send_to(topic, {0: [record(0), huge, record(2)]})
        (part,) = result.parts
        assert [(index, type(error)) for index, error in part.failed] == [(1, RecordTooLarge)]
        assert numbers_of(await read_all(broker, topic, harness.fresh_name("g"))) == [0, 2]


async def test_appender_names_the_failed_index(harness: Harness) -> None:
    """If it fails, the appender raises for a whole batch what is true of one record, and good events are refused."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        await append(broker, topic, [record(0)])
        huge = Record(b"k", b"x" * (broker.features.max_record_bytes + 1), BASE_TIME)
        appended = await broker.appender.append(topic, 0, [record(1), huge, record(3)], timeout=10)
        assert [(index, type(error)) for index, error in appended.failed] == [(1, RecordTooLarge)]
        batches = await read_all(broker, topic, harness.fresh_name("g"))
        assert numbers_of(batches) == [0, 1, 3]
        offsets = [offset for batch in batches for offset in batch.offsets]
        assert (appended.first, appended.last) == (offsets[1], offsets[2])


async def test_as_much_as_an_append_may_hold(harness: Harness) -> None:
    """If it fails, the largest batch that the producer builds is refused by the backend, for ever."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        count = MAX_APPEND_BYTES // 364
        headers = (("ce_id", b"i" * 36), ("origin", b"o" * 20))
        batch = [Record(b"key-%d" % n, b"v" * 300, BASE_TIME + n, headers) for n in range(count)]
        await append(broker, topic, batch)
        assert records_of(await read_all(broker, topic, harness.fresh_name("g"))) == batch


async def test_unknown_topic_is_refused_and_not_created(harness: Harness) -> None:
    """If it fails, a typo creates a topic that nobody reads, and its events are lost to everybody."""
    async with harness.open() as broker:
        missing = harness.fresh_name("missing")
        with pytest.raises(UnknownTopic):
            await broker.appender.partition_count(missing)
        with pytest.raises(UnknownTopic):
            await broker.appender.append(missing, 0, [record(0)], timeout=10)
        with pytest.raises(UnknownTopic):
            async with broker.consumer(harness.fresh_name("g"), [missing], start="earliest", on_revoke=_never):
                pass
        with pytest.raises(UnknownTopic):
            await broker.probe(missing, timeout=10)
        for call in (
            broker.reader.describe(missing),
            broker.reader.offsets_at(missing, "latest"),
            broker.admin.delete_topic(missing),
            broker.admin.add_partitions(missing, 2),
        ):
            with pytest.raises(UnknownTopic):
                await call
        assert missing not in await broker.admin.topics()


async def _never(partitions: object) -> None:
    raise AssertionError(f"nothing to revoke, yet {partitions}")


async def test_appends_to_many_partitions_at_once(harness: Harness) -> None:
    """If it fails, concurrent appends mix up their answers or their partitions."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker, partitions=6)
        async with asyncio.timeout(DEADLINE):
            answers = await asyncio.gather(
                *(append(broker, topic, numbered(range(p * 100, p * 100 + 50)), p) for p in range(6)),
                *(append(broker, topic, numbered(range(p * 100 + 50, p * 100 + 60)), p) for p in range(6)),
            )
        assert len(answers) == 12
        found: dict[int, list[int]] = {}
        for batch in await read_all(broker, topic, harness.fresh_name("g")):
            found.setdefault(batch.partition, []).extend(numbers_of([batch]))
        for partition, numbers in found.items():
            assert sorted(numbers) == list(range(partition * 100, partition * 100 + 60))
        assert len(found) == 6


async def test_two_connections_append_to_one_partition(harness: Harness) -> None:
    """If it fails, two processes that write the same partition lose or interleave parts of each other's batches."""
    async with harness.open() as one, harness.open() as two:
        topic = await harness.create_topic(one)
        await asyncio.gather(
            *(
                append(broker, topic, numbered(range(start, start + 10)))
                for start in range(0, 200, 20)
                for broker in [one]
            ),
            *(
                append(broker, topic, numbered(range(start, start + 10)))
                for start in range(10, 200, 20)
                for broker in [two]
            ),
        )
        numbers = numbers_of(await read_all(one, topic, harness.fresh_name("g")))
        assert sorted(numbers) == list(range(200))
        for start in range(0, 200, 10):
            at = numbers.index(start)
            assert numbers[at : at + 10] == list(range(start, start + 10)), "a batch is stored in one piece"


async def test_keys_go_where_the_partitioner_says(harness: Harness) -> None:
    """If it fails, readers that compute a key's partition (Spark, replay by key) look in the wrong place."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker, partitions=5)
        records = [record(n, b"key-%d" % n) for n in range(40)]
        async with Producer(broker.appender) as producer:
            (await producer.send(topic, records)).raise_first()
        found = {
            partition: sorted(number_of(r) for b in batches for r in b.records)
            for partition, batches in _by_partition(await read_all(broker, topic, harness.fresh_name("g"))).items()
        }
        wanted = {p: sorted(number_of(r) for r in part) for p, part in split_by_key(records, 5).items()}
        assert found == wanted


def _by_partition(batches: list[Batch]) -> dict[int, list[Batch]]:
    found: dict[int, list[Batch]] = {}
    for batch in batches:
        found.setdefault(batch.partition, []).append(batch)
    return found


async def test_probe_accepts_a_healthy_topic_and_stores_nothing(harness: Harness) -> None:
    """If it fails, readiness lies: a healthy broker looks down, or each probe leaves a record behind."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        await append(broker, topic, [record(0)])
        async with asyncio.timeout(DEADLINE):
            await broker.probe(topic, timeout=10)
        ranges = await broker.reader.describe(topic)
        assert ranges[0].end - ranges[0].start == 1
