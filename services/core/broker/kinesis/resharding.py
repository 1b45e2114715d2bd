"""Splits, merges and UpdateShardCount."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from services.core.broker.errors import BrokerError
from services.core.broker.kinesis import pace
from services.core.broker.kinesis.aws import Clients, Timing, bounded
from services.core.broker.kinesis.streams import (
    HASH_KEYS,
    PARTITIONS_TAG,
    Shard,
    Streams,
    hash_key_of,
    open_shards,
    read_tags,
    settle,
    shard_id,
    status_of,
)
from services.core.broker.resharding import ShardCapacity, StreamShards

_ROOM_SECONDS = 60.0
_TAG_PREFIX = "penstock:"


class KinesisTags:
    def __init__(self, clients: Clients, timing: Timing) -> None:
        self._kinesis, self._timing = clients.kinesis, timing

    async def read(self, topic: str) -> dict[str, str]:
        tags = await read_tags(self._kinesis, topic, self._timing)
        return {key.removeprefix(_TAG_PREFIX): value for key, value in tags.items() if key.startswith(_TAG_PREFIX)}

    async def write(self, topic: str, tags: Mapping[str, str]) -> None:
        async with bounded(f"tag {topic}", self._timing.request):
            await self._kinesis.add_tags_to_stream(
                StreamName=topic, Tags={_TAG_PREFIX + name: text for name, text in tags.items()}
            )


class KinesisResharding:
    def __init__(self, clients: Clients, streams: Streams, timing: Timing) -> None:
        self._kinesis, self._streams, self._timing, self._prefix = clients.kinesis, streams, timing, clients.prefix
        self.tags = KinesisTags(clients, timing)
        self._room: tuple[float, int] | None = None
        self._asking = asyncio.Lock()

    @property
    def capacity(self) -> ShardCapacity:
        """The published write limits."""
        return ShardCapacity(pace.BYTES_PER_SECOND, pace.ENTRIES_PER_SECOND)

    async def shards(self, topic: str) -> StreamShards:
        status = await status_of(self._kinesis, topic, self._timing)
        topology = await self._streams.find(topic, max_age=0.0)
        shards = open_shards(topology.shards)
        layout = tuple(_first_slot(shard, topology.partitions) for shard in shards)
        return StreamShards(status == "ACTIVE", topology.partitions, layout, tuple(shard.number for shard in shards))

    async def split(self, topic: str, number: int, partition: int) -> None:
        """As in `Resharding`: between two partitions."""
        partitions = (await self._streams.find(topic)).partitions
        cut = partition * HASH_KEYS // partitions
        await self._change(
            topic, "split_shard", ShardToSplit=shard_id(number), NewStartingHashKey=str(cut), StreamName=topic
        )

    async def merge(self, topic: str, left: int, right: int) -> None:
        names = {"ShardToMerge": shard_id(left), "AdjacentShardToMerge": shard_id(right)}
        await self._change(topic, "merge_shards", StreamName=topic, **names)

    async def update_count(self, topic: str, count: int) -> None:
        """As in `Resharding`. Its cuts may fall within a slot; then the slot's middle decides where its partition goes."""
        await self._change(
            topic, "update_shard_count", StreamName=topic, TargetShardCount=count, ScalingType="UNIFORM_SCALING"
        )

    async def settled(self, topic: str) -> None:
        try:
            await settle(self._kinesis, topic, self._timing)
        finally:
            self._streams.invalidate(topic)

    async def room(self) -> int:
        """As in `Resharding`; at most a minute old, since an account may ask once a second in all."""
        async with self._asking:
            if self._room is None or time.monotonic() - self._room[0] > _ROOM_SECONDS:
                async with bounded("describe limits", self._timing.request):
                    answer = await self._kinesis.describe_limits()
                self._room = time.monotonic(), max(0, int(answer["ShardLimit"]) - int(answer["OpenShardCount"]))
            return self._room[1]

    async def _change(self, topic: str, operation: str, **parameters: Any) -> None:
        await self._tag(topic)
        async with bounded(f"{operation} {topic}", self._timing.request):
            await getattr(self._kinesis, operation)(**parameters)
        self._room = None

    async def _tag(self, topic: str) -> None:
        """Write the tag before the first change: without it the number of shards is the number of partitions. Raises
        BrokerError when the shards may have been changed before."""
        self._streams.invalidate(topic)
        topology = await self._streams.find(topic, max_age=0.0)
        if topology.is_tagged:
            return
        if not topology.is_certain:
            raise BrokerError(
                f"{topic} has no tag {PARTITIONS_TAG}, and its shards were split or merged before. So the number of its "
                "partitions is not known, and no shard is changed. Try: aws kinesis add-tags-to-stream --stream-name "
                f"{self._prefix}{topic} "
                f"--tags {PARTITIONS_TAG}=<partitions>"
            )
        await self.tags.write(topic, {PARTITIONS_TAG.removeprefix(_TAG_PREFIX): str(topology.partitions)})
        self._streams.invalidate(topic)


def _first_slot(shard: Shard, partitions: int) -> int:
    """The first partition whose middle is in or behind the shard."""
    return bisect_left(range(partitions), shard.first_key, key=lambda slot: hash_key_of(slot, partitions))
