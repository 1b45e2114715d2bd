"""A stream's shards: their numbers, their ranges of hash keys, whose children they are.

A partition's number is its shard's: 7 for `shardId-000000000007`. So a partition is one shard for ever, also across
splits and merges: it closes, and others with higher numbers go on in its range. The open ones need not count from 0.
"""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

_PREFIX = "shardId-"


class Shard(NamedTuple):
    """One shard. number: the partition's. parents: numbers, two after a merge. first_key, last_key: of its hash range.

    is_open: it can be written to.
    """

    number: int
    parents: tuple[int, ...]
    first_key: int
    last_key: int
    is_open: bool


def shard_id(number: int) -> str:
    """The service's name of a shard."""
    return f"{_PREFIX}{number:012d}"


def shard_number(name: str) -> int:
    """The number in a shard's name. Raises ValueError."""
    if not name.startswith(_PREFIX):
        raise ValueError(f"not the name of a shard: {name!r}")
    return int(name.removeprefix(_PREFIX))


def parse_shard(row: Mapping[str, Any]) -> Shard:
    """A row of ListShards' answer."""
    parents = [row[name] for name in ("ParentShardId", "AdjacentParentShardId") if row.get(name)]
    return Shard(
        number=shard_number(row["ShardId"]),
        parents=tuple(shard_number(name) for name in parents),
        first_key=int(row["HashKeyRange"]["StartingHashKey"]),
        last_key=int(row["HashKeyRange"]["EndingHashKey"]),
        is_open=row["SequenceNumberRange"].get("EndingSequenceNumber") is None,
    )


def open_shards(shards: Collection[Shard]) -> list[Shard]:
    """Those that can be written to, by hash range: adjacent ones touch."""
    return sorted((shard for shard in shards if shard.is_open), key=lambda shard: shard.first_key)
