"""A model of PutRecords: everything that it may do to an entry, and say of it, while shards split and merge."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import ClientOSError
from botocore.exceptions import ClientError, ConnectionClosedError, EndpointConnectionError, ReadTimeoutError

from services.core.broker.kinesis.aws import Put
from services.core.broker.kinesis.record_format import read_entry
from services.core.broker.kinesis.streams import HASH_KEYS, Shard, Streams, Topology, open_shards, shard_of

REQUEST_SECONDS = 7.0
"""After which the client gives a request up; what it was to do may be done all the same, later."""

_REFUSALS = ("ExpiredTokenException", "AccessDeniedException", "ResourceNotFoundException", "LimitExceededException")
_THROTTLED = "ProvisionedThroughputExceededException"


class PutModel(Streams):
    """The stream, as a client sees it. Everything that happens is drawn from `chance`.

    stored: by partition the values of its records, in the order in which a reader gets them: a shard's before its children's.
    trouble: how much of what is asked goes wrong, 0 to 1; tests end it.
    """

    def __init__(self, chance: random.Random, partitions: int, shards: int) -> None:
        self._chance, self._partitions = chance, partitions
        step = HASH_KEYS // shards
        self._shards = [Shard(n, (), n * step, (n + 1) * step - 1, True) for n in range(shards)]
        self._seen = Topology(tuple(self._shards), partitions)
        self._sequence = 0
        self._refusing: str | None = None
        self._late: set[asyncio.Task[None]] = set()
        self.stored: dict[int, list[bytes]] = {partition: [] for partition in range(partitions)}
        self.trouble = chance.choice((0.0, 0.2, 0.6))

    async def find(self, topic: str, *, max_age: float | None = None) -> Topology:
        """What was known a while ago."""
        if self._chance.random() < 0.1:
            self._seen = Topology(tuple(self._shards), self._partitions)
        if self._chance.random() < self.trouble * 0.2:
            await asyncio.sleep(self._chance.choice((0.01, 5.0)))
        return self._seen

    async def change(self) -> None:
        """What happens to a stream while it is written to: splits, merges, rights and tokens that go and come."""
        while True:
            await asyncio.sleep(self._chance.expovariate(0.3))
            what = self._chance.randrange(4)
            if what == 0 and len(self._shards) < 40:
                self._split(self._chance.choice(open_shards(self._shards)))
            elif what == 1 and len(self._shards) < 40:
                self._merge()
            elif what == 2 and self._chance.random() < self.trouble:
                self._refusing = self._chance.choice(_REFUSALS)
            else:
                self._refusing = None

    async def drain(self) -> None:
        """Until nothing is under way any more that nobody waits for."""
        while self._late:
            await asyncio.wait(self._late)

    async def put(self, _stream: str, puts: Sequence[Put]) -> list[dict[str, Any]]:
        """`put_lane.SendPuts`."""
        await asyncio.sleep(self._chance.choice((0.0, 0.0, 0.005, 0.05)))
        if self._refusing is not None and self.trouble:
            raise _error(self._refusing, 400)
        if self._chance.random() < self.trouble:
            await self._go_wrong(puts)
        return [self._take(put) for put in puts]

    async def _go_wrong(self, puts: Sequence[Put]) -> None:
        """May raise; then each entry may be stored before, later, or never."""
        ways: list[Callable[[], Exception]] = [
            lambda: EndpointConnectionError(endpoint_url="x", error=ClientOSError("reset by peer")),
            lambda: ConnectionClosedError(endpoint_url="x"),
            lambda: _error("InternalFailure", 500),
            lambda: _error("503", 503),
            lambda: ReadTimeoutError(endpoint_url="x"),
        ]
        what = self._chance.randrange(len(ways) + 4)
        if what < len(ways):
            self._store_some(puts)
            failure = ways[what]()
            await asyncio.sleep(REQUEST_SECONDS if isinstance(failure, ReadTimeoutError) else 0.0)
            raise failure
        if what == len(ways):
            raise _error(self._chance.choice((_THROTTLED, *_REFUSALS)), 400)
        if what == len(ways) + 1:  # slow, and well: it may be given up before it is answered
            await asyncio.sleep(self._chance.uniform(0.0, REQUEST_SECONDS))

    def _store_some(self, puts: Sequence[Put]) -> None:
        for put in puts:
            when = self._chance.choice((None, 0.0, 0.0, 0.01, 3.0, 20.0))
            if when == 0.0:
                self._store(put)
            elif when is not None:
                self._late.add(task := asyncio.create_task(self._store_later(put, when)))
                task.add_done_callback(self._late.discard)

    async def _store_later(self, put: Put, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._store(put)

    def _take(self, put: Put) -> dict[str, str]:
        luck = self._chance.random()
        if luck < self.trouble * 0.3:
            return {"ErrorCode": _THROTTLED, "ErrorMessage": "Rate exceeded"}
        if luck < self.trouble * 0.5:
            self._store_some([put])
            return {"ErrorCode": "InternalFailure", "ErrorMessage": ""}
        return {"SequenceNumber": str(self._store(put)), "ShardId": "shardId-000000000000"}

    def _store(self, put: Put) -> int:
        assert shard_of(int(put.hash_key), self._shards) is not None, "every hash key has an open shard"
        self._sequence += 1
        partition = int(put.hash_key) * self._partitions // HASH_KEYS
        values = [record.value or b"" for record in read_entry(put.data, put.partition_key, 0)]
        self.stored[partition] += values
        return self._sequence

    def _split(self, shard: Shard) -> None:
        if shard.last_key - shard.first_key > 16:
            middle = self._chance.randrange(shard.first_key + 1, shard.last_key)
            self._replace([shard], [(shard.first_key, middle - 1), (middle, shard.last_key)])

    def _merge(self) -> None:
        shards = open_shards(self._shards)
        if len(shards) > 1:
            at = self._chance.randrange(len(shards) - 1)
            pair = shards[at : at + 2]
            self._replace(pair, [(pair[0].first_key, pair[1].last_key)])

    def _replace(self, parents: list[Shard], ranges: list[tuple[int, int]]) -> None:
        for parent in parents:
            self._shards[parent.number] = parent._replace(is_open=False)
        for first, last in ranges:
            numbers = tuple(parent.number for parent in parents)
            self._shards.append(Shard(len(self._shards), numbers, first, last, True))


def _error(code: str, status: int) -> ClientError:
    response: Any = {"Error": {"Code": code, "Message": "on purpose"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "PutRecords")
