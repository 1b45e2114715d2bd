"""Changing what carries the partitions of a topic while everything runs; only Kinesis has such a thing.

A topic's partitions (slots) lie in shards, each shard holds neighbouring ones, and a split or merge moves partitions as a
whole, so keys keep their order. Which shards there are changes what is paid for and what is taken, nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StreamShards:
    """is_active: it may be changed now. layout: the first partition of each open shard, ascending; numbers: of these shards.

    Two equal numbers in the layout: the first of them holds no partition.
    """

    is_active: bool
    partitions: int
    layout: tuple[int, ...]
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardCapacity:
    """What one shard takes in a second."""

    bytes: float
    entries: float


class Resharding(Protocol):
    """Each change returns when it was accepted; the next one waits for `settled`. Raises BrokerError kinds; retries no change."""

    @property
    def capacity(self) -> ShardCapacity: ...

    async def shards(self, topic: str) -> StreamShards:
        """As it is now."""

    async def split(self, topic: str, number: int, partition: int) -> None:
        """Split this shard; the second half begins with `partition`."""

    async def merge(self, topic: str, left: int, right: int) -> None:
        """Merge two neighbouring shards."""

    async def update_count(self, topic: str, count: int) -> None:
        """Equal shards, so many; the service allows ten in a rolling day, at most twice and at least half of what there are."""

    async def settled(self, topic: str) -> None:
        """Wait until the stream can be changed again, for minutes at most. Raises Unavailable."""

    async def room(self) -> int:
        """How many more shards the account may have."""

    async def notes(self, topic: str) -> dict[str, str]:
        """What was noted with `note`, by whomever."""

    async def note(self, topic: str, texts: Mapping[str, str]) -> None:
        """Keep short texts (256 characters each) with the stream, for as long as it lives; replaces those of the same names."""
