"""Joining a group, and the consumer of a member. Nothing is returned of a shard whose lease may be lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from services.core.broker.contract import Lag, OnRevoke, Start
from services.core.broker.errors import BrokerError
from services.core.broker.kinesis.aws import Clients, Timing
from services.core.broker.kinesis.dynamo_table import DynamoTable
from services.core.broker.kinesis.fan_out import FanOut
from services.core.broker.kinesis.incarnation import Incarnations, Stream
from services.core.broker.kinesis.leases import HeldLease
from services.core.broker.kinesis.membership import KinesisMembership
from services.core.broker.kinesis.pace import ReadPaces
from services.core.broker.kinesis.prefetch import ReadBudget
from services.core.broker.kinesis.shard_reader import ReaderContext, read_shard
from services.core.broker.kinesis.shard_source import ShardSource
from services.core.broker.kinesis.streams import Streams
from services.core.broker.record import Batch, TopicPartition
from services.core.clock import boot_seconds

_LISTED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class SharedResources:
    """Shared by all members of a broker."""

    clients: Clients
    streams: Streams
    incarnations: Incarnations
    paces: ReadPaces
    timing: Timing
    fan_out: FanOut | None = None
    budget: ReadBudget = field(default_factory=ReadBudget)

    async def describe(self, topic: str, *, max_age: float | None = None) -> Stream:
        """The incarnation and its shards; max_age as in `Streams.find`. Raises UnknownTopic, Unavailable."""
        topology = await self.streams.find(topic, max_age=max_age)
        incarnation = await self.incarnations.find(topic)
        return Stream(incarnation.name, topology.shards, incarnation.retention_ms, incarnation.made_ms)


class KinesisMemberBackend:
    """`MemberBackend` on AWS. changed: set when poll should check again."""

    def __init__(self, shared: SharedResources, group: str) -> None:
        self._shared, self._group = shared, group
        self._table = DynamoTable(shared.clients.dynamodb, group, shared.timing, shared.clients.prefix)
        self._failure: BrokerError | None = None
        self.changed = asyncio.Event()

    @property
    def table(self) -> DynamoTable:
        return self._table

    @property
    def timing(self) -> Timing:
        return self._shared.timing

    @property
    def budget(self) -> ReadBudget:
        """The broker's: one for all groups of this process."""
        return self._shared.budget

    def clock(self) -> float:
        """BOOTTIME runs during a suspend, while leases expire."""
        return boot_seconds()

    def now_ms(self) -> int:
        return self._shared.incarnations.clock.now_ms()

    async def next_second(self, topic: str) -> int:
        return await self._shared.incarnations.next_second(topic)

    async def describe(self, topic: str) -> Stream:
        stream = await self._shared.describe(topic, max_age=0.0)
        self._shared.paces.keep(topic, {shard.number for shard in stream.shards})
        return stream

    async def read(self, held: HeldLease, stream: Stream) -> None:
        shared, (topic, shard) = self._shared, held.source
        pace = shared.paces.find(topic, shard)
        is_closed = not any(one.is_open for one in stream.shards if one.number == shard)
        source = ShardSource(shared.clients.kinesis, topic, shard, pace, shared.timing, is_closed)
        context = ReaderContext(self.now_ms, self._record_failure, self.wake, self._is_listed)
        if shared.fan_out is None:
            await read_shard(context, held, source)
            return
        async with shared.fan_out.pushed(source, shared.streams, stream.name, self._group) as pushed:
            await read_shard(context, held, pushed)

    def wake(self) -> None:
        self.changed.set()

    def pop_failure(self) -> BrokerError | None:
        """The error of a reader since the last call."""
        failure, self._failure = self._failure, None
        return failure

    async def _is_listed(self, source: TopicPartition) -> bool:
        topology = await self._shared.streams.find(source.topic, max_age=_LISTED_SECONDS)
        return source.partition in {shard.number for shard in topology.shards}

    def _record_failure(self, error: BrokerError) -> None:
        self._failure = error


@asynccontextmanager
async def join(
    shared: SharedResources, group: str, topics: Collection[str], start: Start, on_revoke: OnRevoke
) -> AsyncIterator["KinesisConsumer"]:
    """A member for the time of the context. Creates the group's lease table. Raises UnknownTopic."""
    backend = KinesisMemberBackend(shared, group)
    for topic in topics:
        shared.incarnations.forget(topic)  # it may be a new incarnation
        await backend.describe(topic)
    await backend.table.prepare()
    membership = KinesisMembership(backend, group, topics, start, on_revoke)
    try:
        await membership.join()
        yield KinesisConsumer(backend, membership)
    finally:
        await membership.leave()


_LAG_SECONDS = 10.0
_PAUSE = 0.02


class KinesisConsumer:
    """A partition is a shard. After its end it leaves the assignment, after on_revoke."""

    def __init__(self, backend: KinesisMemberBackend, membership: KinesisMembership) -> None:
        self._backend, self._membership = backend, membership
        self._turn = 0

    def assignment(self) -> frozenset[TopicPartition]:
        """As in the contract. A shard is listed once its read position is known."""
        return frozenset(source for source, held in self._membership.held.items() if held.is_placed)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        self._set_paused(partitions, True)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        self._set_paused(partitions, False)
        self._backend.wake()

    async def poll(self, *, max_records: int, max_wait: float) -> list[Batch]:
        with self._membership.polls.polling():
            self._backend.budget.wake()
            return await self._poll(max_records, asyncio.get_running_loop().time() + max_wait)

    async def _poll(self, max_records: int, deadline: float) -> list[Batch]:
        while True:
            self._backend.changed.clear()
            self._raise_failure()
            batches = self._poll_now(max_records)
            if batches:
                return batches
            try:
                async with asyncio.timeout_at(deadline):
                    await self._backend.changed.wait()
            except TimeoutError:
                self._raise_failure()
                return self._poll_now(max_records)

    async def commit(self, processed: Mapping[TopicPartition, int]) -> None:
        """As in the contract; one write to DynamoDB per partition."""
        await self._membership.commit(processed)

    async def lag(self) -> dict[TopicPartition, Lag]:
        """As in the contract, after a fresh read of each shard.

        Kinesis has no counts. `records` is exact for a shard that is read to its end. Further behind it is the number
        of records that this member has read, and at least one.
        """
        asks = {source: held.backlog.reads for source, held in self._membership.held.items()}
        for held_lease in self._membership.held.values():
            held_lease.backlog.want_read()
        deadline = asyncio.get_running_loop().time() + _LAG_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            held = self._membership.held
            if all(held[source].backlog.is_newer_than(number) for source, number in asks.items() if source in held):
                break
            await asyncio.sleep(_PAUSE)
        now = time.time_ns() // 1_000_000
        return {source: held.backlog.lag(now) for source, held in self._membership.held.items() if held.is_placed}

    def _set_paused(self, partitions: Collection[TopicPartition], paused: bool) -> None:
        for source in partitions:
            if (held := self._membership.held.get(source)) is not None:
                held.backlog.is_paused = paused

    def _raise_failure(self) -> None:
        failure = self._membership.next_error() or self._backend.pop_failure()
        if failure is not None:
            raise failure
        for held in self._membership.held.values():
            if held.backlog.error is not None and held.is_readable:
                raise held.backlog.error

    def _poll_now(self, max_records: int) -> list[Batch]:
        """The records that are ready, evenly from all shards, starting with another shard each time."""
        ready = [held for held in self._membership.held.values() if held.is_readable and held.backlog.has_records()]
        if not ready:
            return []
        self._turn += 1
        turn = self._turn % len(ready)
        batches: list[Batch] = []
        share = -(-max_records // len(ready))
        for held in ready[turn:] + ready[:turn]:
            count = min(share, max_records)
            if count > 0:
                polled = held.backlog.poll(count)
                batches += polled
                max_records -= sum(len(batch.records) for batch in polled)
        return batches
