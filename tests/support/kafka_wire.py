"""What `KafkaAppender` uses of a cluster, over the model of Kafka's leaders: connections that break, answers that get lost.

`ModelCluster` stands in for `kafka.cluster.Cluster` at the few calls of the sending half; the appender, its lanes per node, its
numbering and its packing are the real ones, and so are the bytes of the batches.
"""

import asyncio
import random
import struct
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any, cast

from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient
from aiokafka.record.memory_records import MemoryRecords

from services.core.broker.errors import Unavailable
from services.core.broker.kafka.cluster import Cluster, Timing
from tests.support.kafka_leader import NONE, REQUEST_TIMED_OUT, UNKNOWN_TOPIC, Nodes, Partition, StoredBatch

TOPIC = "events"
_IDENTITY = struct.Struct(">qhi").unpack_from
_IDENTITY_AT = 43
_HOP = 0.002
_METADATA_AGE = 5.0
_PRODUCE_7 = {0: (3, 7)}
LINKS = ("whole", "loses requests", "loses answers", "breaks after", "late", "very late", "unreachable")
"""What a connection to a node may be like. *Breaks after*: it breaks while the request is worked off. *Late*: the request
arrives seconds after the connection broke; *very late*: also after everybody has given up."""
_LATE = {"late": 4.0, "very late": 30.0}


class ModelCluster(Cluster):
    """One client's connections to three nodes that hold one topic. All knobs may be turned at any time.

    links: how the connection to a node is. instead: codes that a node answers instead of asking the model.
    after: codes that it answers although it has appended. identities: False: no producer id is to be had.
    asked: the node that is asked for metadata; None: any that moves.
    """

    def __init__(self, partitions: int, *, forgetful: bool) -> None:
        super().__init__("nowhere:0", "model", Timing())
        self.nodes = Nodes()
        leaders = self.nodes.names
        self.partitions = [
            Partition(self.nodes, leaders[number % len(leaders)], forgetful=forgetful) for number in range(partitions)
        ]
        self.links = dict.fromkeys(leaders, LINKS[0])
        self.instead: dict[int, int] = {}
        self.after: dict[int, int] = {}
        self.identities = True
        self.asked: int | None = None
        self.cluster = self
        self._given = 0
        self._known: list[int | None] = [partition.view.leader for partition in self.partitions]
        self._known_at = 0.0
        self.running: set[asyncio.Task[Any]] = set()

    # What the appender calls.

    async def client(self) -> AIOKafkaClient:
        """As `Cluster.client`; this is its own client, and its own metadata."""
        return cast("AIOKafkaClient", self)

    def partitions_for_topic(self, _topic: str) -> set[int]:
        """Of aiokafka's metadata."""
        return set(range(len(self.partitions)))

    def leader_for_partition(self, place: tuple[str, int]) -> int | None:
        """Of aiokafka's metadata: up to some seconds old, and from a node that may have heard nothing new itself."""
        now = asyncio.get_running_loop().time()
        if now - self._known_at > _METADATA_AGE:
            asked = self.asked or random.choice([n for n in self.nodes.names if n not in self.nodes.frozen] or [1])
            self._known = [partition.replicas[asked].view.leader for partition in self.partitions]
            self._known_at = now
        return self._known[place[1]]

    def force_metadata_update(self) -> None:
        """Of aiokafka's client."""
        self._known_at = 0.0

    async def ask_any(self, request: Any) -> Any:
        """As `Cluster.ask_any`, for the two requests that senders make."""
        await asyncio.sleep(_HOP)
        if not self.identities:
            raise Unavailable("no node answers")
        if type(request).__name__ == "InitProducerIdRequest":
            self._given += 1
            return SimpleNamespace(error_code=0, producer_id=1000 + self._given, producer_epoch=0)
        largest = str(min(partition.max_bytes for partition in self.partitions))
        entries = [("max.message.bytes", largest), ("min.insync.replicas", "2")]
        return SimpleNamespace(resources=[(0, "", 2, TOPIC, entries)])

    async def ready(self, node: int) -> bool:
        """Of aiokafka's client."""
        await asyncio.sleep(_HOP)
        return self.links[node] != "unreachable"

    async def send(self, node: int, request: Any) -> Any:
        """Of aiokafka's client: one produce request."""
        link = self.links[node]
        if link == "unreachable":
            raise kafka.NodeNotReadyError(f"node {node}")
        if link != "loses requests":
            answering = self._start(self._work(node, request.prepare(_PRODUCE_7), _LATE.get(link, 0.0)))
        if link in ("late", "very late", "breaks after"):
            await asyncio.sleep(random.choice((0.0, _HOP, 1.0)))
            raise kafka.KafkaConnectionError(f"node {node}: reset")
        if link == "whole":
            done, _ = await asyncio.wait([answering], timeout=self.timing.request)
            if done:
                return answering.result()
        else:
            await asyncio.sleep(self.timing.request)
        raise kafka.RequestTimedOutError

    # The other end.

    def _start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.get_running_loop().create_task(work)
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        return task

    async def _work(self, node: int, request: Any, late: float) -> Any:
        """What the broker does with one request, whether or not anybody waits for its answer."""
        await asyncio.sleep(late or _HOP)
        await self.nodes.until_thawed(node)
        places = [(number, data) for _, parts in request.topics for number, data in parts]
        answers = [self._append(node, number, data) for number, data in places]
        codes = await asyncio.gather(*[self._settle(answer, request.timeout / 1000) for answer in answers])
        await self.nodes.until_thawed(node)
        after = self.after.get(node)
        rows = [
            (number, code if after is None or code else after, offset, -1, 0)
            for (number, _), (code, offset) in zip(places, codes, strict=True)
        ]
        return SimpleNamespace(topics=[(TOPIC, rows)], throttle_time_ms=random.choice((0, 0, 0, 200)))

    def _append(self, node: int, number: int, data: bytes) -> "int | tuple[int, asyncio.Future[int]]":
        if (code := self.instead.get(node)) is not None:
            return code
        if number >= len(self.partitions):
            return UNKNOWN_TOPIC
        return self.partitions[number].append(node, decode(data))

    async def _settle(self, answer: "int | tuple[int, asyncio.Future[int]]", patience: float) -> tuple[int, int]:
        """(code, base offset), after the node's patience at the latest."""
        if isinstance(answer, int):
            return answer, -1
        offset, settled = answer
        done, _ = await asyncio.wait([settled], timeout=patience)
        code = settled.result() if done else REQUEST_TIMED_OUT
        settled.cancel()
        return code, offset if code == NONE else -1


def decode(data: bytes) -> StoredBatch:
    """A record batch as it was sent; its checksum must be right."""
    batch = MemoryRecords(bytes(data)).next_batch()
    assert batch.validate_crc()
    return StoredBatch(*read_identity(data), tuple(record.value for record in batch), len(data))


def read_identity(data: bytes) -> tuple[int, int, int]:
    """Of a record batch: producer id, epoch and sequence number."""
    identity, epoch, first = _IDENTITY(data, _IDENTITY_AT)
    return identity, epoch, first
