"""The `Broker` above several brokers."""

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace

from services.core.broker.contract import Appended, Broker, Consumer, Features, OnRevoke, Start
from services.core.broker.record import Record
from services.core.broker.several.admin import SeveralAdmin
from services.core.broker.several.brokers import DEFAULT, Brokers, Opening, Places
from services.core.broker.several.consumer import Revocations, SeveralConsumer


class SeveralAppender:
    """`Appender`: to the broker of each topic."""

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers

    async def partition_count(self, topic: str) -> int:
        return await (await self._brokers.of(topic)).appender.partition_count(topic)

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        appender = (await self._brokers.of(topic)).appender
        return await appender.append(topic, partition, records, timeout=timeout)


class SeveralBrokers:
    """As in the contract. None of them is Kinesis: its offsets are of another kind, and services ask once for all topics."""

    resharding = None

    def __init__(self, brokers: Brokers) -> None:
        self._brokers = brokers
        self.admin = self.reader = SeveralAdmin(brokers)
        self.appender = SeveralAppender(brokers)

    @property
    def features(self) -> Features:
        """Of those that are open now."""
        first, *others = (broker.features for broker in self._brokers.opened())
        for one in others:
            first = replace(
                first,
                dates_by_storing=first.dates_by_storing or one.dates_by_storing,
                max_record_bytes=min(first.max_record_bytes, one.max_record_bytes),
            )
        return first

    @asynccontextmanager
    async def consumer(
        self, group: str, topics: Collection[str], *, start: Start, on_revoke: OnRevoke
    ) -> AsyncIterator[Consumer]:
        """As in the contract: a membership on each broker that has one of the topics. All must be there for the join."""
        parts = self._brokers.by_broker(topics)
        if len(parts) <= 1:
            broker = await self._brokers.named(next(iter(parts), DEFAULT))
            async with broker.consumer(group, topics, start=start, on_revoke=on_revoke) as consumer:
                yield consumer
            return
        revocations = Revocations(on_revoke)
        async with AsyncExitStack() as stack:
            members = []
            for name, some in parts.items():
                broker = await self._brokers.named(name)
                joining = broker.consumer(group, some, start=start, on_revoke=revocations)
                members.append((await stack.enter_async_context(joining), some))
            yield SeveralConsumer(members, revocations)

    async def probe(self, topic: str, *, timeout: float) -> None:
        await (await self._brokers.of(topic)).probe(topic, timeout=timeout)


@asynccontextmanager
async def open_several(
    default: AbstractAsyncContextManager[Broker], openings: Mapping[str, Opening], places: Places
) -> AsyncIterator[Broker]:
    """Entering opens the default broker; the others are opened when they are needed. Leaving closes all."""
    async with default as opened:
        brokers = Brokers(opened, openings, places)
        try:
            yield SeveralBrokers(brokers)
        finally:
            await brokers.close()
