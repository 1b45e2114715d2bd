"""Kinesis' writing side in the simulation: PutRecords over shards that split and merge, for the real appender.

An entry is stored whole, under a sequence number; its records' offsets are those that a reader computes from it. What a client
gives up may be stored seconds later. Readers get partitions, as writers see them: that a shard is drained before its children
is taken for granted here (tests/unit/kinesis).
"""

import asyncio
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import ClientOSError
from botocore.exceptions import ClientError, ConnectionClosedError, EndpointConnectionError, ReadTimeoutError

from services.core.broker.errors import UnknownTopic
from services.core.broker.kinesis.appender import KinesisAppender
from services.core.broker.kinesis.aws import Put, Timing
from services.core.broker.kinesis.record_format import offset_of, read_entry
from services.core.broker.kinesis.streams import HASH_KEYS, Shard, Streams, Topology, open_shards
from tests.simulation.machine import WORLD

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

FAULTS = ("split", "merge")
_THROTTLED = "ProvisionedThroughputExceededException"
_REFUSED = {
    "throttled": (_THROTTLED, "LimitExceededException"),
    "denied": ("AccessDeniedException", "ExpiredTokenException"),
    "refused": ("ResourceNotFoundException", "ResourceInUseException", "ServiceUnavailable"),
    "full": (_THROTTLED,),
}
_MOST_SHARDS = 12


class KinesisStreams:
    """The streams' shards, and what they store."""

    def __init__(self, cluster: "Cluster", rng: random.Random) -> None:
        self.cluster, self.rng = cluster, rng
        self._shards: dict[tuple[str, int], list[Shard]] = {}
        self._sequence = 1

    def topology(self, topic: str) -> Topology:
        """As it is now. Raises UnknownTopic."""
        held = self.cluster.store.topic(topic)
        count = len(held.partitions)
        shards = self._shards.get((topic, held.life))
        if shards is None:
            step = HASH_KEYS // count
            shards = [
                Shard(n, (), n * step, HASH_KEYS - 1 if n + 1 == count else (n + 1) * step - 1, True)
                for n in range(count)
            ]
            self._shards[topic, held.life] = shards
        return Topology(tuple(shards), count)

    def strike(self, fault: str) -> None:
        """A shard of some stream is split, or merged with its neighbour; both take effect at once."""
        places = sorted(place for place in self._shards if self._is_there(*place))
        if not places:
            return
        place = self.rng.choice(places)
        shards = open_shards(self._shards[place])
        self.cluster.machine.trace(f"kinesis: {fault} a shard of {place[0]}")
        at = self.rng.randrange(len(shards))
        if fault == "split" and len(shards) < _MOST_SHARDS and shards[at].last_key - shards[at].first_key > 16:
            shard = shards[at]
            middle = self.rng.randrange(shard.first_key + 1, shard.last_key)
            self._replace(place, [shard], [(shard.first_key, middle - 1), (middle, shard.last_key)])
        elif fault == "merge" and at:
            pair = shards[at - 1 : at + 1]
            self._replace(place, pair, [(pair[0].first_key, pair[1].last_key)])

    def _is_there(self, topic: str, life: int) -> bool:
        held = self.cluster.store.topics.get(topic)
        return held is not None and held.life == life

    def _replace(self, place: tuple[str, int], parents: list[Shard], ranges: list[tuple[int, int]]) -> None:
        shards = self._shards[place]
        numbers = tuple(parent.number for parent in parents)
        for parent in parents:
            shards[shards.index(parent)] = parent._replace(is_open=False)
        for first, last in ranges:
            shards.append(Shard(len(shards), numbers, first, last, True))

    def store(self, topic: str, put: Put) -> str:
        """One entry; its sequence number. Raises UnknownTopic."""
        store = self.cluster.store
        count = len(store.topic(topic).partitions)
        partition = int(put.hash_key) * count // HASH_KEYS
        self._sequence += self.rng.randint(1, 3)
        records = read_entry(put.data, put.partition_key, store.wall_ms())
        offsets = [offset_of(self._sequence, index) for index in range(len(records))]
        store.append(topic, partition, records, offsets)
        return str(self._sequence)

    def arrive(self, answer: "asyncio.Future[Any]", topic: str, puts: Sequence[Put], kind: str) -> None:
        """A request is at the service; what it says comes a moment later."""
        weather = self.cluster.weather
        if topic not in self.cluster.store.topics:
            self.cluster.answer(answer, None, _error("ResourceNotFoundException", 400), weather.delay())
            return
        if kind in _REFUSED and self.rng.random() < 0.5:  # the whole request
            code = self.rng.choice(_REFUSED[kind])
            self.cluster.answer(
                answer, None, _error(code, 503 if code == "ServiceUnavailable" else 400), weather.delay()
            )
            return
        rows = [self._take(topic, put, kind) for put in puts]
        if kind == "answer_lost":
            wait = self.rng.choice((0.01, self.rng.uniform(0.05, Timing().request)))
            self.cluster.answer(answer, None, self._lost(), wait)
        else:
            self.cluster.answer(answer, rows, None, weather.delay(kind))

    def _take(self, topic: str, put: Put, kind: str) -> dict[str, str]:
        """One entry's row. Some are refused, throttled, or fail although they are, or will be, stored."""
        if kind in ("partial", *_REFUSED) and self.rng.random() < 0.5:
            if kind != "partial" or self.rng.random() < 0.5:
                return {"ErrorCode": _THROTTLED, "ErrorMessage": "Rate exceeded"}
            when = self.rng.choice((None, 0.0, 3.0))
            if when == 0.0:
                self.store(topic, put)
            elif when is not None:
                self.cluster.machine.call_later(when, self.store_late, topic, put, context=WORLD)
            return {"ErrorCode": "InternalFailure", "ErrorMessage": ""}
        return {"SequenceNumber": self.store(topic, put), "ShardId": "shardId-000000000000"}

    def store_late(self, topic: str, put: Put) -> None:
        """What nobody waits for any more."""
        if topic in self.cluster.store.topics:
            self.store(topic, put)

    def _lost(self) -> Exception:
        lost: tuple[Exception, ...] = (
            EndpointConnectionError(endpoint_url="x", error=ClientOSError("reset by peer")),
            ConnectionClosedError(endpoint_url="x"),
            ReadTimeoutError(endpoint_url="x"),
            _error("InternalFailure", 500),
        )
        return self.rng.choice(lost)

    async def put(self, topic: str, puts: Sequence[Put]) -> list[dict[str, Any]]:
        """`PutRecords`, of one process."""
        cluster, rng = self.cluster, self.rng
        kind = cluster.weather.draw(topic, writes=True)
        answer = cluster.machine.create_future()
        if kind not in ("never_arrived", "late"):
            cluster.machine.call_later(
                cluster.weather.delay(kind), self.arrive, answer, topic, tuple(puts), kind, context=WORLD
            )
        else:
            wait = rng.choice((0.01, rng.uniform(0.05, Timing().request)))
            cluster.answer(answer, None, self._lost(), wait)
            for put in puts if kind == "late" else ():
                cluster.machine.call_later(wait + rng.uniform(0.0, 3.0), self.store_late, topic, put, context=WORLD)
        rows: list[dict[str, Any]] = await answer
        return rows


class _Streams(Streams):
    """What one process knows of the streams: up to some seconds old."""

    def __init__(self, streams: KinesisStreams) -> None:
        self._service = streams
        self._known: dict[str, tuple[float, Topology]] = {}

    async def find(self, topic: str, *, max_age: float | None = None) -> Topology:
        """As there."""
        world = self._service.cluster
        now = world.machine.time()
        known = self._known.get(topic)
        if known is None or now - known[0] > (Timing().sync if max_age is None else max_age):
            try:
                known = now, await world.call(lambda: self._service.topology(topic), topic)
            except UnknownTopic:
                self._known.pop(topic, None)
                raise
            self._known[topic] = known
        return known[1]


def make_appender(streams: KinesisStreams) -> KinesisAppender:
    """The real one."""
    return KinesisAppender(streams.put, _Streams(streams), Timing())


def _error(code: str, status: int) -> ClientError:
    response: Any = {"Error": {"Code": code, "Message": "on purpose"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "PutRecords")
