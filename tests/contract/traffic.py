"""Records to send, ways to read them, and members that note what they owned and processed."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from services.core.broker.contract import Appended, Broker, Consumer
from services.core.broker.errors import BrokerError, NotOwner
from services.core.broker.record import Batch, Record, TopicPartition
from tests.support.pacing import Pace

DEADLINE = 600.0
"""Seconds that a condition may take before the test fails: generous, a busy machine is no defect."""

BASE_TIME = 1_700_000_000_000
"""Event time of record 0, ms; record n is n ms younger."""


def record(number: int, key: bytes | None = b"k", size: int = 0) -> Record:
    """Record `number`: its value says so, its timestamp too."""
    value = b"%d" % number
    return Record(key, value.ljust(size, b" "), BASE_TIME + number)


def numbered(numbers: Iterable[int], key: bytes | None = b"k") -> list[Record]:
    """One record per number."""
    return [record(number, key) for number in numbers]


def number_of(read: Record) -> int:
    """The number that `record` put in."""
    assert read.value is not None
    return int(read.value)


async def append(broker: Broker, topic: str, records: Sequence[Record], partition: int = 0) -> Appended:
    """Append and insist that everything was stored. Retries what may be retried: clusters elect leaders at first."""
    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                appended = await broker.appender.append(topic, partition, records, timeout=DEADLINE)
            except BrokerError as error:
                if not error.retriable:
                    raise
                await asyncio.sleep(0.1)
            else:
                assert not appended.failed
                return appended


async def ignore_revoke(partitions: frozenset[TopicPartition]) -> None:
    """An on_revoke for tests that have nothing in flight."""


async def read(consumer: Consumer, count: int, *, max_records: int = 500) -> list[Batch]:
    """Poll until `count` records came in all; fails after DEADLINE. May return more when a batch holds more."""
    batches: list[Batch] = []
    async with asyncio.timeout(DEADLINE):
        while sum(len(batch.records) for batch in batches) < count:
            batches += await poll(consumer, max_records=max_records)
    return batches


async def poll(consumer: Consumer, *, max_records: int = 500, max_wait: float = 0.5) -> list[Batch]:
    """One poll that takes a retriable failure (an election, say) for nothing to read."""
    try:
        return await consumer.poll(max_records=max_records, max_wait=max_wait)
    except BrokerError as error:
        if not error.retriable:
            raise
        await asyncio.sleep(0.1)
        return []


def records_of(batches: Iterable[Batch]) -> list[Record]:
    """All records of the batches, in order."""
    return [read for batch in batches for read in batch.records]


def numbers_of(batches: Iterable[Batch]) -> list[int]:
    """The numbers of all records of the batches, in order."""
    return [number_of(read) for read in records_of(batches)]


def marks_of(batches: Iterable[Batch]) -> dict[TopicPartition, int]:
    """What to commit when all of the batches are processed."""
    return {batch.source: batch.offsets[-1] for batch in batches}


async def read_all(broker: Broker, topic: str, group: str) -> list[Batch]:
    """What a new group reads from the earliest record to the end as it is now."""
    ranges = await broker.reader.describe(topic)
    missing = {partition: stored.end - 1 for partition, stored in ranges.items() if stored.start < stored.end}
    batches: list[Batch] = []
    async with broker.consumer(group, [topic], start="earliest", on_revoke=ignore_revoke) as consumer:
        async with asyncio.timeout(DEADLINE):
            while missing:
                for batch in await poll(consumer):
                    batches.append(batch)
                    if batch.offsets[-1] >= missing.get(batch.partition, 0):
                        missing.pop(batch.partition, None)
    return batches


async def until(condition: Callable[[], bool], what: str, deadline: float = DEADLINE) -> None:
    """Wait for something that other tasks bring about."""
    try:
        async with asyncio.timeout(deadline):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"still not after {deadline} s: {what}") from None


async def until_async(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Wait for something that one has to ask the broker about; a retriable failure counts as "not yet"."""
    try:
        async with asyncio.timeout(DEADLINE):
            pace = Pace()
            while True:
                try:
                    if await condition():
                        return
                except BrokerError as error:
                    if not error.retriable:
                        raise
                await pace.rest()
    except TimeoutError:
        raise AssertionError(f"still not after {DEADLINE} s: {what}") from None


async def own(consumer: Consumer, partitions: int) -> None:
    """Poll nothing away: wait until the member owns this many partitions."""

    async def owns() -> bool:
        if len(consumer.assignment()) != partitions:
            await consumer.lag()  # as a poll does, it finds positions that were not found in time
        return len(consumer.assignment()) == partitions

    await until_async(owns, f"owning {partitions} partitions")


@dataclass
class Ledger:
    """Who owned what, and what was processed, over all members of a group in this process."""

    owner: dict[TopicPartition, str] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)
    processed: Counter[int] = field(default_factory=Counter)

    def claim(self, source: TopicPartition, name: str) -> None:
        holder = self.owner.setdefault(source, name)
        if holder != name:
            self.conflicts.append(f"{name} read {source} while {holder} had not let go")
            self.owner[source] = name

    def release(self, sources: Collection[TopicPartition], name: str) -> None:
        for source in sources:
            if self.owner.get(source) == name:
                del self.owner[source]


class Member:
    """A group member that polls, processes and commits until it is told to leave."""

    def __init__(self, broker: Broker, group: str, topic: str, name: str, ledger: Ledger) -> None:
        self._broker, self._group, self._topic = broker, group, topic
        self.name, self.ledger = name, ledger
        self.refused = 0
        self._leave = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=self.name)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave.set()
        assert self._task is not None
        await self._task

    async def _on_revoke(self, partitions: frozenset[TopicPartition]) -> None:
        await self._idle.wait()
        self.ledger.release(partitions, self.name)

    async def _run(self) -> None:
        async with self._broker.consumer(
            self._group, [self._topic], start="earliest", on_revoke=self._on_revoke
        ) as consumer:
            while not self._leave.is_set():
                batches = await poll(consumer, max_records=50, max_wait=0.2)
                self._idle.clear()
                try:
                    await self._process(consumer, batches)
                finally:
                    self._idle.set()

    async def _process(self, consumer: Consumer, batches: list[Batch]) -> None:
        for batch in batches:
            self.ledger.claim(batch.source, self.name)
            for one in batch.records:
                self.ledger.processed[number_of(one)] += 1
        if batches:
            try:
                await consumer.commit(marks_of(batches))
            except NotOwner:
                self.refused += 1
            except BrokerError as error:
                if not error.retriable:
                    raise
