"""Groups: who gets what, who owns what, and what a commit means."""

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from services.core.broker.contract import Broker, Consumer
from services.core.broker.errors import NotOwner
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, TopicPartition
from tests.contract.child import child
from tests.contract.harness import Harness
from tests.contract.traffic import (
    DEADLINE,
    Ledger,
    Member,
    append,
    ignore_revoke,
    marks_of,
    numbered,
    numbers_of,
    own,
    poll,
    read,
    record,
    until,
    until_async,
)

_PATIENCE_S = 120.0
"""Where nobody hangs or dies."""


async def test_two_groups_each_get_everything(harness: Harness) -> None:
    """If it fails, a second pipe on the same stream takes events away from the first."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker, partitions=2)
        await append(broker, topic, numbered(range(10)), 0)
        await append(broker, topic, numbered(range(10, 20)), 1)
        one, two = harness.fresh_name("one"), harness.fresh_name("two")
        async with (
            broker.consumer(one, [topic], start="earliest", on_revoke=ignore_revoke) as first,
            broker.consumer(two, [topic], start="earliest", on_revoke=ignore_revoke) as second,
        ):
            assert sorted(numbers_of(await read(first, 20))) == list(range(20))
            assert sorted(numbers_of(await read(second, 20))) == list(range(20))


async def test_one_member_reads_several_topics(harness: Harness) -> None:
    """If it fails, a group of instances that runs all pipes reads only some of them."""
    async with harness.open() as broker:
        topics = [await harness.create_topic(broker) for _ in range(2)]
        for number, topic in enumerate(topics):
            await append(broker, topic, [record(number)])
        group = harness.fresh_name("g")
        async with broker.consumer(group, topics, start="earliest", on_revoke=ignore_revoke) as consumer:
            batches = await read(consumer, 2)
            await consumer.commit(marks_of(batches))
        assert {batch.topic: numbers_of([batch]) for batch in batches} == {topics[0]: [0], topics[1]: [1]}


async def test_poll_respects_max_records_and_order(harness: Harness) -> None:
    """If it fails, memory bounds of the services do not hold, or records come out of order."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker, partitions=2)
        for partition in range(2):
            for start in range(0, 50, 10):
                await append(broker, topic, numbered(range(start, start + 10)), partition)
        async with broker.consumer(
            harness.fresh_name("g"), [topic], start="earliest", on_revoke=ignore_revoke
        ) as consumer:
            seen: dict[int, list[int]] = {0: [], 1: []}
            async with asyncio.timeout(DEADLINE):
                while sum(map(len, seen.values())) < 100:
                    batches = await poll(consumer, max_records=7)
                    assert sum(len(batch.records) for batch in batches) <= 7
                    for batch in batches:
                        assert len(batch.offsets) == len(batch.records) > 0
                        seen[batch.partition] += numbers_of([batch])
            assert seen == {0: list(range(50)), 1: list(range(50))}
            assert await consumer.poll(max_records=7, max_wait=0.05) == []


async def test_uncommitted_comes_again(harness: Harness) -> None:
    """If it fails, what a crashed worker had read but not finished is lost."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        await append(broker, topic, numbered(range(10)))
        group = harness.fresh_name("g")
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            batches = await read(consumer, 10)
            (source,) = {batch.source for batch in batches}
            offsets = [offset for batch in batches for offset in batch.offsets]
            await consumer.commit({source: offsets[3]})
        async with broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
            assert numbers_of(await read(consumer, 6)) == [4, 5, 6, 7, 8, 9]


async def test_commit_survives_a_restart(harness: Harness) -> None:
    """If it fails, a restart of the broker delivers everything again (or nothing, for a commit that was lost)."""
    group = harness.fresh_name("g")
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        appended = await append(broker, topic, numbered(range(5)))
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            await consumer.commit(marks_of(await read(consumer, 5)))
    await harness.restart()
    async with harness.open() as broker:

        async def kept() -> bool:
            return await broker.admin.committed(group, topic) == {0: appended.last}

        await until_async(kept, "the committed offset is back")
        await append(broker, topic, [record(5)])
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            assert numbers_of(await read(consumer, 1)) == [5]


async def test_on_revoke_is_awaited_before_the_next_owner_reads(harness: Harness) -> None:
    """If it fails, a rebalance delivers in-flight events twice, and two workers send one key at once."""
    async with harness.open(_PATIENCE_S) as one, harness.open(_PATIENCE_S) as two:
        topic = await harness.create_topic(one, partitions=2)
        for partition in range(2):
            await append(one, topic, numbered(range(partition * 10, partition * 10 + 10)), partition)
        group = harness.fresh_name("g")
        leaving, drained = asyncio.Event(), asyncio.Event()
        held: list[Batch] = []
        first: Consumer

        async def drain_slowly(partitions: frozenset[TopicPartition]) -> None:
            if leaving.is_set():
                return
            leaving.set()
            await asyncio.sleep(1)
            await first.commit(marks_of(held))
            drained.set()

        async with one.consumer(group, [topic], start="earliest", on_revoke=drain_slowly) as first:
            held += await read(first, 20)
            polling = asyncio.create_task(_keep_polling(first))
            try:
                async with two.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as second:
                    read_early = False
                    async with asyncio.timeout(DEADLINE):
                        while not second.assignment():
                            batches = await poll(second, max_wait=0.1)
                            read_early |= bool(batches) and not drained.is_set()
                    await append(one, topic, [record(100)], 0)
                    await append(one, topic, [record(101)], 1)
                    batches = await read(second, 1)
                    assert drained.is_set()
                    assert not read_early
                    assert set(numbers_of(batches)) <= {100, 101}, "what was committed while draining came again"
            finally:
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)


async def _keep_polling(consumer: Consumer) -> None:
    while True:
        await poll(consumer, max_wait=0.1)


async def test_late_commit_is_refused_and_the_others_are_committed(harness: Harness) -> None:
    """If it fails, a member that lost a partition moves the new owner's offset: events are skipped or repeated."""
    async with harness.open() as one, harness.open() as two:
        topic = await harness.create_topic(one, partitions=2)
        for partition in range(2):
            await append(one, topic, numbered(range(5)), partition)
        group = harness.fresh_name("g")
        async with one.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as first:
            marks = marks_of(await read(first, 10))
            polling = asyncio.create_task(_keep_polling(first))
            try:
                async with two.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as second:
                    await until(lambda: len(first.assignment()) == 1 == len(second.assignment()), "one partition each")
                    (kept,), (lost,) = first.assignment(), second.assignment()

                    async def the_lost_one_is_refused() -> bool:
                        with pytest.raises(NotOwner) as refused:
                            await first.commit(marks)
                        return refused.value.partitions == {lost}  # Kafka's comes back first, and is read again

                    await until_async(the_lost_one_is_refused, "what was kept is committed")
                    assert await one.admin.committed(group, topic) == {kept.partition: marks[kept]}
                    assert {batch.source for batch in await read(second, 5)} == {lost}
            finally:
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)


async def test_what_was_not_polled_is_not_committed(harness: Harness) -> None:
    """If it fails, marks that are older than their topic pass over the records of the topic that has its name now."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        await append(broker, topic, numbered(range(5)))
        later = await append(broker, topic, numbered(range(5, 8)))
        group, source = harness.fresh_name("g"), TopicPartition(topic, 0)
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            (first, *_) = await read(consumer, 1, max_records=3)
            for beyond in (later.last, later.last + 1000):
                with pytest.raises(NotOwner) as refused:
                    await consumer.commit({source: beyond})
                assert refused.value.partitions == {source}
            await consumer.commit({source: first.offsets[0]})
            assert await broker.admin.committed(group, topic) == {0: first.offsets[0]}


async def test_a_commit_does_not_go_back_within_one_ownership(harness: Harness) -> None:
    """If it fails, commits that overtake each other make a group read again what it had settled."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        await append(broker, topic, numbered(range(5)))
        group, source = harness.fresh_name("g"), TopicPartition(topic, 0)
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            offsets = [offset for batch in await read(consumer, 5) for offset in batch.offsets]
            await consumer.commit({source: offsets[3]})
            await consumer.commit({source: offsets[1]})
            assert await broker.admin.committed(group, topic) == {0: offsets[3]}


async def test_after_leaving_nothing_can_be_committed(harness: Harness) -> None:
    """If it fails, a consumer that was closed still moves the group's offsets."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        await append(broker, topic, numbered(range(5)))
        group = harness.fresh_name("g")
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            marks = marks_of(await read(consumer, 5))
        with pytest.raises(NotOwner):
            await consumer.commit(marks)
        assert await broker.admin.committed(group, topic) == {}


async def test_leaving_drains_first(harness: Harness) -> None:
    """If it fails, every orderly stop (SIGTERM, a deploy) delivers the last batches again."""
    async with harness.open(_PATIENCE_S) as broker:
        topic = await harness.create_topic(broker)
        appended = await append(broker, topic, numbered(range(5)))
        group = harness.fresh_name("g")
        held: list[Batch] = []
        revoked: list[frozenset[TopicPartition]] = []

        async def drain(partitions: frozenset[TopicPartition]) -> None:
            revoked.append(partitions)
            await consumer.commit(marks_of(held))

        async with broker.consumer(group, [topic], start="earliest", on_revoke=drain) as consumer:
            held += await read(consumer, 5)
        assert revoked == [{(topic, 0)}]
        assert await broker.admin.committed(group, topic) == {0: appended.last}


async def test_join_leave_storm_loses_nothing(harness: Harness) -> None:
    """If it fails, autoscaling or a rolling deploy loses events, or lets two members own a partition."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    total = 400
    async with harness.open(_PATIENCE_S) as broker:
        topic = await harness.create_topic(broker, partitions=4)
        group, ledger = harness.fresh_name("g"), Ledger()

        async def produce() -> None:
            async with Producer(broker.appender) as producer:
                for start in range(0, total, 10):
                    parts = {chance.randrange(4): numbered(range(start, start + 10))}
                    (await producer.send_to(topic, parts)).raise_first()
                    await asyncio.sleep(0.1)

        async def come_and_go(number: int) -> None:
            for life in range(2):
                async with (
                    harness.open(_PATIENCE_S) as own_one,
                    Member(own_one, group, topic, f"m{number}.{life}", ledger),
                ):
                    await asyncio.sleep(chance.uniform(0.5, 3))

        async with asyncio.timeout(2 * DEADLINE), asyncio.TaskGroup() as tasks:
            tasks.create_task(produce())
            for number in range(4):
                tasks.create_task(come_and_go(number))
        async with harness.open(_PATIENCE_S) as own_one, Member(own_one, group, topic, "last", ledger):
            await until(lambda: len(ledger.processed) == total, "everything was processed")

            async def settled() -> bool:
                return all(lag.records == 0 for lag in (await broker.admin.group_lag(group, topic)).values())

            await until_async(settled, "everything was committed")
        assert ledger.conflicts == []


async def test_killed_member_is_replaced(harness: Harness) -> None:
    """If it fails, kill -9 of a worker stops its partitions, or what it had not committed is lost."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        await append(broker, topic, numbered(range(200)))
        group = harness.fresh_name("g")
        async with child("member", harness.spec, group, topic) as first:
            said = await first.say()
            while "processed" not in said:
                said = await first.say()
            await first.kill()
            lines = [said, *await first.rest()]
        done = {n for line in lines for n in line.get("processed", [])}
        last = next((line for line in reversed(lines) if "polled" in line), None)
        if last is not None and await broker.admin.committed(group, topic) == {0: last["mark"]}:
            done.update(last["polled"])  # killed after the commit and before the line about it
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as second:
            await own(second, 1)
            rest = numbers_of(await read(second, 195 - len(done)))
        assert not set(range(200)) - done - set(rest) - set(range(195, 200))
        assert rest[0] == max(done) + 1, "the new owner starts where the commit ended"


async def test_frozen_member_cannot_commit_after_its_lease(harness: Harness) -> None:
    """If it fails, a worker that wakes from a long pause (GC, VM migration) overwrites its successor's progress."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        await append(broker, topic, numbered(range(300)))
        group = harness.fresh_name("g")
        async with child("member", harness.spec, group, topic) as sleeper:
            said = await sleeper.say()
            while "processed" not in said:
                said = await sleeper.say()
            sleeper.freeze()
            async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as second:
                await own(second, 1)
                batches: list[Batch] = []
                while not batches or numbers_of(batches)[-1] < 250:
                    batches += await read(second, 1, max_records=50)
                marks = marks_of(batches)
                await second.commit(marks)
                sleeper.thaw()
                async with asyncio.timeout(DEADLINE):
                    while not {"refused", "revoked"} & said.keys():
                        said = await sleeper.say()
                committed = await broker.admin.committed(group, topic)
                assert committed[0] >= marks[TopicPartition(topic, 0)]


async def test_pause_outlives_the_poll_interval(harness: Harness) -> None:
    """If it fails, a slow destination (everything paused, nobody polls) makes the worker lose its partitions."""
    async with harness.open() as broker, harness.open() as other:
        topic = await harness.create_topic(broker, partitions=2)
        group = harness.fresh_name("g")
        revoked: list[frozenset[TopicPartition]] = []

        async def note(partitions: frozenset[TopicPartition]) -> None:
            revoked.append(partitions)

        async with (
            broker.consumer(group, [topic], start="earliest", on_revoke=note) as first,
            other.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as second,
        ):
            polling = asyncio.create_task(_keep_polling(second))
            try:
                await until(lambda: len(first.assignment()) == 1 == len(second.assignment()), "one partition each")
                (mine,) = first.assignment()
                first.pause([mine])
                revoked.clear()
                await append(broker, topic, numbered(range(5)), mine.partition)
                await asyncio.sleep(1.5 * max(harness.poll_interval, harness.member_timeout))
                assert first.assignment() == {mine}
                assert revoked == []
                first.resume([mine])
                batches = await read(first, 5)
                await first.commit(marks_of(batches))
                assert numbers_of(batches) == list(range(5))
            finally:
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)


async def test_paused_partitions_stay_silent_and_lose_nothing(harness: Harness) -> None:
    """If it fails, a lane that is full gets more anyway, or pausing skips what was fetched already."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker, partitions=2)
        for partition in range(2):
            await append(broker, topic, numbered(range(20)), partition)
        async with broker.consumer(
            harness.fresh_name("g"), [topic], start="earliest", on_revoke=ignore_revoke
        ) as consumer:
            seen: dict[int, list[int]] = {0: [], 1: []}
            for batch in await read(consumer, 1, max_records=5):
                seen[batch.partition] += numbers_of([batch])
            paused, other = TopicPartition(topic, 0), TopicPartition(topic, 1)
            consumer.pause([paused, TopicPartition(topic, 99), TopicPartition("elsewhere", 0)])
            frozen_at = len(seen[0])
            async with asyncio.timeout(DEADLINE):
                while len(seen[1]) < 20:
                    for batch in await poll(consumer):
                        assert batch.source == other
                        seen[1] += numbers_of([batch])
            assert await poll(consumer, max_wait=0.3) == []
            assert len(seen[0]) == frozen_at
            consumer.resume([paused])
            async with asyncio.timeout(DEADLINE):
                while len(seen[0]) < 20:
                    for batch in await poll(consumer):
                        seen[batch.partition] += numbers_of([batch])
            assert seen == {0: list(range(20)), 1: list(range(20))}


async def test_cancelling_a_poll_loses_nothing(harness: Harness) -> None:
    """If it fails, a time-out around a poll (shutdown, a select over several sources) silently drops a batch."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        async with broker.consumer(
            harness.fresh_name("g"), [topic], start="earliest", on_revoke=ignore_revoke
        ) as consumer:
            await own(consumer, 1)
            seen: list[int] = []
            cancelled = 0
            appending = asyncio.create_task(_append_slowly(broker, topic, 100))
            async with asyncio.timeout(DEADLINE):
                while len(seen) < 100:
                    polling = asyncio.create_task(consumer.poll(max_records=7, max_wait=2))
                    await asyncio.sleep(random.uniform(0, 0.02))
                    polling.cancel()
                    try:
                        seen += numbers_of(await polling)
                    except asyncio.CancelledError:
                        cancelled += 1
            await appending
            assert cancelled, "the fault never bit"
            assert seen == list(range(100))


async def _append_slowly(broker: Broker, topic: str, total: int) -> None:
    for number in range(total):
        await append(broker, topic, [record(number)])
        await asyncio.sleep(0.01)


async def test_a_waiting_poll_wakes_up_for_new_records(harness: Harness) -> None:
    """If it fails, events wait for the end of the poll's max_wait, and latency is that of the longest wait."""
    async with harness.open() as broker, harness.open() as writer:
        topic = await harness.create_topic(broker)
        async with broker.consumer(
            harness.fresh_name("g"), [topic], start="earliest", on_revoke=ignore_revoke
        ) as consumer:
            await own(consumer, 1)
            polling = asyncio.create_task(consumer.poll(max_records=10, max_wait=10 * DEADLINE))
            await asyncio.sleep(0.1)
            await append(writer, topic, [record(1)])
            async with asyncio.timeout(DEADLINE):
                assert numbers_of(await polling) == [1]


async def test_members_of_one_connection_share_the_work(harness: Harness) -> None:
    """If it fails, a partition is left without an owner, or has two, when members outnumber or match partitions."""
    async with harness.open() as broker, AsyncExitStack() as stack:
        topic = await harness.create_topic(broker, partitions=3)
        group = harness.fresh_name("g")
        members = [
            await stack.enter_async_context(broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke))
            for _ in range(4)
        ]
        polling = [asyncio.create_task(_keep_polling(member)) for member in members]
        try:
            await until(lambda: sorted(len(m.assignment()) for m in members) == [0, 1, 1, 1], "one each, one idle")
            owned = [tp for m in members for tp in m.assignment()]
            assert sorted(owned) == [(topic, 0), (topic, 1), (topic, 2)]
        finally:
            for task in polling:
                task.cancel()
            await asyncio.gather(*polling, return_exceptions=True)
