"""An in-memory broker that keeps the contract, small enough to be told when to fail, to revoke and to refuse."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime

from services.core.broker.contract import Appended, Features, Lag, OnRevoke, PartitionRange, Start
from services.core.broker.errors import BrokerError, NotOwner, UnknownTopic
from services.core.broker.record import Batch, Record, TopicPartition


class FakeBroker:
    """Topics are lists. `append_error`, `poll_errors`, `commit_error` are raised while set. One member per group."""

    def __init__(self, topics: Mapping[str, int]) -> None:
        self.stored = {TopicPartition(t, p): list[Record]() for t, count in topics.items() for p in range(count)}
        self.committed: dict[tuple[str, TopicPartition], int] = {}
        self.commits: list[dict[TopicPartition, int]] = []
        self.append_error: BrokerError | None = None
        self.poll_errors: list[BrokerError] = []
        self.commit_error: BrokerError | None = None
        self.consumers: list[FakeConsumer] = []
        self.admin = self.reader = FakeAdmin(self)
        self.features = Features(True, False, 1 << 20)
        self.appender = self

    def is_contiguous(self, topic: str) -> bool:
        """As in the contract."""
        return self.features.contiguous_offsets

    async def partition_count(self, topic: str) -> int:
        count = sum(source.topic == topic for source in self.stored)
        if not count:
            raise UnknownTopic(f"no topic {topic}")
        return count

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        if self.append_error is not None:
            raise self.append_error
        held = self.stored[TopicPartition(topic, partition)]
        first = len(held)
        held.extend(records)
        return Appended(first, len(held) - 1)

    @asynccontextmanager
    async def consumer(
        self, group: str, topics: Collection[str], *, start: Start, on_revoke: OnRevoke
    ) -> AsyncIterator["FakeConsumer"]:
        for topic in topics:
            await self.partition_count(topic)
        consumer = FakeConsumer(self, group, [source for source in self.stored if source.topic in topics])
        consumer.on_revoke = on_revoke
        self.consumers.append(consumer)
        try:
            yield consumer
        finally:
            await on_revoke(consumer.assignment())
            consumer.positions.clear()


class FakeAdmin:
    """What lanes ask of it."""

    def __init__(self, broker: FakeBroker) -> None:
        self._broker = broker

    async def present(self, topics: Collection[str]) -> frozenset[str]:
        return frozenset(topics) & {source.topic for source in self._broker.stored}

    async def group_lag(self, group: str, topic: str) -> dict[int, Lag]:
        return {
            source.partition: Lag(len(records) - 1 - self._broker.committed.get((group, source), -1), 0)
            for source, records in self._broker.stored.items()
            if source.topic == topic
        }

    async def describe(self, topic: str) -> dict[int, PartitionRange]:
        stored = self._broker.stored
        return {source.partition: PartitionRange(0, len(stored[source])) for source in stored if source.topic == topic}

    async def offsets_at(self, topic: str, start: Start) -> dict[int, int]:
        assert isinstance(start, datetime)
        since, found = start.timestamp() * 1000, {}
        for source, records in self._broker.stored.items():
            if source.topic == topic:
                new = (offset for offset, record in enumerate(records) if record.timestamp >= since)
                found[source.partition] = next(new, len(records))
        return found

    async def committed(self, group: str, topic: str) -> dict[int, int]:
        marks = self._broker.committed
        return {s.partition: mark for (name, s), mark in marks.items() if (name, s.topic) == (group, topic)}

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        try:
            records = self._broker.stored[TopicPartition(topic, partition)][offset : offset + max_records]
        except KeyError:
            raise UnknownTopic(f"no topic {topic}") from None
        return Batch(topic, partition, range(offset, offset + len(records)), records) if records else None


class FakeConsumer:
    """As in the contract. `revoke` takes a partition away as a rebalance does."""

    on_revoke: OnRevoke

    def __init__(self, broker: FakeBroker, group: str, sources: Sequence[TopicPartition]) -> None:
        self.broker, self._group = broker, group
        self.positions = {source: broker.committed.get((group, source), -1) + 1 for source in sources}
        self.paused: set[TopicPartition] = set()
        self.polls = 0

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self.positions)

    async def poll(self, *, max_records: int, max_wait: float) -> list[Batch]:
        self.polls += 1
        await asyncio.sleep(0.001)
        if self.broker.poll_errors:
            raise self.broker.poll_errors.pop(0)
        for source, position in self.positions.items():
            records = self.broker.stored[source][position : position + max_records]
            if records and source not in self.paused:
                self.positions[source] += len(records)
                return [Batch(*source, range(position, position + len(records)), records)]
        return []

    async def commit(self, processed: Mapping[TopicPartition, int]) -> None:
        if self.broker.commit_error is not None:
            raise self.broker.commit_error
        refused = processed.keys() - self.positions.keys()
        for source in processed.keys() - refused:
            self.broker.committed[(self._group, source)] = processed[source]
        self.broker.commits.append(dict(processed))
        if refused:
            raise NotOwner(frozenset(refused))

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        self.paused.update(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        self.paused.difference_update(partitions)

    async def revoke(self, source: TopicPartition) -> None:
        self.paused.add(source)
        await self.on_revoke(frozenset({source}))
        self.positions.pop(source)

    async def lag(self) -> dict[TopicPartition, Lag]:
        return {
            source: Lag(len(self.broker.stored[source]) - position, 0) for source, position in self.positions.items()
        }
