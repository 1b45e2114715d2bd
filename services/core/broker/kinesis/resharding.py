"""Splits, merges and UpdateShardCount. Notes are the stream's tags."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

from services.core.broker.errors import BrokerError
from services.core.broker.kinesis import pace
from services.core.broker.kinesis.faults import bounded
from services.core.broker.kinesis.sdk import Clients
from services.core.broker.kinesis.settling import settle, status_of
from services.core.broker.kinesis.shards import Shard, open_shards, shard_id
from services.core.broker.kinesis.slots import HASH_KEYS, PARTITIONS_TAG, hash_key_of
from services.core.broker.kinesis.streams import Streams
from services.core.broker.kinesis.tags import read_tags
from services.core.broker.kinesis.timing import Timing
from services.core.broker.resharding import ShardCapacity, StreamShards

_PREFIX = "penstock:"
_ROOM_SECONDS = 60.0


class KinesisResharding:
    """`resharding.Resharding`."""

    def __init__(self, clients: Clients, streams: Streams, timing: Timing) -> None:
        self._kinesis, self._streams, self._timing = clients.kinesis, streams, timing
        self._room: tuple[float, int] | None = None
        self._asking = asyncio.Lock()

    @property
    def capacity(self) -> ShardCapacity:
        """The published limits of writing."""
        return ShardCapacity(pace.BYTES_PER_SECOND, pace.ENTRIES_PER_SECOND)

    async def shards(self, topic: str) -> StreamShards:
        """As in `Resharding`."""
        status = await status_of(self._kinesis, topic, self._timing)
        topology = await self._streams.of(topic, max_age=0.0)
        shards = open_shards(topology.shards)
        layout = tuple(_first_slot(shard, topology.partitions) for shard in shards)
        return StreamShards(status == "ACTIVE", topology.partitions, layout, tuple(shard.number for shard in shards))

    async def split(self, topic: str, number: int, partition: int) -> None:
        """As in `Resharding`: between two partitions."""
        partitions = (await self._streams.of(topic)).partitions
        cut = partition * HASH_KEYS // partitions
        await self._change(
            topic, "split_shard", ShardToSplit=shard_id(number), NewStartingHashKey=str(cut), StreamName=topic
        )

    async def merge(self, topic: str, left: int, right: int) -> None:
        """As in `Resharding`."""
        names = {"ShardToMerge": shard_id(left), "AdjacentShardToMerge": shard_id(right)}
        await self._change(topic, "merge_shards", StreamName=topic, **names)

    async def update_count(self, topic: str, count: int) -> None:
        """As in `Resharding`. Its cuts need not lie between partitions; each partition goes where its middle lies."""
        await self._change(
            topic, "update_shard_count", StreamName=topic, TargetShardCount=count, ScalingType="UNIFORM_SCALING"
        )

    async def settled(self, topic: str) -> None:
        """As in `Resharding`."""
        try:
            await settle(self._kinesis, topic, self._timing)
        finally:
            self._streams.refresh(topic)

    async def room(self) -> int:
        """As in `Resharding`; at most a minute old: an account may ask once a second in all."""
        async with self._asking:
            if self._room is None or time.monotonic() - self._room[0] > _ROOM_SECONDS:
                async with bounded("describe limits", self._timing.request):
                    answer = await self._kinesis.describe_limits()
                self._room = time.monotonic(), max(0, int(answer["ShardLimit"]) - int(answer["OpenShardCount"]))
            return self._room[1]

    async def notes(self, topic: str) -> dict[str, str]:
        """As in `Resharding`."""
        tags = await read_tags(self._kinesis, topic, self._timing)
        return {key.removeprefix(_PREFIX): value for key, value in tags.items() if key.startswith(_PREFIX)}

    async def note(self, topic: str, texts: Mapping[str, str]) -> None:
        """As in `Resharding`."""
        async with bounded(f"tag {topic}", self._timing.request):
            await self._kinesis.add_tags_to_stream(
                StreamName=topic, Tags={_PREFIX + name: text for name, text in texts.items()}
            )

    async def _change(self, topic: str, operation: str, **asked: Any) -> None:
        await self._tag(topic)
        async with bounded(f"{operation} {topic}", self._timing.request):
            await getattr(self._kinesis, operation)(**asked)
        self._room = None

    async def _tag(self, topic: str) -> None:
        """Without a tag the shards tell how many partitions there are, so it is written before they change. Raises BrokerError
        when they may have changed already.
        """
        self._streams.refresh(topic)
        topology = await self._streams.of(topic, max_age=0.0)
        if topology.is_tagged:
            return
        if not topology.is_certain:
            raise BrokerError(
                f"{topic} has no tag {PARTITIONS_TAG} and was split or merged before: nobody knows over how many partitions its "
                f"keys are spread, so its shards are left alone. Try: aws kinesis add-tags-to-stream --stream-name {topic} "
                f"--tags {PARTITIONS_TAG}=<partitions>"
            )
        await self.note(topic, {PARTITIONS_TAG.removeprefix(_PREFIX): str(topology.partitions)})
        self._streams.refresh(topic)


def _first_slot(shard: Shard, partitions: int) -> int:
    """The first partition whose middle lies in the shard, or behind it."""
    return bisect_left(range(partitions), shard.first_key, key=lambda slot: hash_key_of(slot, partitions))
