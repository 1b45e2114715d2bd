"""A fleet of writers and a group, and migrations of its stream that are killed; an oracle that knows what was acknowledged.

Nothing is lost, the order of each key is kept, and only what was in doubt may be there twice.
"""

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import pytest

from services.core import event
from services.core.broker.errors import BrokerError, HomeChanged, Unavailable
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.broker.several.broker import SeveralBrokers
from services.core.control import homes
from services.core.control.homes import Homes
from services.core.event import Origin
from services.core.fleet_broker import open_with_homes
from services.core.pipe_file.pipes import PipeFile
from services.core.provision import ensure_topics
from services.fleet.migrate import steps
from services.fleet.migrate.movable import check_movable
from services.fleet.migrate.steps import Migration, Result
from tests.support.pacing import Pace

_T = TypeVar("_T")
KEYS = 6
GROUP, STREAM = "shop.crm", "orders"


def shorten_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "LEASE_S", 0.5)
    monkeypatch.setattr(homes, "HOLD_S", 1.6)
    monkeypatch.setattr(homes, "FOLLOW_S", 0.25)
    monkeypatch.setattr(homes, "_APPEND_S", 600.0)
    monkeypatch.setattr(steps, "_MARGIN_S", 0.1)
    monkeypatch.setattr(steps, "MOST_S", 0.6)
    monkeypatch.setattr(steps, "FILE_S", 0.3)


class Killed(Exception):
    """As by kill -9: nothing is tidied up, and what was sent is on its way."""


class World:
    """A fleet of a writer and a member of a group, each with a connection of its own, and what they know."""

    def __init__(self, own: str, second: str, on: str = "default") -> None:
        """The URLs of its brokers. on: where the stream begins."""
        self.url = own
        self.pipes = PipeFile.model_validate(
            {
                "brokers": {"second": second},
                "streams": {STREAM: {"partitions": 2, "on": on}},
                "pipes": {
                    "shop": {
                        "sources": [STREAM],
                        "destinations": [{"name": "crm", "webhook": {"url": "https://x.example/"}}],
                    }
                },
            }
        )
        self.acknowledged: dict[str, list[int]] = defaultdict(list)
        self.received: dict[str, list[int]] = defaultdict(list)
        self.stopping = asyncio.Event()
        self._next = Counter[str]()

    def load(self, to: str | None) -> PipeFile:
        """The pipe file as it is now, as a command loads it."""
        check_movable(self.pipes, STREAM, to, self.url)
        return self.pipes

    @asynccontextmanager
    async def process(self) -> AsyncIterator[tuple[SeveralBrokers, Homes]]:
        async with open_with_homes(self.url, self.pipes) as broker:
            assert isinstance(broker, SeveralBrokers)
            places = broker.brokers.places
            assert isinstance(places, Homes)
            yield broker, places

    async def set_up(self) -> None:
        async with self.process() as (broker, _):
            await ensure_topics(broker.admin, self.pipes)

    async def write(self, run: str) -> None:
        """As ingest: an event of a key is sent when the one before it was answered for. Ends with the stop."""
        async with self.process() as (broker, _), Producer(broker.appender) as producer:
            await asyncio.gather(*(self._write_key(producer, f"{run}{number}") for number in range(KEYS)))

    async def _write_key(self, producer: Producer, key: str) -> None:
        while not self.stopping.is_set():
            number = self._next[key]
            self._next[key] += 1
            origin = Origin(f"run{key}", 0, number).pack()
            headers = ((event.ID, f"{key}-{number}".encode()), (event.ORIGIN, origin))
            with suppress(BrokerError):  # ingest answers 503 then
                sent = await producer.send(STREAM, [Record(key.encode(), str(number).encode(), 1000 + number, headers)])
                if not sent.failed:
                    self.acknowledged[key].append(number)
            await asyncio.sleep(0.005)

    async def read(self, chance: random.Random) -> None:
        """As a lane: it commits what it has got, and joins again where the stream is. Until it is cancelled.

        Some receivers are slow: the lane finishes what it has begun before its partitions go to another member.
        """
        working = asyncio.Lock()

        async def revoke(_partitions: frozenset[TopicPartition]) -> None:
            async with working:
                pass

        async with self.process() as (broker, _):
            while True:
                with suppress(HomeChanged, BrokerError):
                    async with broker.consumer(GROUP, [STREAM], start="earliest", on_revoke=revoke) as consumer:
                        while True:
                            batches = await consumer.poll(max_records=50, max_wait=0.1)
                            async with working:
                                for batch in batches:
                                    if batch.source in consumer.assignment():
                                        await self._receive(batch, chance)
                                        await consumer.commit({batch.source: batch.offsets[-1]})
                await asyncio.sleep(0.05)

    async def _receive(self, batch: Batch, chance: random.Random) -> None:
        if chance.random() < 0.05:
            await asyncio.sleep(1.5)
        for record in batch.records:
            self.received[(record.key or b"").decode()].append(int(record.value or b"0"))

    async def migrate(self, to: str, chance: random.Random, kills: int) -> tuple[Result, int]:
        """Run the migration until it has ended; it is killed at most so often, at its steps or between them."""
        left = killed = kills

        def maybe_die(_step: str) -> None:
            nonlocal left
            if left and chance.random() < 0.3:
                left -= 1
                raise Killed

        while True:
            async with self.process() as (broker, places):
                running = asyncio.create_task(
                    Migration(broker, places, self.load, STREAM, "test", before=maybe_die).run(to)
                )
                limit = chance.uniform(0, 1.5) if left and chance.random() < 0.5 else None
                done, _ = await asyncio.wait([running], timeout=limit)
                if not done:
                    left -= 1
                    running.cancel()
                try:
                    return await running, killed - left
                except (Killed, asyncio.CancelledError):
                    continue

    async def until_received(self) -> None:
        """Until the group has got everything that was acknowledged."""
        async with asyncio.timeout(300):
            pace = Pace()
            while any(set(numbers) - set(self.received[key]) for key, numbers in self.acknowledged.items()):
                await pace.rest()

    def check(self) -> int:
        """The promises. Gives the number of duplicates."""
        duplicates = 0
        for key, numbers in self.acknowledged.items():
            got = self.received[key]
            first = list(dict.fromkeys(got))
            assert set(numbers) <= set(got), f"lost: {sorted(set(numbers) - set(got))} of {key}"
            assert first == sorted(first), f"key {key} is out of order: {got}"
            duplicates += len(got) - len(first)
        return duplicates


async def run_history(world: World, seed: int, kills: int, *, back: bool | None = None) -> int:
    """Writers, a group, a migration there and in some histories back; back: in this one. Gives the duplicates."""
    chance = random.Random(seed)
    print(f"seed {seed}")
    reading = [asyncio.create_task(world.read(random.Random(seed + number))) for number in range(2)]
    writers = [asyncio.create_task(world.write("a"))]
    await asyncio.sleep(0.3)
    result, _ = await world.migrate("second", chance, kills)
    assert (result.home.readers, result.home.writers, result.home.state) == ("second", "second", None)
    if chance.random() < 0.5:  # one more instance begins in between
        writers.append(asyncio.create_task(world.write("b")))
    await asyncio.sleep(0.2)
    if chance.random() < 0.4 if back is None else back:
        returned, _ = await world.migrate("default", chance, kills)
        assert returned.home.readers == "default"
    await asyncio.sleep(0.2)
    world.stopping.set()
    await asyncio.gather(*writers)
    await world.until_received()
    for task in reading:
        task.cancel()
    await asyncio.wait(reading)
    async with world.process() as (broker, places):
        migration = Migration(broker, places, world.load, STREAM, "test")
        finished = await _until_answered(migration.finish)
        assert finished.home.former == ""
        stored = await _until_answered(lambda: broker.reader.describe(STREAM))
        assert sum(held.end for held in stored.values()) >= sum(map(len, world.acknowledged.values()))
    return world.check()


async def _until_answered(command: Callable[[], Awaitable[_T]]) -> _T:
    """As an operator does, who gives a command again when the broker did not answer."""
    for _ in range(20):
        with suppress(Unavailable):
            return await command()
        await asyncio.sleep(0.1)
    return await command()
