"""A stream in memory, behind the protocol by which shards are changed."""

from collections.abc import Mapping

from services.core.broker.errors import BrokerError
from services.core.broker.resharding import ShardCapacity, StreamShards

CAPACITY = ShardCapacity(bytes=1_000_000, entries=1_000)
SLOTS = 24


class StreamService:
    """A stream with Kinesis' rules for changes; it numbers shards as Kinesis does.

    refusals: raised by the next changes, which then do nothing; look_failures: by the next looks once something changed;
    broken_off: by the next waits for the end of a change. noted_at_change: what was noted when each change was asked for.
    looks: how often the shards were asked for.
    """

    capacity = CAPACITY

    def __init__(self, layout: tuple[int, ...]) -> None:
        self.open = dict(enumerate(layout))
        self.next, self.changes = len(layout), 0
        self.kept: dict[str, str] = {}
        self.refusals: list[BrokerError] = []
        self.look_failures: list[BrokerError] = []
        self.broken_off: list[BrokerError] = []
        self.noted_at_change: list[str] = []
        self.samples = 0
        self.tags = self

    async def shards(self, _topic: str) -> StreamShards:
        self.samples += 1
        if self.changes and self.look_failures:
            raise self.look_failures.pop(0)
        ordered = sorted(self.open.items(), key=lambda item: (item[1], item[0]))
        return StreamShards(True, SLOTS, tuple(cut for _, cut in ordered), tuple(number for number, _ in ordered))

    async def split(self, topic: str, number: int, partition: int) -> None:
        shards = await self.shards(topic)
        at = shards.numbers.index(number)
        end = (*shards.layout[1:], SLOTS)[at]
        assert self.open[number] < partition < end
        self._refuse()
        first = self.open.pop(number)
        self._add(first, partition)

    async def merge(self, topic: str, left: int, right: int) -> None:
        numbers = (await self.shards(topic)).numbers
        assert numbers.index(right) == numbers.index(left) + 1
        first = self.open.pop(left)
        del self.open[right]
        self._add(first)

    async def update_count(self, _topic: str, count: int) -> None:
        self._refuse()
        self.open.clear()
        self._add(*(slot * SLOTS // count for slot in range(count)))

    async def settled(self, _topic: str) -> None:
        if self.broken_off:
            raise self.broken_off.pop(0)

    async def room(self) -> int:
        return 100

    async def read(self, topic: str) -> dict[str, str]:
        return dict(self.kept)

    async def write(self, topic: str, tags: Mapping[str, str]) -> None:
        self.kept |= tags

    def _refuse(self) -> None:
        self.noted_at_change.append(self.kept.get("updates", ""))
        if self.refusals:
            raise self.refusals.pop(0)

    def _add(self, *firsts: int) -> None:
        self.changes += 1
        for first in firsts:
            self.open[self.next] = first
            self.next += 1
