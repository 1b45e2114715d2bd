"""Administration of streams and groups."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeVar

from botocore.exceptions import ClientError

from services.core.broker.contract import Lag, PartitionRange, Start, TopicSpec
from services.core.broker.errors import Unavailable, UnknownTopic
from services.core.broker.kinesis.faults import bounded, classify_create
from services.core.broker.kinesis.group_offsets import committed, copy_positions, set_committed
from services.core.broker.kinesis.look import Ends, lag_behind, look, offset_at, patiently
from services.core.broker.kinesis.member_side import GroupSide, MemberSide
from services.core.broker.kinesis.settling import PAUSE_S, settle, status_of
from services.core.broker.kinesis.shard_iterator import ShardSource
from services.core.broker.kinesis.shards import Shard, shard_id
from services.core.broker.kinesis.slots import PARTITIONS_TAG, next_split
from services.core.broker.kinesis.stored import next_at_least, stored_range
from services.core.broker.record import Batch

_HOUR_MS = 3_600_000
_SHORTEST_HOURS, _LONGEST_HOURS = 24, 8_760

_T = TypeVar("_T")


class KinesisAdmin:
    """The contract's `Admin`. What is asked per partition is answered per shard; see `slots`."""

    def __init__(self, side: GroupSide) -> None:
        self._side, self._kinesis, self._streams = side, side.clients.kinesis, side.streams
        self._ends = Ends(side.identities.clock.now_ms)

    async def create_topic(self, spec: TopicSpec) -> None:
        """As in the contract. Kinesis keeps records for a day at least and a year at most, and does not compact."""
        if spec.compact:
            raise ValueError(f"topic {spec.name}: Kinesis cannot compact. Try: a topic that is not compacted")
        shards = spec.shards or spec.partitions
        async with self._bounded(f"create {spec.name}"):
            try:
                await self._kinesis.create_stream(
                    StreamName=spec.name, ShardCount=shards, Tags={PARTITIONS_TAG: str(spec.partitions)}
                )
            except ClientError as error:
                raise classify_create(error, f"create {spec.name}") from error
        await settle(self._kinesis, spec.name, self._side.timing)
        if (hours := retention_hours(spec.retention_ms)) > _SHORTEST_HOURS:
            async with self._bounded(f"set the retention of {spec.name}"):
                await self._kinesis.increase_stream_retention_period(StreamName=spec.name, RetentionPeriodHours=hours)
            await settle(self._kinesis, spec.name, self._side.timing)
        self._streams.forget(spec.name)

    async def delete_topic(self, topic: str) -> None:
        """As in the contract. The groups' leases name the stream's life, so another one of this name has none."""
        async with self._bounded(f"delete {topic}"):
            await self._kinesis.delete_stream(StreamName=topic, EnforceConsumerDeletion=True)
        deadline = time.monotonic() + self._side.timing.settle
        while await status_of(self._kinesis, topic, self._side.timing) is not None:
            if time.monotonic() > deadline:
                raise Unavailable(f"{topic} is still being deleted after {self._side.timing.settle:g} s")
            await asyncio.sleep(PAUSE_S)
        self._streams.forget(topic)
        self._side.identities.forget(topic)

    async def topics(self) -> dict[str, int]:
        """As in the contract: all streams of the account in this region."""
        names: list[str] = []
        page: dict[str, str] = {}
        async with self._bounded("list streams"):
            while True:
                answer = await self._kinesis.list_streams(**page)
                names += answer["StreamNames"]
                if not answer.get("HasMoreStreams"):
                    break
                page = {"ExclusiveStartStreamName": names[-1]}
        found = {}
        for name in names:
            try:
                found[name] = (await self._streams.of(name)).partitions
            except (UnknownTopic, Unavailable):  # being deleted, or made
                continue
        return found

    async def add_partitions(self, topic: str, partitions: int) -> None:
        """As in the contract; splits shards until each partition has one of its own."""
        topology = await self._streams.of(topic, max_age=0)
        if partitions <= topology.partitions:
            raise ValueError(f"{topic} has {topology.partitions} partitions; {partitions} is not more")
        async with self._bounded(f"tag {topic}"):
            await self._kinesis.add_tags_to_stream(StreamName=topic, Tags={PARTITIONS_TAG: str(partitions)})
        self._streams.refresh(topic)
        while (step := next_split((await self._streams.of(topic, max_age=0)).shards, partitions)) is not None:
            shard, cut = step
            async with self._bounded(f"split {topic}[{shard.number}]"):
                await self._kinesis.split_shard(
                    StreamName=topic, ShardToSplit=shard_id(shard.number), NewStartingHashKey=str(cut)
                )
            await settle(self._kinesis, topic, self._side.timing)

    async def describe(self, topic: str) -> dict[int, PartitionRange]:
        """As in the contract, per shard that is kept. Reads the shards' ends: seconds, not milliseconds."""
        return await self._per_shard(topic, stored_range)

    async def next_at_least(self, topic: str) -> dict[int, int]:
        """As in the contract, per open shard; an event from about as long ago as the last one."""
        return await self._per_shard(topic, next_at_least, only_open=True)

    async def offsets_at(self, topic: str, start: Start) -> dict[int, int]:
        """As in the contract, per shard that is kept."""
        return await self._per_shard(topic, lambda source: offset_at(source, start))

    async def committed(self, group: str, topic: str) -> dict[int, int]:
        """As in the contract, per shard."""
        member = MemberSide(self._side, group)
        stream = await member.look(topic)
        if not await member.table.exists():
            return {}
        return await committed(member.table, stream.name)

    async def set_committed(self, group: str, topic: str, processed: Mapping[int, int]) -> None:
        """As in the contract. A shard that aged out before the group was through with it is done then, wherever it is moved."""
        member = MemberSide(self._side, group)
        self._side.identities.forget(topic)
        stream = await member.look(topic)
        await member.table.prepare()
        await set_committed(member.table, stream, processed, self._side.timing, member.now_ms())

    async def copy_positions(self, group: str, to: str, topic: str) -> bool:
        """As in the contract, per shard."""
        old, new = MemberSide(self._side, group), MemberSide(self._side, to)
        stream = await old.look(topic)
        if not await old.table.exists():
            return False
        await new.table.prepare()
        return await copy_positions(old.table, new.table, stream.name, new.timing)

    async def check_durability(self, topics: Collection[str]) -> None:
        """Nothing to check: Kinesis keeps every record in three zones for its retention, whatever a stream's settings."""

    async def group_lag(self, group: str, topic: str) -> dict[int, Lag]:
        """As in the contract, per shard; a shard without a commit counts from its oldest record, a finished one as 0."""
        member = MemberSide(self._side, group)
        stream = await member.look(topic)
        rows = await member.table.rows() if await member.table.exists() else {}
        mine = {row.shard: row for row in rows.values() if row.stream == stream.name}
        now = time.time_ns() // 1_000_000

        async def measure(source: ShardSource) -> Lag:
            row = mine.get(source.shard)
            if row is not None and row.is_done:
                return Lag(0, 0)
            return await lag_behind(source, None if row is None else row.committed, now)

        return await self._per_shard(topic, measure)

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        """As in the contract, of a shard."""
        topology = await self._streams.of(topic)
        known = next((shard for shard in topology.shards if shard.number == partition), None)
        if known is None:
            raise UnknownTopic(f"{topic} has no shard {partition}")
        source = self._source(topic, known)
        return await patiently(lambda: look(source, offset, max_records, ends=self._ends))

    async def _per_shard(
        self, topic: str, ask: Callable[[ShardSource], Awaitable[_T]], *, only_open: bool = False
    ) -> dict[int, _T]:
        every = (await self._streams.of(topic, max_age=0)).shards
        shards = [shard for shard in every if shard.is_open or not only_open]

        async def one(shard: Shard) -> _T:
            source = self._source(topic, shard)
            return await patiently(lambda: ask(source))

        answers = await asyncio.gather(*map(one, shards))
        return {shard.number: answer for shard, answer in zip(shards, answers, strict=True)}

    def _source(self, topic: str, shard: Shard) -> ShardSource:
        pace = self._side.paces.of(topic, shard.number)
        return ShardSource(self._kinesis, topic, shard.number, pace, self._side.timing, not shard.is_open)

    def _bounded(self, what: str) -> Any:
        return bounded(what, self._side.timing.request)


def retention_hours(retention_ms: int | None) -> int:
    """What Kinesis can do that comes nearest, never shorter than asked: None, for ever, is a year."""
    if retention_ms is None:
        return _LONGEST_HOURS
    return min(_LONGEST_HOURS, max(_SHORTEST_HOURS, -(-retention_ms // _HOUR_MS)))
