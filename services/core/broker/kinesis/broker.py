"""An open connection to Kinesis in one region."""

from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from urllib.parse import urlsplit

from services.core import metrics
from services.core.broker.connect import parse_kinesis_url
from services.core.broker.contract import Consumer, Features, OnRevoke, Start
from services.core.broker.errors import Unavailable
from services.core.broker.kinesis.admin import KinesisAdmin
from services.core.broker.kinesis.appender import KinesisAppender
from services.core.broker.kinesis.aws import Clients, Timing, bounded, open_clients
from services.core.broker.kinesis.consumer import SharedResources, join
from services.core.broker.kinesis.fan_out import FanOut
from services.core.broker.kinesis.incarnation import Incarnations, Stream
from services.core.broker.kinesis.pace import ReadPaces
from services.core.broker.kinesis.record_format import MAX_RECORD_BYTES
from services.core.broker.kinesis.resharding import KinesisResharding
from services.core.broker.kinesis.streams import Streams, hash_key_of, shard_of
from services.core.http.address import is_loopback

_OF_AN_EMULATOR = Timing(request=30.0)
"""On this machine. It has the CPU that others leave it: whoever gives up early and asks again makes it slower."""
_FEATURES = Features(contiguous_offsets=False, dates_by_storing=False, max_record_bytes=MAX_RECORD_BYTES)


class KinesisBroker:
    def __init__(self, clients: Clients, timing: Timing) -> None:
        self._streams = Streams(clients.kinesis, timing, clients.prefix)
        self._shared = SharedResources(
            clients, self._streams, Incarnations(clients.kinesis, timing), ReadPaces(), timing, FanOut.of(clients)
        )
        metrics.BROKER_PREFETCHED.set_function(lambda: self._shared.budget.used)
        self.features = _FEATURES
        self.appender = KinesisAppender(clients.put_records, self._streams, timing)
        self.admin = self.reader = KinesisAdmin(self._shared)
        self.resharding = KinesisResharding(clients, self._streams, timing)

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, timing: Timing | None = None) -> "AsyncIterator[KinesisBroker]":
        """`url`: see `parse_kinesis_url`. Raises ValueError for an invalid one, Unavailable without credentials."""
        address = parse_kinesis_url(url)
        is_local = is_loopback(urlsplit(address.endpoint or "").hostname or "")
        timing = timing or (_OF_AN_EMULATOR if is_local else Timing())
        async with open_clients(address, timing.request) as clients:
            broker = cls(clients, timing)
            try:
                yield broker
            finally:
                await broker.appender.close()
                await broker._streams.close()

    def is_contiguous(self, topic: str) -> bool:
        return self.features.contiguous_offsets

    def consumer(
        self, group: str, topics: Collection[str], *, start: Start, on_revoke: OnRevoke
    ) -> AbstractAsyncContextManager[Consumer]:
        return join(self._shared, group, topics, start, on_revoke)

    async def stream(self, topic: str) -> Stream:
        """The incarnation and its shards, seconds old at most. Raises UnknownTopic, Unavailable."""
        return await self._shared.describe(topic)

    async def probe(self, topic: str, *, timeout: float) -> None:
        """The service answers now, and each partition has an open shard. Raises UnknownTopic, Unavailable."""
        async with bounded(f"probe {topic}", timeout):
            topology = await self._streams.find(topic, max_age=0)
        for partition in range(topology.partitions):
            if shard_of(hash_key_of(partition, topology.partitions), topology.shards) is None:
                raise Unavailable(f"{topic}[{partition}] has no open shard now")
