"""One process's connection to the modelled broker, at the level of the contract."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

from services.core.broker.contract import Appended, Lag, OnRevoke, PartitionRange, Start, TopicSpec
from services.core.broker.errors import OutcomeUnknown, RecordTooLarge, UnknownTopic
from services.core.broker.kafka.appender import KafkaAppender
from services.core.broker.kinesis.appender import KinesisAppender
from services.core.broker.record import Batch, Record, TopicPartition, estimate_size
from services.core.broker.resharding import Resharding
from tests.simulation import kafka_nodes, kinesis_puts
from tests.simulation.cluster import MAX_RECORD_BYTES, Cluster
from tests.simulation.consumer import ModelConsumer, join_group
from tests.simulation.machine import WORLD, Process
from tests.simulation.weather import refusal


@asynccontextmanager
async def open_broker(cluster: Cluster, process: Process) -> AsyncIterator["ModelBroker"]:
    """As `connect.open_broker`."""
    await cluster.call(lambda: None, None)
    broker = ModelBroker(cluster, process)
    try:
        yield broker
    finally:
        await broker.close()


class ModelBroker:
    """One process's connection."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self._cluster, self._process = cluster, process
        self.features = cluster.kind.features
        self.admin = self.reader = ModelAdmin(cluster)
        self.appender = make_appender(cluster)
        self.resharding: Resharding | None = None

    def is_contiguous(self, topic: str) -> bool:
        """As in the contract."""
        return self.features.contiguous_offsets

    def consumer(
        self, group: str, topics: Collection[str], *, start: Start, on_revoke: OnRevoke
    ) -> AbstractAsyncContextManager["ModelConsumer"]:
        """As in the contract."""
        return join_group(self._cluster, self._process, group, tuple(topics), start, on_revoke)

    async def close(self) -> None:
        """Wait for what is under way."""
        if not isinstance(self.appender, ModelAppender):
            await self.appender.close()

    async def probe(self, topic: str, *, timeout: float) -> None:
        """As in the contract."""
        await self._cluster.call(lambda: self._cluster.store.topic(topic), topic, writes=True)


def make_appender(cluster: Cluster) -> "KafkaAppender | KinesisAppender | ModelAppender":
    """The real one over a model of Kafka's nodes or Kinesis' shards; a model of the log's."""
    if cluster.kafka is not None:
        return kafka_nodes.make_appender(cluster.kafka)
    if cluster.kinesis is not None:
        return kinesis_puts.make_appender(cluster.kinesis)
    return ModelAppender(cluster)


class ModelAppender:
    """The log's, as `contract.Appender`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def partition_count(self, topic: str) -> int:
        """As in the contract."""
        return len((await self._cluster.call(lambda: self._cluster.store.topic(topic), topic)).partitions)

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        """As in the contract."""
        if any(estimate_size((record,)) > MAX_RECORD_BYTES for record in records):
            raise RecordTooLarge(topic)
        cluster, answer = self._cluster, self._cluster.machine.create_future()
        kind = cluster.weather.draw(topic, writes=True)
        after = cluster.weather.delay(kind)
        cluster.machine.call_later(
            after, self._arrive, answer, topic, partition, tuple(records), kind, timeout, context=WORLD
        )
        appended: Appended = await answer
        return appended

    def _arrive(
        self,
        answer: "asyncio.Future[Any]",
        topic: str,
        partition: int,
        records: tuple[Record, ...],
        kind: str,
        timeout: float,
    ) -> None:
        cluster, where = self._cluster, f"{topic}[{partition}]"
        if kind in ("refused", "throttled", "full", "denied"):
            cluster.answer(answer, None, refusal(kind, where), cluster.weather.delay())
            return
        if kind in ("never_arrived", "late"):
            wait = cluster.rng.choice((0.01, cluster.rng.uniform(0.05, timeout)))
            if kind == "late":
                after = wait + cluster.rng.uniform(0.0, 3.0)
                cluster.machine.call_later(after, self._store_late, topic, partition, records, context=WORLD)
            cluster.answer(answer, None, OutcomeUnknown(f"{where}: no answer"), wait)
            return
        count = cluster.rng.randrange(len(records)) if kind == "partial" else len(records)
        try:
            first, last = cluster.store.append(topic, partition, records[:count]) if count else (-1, -1)
            if not count:
                cluster.store.partition(topic, partition)
        except UnknownTopic as error:
            cluster.answer(answer, None, error, cluster.weather.delay())
            return
        if kind == "answer_lost":
            wait = cluster.rng.choice((0.01, cluster.rng.uniform(0.05, timeout)))
            cluster.answer(answer, None, OutcomeUnknown(f"{where}: no answer"), wait)
            return
        error_kind = cluster.rng.choice(("refused", "throttled", "denied")) if count < len(records) else "ok"
        failed = tuple((index, refusal(error_kind, where)) for index in range(count, len(records)))
        if len(failed) == len(records):
            cluster.answer(answer, None, failed[0][1], cluster.weather.delay())
            return
        cluster.answer(answer, Appended(first, last, failed), None, cluster.weather.delay(kind))

    def _store_late(self, topic: str, partition: int, records: tuple[Record, ...]) -> None:
        with suppress(UnknownTopic):
            self._cluster.store.append(topic, partition, records)


class ModelAdmin:
    """As `contract.Admin`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._store = cluster, cluster.store

    async def create_topic(self, spec: TopicSpec) -> None:
        """As in the contract."""
        await self._cluster.call(lambda: self._store.create(spec), spec.name)

    async def create_own_topics(self) -> None:
        """As in the contract: there are none."""

    async def delete_topic(self, topic: str, incarnation: str | None = None) -> None:
        """As in the contract."""
        await self._cluster.call(lambda: self._store.delete(topic), topic)

    async def topics(self) -> dict[str, int]:
        """As in the contract."""
        return await self._cluster.call(
            lambda: {name: len(topic.partitions) for name, topic in self._store.topics.items()}, None
        )

    async def present(self, topics: Collection[str]) -> frozenset[str]:
        """As in the contract."""
        return frozenset(topics) & (await self.topics()).keys()

    async def add_partitions(self, topic: str, partitions: int) -> None:
        """As in the contract."""
        await self._cluster.call(lambda: self._store.add_partitions(topic, partitions), topic)

    async def describe(self, topic: str) -> dict[int, PartitionRange]:
        """As in the contract."""
        return await self._cluster.call(lambda: self._store.ranges(topic), topic)

    async def next_at_least(self, topic: str) -> dict[int, int]:
        """As in the contract."""
        return await self._cluster.call(
            lambda: {number: held.end for number, held in self._store.ranges(topic).items()}, topic
        )

    async def fence(self, topic: str) -> dict[int, int]:
        """As in the contract: the ends."""
        return {partition: held.end for partition, held in (await self.describe(topic)).items()}

    async def offsets_at(self, topic: str, start: Start) -> dict[int, int]:
        """As in the contract."""
        return await self._cluster.call(lambda: self._store.offsets_at(topic, start), topic)

    async def committed(self, group: str, topic: str) -> dict[int, int]:
        """As in the contract."""

        def find() -> dict[int, int]:
            known = self._store.groups.get(group)
            marks = {} if known is None else known.committed
            return {source.partition: mark for source, mark in marks.items() if source.topic == topic}

        return await self._cluster.call(find, topic)

    async def has_begun(self, group: str, topic: str) -> bool:
        """As in the contract."""
        return await self._cluster.call(lambda: self._store.has_begun(group, topic), topic)

    async def positions(self, group: str, topic: str) -> dict[int, int]:
        """As in the contract; where the group has committed nothing, it is absent."""
        return {number: mark + 1 for number, mark in (await self.committed(group, topic)).items()}

    async def members(self, group: str) -> list[str]:
        """As in the contract."""
        return [str(number) for name, number in self._cluster.coordinator.groups() if name == group]

    async def set_committed(self, group: str, topic: str, processed: Mapping[int, int]) -> None:
        """As in the contract."""
        busy = bool(self._cluster.coordinator.members(group))
        await self._cluster.call(lambda: self._store.rewind(group, topic, processed, has_members=busy), topic)

    async def copy_positions(self, group: str, to: str, topic: str) -> bool:
        """As in the contract."""
        busy = bool(self._cluster.coordinator.members(to))
        return await self._cluster.call(lambda: self._store.copy_positions(group, to, topic, has_members=busy), topic)

    async def incarnation(self, topic: str) -> str:
        """As in the contract: no topic is created twice here."""
        return topic

    why_not_compact: str | None = None

    async def compacted(self, topics: Collection[str]) -> frozenset[str]:
        """As in the contract: the simulation has no compacted topics."""
        return frozenset()

    async def check_durability(self, topics: Collection[str]) -> None:
        """As in the contract."""

    async def kept_by_event_time(self, topics: Collection[str]) -> frozenset[str]:
        """As in the contract: none."""
        return frozenset()

    async def keep_by_storing(self, topics: Collection[str]) -> None:
        """As in the contract: it always does."""

    async def group_lag(self, group: str, topic: str) -> dict[int, Lag]:
        """As in the contract."""
        return await self._cluster.call(
            lambda: {
                number: self._store.lag(group, TopicPartition(topic, number))
                for number in range(len(self._store.topic(topic).partitions))
            },
            topic,
        )

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        """As in the contract."""
        return await self._cluster.call(lambda: self._store.read(topic, partition, offset, max_records), topic)
