"""Administration and reading over several brokers."""

from collections.abc import Callable, Collection, Mapping

from services.core.broker.contract import Broker, Lag, PartitionRange, Start, TopicSpec
from services.core.broker.errors import NotAllowed, Unavailable, UnsafeTopic
from services.core.broker.record import Batch
from services.core.broker.rights import Right, RightsReader
from services.core.broker.several.brokers import Brokers, shift_batch, shifted_errors

_ELSEWHERE = (
    "the pipe file says that this stream lives on {home}, but {there} has a topic of this name. The events of that topic would "
    "be left behind. Try: on: {there}; or a ?prefix= in the URL of {there}, if the topic is of others; or delete the topic, if "
    "nobody needs its events"
)
Shift = Callable[[Mapping[int, int]], dict[int, int]]
_ON_EACH = ("penstock.groups",)
"""Topics that each Kafka has for itself."""


def _may_be_stream(topic: str) -> bool:
    """Names of streams have no dot; those of all other topics do."""
    return "." not in topic


class SeveralAdmin:
    """`Admin` and `Reader`: each topic is asked for where it lives. What a broker has beside those is not shown: topics of other
    fleets, and a stream's topic where it lived before."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def create_topic(self, spec: TopicSpec) -> None:
        """A stream's topic is not created while another broker has one of its name: its events would be left behind there.
        Raises UnsafeTopic."""
        if _may_be_stream(spec.name):
            home = self._brokers.places.of(spec.name)
            for name in self._brokers.names:
                if name != home and spec.name in await (await self._brokers.named(name)).admin.topics():
                    raise UnsafeTopic([(spec.name, "on", _ELSEWHERE.format(home=home, there=name))])
        await (await self._brokers.of(spec.name)).admin.create_topic(spec)

    async def create_own_topics(self) -> None:
        for broker in (await self._brokers.with_streams()).values():
            await broker.admin.create_own_topics()

    async def delete_topic(self, topic: str, incarnation: str | None = None) -> None:
        await (await self._brokers.of(topic)).admin.delete_topic(topic, incarnation)

    async def topics(self) -> dict[str, int]:
        """Not those on a broker that only destinations name: while it is down, the topics of the fleet are known all the same.
        `present` finds them."""
        found: dict[str, int] = {}
        for name, broker in (await self._brokers.with_streams()).items():
            there = await broker.admin.topics()
            found |= {topic: count for topic, count in there.items() if self._brokers.places.of(topic) == name}
        return found

    async def present(self, topics: Collection[str]) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for name, some in self._brokers.by_broker(topics).items():
            found |= await (await self._brokers.named(name)).admin.present(some)
        return found

    async def add_partitions(self, topic: str, partitions: int) -> None:
        await (await self._brokers.of(topic)).admin.add_partitions(topic, partitions)

    async def committed(self, group: str, topic: str) -> dict[int, int]:
        broker, shift = await self._home(topic)
        return shift(await broker.admin.committed(group, topic))

    async def has_begun(self, group: str, topic: str) -> bool:
        return await (await self._brokers.of(topic)).admin.has_begun(group, topic)

    async def positions(self, group: str, topic: str) -> dict[int, int]:
        broker, shift = await self._home(topic)
        return shift(await broker.admin.positions(group, topic))

    async def members(self, group: str) -> list[str]:
        """Of each broker: a member that reads on two of them has two names."""
        found: list[str] = []
        for broker in (await self._brokers.with_streams()).values():
            found += await broker.admin.members(group)
        return found

    async def set_committed(self, group: str, topic: str, processed: Mapping[int, int]) -> None:
        name, base = self._brokers.places.of(topic), self._brokers.places.base
        stored = {partition: offset - base(name, topic, partition) for partition, offset in processed.items()}
        await (await self._brokers.named(name)).admin.set_committed(group, topic, stored)

    async def copy_positions(self, group: str, to: str, topic: str) -> bool:
        return await (await self._brokers.of(topic)).admin.copy_positions(group, to, topic)

    @property
    def why_not_compact(self) -> str | None:
        """Of the fleet's own. A pipe file has no compacted stream on another broker that cannot have it."""
        return next(iter(self._brokers.opened())).admin.why_not_compact

    async def incarnation(self, topic: str) -> str:
        return await (await self._brokers.of(topic)).admin.incarnation(topic)

    async def compacted(self, topics: Collection[str]) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for name, some in self._brokers.by_broker(topics).items():
            found |= await (await self._brokers.named(name)).admin.compacted(some)
        return found

    async def check_durability(self, topics: Collection[str]) -> None:
        for name, some in self._brokers.by_broker(topics).items():
            await (await self._brokers.named(name)).admin.check_durability(some)

    async def kept_by_event_time(self, topics: Collection[str]) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for name, some in self._brokers.by_broker(topics).items():
            found |= await (await self._brokers.named(name)).admin.kept_by_event_time(some)
        return found

    async def keep_by_storing(self, topics: Collection[str]) -> None:
        for name, some in self._brokers.by_broker(topics).items():
            await (await self._brokers.named(name)).admin.keep_by_storing(some)

    async def group_lag(self, group: str, topic: str) -> dict[int, Lag]:
        return await (await self._brokers.of(topic)).admin.group_lag(group, topic)

    async def missing_rights(self, rights: Collection[Right]) -> list[Right]:
        """`RightsReader`: a right to a topic where it lives, one to a group on each broker that has streams. No other broker is
        opened. None is known to be missing on a broker that only destinations name while it is down or refuses our login: it
        holds up their lanes only, and what writes there names the refusal, or the right that it lacks. Raises NotAllowed."""
        missing: dict[Right, None] = {}
        for name in self._brokers.names:
            if here := [right for right in rights if self._is_on(right, name)]:
                try:
                    admin = (await self._brokers.named(name)).admin
                    if isinstance(admin, RightsReader):
                        missing |= dict.fromkeys(await admin.missing_rights(here))
                except NotAllowed:
                    raise
                except Unavailable:
                    if name in self._brokers.places.with_streams():
                        raise
        return list(missing)

    def _is_on(self, right: Right, name: str) -> bool:
        if right.kind == "group" or right.name in _ON_EACH:
            return name in self._brokers.places.with_streams()
        return self._brokers.places.of(right.name) == name

    async def describe(self, topic: str) -> dict[int, PartitionRange]:
        broker, shift = await self._home(topic)
        found = await broker.reader.describe(topic)
        starts = shift({partition: held.start for partition, held in found.items()})
        ends = shift({partition: held.end for partition, held in found.items()})
        return {partition: PartitionRange(start, ends[partition]) for partition, start in starts.items()}

    async def next_at_least(self, topic: str) -> dict[int, int]:
        """Of the broker that new records go to."""
        broker, shift = await self._home(topic, self._brokers.places.written_to(topic))
        return shift(await broker.reader.next_at_least(topic))

    async def fence(self, topic: str) -> dict[int, int]:
        broker, shift = await self._home(topic)
        return shift(await broker.reader.fence(topic))

    async def offsets_at(self, topic: str, start: Start) -> dict[int, int]:
        broker, shift = await self._home(topic)
        return shift(await broker.reader.offsets_at(topic, start))

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        name = self._brokers.places.of(topic)
        base = self._brokers.places.base(name, topic, partition)
        reader = (await self._brokers.named(name)).reader
        with shifted_errors(base):
            batch = await reader.read(topic, partition, offset - base, max_records=max_records)
        return None if batch is None else shift_batch(batch, base)

    async def _home(self, topic: str, name: str = "") -> tuple[Broker, Shift]:
        """The broker where the topic lives, or the one of this name; and what adds the bases there, because the topic may move
        before the broker answers."""
        name, base = name or self._brokers.places.of(topic), self._brokers.places.base

        def shift(offsets: Mapping[int, int]) -> dict[int, int]:
            return {partition: offset + base(name, topic, partition) for partition, offset in offsets.items()}

        return await self._brokers.named(name), shift
