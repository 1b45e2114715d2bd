"""The `Broker` above several brokers."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from services.core.broker.contract import Appended, Broker, Consumer, Features, OnRevoke, Start
from services.core.broker.errors import Unavailable
from services.core.broker.record import Record
from services.core.broker.several.admin import SeveralAdmin
from services.core.broker.several.brokers import DEFAULT, Brokers, Opening, Places
from services.core.broker.several.consumer import HomeConsumer, Revocations, SeveralConsumer

_KNOWN_WITHIN_S = 5.0


class SeveralAppender:
    """`Appender`: to the broker of each topic."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def partition_count(self, topic: str) -> int:
        return await (await self._brokers.of(topic)).appender.partition_count(topic)

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        """Waits while the topic is held for a migration. An append that ends when it is already elsewhere is in doubt."""
        places = self._brokers.places
        self._brokers.prepare_move(topic)
        grant = await places.write_to(topic, timeout)
        appender = (await self._brokers.named(grant.broker)).appender
        appended = await appender.append(topic, partition, records, timeout=timeout)
        await places.confirm(topic, grant, timeout)
        base = places.base(grant.broker, topic, partition)
        if base and appended.first >= 0:
            appended = replace(appended, first=appended.first + base, last=appended.last + base)
        return appended


class SeveralBrokers:
    """As in the contract. Shards of streams on Kinesis are not adapted to the load: `resharding` is for a fleet of one broker."""

    resharding = None

    def __init__(self, brokers: Brokers) -> None:
        self.brokers = brokers
        self.admin = self.reader = SeveralAdmin(brokers)
        self.appender = SeveralAppender(brokers)

    @property
    def features(self) -> Features:
        """Of those that are open now; offsets are contiguous where all brokers of the fleet have such."""
        first, *others = (broker.features for broker in self.brokers.opened())
        first = replace(first, contiguous_offsets=first.contiguous_offsets and not self.brokers.noncontiguous)
        for one in others:
            first = replace(
                first,
                dates_by_storing=first.dates_by_storing or one.dates_by_storing,
                max_record_bytes=min(first.max_record_bytes, one.max_record_bytes),
            )
        return first

    def is_contiguous(self, topic: str) -> bool:
        """As in the contract. Only streams and topics of others are on other brokers than the fleet's own."""
        return self.brokers.places.of(topic) not in self.brokers.noncontiguous

    @asynccontextmanager
    async def consumer(
        self, group: str, topics: Collection[str], *, start: Start, on_revoke: OnRevoke
    ) -> AsyncIterator[Consumer]:
        """As in the contract: a membership on each broker that has one of the topics. All must be there for the join."""
        places = self.brokers.places
        for topic in topics:
            await places.known(topic, _KNOWN_WITHIN_S)
            if places.is_leaving(topic):
                raise Unavailable(
                    f"{topic} moves from broker {places.of(topic)}. Its readers wait until the move has ended"
                )
        parts, homes = self.brokers.by_broker(topics), {topic: places.of(topic) for topic in topics}
        if len(parts) <= 1:
            broker = await self.brokers.named(next(iter(parts), DEFAULT))
            async with broker.consumer(group, topics, start=start, on_revoke=on_revoke) as consumer:
                yield HomeConsumer(consumer, homes, places)
            return
        revocations = Revocations(on_revoke)
        async with AsyncExitStack() as stack:
            members = []
            for name, some in parts.items():
                broker = await self.brokers.named(name)
                joining = broker.consumer(group, some, start=start, on_revoke=revocations)
                members.append((await stack.enter_async_context(joining), some))
            several = SeveralConsumer(members, revocations)
            stack.push_async_callback(several.close)
            yield HomeConsumer(several, homes, places)

    async def probe(self, topic: str, *, timeout: float) -> None:
        await (await self.brokers.of(topic)).probe(topic, timeout=timeout)


@asynccontextmanager
async def open_several(
    default: Broker, openings: Mapping[str, Opening], places: Places, noncontiguous: Collection[str] = ()
) -> AsyncIterator[SeveralBrokers]:
    """default: open. The others are opened when they are needed. Leaving closes these. noncontiguous: as in `Brokers`."""
    brokers = Brokers(default, openings, places, noncontiguous)
    try:
        yield SeveralBrokers(brokers)
    finally:
        await brokers.close()
