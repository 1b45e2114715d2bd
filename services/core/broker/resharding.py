"""Changing the shards below a topic's partitions while everything runs. Only Kinesis has shards.

Each shard holds neighbouring partitions (slots) of a topic. A split or merge moves whole partitions, so keys keep their order.
The number of shards changes the price and the capacity, nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StreamShards:
    """is_active: the shards may be changed now. layout: the first partition of each open shard, ascending. numbers: theirs.

    Two equal numbers in the layout: the first of them holds no partition.
    """

    is_active: bool
    partitions: int
    layout: tuple[int, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardCapacity:
    """The capacity of one shard per second."""

    bytes: float
    entries: float


class StreamTags(Protocol):
    """Short texts by name, kept with a stream for as long as it lives. Every process may write them. Raises BrokerError kinds."""

    async def read(self, topic: str) -> dict[str, str]:
        """The tags that were written with `write`, by any process."""

    async def write(self, topic: str, tags: Mapping[str, str]) -> None:
        """Add these tags, or replace those of the same names. A text has at most 256 characters."""


class Resharding(Protocol):
    """A change returns when it was accepted; await `settled` before the next one. Raises BrokerError kinds, retries no change."""

    @property
    def capacity(self) -> ShardCapacity: ...

    @property
    def tags(self) -> StreamTags: ...

    async def shards(self, topic: str) -> StreamShards:
        """The shards of a stream now."""

    async def split(self, topic: str, number: int, partition: int) -> None:
        """Split this shard; the second half begins with `partition`."""

    async def merge(self, topic: str, left: int, right: int) -> None:
        """Merge two neighbouring shards."""

    async def update_count(self, topic: str, count: int) -> None:
        """Change to `count` equal shards. Kinesis allows ten such changes a day, each by a factor of two at most."""

    async def settled(self, topic: str) -> None:
        """Wait until the stream can be changed again, for minutes at most. Raises Unavailable."""

    async def room(self) -> int:
        """The number of shards that the account may still add."""
