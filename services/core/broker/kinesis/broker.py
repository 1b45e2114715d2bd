"""An open connection to Kinesis in one region."""

from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from services.core import metrics
from services.core.broker.contract import Admin, Consumer, Driver, Features, OnRevoke, Start
from services.core.broker.errors import Unavailable
from services.core.broker.kinesis.admin import KinesisAdmin
from services.core.broker.kinesis.driver import KinesisDriver
from services.core.broker.kinesis.faults import bounded
from services.core.broker.kinesis.frames import MAX_RECORD_BYTES
from services.core.broker.kinesis.group import join
from services.core.broker.kinesis.identity import Identities
from services.core.broker.kinesis.member_side import GroupSide
from services.core.broker.kinesis.membership import Stream
from services.core.broker.kinesis.read_pace import ReadPaces
from services.core.broker.kinesis.resharding import KinesisResharding
from services.core.broker.kinesis.sdk import Clients, open_clients
from services.core.broker.kinesis.slots import hash_key_of, shard_of
from services.core.broker.kinesis.streams import Streams
from services.core.broker.kinesis.timing import Timing
from services.core.broker.kinesis_url import parse_address
from services.core.broker.resharding import Resharding

_FEATURES = Features(
    contiguous_offsets=False, compaction=False, retention_by_event_time=False, max_record_bytes=MAX_RECORD_BYTES
)


class KinesisBroker:
    """The contract's `Broker`."""

    def __init__(self, clients: Clients, timing: Timing) -> None:
        self._streams = Streams(clients.kinesis, timing)
        self._side = GroupSide(clients, self._streams, Identities(clients.kinesis, timing), ReadPaces(), timing)
        metrics.BROKER_PREFETCHED.set_function(lambda: self._side.budget.used)
        self._driver = KinesisDriver(clients.put_records, self._streams, timing)
        self._admin = KinesisAdmin(self._side)
        self._resharding = KinesisResharding(clients, self._streams, timing)

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, timing: Timing | None = None) -> "AsyncIterator[KinesisBroker]":
        """`url`: see `kinesis_url`. Raises ValueError for one that cannot be read, Unavailable without credentials."""
        timing = timing or Timing()
        async with open_clients(parse_address(url), timing.request) as clients:
            broker = cls(clients, timing)
            try:
                yield broker
            finally:
                await broker._driver.close()
                await broker._streams.close()

    @property
    def features(self) -> Features:
        return _FEATURES

    @property
    def admin(self) -> Admin:
        return self._admin

    @property
    def resharding(self) -> Resharding:
        return self._resharding

    @property
    def driver(self) -> Driver:
        return self._driver

    def consumer(
        self, group: str, topics: Collection[str], *, start: Start, on_revoke: OnRevoke
    ) -> AbstractAsyncContextManager[Consumer]:
        """As in the contract."""
        return join(self._side, group, topics, start, on_revoke)

    async def stream(self, topic: str) -> Stream:
        """Which life of the stream this is, and its shards, seconds old at most. Raises UnknownTopic, Unavailable."""
        topology = await self._streams.of(topic)
        identity = await self._side.identities.of(topic)
        return Stream(identity.name, topology.shards, identity.retention_ms, identity.made_ms)

    async def probe(self, topic: str, *, timeout: float) -> None:
        """The service answers now, and each partition has an open shard. Raises UnknownTopic, Unavailable."""
        async with bounded(f"probe {topic}", timeout):
            topology = await self._streams.of(topic, max_age=0)
        for partition in range(topology.partitions):
            if shard_of(hash_key_of(partition, topology.partitions), topology.shards) is None:
                raise Unavailable(f"{topic}[{partition}] has no open shard now")
