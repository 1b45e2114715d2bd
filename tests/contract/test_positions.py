"""Where reading starts, how far behind a group is, and what happens when its place is gone."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Literal

import pytest

from services.core.broker.contract import MAX_POLL_BYTES, Broker, Lag, Start, TopicSpec
from services.core.broker.errors import OffsetOutOfRange, Unavailable
from services.core.broker.reading import read_tail
from services.core.broker.record import Record, TopicPartition
from tests.contract.harness import Harness
from tests.contract.traffic import (
    BASE_TIME,
    DEADLINE,
    append,
    ignore_revoke,
    marks_of,
    numbered,
    numbers_of,
    own,
    poll,
    read,
    record,
    until_async,
)

_APART_S = 0.05
"""Between two chunks: more than two clocks of one machine differ."""


async def _store(broker: Broker, topic: str, *chunks: range) -> list[datetime]:
    """Append each chunk, stamped with the present time. Gives a date shortly before each, and one behind the last.

    So it is the same whether a date is compared with the storing of the records or with their timestamps.
    """
    dates = []
    for chunk in chunks:
        await asyncio.sleep(_APART_S)
        dates.append(datetime.now(UTC))
        await asyncio.sleep(_APART_S)
        stamp = round(datetime.now(UTC).timestamp() * 1000)
        await append(broker, topic, [Record(one.key, one.value, stamp) for one in numbered(chunk)])
    await asyncio.sleep(_APART_S)
    return [*dates, datetime.now(UTC)]


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ("earliest", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ("latest", [10]),
        (1, [4, 5, 6, 7, 8, 9, 10]),
        (0, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (-1, [10]),
    ],
    ids=["earliest", "latest", "date", "date-before-all", "date-after-all"],
)
async def test_start(harness: Harness, which: Literal["earliest", "latest"] | int, expected: list[int]) -> None:
    """If it fails, a new group misses events or reads old ones: time travel and replay land at the wrong place."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        dates = await _store(broker, topic, range(4), range(4, 5), range(5, 10))
        start: Start = dates[which] if isinstance(which, int) else which
        async with broker.consumer(harness.fresh_name("g"), [topic], start=start, on_revoke=ignore_revoke) as consumer:
            await own(consumer, 1)
            assert await poll(consumer, max_records=1, max_wait=0.2) is not None
            lag = (await consumer.lag())[TopicPartition(topic, 0)]
            assert lag.records == len(expected) - 1, "counted from the start position as long as nothing is committed"
        async with broker.consumer(harness.fresh_name("g"), [topic], start=start, on_revoke=ignore_revoke) as consumer:
            await own(consumer, 1)
            assert (await consumer.lag())[TopicPartition(topic, 0)].records == len(expected) - 1
            await append(broker, topic, [record(10)])
            assert numbers_of(await read(consumer, len(expected))) == expected


async def test_the_tail_since_a_time_is_read_to_the_end(harness: Harness) -> None:
    """If it fails, an owner that takes a partition over writes again what its predecessor has written to another topic."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)

        async def tail(since: datetime, most: int = 100) -> list[int]:
            batches = [batch async for batch in read_tail(broker, topic, round(since.timestamp() * 1000), most)]
            return numbers_of(batches)

        assert await tail(datetime.now(UTC)) == []
        dates = await _store(broker, topic, range(4), range(4, 7), range(7, 10))
        assert await tail(dates[0]) == list(range(10))
        assert await tail(dates[2]) == [7, 8, 9]
        assert await tail(dates[3]) == []
        assert len(await tail(dates[0], most=3)) in (3, 4)
        assert [batch async for batch in read_tail(broker, harness.fresh_name("none"), BASE_TIME, 10)] == []


async def test_start_applies_only_without_a_commit(harness: Harness) -> None:
    """If it fails, a restart with another start setting skips or repeats what the group had settled."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        dates = await _store(broker, topic, range(3), range(3, 5))
        group = harness.fresh_name("g")
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            (first, *_) = await read(consumer, 1, max_records=2)
            await consumer.commit({first.source: first.offsets[0]})
        starts: tuple[Start, ...] = ("latest", "earliest", dates[1])
        for start in starts:
            async with broker.consumer(group, [topic], start=start, on_revoke=ignore_revoke) as consumer:
                assert numbers_of(await read(consumer, 4)) == [1, 2, 3, 4]


async def test_where_a_group_began_is_remembered(harness: Harness) -> None:
    """If it fails, a "latest" group that stops before its first commit skips what was sent while it was away."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        await append(broker, topic, numbered(range(5)))
        group = harness.fresh_name("g")
        async with broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
            await own(consumer, 1)
        await append(broker, topic, numbered(range(5, 8)))
        async with broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
            assert numbers_of(await read(consumer, 3)) == [5, 6, 7]


@pytest.mark.parametrize("suffix", [".retry", ".parked"])
async def test_what_is_kept_for_a_group_is_read_from_the_earliest(harness: Harness, suffix: str) -> None:
    """If it fails, a destination that begins at "latest" skips its own events: retried, or parked while it was paused."""
    async with harness.open() as broker:
        topic = harness.fresh_name("pipe") + suffix
        await broker.admin.create_topic(TopicSpec(topic, partitions=1))
        await append(broker, topic, numbered(range(5)))
        async with broker.consumer(
            harness.fresh_name("g"), [topic], start="latest", on_revoke=ignore_revoke
        ) as consumer:
            assert numbers_of(await read(consumer, 5)) == list(range(5))


async def test_offsets_at(harness: Harness) -> None:
    """If it fails, a replay of a date range reads another range than it says."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker, partitions=2)
        dates = await _store(broker, topic, range(3), range(3, 10))
        ranges = await broker.reader.describe(topic)
        assert await broker.reader.offsets_at(topic, "earliest") == {p: r.start for p, r in ranges.items()}
        assert await broker.reader.offsets_at(topic, "latest") == {p: r.end for p, r in ranges.items()}
        at = await broker.reader.offsets_at(topic, dates[1])
        assert at[1] == ranges[1].end, "the end when nothing is that new"
        found = await broker.reader.read(topic, 0, at[0], max_records=10)
        assert found is not None
        assert numbers_of([found]) == list(range(3, 10))


async def test_start_at_a_date_with_times_out_of_order(harness: Harness) -> None:
    """If it fails, late events shift the start: it is the first record not older than the date, in storage order. Where the
    time of storing counts, the start is earlier."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        now = datetime.now(UTC) - timedelta(milliseconds=55)
        times = [round(now.timestamp() * 1000) + time for time in (0, 50, 10, 60, 20)]
        await append(broker, topic, [Record(b"k", b"%d" % n, time) for n, time in enumerate(times)])
        start, count = now + timedelta(milliseconds=55), 5 if broker.features.dates_by_storing else 2
        async with broker.consumer(harness.fresh_name("g"), [topic], start=start, on_revoke=ignore_revoke) as consumer:
            assert numbers_of(await read(consumer, count)) == [0, 1, 2, 3, 4][-count:]


async def test_retention_counts_from_storing(harness: Harness) -> None:
    """If it fails, a client whose clock is a month behind makes the broker delete what was acknowledged."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        assert await broker.admin.kept_by_event_time([topic, harness.fresh_name("none")]) == frozenset()


async def test_lag_counts_and_reaches_zero(harness: Harness) -> None:
    """If it fails, autoscaling and alarms work on wrong figures, or a drained stream never looks drained."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        group = harness.fresh_name("g")
        await append(broker, topic, numbered(range(10)))
        source = TopicPartition(topic, 0)
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            await own(consumer, 1)
            lag = (await consumer.lag())[source]
            assert lag.records == 10
            assert _is_young(lag), (
                "the time since the oldest unprocessed record was stored, not its own, which is years ago"
            )
            batches = await read(consumer, 10)
            assert (await consumer.lag())[source].records == 10, "read is not processed"
            offsets = [offset for batch in batches for offset in batch.offsets]
            await consumer.commit({source: offsets[6]})

            async def three_left() -> bool:
                lag = (await consumer.lag())[source]
                return lag.records == 3 and _is_young(lag)

            await until_async(three_left, "three records left")
            await consumer.commit({source: offsets[-1]})

            async def none_left() -> bool:
                return (await consumer.lag())[source] == Lag(0, 0)

            await until_async(none_left, "lag is zero, in records and milliseconds")


def _is_young(lag: Lag) -> bool:
    """Whether the oldest record was stored in this test."""
    now = datetime.now(UTC).timestamp() * 1000
    return lag.stored is not None and abs(lag.stored - now) < 1000 * DEADLINE and lag.millis < 1000 * DEADLINE


async def test_group_lag_without_members(harness: Harness) -> None:
    """If it fails, a group whose workers are all dead looks healthy: nobody wakes up."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker, partitions=2)
        group = harness.fresh_name("g")
        await append(broker, topic, numbered(range(10)), 0)
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            batches = await read(consumer, 10)
            offsets = [offset for batch in batches for offset in batch.offsets]
            await consumer.commit({TopicPartition(topic, 0): offsets[3]})
        lag = await broker.admin.group_lag(group, topic)
        assert (lag[0].records, lag[1]) == (6, Lag(0, 0))
        assert _is_young(lag[0])


async def test_set_committed_moves_an_empty_group(harness: Harness) -> None:
    """If it fails, an operator cannot replay, or skip a gap."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        placed = await append(broker, topic, numbered(range(5)))
        group = harness.fresh_name("g")
        assert (await broker.admin.positions(group, topic), await broker.admin.members(group)) == ({}, [])
        await broker.admin.set_committed(group, topic, {0: placed.last})
        assert await broker.admin.committed(group, topic) == {0: placed.last}
        assert await broker.admin.positions(group, topic) == {0: placed.last + 1}
        assert (await broker.admin.group_lag(group, topic))[0] == Lag(0, 0)
        await broker.admin.set_committed(group, topic, {0: placed.first})
        async with broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
            assert numbers_of(await read(consumer, 4)) == [1, 2, 3, 4]


async def test_set_committed_is_refused_while_members_exist(harness: Harness) -> None:
    """If it fails, moving a live group's offset is silently undone by its next commit, or skips what is in flight."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        placed = await append(broker, topic, numbered(range(5)))
        group = harness.fresh_name("g")
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            await consumer.commit(marks_of(await read(consumer, 5)))
            with pytest.raises(Unavailable):
                await broker.admin.set_committed(group, topic, {0: placed.first})
            assert await broker.admin.committed(group, topic) == {0: placed.last}
            assert len(await broker.admin.members(group)) == 1
        assert await broker.admin.members(group) == []


async def test_the_position_of_a_group_without_a_commit_is_where_it_began(harness: Harness) -> None:
    """If it fails, `penstock group` shows a new destination as if old events waited for it, and counts them as skipped."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        await append(broker, topic, numbered(range(5)))
        group = harness.fresh_name("g")
        async with broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
            await own(consumer, 1)
        placed = await append(broker, topic, numbered(range(5, 8)))
        (position,) = (await broker.admin.positions(group, topic)).values()
        assert placed.first - 1 <= position <= placed.first or not broker.features.contiguous_offsets
        batch = await broker.reader.read(topic, 0, position, max_records=10)
        assert batch is not None
        assert numbers_of([batch]) == [5, 6, 7]


async def test_expired_position_is_loud(harness: Harness) -> None:
    """If it fails, retention that passed a slow group skips events without a word: the one thing we promise not to do."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        group = harness.fresh_name("g")
        first = await append(broker, topic, numbered(range(3)))
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            await consumer.commit(marks_of(await read(consumer, 3)))
        await append(broker, topic, numbered(range(3, 10)))
        later = await append(broker, topic, numbered(range(10, 12)))
        await harness.expire(topic, 0, later.first)
        ranges = await broker.reader.describe(topic)
        assert ranges[0].start == later.first
        async with broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
            for _ in range(2):
                with pytest.raises(OffsetOutOfRange) as gone:
                    await read(consumer, 1)
                assert (gone.value.topic, gone.value.partition) == (topic, 0)
                assert first.last < gone.value.wanted < gone.value.start == later.first
                assert gone.value.end == ranges[0].end
        await broker.admin.set_committed(group, topic, {0: later.first - 1})
        async with broker.consumer(group, [topic], start="latest", on_revoke=ignore_revoke) as consumer:
            assert numbers_of(await read(consumer, 2)) == [10, 11]


async def test_position_behind_the_end_is_loud(harness: Harness) -> None:
    """If it fails, a topic that was deleted and created again is read from nowhere: its new events are skipped."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        group = harness.fresh_name("g")
        placed = await append(broker, topic, numbered(range(3)))
        await broker.admin.set_committed(group, topic, {0: placed.last + 1000})
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            with pytest.raises(OffsetOutOfRange) as gone:
                await read(consumer, 1)
            assert gone.value.wanted > gone.value.end


async def test_an_expired_partition_can_be_paused_and_the_rest_goes_on(harness: Harness) -> None:
    """If it fails, one partition with a gap stops all others of its worker."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker, partitions=2)
        group = harness.fresh_name("g")
        placed = await append(broker, topic, numbered(range(5)), 0)
        await append(broker, topic, numbered(range(10, 15)), 1)
        await broker.admin.set_committed(group, topic, {0: placed.first})
        await harness.expire(topic, 0, placed.last)
        async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
            seen: list[int] = []
            gaps = 0
            async with asyncio.timeout(DEADLINE):
                while len(seen) < 5:
                    try:
                        seen += numbers_of(await poll(consumer))
                    except OffsetOutOfRange as gone:
                        gaps += 1
                        consumer.pause([TopicPartition(gone.topic, gone.partition)])
            assert seen == list(range(10, 15))
            assert gaps <= 1


async def test_a_poll_takes_a_bounded_share(harness: Harness) -> None:
    """If it fails, a member that asks for many records gets as many megabytes as there are, and runs out of memory."""
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        for start in range(0, 80, 8):
            await append(broker, topic, [record(number, size=100_000) for number in range(start, start + 8)])
        async with broker.consumer(
            harness.fresh_name("g"), [topic], start="earliest", on_revoke=ignore_revoke
        ) as consumer:
            numbers: list[int] = []
            async with asyncio.timeout(DEADLINE):
                while len(numbers) < 80:
                    batches = await poll(consumer, max_records=1_000_000)
                    assert sum(len(one.value or b"") for batch in batches for one in batch.records) <= MAX_POLL_BYTES
                    numbers += numbers_of(batches)
            assert numbers == list(range(80))
