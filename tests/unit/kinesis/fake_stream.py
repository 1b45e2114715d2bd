"""A stream in memory that holds nothing: what is asked of it to know its shards."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from botocore.exceptions import ClientError

from services.core.broker.kinesis.streams import Shard, shard_id, shard_number


class FakeStream:
    """The client. fail: error codes by operation. asked: how often, by operation. read: shards that somebody reads.

    gate: closed, ListShards does not answer. tag_at_change: the tag when each split or merge was asked for.
    """

    def __init__(self, shards: Sequence[Shard], partitions: int | None = None) -> None:
        self.shards, self.partitions = list(shards), partitions
        self.fail: dict[str, str] = {}
        self.asked = Counter[str]()
        self.read = set[int]()
        self.tag_at_change: list[int | None] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def list_shards(self, **_asked: Any) -> dict[str, Any]:
        self._answer("ListShards")
        await self.gate.wait()
        return {"Shards": [_row(shard) for shard in self.shards]}

    async def list_tags_for_stream(self, **_asked: Any) -> dict[str, Any]:
        self._answer("ListTagsForStream")
        tags = [] if self.partitions is None else [{"Key": "penstock:partitions", "Value": str(self.partitions)}]
        return {"Tags": tags, "HasMoreTags": False}

    async def add_tags_to_stream(self, **asked: Any) -> None:
        self._answer("AddTagsToStream")
        self.partitions = int(asked["Tags"]["penstock:partitions"])

    async def merge_shards(self, **_asked: Any) -> None:
        self._answer("MergeShards")
        self.tag_at_change.append(self.partitions)

    async def split_shard(self, **_asked: Any) -> None:
        self._answer("SplitShard")
        self.tag_at_change.append(self.partitions)

    async def get_shard_iterator(self, **asked: Any) -> dict[str, Any]:
        self._answer("GetShardIterator")
        self.read.add(shard_number(asked["ShardId"]))
        return {"ShardIterator": "0"}

    async def get_records(self, **_asked: Any) -> dict[str, Any]:
        self._answer("GetRecords")
        return {"Records": [], "MillisBehindLatest": 0, "NextShardIterator": "0"}

    def _answer(self, operation: str) -> None:
        self.asked[operation] += 1
        if code := self.fail.get(operation):
            raise ClientError({"Error": {"Code": code, "Message": ""}}, operation)


def _row(shard: Shard) -> dict[str, Any]:
    sequences = {"StartingSequenceNumber": "1"} | ({} if shard.is_open else {"EndingSequenceNumber": "9"})
    keys = {"StartingHashKey": str(shard.first_key), "EndingHashKey": str(shard.last_key)}
    row: dict[str, Any] = {
        "ShardId": shard_id(shard.number),
        "HashKeyRange": keys,
        "SequenceNumberRange": sequences,
    }
    for name, parent in zip(("ParentShardId", "AdjacentParentShardId"), shard.parents, strict=False):
        row[name] = shard_id(parent)
    return row
