"""`contract.Admin` and `contract.Reader` over the embedded log."""

from collections.abc import Collection, Mapping

from services.core.broker.contract import Lag, PartitionRange, Start, TopicSpec
from services.core.broker.errors import GroupHasMembers, UnknownTopic
from services.core.broker.log import topics
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.groups import CommittedOffsets, GroupPosition, GroupsFile
from services.core.broker.log.topic_reader import Readers, ReadResult, TopicReader, lag_behind
from services.core.broker.record import Batch, TopicPartition


class LogAdmin:
    """Administration of the topics and groups in one data folder."""

    def __init__(self, folder: DataFolder, readers: Readers, offsets: CommittedOffsets, clock: WallClock) -> None:
        self._folder, self._readers, self._offsets, self._clock = folder, readers, offsets, clock

    async def create_topic(self, spec: TopicSpec) -> None:
        """As in the contract. Raises ValueError for a bad name or number of partitions."""
        await self._readers.run(lambda: topics.create_topic(self._folder, spec))

    async def create_own_topics(self) -> None:
        """As in the contract: there are none."""

    async def delete_topic(self, topic: str, incarnation: str | None = None) -> None:
        deleted = await self._readers.run(lambda: topics.delete_topic(self._folder, topic, incarnation))
        self._readers.forget(topic)
        await self._offsets.use(lambda file: file.forget_topic(topic, deleted))

    async def topics(self) -> dict[str, int]:
        """As in the contract. A damaged topic is listed with 0 partitions."""
        return await self._readers.run(lambda: topics.list_topics(self._folder))

    async def present(self, topics: Collection[str]) -> frozenset[str]:
        return frozenset(topics) & (await self.topics()).keys()

    async def add_partitions(self, topic: str, partitions: int) -> None:
        await self._readers.run(lambda: topics.add_partitions(self._folder, topic, partitions))
        self._readers.forget(topic)

    async def describe(self, topic: str) -> dict[int, PartitionRange]:
        return await self._readers.use(topic, lambda reader: reader.ranges())

    async def next_at_least(self, topic: str) -> dict[int, int]:
        return {partition: stored.end for partition, stored in (await self.describe(topic)).items()}

    async def fence(self, topic: str) -> dict[int, int]:
        return await self.next_at_least(topic)

    async def offsets_at(self, topic: str, start: Start) -> dict[int, int]:
        return await self._readers.use(topic, lambda reader: reader.offsets_at(start))

    async def committed(self, group: str, topic: str) -> dict[int, int]:
        await self._readers.partition_count(topic)
        progress = await self._offsets.use(lambda file: file.progress(group, topic))
        return {partition: value.processed for partition, value in progress.items() if value.processed is not None}

    async def has_begun(self, group: str, topic: str) -> bool:
        incarnation = await self._readers.use(topic, lambda r: (r.refresh(), r.store.meta.incarnation)[1])
        return bool(await self._offsets.use(lambda file: file.begun(group, topic, incarnation)))

    async def positions(self, group: str, topic: str) -> dict[int, int]:
        incarnation = await self._readers.use(topic, lambda r: (r.refresh(), r.store.meta.incarnation)[1])
        progress = await self._offsets.use(lambda file: file.progress(group, topic))
        return {partition: value.next for partition, value in progress.items() if value.incarnation == incarnation}

    async def members(self, group: str) -> list[str]:
        return sorted(await self._offsets.use(lambda file: file.members(group)))

    async def set_committed(self, group: str, topic: str, processed: Mapping[int, int]) -> None:
        count, incarnation = await self._readers.use(topic, lambda r: (r.refresh(), r.store.meta.incarnation))
        unknown = sorted(p for p in processed if not 0 <= p < count)
        if unknown:
            raise UnknownTopic(f"topic {topic!r} has {count} partitions, none numbered {unknown[0]}")
        moved = {
            TopicPartition(topic, p): GroupPosition(incarnation, offset + 1, offset) for p, offset in processed.items()
        }

        await self._offsets.use(lambda file: file.move(group, topic, moved))
        await self._readers.register_group(topic, group)  # a registered group without offsets has lost them

    async def copy_positions(self, group: str, to: str, topic: str) -> bool:
        incarnation = await self._readers.use(topic, lambda r: (r.refresh(), r.store.meta.incarnation)[1])

        def copy(file: GroupsFile) -> bool:
            missing = file.begun(group, topic, incarnation)
            for known in file.begun(to, topic, incarnation):
                missing.pop(known, None)
            if missing and (members := file.live_members(to, topic)):
                raise GroupHasMembers(f"group {to!r} has {members} members on {topic!r}. Try: stop them first")
            if missing:
                file.set_progress(to, missing)
            return bool(missing)

        is_new = await self._offsets.use(copy)
        if await self._offsets.use(lambda file: file.begun(to, topic, incarnation)):
            await self._readers.register_group(topic, to)
        return is_new

    async def incarnation(self, topic: str) -> str:
        return await self._readers.use(topic, lambda r: (r.refresh(), r.store.meta.incarnation.hex())[1])

    why_not_compact: str | None = None

    async def compacted(self, topics: Collection[str]) -> frozenset[str]:
        existing = await self.topics()

        def is_compacted(reader: TopicReader) -> bool:
            reader.refresh()
            return reader.store.meta.compact

        return frozenset(
            [topic for topic in topics if existing.get(topic) and await self._readers.use(topic, is_compacted)]
        )

    async def check_durability(self, topics: Collection[str]) -> None:
        """As in the contract: the log has no such settings, every append is on this disk."""

    async def kept_by_event_time(self, topics: Collection[str]) -> frozenset[str]:
        return frozenset()

    async def keep_by_storing(self, topics: Collection[str]) -> None:
        """As in the contract: it always does."""

    async def group_lag(self, group: str, topic: str) -> dict[int, Lag]:
        """As in the contract. A partition that the group has not begun counts from its first record."""
        progress = await self._offsets.use(lambda file: file.progress(group, topic))
        ranges = await self._readers.use(topic, lambda reader: reader.ranges())
        nexts = {p: progress[p].next if p in progress else stored.start for p, stored in ranges.items()}
        return await self._readers.use(topic, lambda reader: lag_behind(reader, nexts, self._clock.now_ms()))

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        """As in the contract. Records that compaction removed, and ranges that `repair` has recorded as lost, are passed over."""

        def read_rows(reader: TopicReader) -> ReadResult | None:
            count = reader.refresh()
            if not 0 <= partition < count:
                raise UnknownTopic(f"topic {topic!r} has {count} partitions, none numbered {partition}")
            return reader.read(partition, offset, max_records)

        while (run := await self._readers.use(topic, read_rows)) is not None:
            if run.records:
                return Batch(topic, partition, run.offsets[:max_records], run.records[:max_records])
            if run.next == offset:
                return None
            offset = run.next
        return None
