"""Administration of streams and groups."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from services.core.broker.contract import Lag, PartitionRange, Start, TopicSpec
from services.core.broker.errors import GroupHasMembers, TopicExists, Unavailable, UnknownTopic
from services.core.broker.kinesis.aws import Timing, bounded, classify_create
from services.core.broker.kinesis.consumer import KinesisMemberBackend, SharedResources
from services.core.broker.kinesis.deletion import delete_stream
from services.core.broker.kinesis.fence import Fence, put_fences, read_fence
from services.core.broker.kinesis.incarnation import Stream
from services.core.broker.kinesis.leases import Lease, LeaseExpiry, LeaseTable, StartPosition, by_stream
from services.core.broker.kinesis.pace import ReadPace
from services.core.broker.kinesis.shard_lookup import (
    KnownEnds,
    lag_of,
    next_at_least,
    offset_at,
    offset_from,
    read_at,
    retry_briefly,
    stored_range,
)
from services.core.broker.kinesis.shard_source import ShardSource
from services.core.broker.kinesis.streams import (
    PARTITIONS_TAG,
    Shard,
    next_split,
    read_tags,
    settle,
    shard_id,
)
from services.core.broker.prefix import find_own
from services.core.broker.record import Batch, TopicPartition

_UNSETTLED = StartPosition("offset", 0)
"""For a row that an operator created: its offset is committed, so it has no start of its own."""


async def committed(table: LeaseTable, stream: str) -> dict[int, int]:
    """The last processed offset per shard, also of finished shards."""
    rows = by_stream(await table.rows(), stream)
    return {row.shard: row.committed for row in rows if row.committed is not None}


async def set_committed(
    table: LeaseTable, stream: Stream, processed: Mapping[int, int], timing: Timing, now_ms: int
) -> None:
    """Move the group. Raises GroupHasMembers while it has members, UnknownTopic for a shard that is in neither stream nor
    group.

    A shard that is only in the group has aged out, and is done. The row of a dead holder is free after the lease time.
    """
    shards = {shard.number: shard for shard in stream.shards}
    known = shards.keys() | {row.shard for row in by_stream(await table.rows(), stream.name)}
    if unknown := processed.keys() - known:
        raise UnknownTopic(f"{stream.name} has no shards {sorted(unknown)}")
    if await has_members(table, timing):
        raise GroupHasMembers("the group has members. Try: stop them first")
    rows = {row.shard: row for row in by_stream(await table.rows(), stream.name)}
    for number, offset in processed.items():
        if number not in rows:
            seen_open = now_ms if shards[number].is_open else 0
            new = Lease(stream.name, number, shards[number].parents, _UNSETTLED, settled=now_ms, open=seen_open)
            await table.add(new)
        row = rows.get(number) or await table.get(new.key)
        assert row is not None
        is_done = number not in shards
        moved = row._replace(
            committed=offset,
            is_done=is_done,
            owner=None,
            draining=None,
            arrived=0,
            settled=now_ms,
            switches=0,
            retention=stream.retention_ms,
        )
        if not await table.replace(row, moved):
            raise GroupHasMembers("the group has members. Try: stop them first")


async def copy_positions(table: LeaseTable, to: LeaseTable, stream: str, timing: Timing) -> bool:
    """Copy the rows that the group of `to` does not have, without owners. Returns whether there were any.

    Raises GroupHasMembers while that group has members.
    """
    known = await to.rows()
    missing = [row for row in by_stream(await table.rows(), stream) if row.key not in known]
    if missing and await has_members(to, timing):
        raise GroupHasMembers("the group has members. Try: stop them first")
    for row in missing:
        await to.add(row._replace(owner=None, draining=None, counter=0, switches=0))
    return bool(missing)


async def has_members(table: LeaseTable, timing: Timing) -> bool:
    """Whether the group has living members. When rows have holders, this takes up to the lease time."""
    return bool(await find_members(table, timing, once=True))


async def find_members(table: LeaseTable, timing: Timing, *, once: bool = False) -> set[str]:
    """The members that write their rows. When rows have holders, this takes up to the lease time; `once`: until it finds one."""
    expiry = LeaseExpiry(timing.lease)
    loop = asyncio.get_running_loop()
    seen: dict[str, int] = {}
    found: set[str] = set()
    while True:
        rows = await table.rows()
        changed = {row.key for row in rows.values() if seen.get(row.key, row.counter) != row.counter}
        found |= {rows[key].holder or "a member that has left" for key in changed}
        seen = {row.key: row.counter for row in rows.values()}
        free = expiry.find_free(rows.values(), loop.time())
        if (once and found) or all(row.key in free or row.holder in found for row in rows.values()):
            return found
        await asyncio.sleep(timing.lease / 10)


_HOUR_MS = 3_600_000
_FENCE_S = 3600.0
"""Much less than the shortest retention: until then it is certainly stored."""
_SHORTEST_HOURS, _LONGEST_HOURS = 24, 8_760

_T = TypeVar("_T")


class KinesisAdmin:
    """Answers per partition are answers per shard; see `streams`."""

    def __init__(self, shared: SharedResources) -> None:
        self._shared, self._kinesis, self._streams = shared, shared.clients.kinesis, shared.streams
        self.ends = KnownEnds(shared.incarnations.clock.now_ms)
        self._fences: dict[TopicPartition, Fence] = {}
        """The last one of each shard."""

    async def create_topic(self, spec: TopicSpec) -> None:
        """As in the contract. Retention is a day at least and a year at most; there is no compaction."""
        if spec.compact:
            raise ValueError(f"topic {spec.name}: {self.why_not_compact}")
        async with self._bounded(f"create {spec.name}"):
            try:
                await self._kinesis.create_stream(
                    StreamName=spec.name, ShardCount=spec.first_shards, Tags={PARTITIONS_TAG: str(spec.partitions)}
                )
            except ClientError as error:
                found = classify_create(error, f"create {spec.name}")
                if isinstance(found, TopicExists):
                    await self._complete(spec)
                raise found from error
        await settle(self._kinesis, spec.name, self._shared.timing)
        await self._raise_retention(spec.name, _SHORTEST_HOURS, retention_hours(spec.retention_ms))
        self._streams.forget(spec.name)

    async def _complete(self, spec: TopicSpec) -> None:
        """Of a stream of ours that is there already: it was created in two steps, and its maker may have been killed between
        them. Its retention is raised then, and never lowered."""
        if (await read_tags(self._kinesis, spec.name, self._shared.timing)).get(PARTITIONS_TAG) != str(spec.partitions):
            return
        await settle(self._kinesis, spec.name, self._shared.timing)
        now = (await self._shared.incarnations.find(spec.name, max_age=0.0)).retention_ms // _HOUR_MS
        await self._raise_retention(spec.name, now, retention_hours(spec.retention_ms))

    async def _raise_retention(self, topic: str, now: int, hours: int) -> None:
        if hours > now:
            async with self._bounded(f"set the retention of {topic}"):
                await self._kinesis.increase_stream_retention_period(StreamName=topic, RetentionPeriodHours=hours)
            await settle(self._kinesis, topic, self._shared.timing)

    async def create_own_topics(self) -> None:
        """As in the contract: there are none."""

    async def delete_topic(self, topic: str, incarnation: str | None = None) -> None:
        """As in the contract. The groups' leases name the incarnation, so a new stream of this name has none."""
        await delete_stream(self._kinesis, self._shared.incarnations, topic, incarnation, self._shared.timing)
        self._streams.forget(topic)
        self._shared.incarnations.forget(topic)
        self._fences = {shard: found for shard, found in self._fences.items() if shard.topic != topic}

    async def topics(self) -> dict[str, int]:
        """As in the contract: all streams of the account in this region, without those of other fleets."""
        return await self._count_partitions(await self._list())

    async def present(self, topics: Collection[str]) -> frozenset[str]:
        return frozenset(await self._count_partitions([name for name in await self._list() if name in topics]))

    async def _list(self) -> list[str]:
        """The names in this fleet of its streams, those in creation and deletion among them."""
        names: list[str] = []
        page: dict[str, str] = {}
        async with self._bounded("list streams"):
            while True:
                answer = await self._kinesis.list_streams(**page)
                names += answer["StreamNames"]
                if not answer.get("HasMoreStreams"):
                    break
                page = {"ExclusiveStartStreamName": names[-1]}
        prefix = self._shared.clients.prefix
        return [name.removeprefix(prefix) for name in find_own(names, prefix)]

    async def _count_partitions(self, names: Iterable[str]) -> dict[str, int]:
        found = {}
        for name in names:
            try:
                found[name] = (await self._streams.find(name)).partitions
            except (UnknownTopic, Unavailable):  # being deleted or created
                continue
        return found

    async def add_partitions(self, topic: str, partitions: int) -> None:
        """As in the contract; splits shards until each partition has its own."""
        topology = await self._streams.find(topic, max_age=0)
        if partitions <= topology.partitions:
            raise ValueError(
                f"{topic} has {topology.partitions} partitions and cannot get {partitions}: they only grow"
            )
        async with self._bounded(f"tag {topic}"):
            await self._kinesis.add_tags_to_stream(StreamName=topic, Tags={PARTITIONS_TAG: str(partitions)})
        self._streams.invalidate(topic)
        while (step := next_split((await self._streams.find(topic, max_age=0)).shards, partitions)) is not None:
            shard, cut = step
            async with self._bounded(f"split {topic}[{shard.number}]"):
                await self._kinesis.split_shard(
                    StreamName=topic, ShardToSplit=shard_id(shard.number), NewStartingHashKey=str(cut)
                )
            await settle(self._kinesis, topic, self._shared.timing)

    async def describe(self, topic: str) -> dict[int, PartitionRange]:
        """As in the contract, per shard. Reads the shards' ends: seconds, not milliseconds."""
        return await self._per_shard(topic, stored_range)

    async def next_at_least(self, topic: str) -> dict[int, int]:
        """As in the contract, per open shard."""
        return await self._per_shard(topic, next_at_least, only_open=True)

    async def fence(self, topic: str) -> dict[int, int]:
        """As in the contract, per open shard: an entry without records in each."""

        async def put() -> tuple[list[Shard], dict[int, str]]:
            shards = [one for one in (await self._streams.find(topic, max_age=0)).shards if one.is_open]
            return shards, await put_fences(self._shared.clients.put_records, topic, shards)

        began_ms = self._shared.incarnations.clock.now_ms()
        shards, sequences = await retry_briefly(put)
        within = self._shared.timing.request

        async def see(shard: Shard) -> int:
            source, sequence = self._source(topic, shard), sequences[shard.number]
            return await retry_briefly(lambda: read_fence(source, sequence, within))

        offsets = await asyncio.gather(*map(see, shards))
        for shard, offset in zip(shards, offsets, strict=True):
            self._fences[TopicPartition(topic, shard.number)] = Fence(time.monotonic(), offset, began_ms)
        return {shard.number: offset for shard, offset in zip(shards, offsets, strict=True)}

    async def offsets_at(self, topic: str, start: Start) -> dict[int, int]:
        """As in the contract, per shard."""
        return await self._per_shard(topic, lambda source: offset_at(source, start))

    async def committed(self, group: str, topic: str) -> dict[int, int]:
        """As in the contract, per shard."""
        member = KinesisMemberBackend(self._shared, group)
        stream = await member.describe(topic)
        if not await member.table.exists():
            return {}
        return await committed(member.table, stream.name)

    async def has_begun(self, group: str, topic: str) -> bool:
        member = KinesisMemberBackend(self._shared, group)
        stream = await member.describe(topic)
        return await member.table.exists() and bool(by_stream(await member.table.rows(), stream.name))

    async def positions(self, group: str, topic: str) -> dict[int, int]:
        """As in the contract, per shard. Absent, too, where the group reads a shard from its oldest record."""
        member = KinesisMemberBackend(self._shared, group)
        stream = await member.describe(topic)
        rows = by_stream(await member.table.rows(), stream.name) if await member.table.exists() else []
        mine = {row.shard: row for row in rows}

        async def find(source: ShardSource) -> int | None:
            row = mine.get(source.shard)
            if row is None:
                return None
            if row.committed is not None:
                return row.committed + 1
            fence = self._fence_of(source)
            is_behind = fence is not None and row.start.kind == "arrival" and row.start.value <= fence.began_ms
            return await offset_from(source, row.start, sees_some=is_behind)

        found = await self._per_shard(topic, find)
        return {number: offset for number, offset in found.items() if offset is not None}

    async def members(self, group: str) -> list[str]:
        """As in the contract: the members that hold shards."""
        member = KinesisMemberBackend(self._shared, group)
        return sorted(await find_members(member.table, member.timing)) if await member.table.exists() else []

    async def set_committed(self, group: str, topic: str, processed: Mapping[int, int]) -> None:
        """As in the contract. A shard that aged out before the group finished it is done, wherever it is moved."""
        member = KinesisMemberBackend(self._shared, group)
        self._shared.incarnations.forget(topic)
        stream = await member.describe(topic)
        await member.table.prepare()
        await set_committed(member.table, stream, processed, self._shared.timing, member.now_ms())

    async def copy_positions(self, group: str, to: str, topic: str) -> bool:
        """As in the contract, per shard."""
        old, new = KinesisMemberBackend(self._shared, group), KinesisMemberBackend(self._shared, to)
        stream = await old.describe(topic)
        if not await old.table.exists():
            return False
        await new.table.prepare()
        return await copy_positions(old.table, new.table, stream.name, new.timing)

    async def incarnation(self, topic: str) -> str:
        """As in the contract: its account, name and time of creation."""
        return str((await self._shared.incarnations.find(topic, max_age=0.0)).name)

    why_not_compact: str | None = (
        "Kinesis keeps no event for more than a year, whatever its key, so it cannot hold a table. Try: Kafka or the embedded log"
    )

    async def compacted(self, topics: Collection[str]) -> frozenset[str]:
        return frozenset()

    async def check_durability(self, topics: Collection[str]) -> None:
        """Nothing to check: Kinesis stores every record in three zones for its retention, whatever the settings."""

    async def kept_by_event_time(self, topics: Collection[str]) -> frozenset[str]:
        return frozenset()

    async def keep_by_storing(self, topics: Collection[str]) -> None:
        """As in the contract: it always does."""

    async def group_lag(self, group: str, topic: str) -> dict[int, Lag]:
        """As in the contract, per shard. A shard that the group has not begun counts from its oldest record."""
        member = KinesisMemberBackend(self._shared, group)
        stream = await member.describe(topic)
        rows = await member.table.rows() if await member.table.exists() else {}
        mine = {row.shard: row for row in rows.values() if row.stream == stream.name}
        now = time.time_ns() // 1_000_000

        async def measure(source: ShardSource) -> Lag:
            return await lag_of(source, mine.get(source.shard), now)

        return await self._per_shard(topic, measure)

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        """As in the contract, of a shard."""
        topology = await self._streams.find(topic)
        known = next((shard for shard in topology.shards if shard.number == partition), None)
        if known is None:
            raise UnknownTopic(f"{topic} has no shard {partition}")
        return await self.read_shard(topic, known, offset, max_records=max_records)

    async def read_shard(self, topic: str, shard: Shard, offset: int, *, max_records: int) -> Batch | None:
        """As `read`, of a shard that the caller knows: asks for no list of shards. Raises UnknownTopic when it is gone."""
        source = self._source(topic, shard)
        fence = self._fence_of(source)
        end = 0 if fence is None else fence.offset
        return await retry_briefly(lambda: read_at(source, offset, max_records, ends=self.ends, fence=end))

    def _fence_of(self, source: ShardSource) -> Fence | None:
        """One that is certainly still stored."""
        shard = TopicPartition(source.topic, source.shard)
        fence = self._fences.get(shard)
        if fence is not None and time.monotonic() > fence.seen + _FENCE_S:
            del self._fences[shard]
            return None
        return fence

    def pace(self, topic: str, shard: int) -> ReadPace:
        """Of this process's reads of a shard."""
        return self._shared.paces.find(topic, shard)

    async def _per_shard(
        self, topic: str, ask: Callable[[ShardSource], Awaitable[_T]], *, only_open: bool = False
    ) -> dict[int, _T]:
        every = (await self._streams.find(topic, max_age=0)).shards
        shards = [shard for shard in every if shard.is_open or not only_open]

        async def one(shard: Shard) -> _T:
            source = self._source(topic, shard)
            return await retry_briefly(lambda: ask(source))

        answers = await asyncio.gather(*map(one, shards))
        return {shard.number: answer for shard, answer in zip(shards, answers, strict=True)}

    def _source(self, topic: str, shard: Shard) -> ShardSource:
        pace = self._shared.paces.find(topic, shard.number)
        return ShardSource(self._kinesis, topic, shard.number, pace, self._shared.timing, not shard.is_open)

    def _bounded(self, what: str) -> Any:
        return bounded(what, self._shared.timing.request)


def retention_hours(retention_ms: int | None) -> int:
    """The nearest retention of Kinesis that is not shorter; None, for ever, is a year."""
    if retention_ms is None:
        return _LONGEST_HOURS
    return min(_LONGEST_HOURS, max(_SHORTEST_HOURS, -(-retention_ms // _HOUR_MS)))
