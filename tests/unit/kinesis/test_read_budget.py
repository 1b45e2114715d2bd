"""What readers hold ahead of poll: one bound for all of them, and nobody who is polled waits for one who is not."""

import asyncio
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import cast

import pytest
from prometheus_client import REGISTRY

from services.core.broker.errors import OffsetOutOfRange
from services.core.broker.kinesis import prefetch
from services.core.broker.kinesis.aws import Clients, PutRecords
from services.core.broker.kinesis.consumer import KinesisConsumer, KinesisMemberBackend, SharedResources
from services.core.broker.kinesis.incarnation import Incarnations
from services.core.broker.kinesis.leases import HeldLease, Lease
from services.core.broker.kinesis.pace import ReadPaces
from services.core.broker.kinesis.prefetch import Backlog, PollActivity, ReadBudget
from services.core.broker.kinesis.record_format import make_entries, parse_entry
from services.core.broker.kinesis.shard_reader import ReaderContext, read_shard
from services.core.broker.kinesis.streams import Streams
from services.core.broker.record import Record, TopicPartition
from tests.unit.kinesis.fake_shard import FakeShard
from tests.unit.kinesis.group_world import TIMING, Actor, MemoryTable, World

_DAY = 86_400_000


class _Member:
    """A member with a reader for each of these shards. got: the numbers that were polled, by shard. now: the clock of polls."""

    def __init__(self, shards: Sequence[FakeShard], limit: int) -> None:
        self.shards, self.budget, self.table = shards, ReadBudget(limit), MemoryTable()
        self.got: list[list[int]] = [[] for _ in shards]
        self.now = 0.0
        self.polls = [PollActivity(lambda: self.now) for _ in shards]
        self.backlogs = [Backlog(TopicPartition("t", n), self.budget, polls) for n, polls in enumerate(self.polls)]

    def held(self, number: int) -> HeldLease:
        row = Lease("1:t:1", number, owner="me", settled=self.shards[number].now_ms)
        self.table.stored[row.key] = row
        return HeldLease(self.backlogs[number], "me", row, 1e9, self.table, lambda: 0.0, 10.0, _DAY)

    def poll(self, *numbers: int) -> int:
        """What poll would return of these shards. How many records were got of the first of them so far."""
        for number in numbers:
            with self.polls[number].polling():
                self.budget.wake()
            if not self.backlogs[number].is_paused:
                for batch in self.backlogs[number].poll(7):
                    self.got[number] += [record.timestamp for record in batch.records]
        return len(self.got[numbers[0]])


@asynccontextmanager
async def _reading(shards: Sequence[FakeShard], limit: int) -> AsyncIterator[_Member]:
    member = _Member(shards, limit)

    async def is_listed(_source: TopicPartition) -> bool:
        return True

    def start(number: int) -> "asyncio.Task[None]":
        shard = shards[number]
        reading = ReaderContext(lambda: shard.now_ms, lambda _error: None, lambda: None, is_listed)
        return asyncio.create_task(read_shard(reading, member.held(number), shard.source()))

    tasks = [start(number) for number in range(len(shards))]
    try:
        yield member
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()
    for backlog in member.backlogs:
        backlog.close()
    assert member.budget.used == 0, "all that was taken is given back"


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(600):
        while not condition():
            await asyncio.sleep(0)


def _given_up() -> float:
    return REGISTRY.get_sample_value("penstock_broker_prefetched_given_up_records_total", {"topic": "t"}) or 0.0


def _shard(entries: int, size: int = 300) -> FakeShard:
    shard = FakeShard()
    for entry in range(entries):
        shard.put(range(10 * entry, 10 * entry + 10), size=size)
    return shard


async def test_all_readers_share_one_bound() -> None:
    """If it fails, a process that gets the shards of others needs eight megabytes for each, and is killed for it."""
    shards = [_shard(400) for _ in range(12)]
    async with _reading(shards, 8 << 20) as member:
        for _ in range(3_000):
            await asyncio.sleep(0)
        assert sum(backlog.size for backlog in member.backlogs) <= member.budget.used <= 13 << 20
        assert all(backlog.size < 6 << 20 for backlog in member.backlogs)

        def is_read() -> bool:
            member.poll(*range(12))
            assert member.budget.used <= 13 << 20
            return all(len(got) == 4_000 for got in member.got)

        await _until(is_read)
        assert all(got == list(range(4_000)) for got in member.got)


@pytest.mark.parametrize("is_closed", [False, True])
async def test_who_is_paused_gives_way_and_misses_nothing(is_closed: bool) -> None:
    """If it fails, one paused destination stops all others of its process; or its own events are passed over when it goes on."""
    paused, polled = _shard(40), FakeShard()
    paused.closed = is_closed
    async with _reading([paused, polled], 100_000) as member:
        first = member.backlogs[0]
        await _until(lambda: first.is_full and first.size > 0)
        member.poll(0)
        waiting, before = first.lag(paused.now_ms), _given_up()
        first.is_paused = True
        for number in range(40):
            polled.put([number], size=300)
        await _until(lambda: member.poll(1) == 40)
        assert not first.is_finished
        after = first.lag(paused.now_ms)
        assert after.records >= waiting.records > 0, "what was given up still waits"
        assert after.stored == waiting.stored
        assert _given_up() > before, "none of it stays in the way"
        first.is_paused = False
        await _until(lambda: member.poll(0, 1) == 400)
        assert member.got == [list(range(400)), list(range(40))]
        if is_closed:
            await _until(lambda: first.ended)
            first.processed(1 << 90)
            assert first.is_finished


async def test_who_does_not_poll_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a destination that is down for hours keeps the others of its process from reading."""
    monkeypatch.setattr(prefetch, "_AGAIN_SECONDS", 0.0)
    down, polled = _shard(40), _shard(4)
    async with _reading([down, polled], 100_000) as member:
        await _until(lambda: member.backlogs[0].is_full and member.backlogs[0].size > 0)
        for _ in range(100):
            await asyncio.sleep(0)
            assert member.poll(1) == 0, "a consumer that was here just now is waited for"
        member.now += 1.0
        await _until(lambda: member.poll(1) == 40)
        await _until(lambda: member.poll(0) == 400)
    assert member.got == [list(range(400)), list(range(40))]


async def test_a_consumer_that_waits_for_records_is_not_idle() -> None:
    """If it fails, whoever waits in poll has no right to room that others hold, or whoever left has."""
    world = World()
    world.add_shard()
    actor = Actor(world)
    polls = actor.membership.polls = PollActivity(lambda: world.now)
    await actor.heartbeat()
    clients = Clients(None, None, cast("PutRecords", None), None)
    streams, incarnations = Streams(None, TIMING), Incarnations(None, TIMING)
    backend = KinesisMemberBackend(SharedResources(clients, streams, incarnations, ReadPaces(), TIMING), "g")
    consumer, idle = KinesisConsumer(backend, actor.membership), list[bool]()
    world.now += 100
    idle.append(polls.is_idle)
    waiting = asyncio.create_task(consumer.poll(max_records=5, max_wait=30.0))
    await _until(lambda: not polls.is_idle)
    await actor.heartbeat()
    world.append(0)
    for held in actor.membership.held.values():
        held.is_placed = True
    actor.feed()
    backend.wake()
    (batch,) = await waiting
    assert list(batch.offsets) == [0]
    idle.append(polls.is_idle)
    world.now += 1.0
    idle.append(polls.is_idle)
    assert idle == [True, False, True], "it was here just now, and then a second ago"
    await actor.die()


async def test_what_expires_after_it_was_given_up_is_loud() -> None:
    """If it fails, what was read, given up for want of memory, and taken by retention meanwhile, is passed over in silence."""
    shard = _shard(2)
    async with _reading([shard], 64 << 20) as member:
        (backlog,) = member.backlogs
        await _until(lambda: backlog.size > 0 and backlog.millis_behind == 0)
        shard.now_ms += 3_600_000
        reads = shard.reads
        await _until(lambda: shard.reads > reads + 2)  # an hour later all was read, and nothing more was there
        backlog.give_up()
        shard.now_ms += _DAY - 60_000
        shard.trim(shard.put([1000]))
        await _until(lambda: backlog.error is not None or member.poll(0) > 0)
        assert isinstance(backlog.error, OffsetOutOfRange)


@pytest.mark.parametrize("seed", range(20))
async def test_a_storm_of_pauses_loses_and_repeats_nothing(seed: int) -> None:
    """If it fails, events are skipped, doubled or turned around when a process is short of memory."""
    chance = random.Random(seed)
    shards = [_shard(chance.randrange(1, 60)) for _ in range(5)]
    expected = [list(range(10 * len(shard.entries))) for shard in shards]
    async with _reading(shards, 60_000) as member:
        for _ in range(600):
            number = chance.randrange(5)
            member.backlogs[number].is_paused = chance.random() < 0.5
            member.poll(chance.randrange(5))
            if chance.random() < 0.05:
                shards[number].fail = [
                    chance.choice(["ExpiredIteratorException", "ProvisionedThroughputExceededException"])
                ]
            if chance.random() < 0.02:
                shards[number].closed = True
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        for backlog in member.backlogs:
            backlog.is_paused = False
        await _until(lambda: member.poll(*range(5)) >= 0 and member.got == expected)


@pytest.mark.parametrize(("count", "size", "headers"), [(2_000, 5, 0), (1_000, 300, 6), (3, 200_000, 2)])
def test_memory_is_counted_decoded(count: int, size: int, headers: int) -> None:
    """If it fails, the bound is one of stored bytes, of which small events take many times as much."""
    names = tuple((f"name-{n}", b"value") for n in range(headers))
    ((entry, *_), _) = make_entries([Record(b"k%d" % n, b"x" * size, n, names) for n in range(count)], "0", 0)
    stored = FakeShard()
    stored.put([], data=entry.data)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        run = parse_entry(stored.entries[0])
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.7 * held < run.memory < 1.6 * held
