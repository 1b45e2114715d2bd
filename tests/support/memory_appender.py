"""A broker in memory: the Appender contract for real, durable for as long as the test runs; it fails on command."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from services.core.broker.contract import Appended
from services.core.broker.errors import UnknownTopic
from services.core.broker.record import Record


@dataclass
class MemoryAppender:
    """Topics by name. `errors`: raised by the next appends to topics that exist, one each. `gate`: while it is cleared, appends
    wait."""

    topics: dict[str, list[list[Record]]] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    appends: int = 0
    waiting: int = 0

    def __post_init__(self) -> None:
        self.gate.set()

    def create(self, topic: str, partitions: int = 4) -> None:
        """Make an empty topic."""
        self.topics[topic] = [[] for _ in range(partitions)]

    def records(self, topic: str) -> list[Record]:
        """Everything in the topic, partition by partition."""
        return [record for partition in self.topics[topic] for record in partition]

    async def partition_count(self, topic: str) -> int:
        """As in the contract."""
        return len(self._find(topic))

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        """As in the contract."""
        self.appends += 1
        self.waiting += 1
        try:
            await self.gate.wait()
        finally:
            self.waiting -= 1
        stored = self._find(topic)[partition]
        if self.errors:
            raise self.errors.pop(0)
        first = len(stored)
        stored.extend(records)
        return Appended(first, len(stored) - 1)

    def _find(self, topic: str) -> list[list[Record]]:
        try:
            return self.topics[topic]
        except KeyError:
            raise UnknownTopic(topic) from None
