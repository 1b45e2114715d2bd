"""A Kafka cluster that others use, too: the names of one fleet, with its prefix on the cluster, and topics of others.

`KafkaBroker` has the cluster's names; its error messages and log lines name them. Here they get and lose the prefix, and topics
of others get the names that the fleet has for them. So do the topics and partitions of errors, which programs read.

A topic of others is created, changed and deleted by nobody here (`broker.existing`), and its settings are not judged.
"""

from collections.abc import AsyncIterator, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import replace

from services.core.broker.contract import (
    Admin,
    Appended,
    Appender,
    Broker,
    Consumer,
    Lag,
    OnRevoke,
    PartitionRange,
    Reader,
    Start,
    TopicSpec,
)
from services.core.broker.errors import BrokerError, DataDamaged, NotOwner, OffsetOutOfRange, UnknownTopic
from services.core.broker.existing import NO_EXISTING, ExistingTopics
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.broker.rights import Right, RightsReader


class _Names:
    """full: a topic's or group's name on the cluster."""

    def __init__(self, prefix: str, existing: ExistingTopics = NO_EXISTING) -> None:
        self._prefix, self.existing = prefix, existing
        self._fleets = {topic: name for name, topic in existing.names.items()}

    def full(self, name: str) -> str:
        return self.existing.names.get(name) or self._prefix + name

    def full_source(self, source: TopicPartition) -> TopicPartition:
        return TopicPartition(self.full(source.topic), source.partition)

    def short(self, name: str) -> str:
        return self._fleets.get(name) or name.removeprefix(self._prefix)

    def own(self, name: str) -> str:
        """The name on the cluster of a topic that may be changed. Raises BrokerError for a topic of others."""
        if name in self.existing.names:
            raise BrokerError(f"{self.existing.names[name]} is a topic of others. Penstock changes nothing there")
        return self.full(name)

    def short_source(self, source: tuple[str, int]) -> TopicPartition:
        return TopicPartition(self.short(source[0]), source[1])

    def short_batch(self, batch: Batch) -> Batch:
        return Batch(self.short(batch.topic), batch.partition, batch.offsets, batch.records, batch.damage)

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Errors leave the block with this fleet's names. Their messages keep the cluster's."""
        try:
            yield
        except BrokerError as error:
            if isinstance(error, NotOwner):
                error.partitions = frozenset(map(self.short_source, error.partitions))
            elif isinstance(error, OffsetOutOfRange | DataDamaged):
                error.topic = self.short(error.topic)
            raise


class PrefixedBroker:
    """The contract's `Broker` for one fleet of a shared cluster."""

    def __init__(self, broker: Broker, prefix: str, existing: ExistingTopics = NO_EXISTING) -> None:
        self._broker, self._names = broker, _Names(prefix, existing)
        self.features, self.resharding = broker.features, None
        self.appender = _PrefixedAppender(broker.appender, self._names)
        self.admin = self.reader = _PrefixedAdmin(broker.admin, broker.reader, broker.appender, self._names)

    @asynccontextmanager
    async def consumer(
        self, group: str, topics: Collection[str], *, start: Start, on_revoke: OnRevoke
    ) -> AsyncIterator[Consumer]:
        names = self._names

        async def revoke(leaving: frozenset[TopicPartition]) -> None:
            await on_revoke(frozenset(map(names.short_source, leaving)))

        full = [names.full(topic) for topic in topics]
        async with self._broker.consumer(names.full(group), full, start=start, on_revoke=revoke) as consumer:
            yield _PrefixedConsumer(consumer, names)

    def is_contiguous(self, topic: str) -> bool:
        return self.features.contiguous_offsets

    async def probe(self, topic: str, *, timeout: float) -> None:
        await self._broker.probe(self._names.full(topic), timeout=timeout)


class _PrefixedAppender:
    def __init__(self, appender: Appender, names: _Names) -> None:
        self._appender, self._names = appender, names

    async def partition_count(self, topic: str) -> int:
        return await self._appender.partition_count(self._names.full(topic))

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        full = self._names.full(topic)
        if full in self._names.existing.translate:
            raise BrokerError(f"{full} is a topic of others, which is only read")
        return await self._appender.append(full, partition, records, timeout=timeout)


class _PrefixedConsumer:
    def __init__(self, consumer: Consumer, names: _Names) -> None:
        self._consumer, self._names = consumer, names

    async def poll(self, *, max_records: int, max_wait: float) -> list[Batch]:
        with self._names.in_errors():
            batches = await self._consumer.poll(max_records=max_records, max_wait=max_wait)
        return [self._names.short_batch(batch) for batch in batches]

    async def commit(self, processed: Mapping[TopicPartition, int]) -> None:
        with self._names.in_errors():
            await self._consumer.commit({self._names.full_source(source): at for source, at in processed.items()})

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        self._consumer.pause([self._names.full_source(source) for source in partitions])

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        self._consumer.resume([self._names.full_source(source) for source in partitions])

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(map(self._names.short_source, self._consumer.assignment()))

    async def lag(self) -> dict[TopicPartition, Lag]:
        return {self._names.short_source(source): lag for source, lag in (await self._consumer.lag()).items()}


class _PrefixedAdmin:
    def __init__(self, admin: Admin, reader: Reader, appender: Appender, names: _Names) -> None:
        self._admin, self._reader, self._names, self._full = admin, reader, names, names.full
        self._appender = appender

    async def create_topic(self, spec: TopicSpec) -> None:
        await self._admin.create_topic(replace(spec, name=self._names.own(spec.name)))

    async def create_own_topics(self) -> None:
        await self._admin.create_own_topics()

    async def delete_topic(self, topic: str, incarnation: str | None = None) -> None:
        await self._admin.delete_topic(self._names.own(topic), incarnation)

    async def topics(self) -> dict[str, int]:
        """Topics of others among them, if they are there: their names may lack the prefix."""
        found = {self._names.short(name): count for name, count in (await self._admin.topics()).items()}
        for name, full in self._names.existing.names.items():
            if name not in found:
                with suppress(UnknownTopic):
                    found[name] = await self._appender.partition_count(full)
        return found

    async def present(self, topics: Collection[str]) -> frozenset[str]:
        found = await self._admin.present([self._full(topic) for topic in topics])
        return frozenset(map(self._names.short, found))

    async def add_partitions(self, topic: str, partitions: int) -> None:
        await self._admin.add_partitions(self._names.own(topic), partitions)

    async def committed(self, group: str, topic: str) -> dict[int, int]:
        return await self._admin.committed(self._full(group), self._full(topic))

    async def has_begun(self, group: str, topic: str) -> bool:
        return await self._admin.has_begun(self._full(group), self._full(topic))

    async def positions(self, group: str, topic: str) -> dict[int, int]:
        return await self._admin.positions(self._full(group), self._full(topic))

    async def members(self, group: str) -> list[str]:
        return await self._admin.members(self._full(group))

    async def set_committed(self, group: str, topic: str, processed: Mapping[int, int]) -> None:
        await self._admin.set_committed(self._full(group), self._full(topic), processed)

    async def copy_positions(self, group: str, to: str, topic: str) -> bool:
        return await self._admin.copy_positions(self._full(group), self._full(to), self._full(topic))

    async def incarnation(self, topic: str) -> str:
        return await self._admin.incarnation(self._full(topic))

    @property
    def why_not_compact(self) -> str | None:
        return self._admin.why_not_compact

    async def compacted(self, topics: Collection[str]) -> frozenset[str]:
        own = {self._full(topic): topic for topic in topics}
        return frozenset([own[full] for full in await self._admin.compacted(list(own))])

    async def check_durability(self, topics: Collection[str]) -> None:
        own = [topic for topic in topics if topic not in self._names.existing.names]
        await self._admin.check_durability([self._full(topic) for topic in own])

    async def kept_by_event_time(self, topics: Collection[str]) -> frozenset[str]:
        found = await self._admin.kept_by_event_time([self._full(topic) for topic in topics])
        return frozenset(map(self._names.short, found))

    async def keep_by_storing(self, topics: Collection[str]) -> None:
        await self._admin.keep_by_storing([self._names.own(topic) for topic in topics])

    async def missing_rights(self, rights: Collection[Right]) -> list[Right]:
        if not isinstance(self._admin, RightsReader):
            return []
        return await self._admin.missing_rights([right._replace(name=self._full(right.name)) for right in rights])

    async def group_lag(self, group: str, topic: str) -> dict[int, Lag]:
        return await self._admin.group_lag(self._full(group), self._full(topic))

    async def describe(self, topic: str) -> dict[int, PartitionRange]:
        return await self._reader.describe(self._full(topic))

    async def next_at_least(self, topic: str) -> dict[int, int]:
        return await self._reader.next_at_least(self._full(topic))

    async def fence(self, topic: str) -> dict[int, int]:
        return await self._reader.fence(self._full(topic))

    async def offsets_at(self, topic: str, start: Start) -> dict[int, int]:
        return await self._reader.offsets_at(self._full(topic), start)

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        with self._names.in_errors():
            batch = await self._reader.read(self._full(topic), partition, offset, max_records=max_records)
        return None if batch is None else self._names.short_batch(batch)
