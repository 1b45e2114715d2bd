"""What one member of a group needs of AWS: the lease table, the streams as they are, a reader for each shard it holds."""

import asyncio
import time
from dataclasses import dataclass, field

from services.core.broker.errors import BrokerError
from services.core.broker.kinesis.dynamo_table import DynamoTable
from services.core.broker.kinesis.held import Held
from services.core.broker.kinesis.identity import Identities
from services.core.broker.kinesis.membership import Stream
from services.core.broker.kinesis.read_budget import ReadBudget
from services.core.broker.kinesis.read_pace import ReadPaces
from services.core.broker.kinesis.sdk import Clients
from services.core.broker.kinesis.shard_iterator import ShardSource
from services.core.broker.kinesis.shard_reader import Reading, read_shard
from services.core.broker.kinesis.streams import Streams
from services.core.broker.kinesis.timing import Timing
from services.core.broker.record import TopicPartition

_LISTED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class GroupSide:
    """What all members of a broker share."""

    clients: Clients
    streams: Streams
    identities: Identities
    paces: ReadPaces
    timing: Timing
    budget: ReadBudget = field(default_factory=ReadBudget)


class MemberSide:
    """`membership.Side` over AWS. news: set when poll should look again."""

    def __init__(self, side: GroupSide, group: str) -> None:
        self._side, self._group = side, group
        self._table = DynamoTable(side.clients.dynamodb, group, side.timing)
        self._failure: BrokerError | None = None
        self.news = asyncio.Event()

    @property
    def table(self) -> DynamoTable:
        """The group's."""
        return self._table

    @property
    def timing(self) -> Timing:
        """The broker's."""
        return self._side.timing

    @property
    def budget(self) -> ReadBudget:
        """The broker's: one for all groups of this process."""
        return self._side.budget

    def clock(self) -> float:
        """Going on during a suspend: leases run out meanwhile."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def now_ms(self) -> int:
        """As in `membership.Side`."""
        return self._side.identities.clock.now_ms()

    async def next_second(self, topic: str) -> int:
        """As in `membership.Side`."""
        return await self._side.identities.next_second(topic)

    async def look(self, topic: str) -> Stream:
        """As in `membership.Side`."""
        topology = await self._side.streams.of(topic, max_age=0.0)
        self._side.paces.keep(topic, {shard.number for shard in topology.shards})
        identity = await self._side.identities.of(topic)
        return Stream(identity.name, topology.shards, identity.retention_ms, identity.made_ms)

    async def read(self, held: Held, stream: Stream) -> None:
        """As in `membership.Side`."""
        side, (topic, shard) = self._side, held.source
        pace = side.paces.of(topic, shard)
        is_closed = not any(one.is_open for one in stream.shards if one.number == shard)
        source = ShardSource(side.clients.kinesis, topic, shard, pace, side.timing, is_closed)
        reading = Reading(self.now_ms, self._note, self.wake, self._is_listed)
        if side.clients.fan_out is None:
            await read_shard(reading, held, source)
            return
        async with side.clients.fan_out.pushed(source, side.streams, stream.name, self._group) as pushed:
            await read_shard(reading, held, pushed)

    def wake(self) -> None:
        """As in `membership.Side`."""
        self.news.set()

    def take_failure(self) -> BrokerError | None:
        """What failed in a reader since the last call."""
        failure, self._failure = self._failure, None
        return failure

    async def _is_listed(self, source: TopicPartition) -> bool:
        topology = await self._side.streams.of(source.topic, max_age=_LISTED_SECONDS)
        return source.partition in {shard.number for shard in topology.shards}

    def _note(self, error: BrokerError) -> None:
        self._failure = error
