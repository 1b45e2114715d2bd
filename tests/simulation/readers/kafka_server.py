"""Kafka's nodes for readers: what they answer to the requests of the real consumer, admin and appender, through aiokafka itself.

What is replaced is the connection (`aiokafka.client.create_conn`): requests arrive here as aiokafka builds them, and answers are
aiokafka's own structures. So aiokafka's client, fetcher and coordinator are the real ones.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import aiokafka.client
from aiokafka import errors as kafka
from aiokafka.conn import CloseReason
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.memory_records import MemoryRecords

from services.core.broker.kafka.fetch_by_id import FetchByIdStruct
from services.core.broker.kafka.protocol import DescribeTopicsResponse
from services.core.broker.kafka.record_batch import MAX_BATCH_BYTES
from tests.simulation.machine import WORLD, Machine, current_process
from tests.simulation.readers.kafka_groups import Groups
from tests.simulation.readers.kafka_log import Log, Partition
from tests.support.kafka_wire import read_identity
from tests.support.virtual_loop import EPOCH

NODES = (1, 2, 3)
_REPLICAS = list(NODES)
_BROKERS = [(each, f"node-{each}", 9092, "rack") for each in NODES]  # with a rack: the hash of None is an address
_VERSIONS = {
    0: (7, 7),
    1: (4, 13),
    2: (2, 2),
    3: (5, 12),
    8: (2, 2),
    9: (3, 3),
    10: (0, 1),
    11: (2, 2),
    12: (0, 0),
    13: (0, 0),
    14: (0, 0),
    15: (0, 0),
    19: (1, 1),
    20: (0, 0),
    22: (0, 0),
    23: (3, 3),
    32: (0, 0),
    37: (0, 0),
}
_UNKNOWN_ID = 100
_UNKNOWN_TOPIC, _NOT_LEADER, _OUT_OF_RANGE, _EXISTS, _CORRUPT = 3, 6, 1, 36, 2
_LOADING, _NOT_COORDINATOR, _NO_COORDINATOR = 14, 16, 15
_LATEST, _EARLIEST = -1, -2
_METADATA = 3
_TOPIC_SETTINGS = {
    "max.message.bytes": str(MAX_BATCH_BYTES),
    "min.insync.replicas": "2",
    "unclean.leader.election.enable": "false",
    "retention.ms": "-1",
    "offsets.retention.minutes": "10080",
}
_WAYS = (0.0, 0.001, 0.005)
_PARTITION_ERRORS = (_NOT_LEADER, _UNKNOWN_TOPIC, 5, 56, 74, 78, 9)
"""What a node may say of a partition for some seconds: not its leader, unknown, no leader, storage, other epochs, no replica."""


def draw_way(rng: random.Random) -> float:
    """Seconds for one way. As `rng.choice` draws it, without its calls: each request asks twice."""
    drawn = rng.getrandbits(2)
    while drawn == len(_WAYS):
        drawn = rng.getrandbits(2)
    return _WAYS[drawn]


@dataclass(eq=False)
class Topic:
    """One life of a topic."""

    id: UUID
    partitions: list[Partition]
    is_compact: bool = False


@dataclass(eq=False)
class Link:
    """How a node is: frozen, unreachable, with connections that break, or with errors for single partitions."""

    is_frozen: bool = False
    is_unreachable: bool = False
    is_odd: bool = False
    """Whether aiokafka meets an error that it does not expect when a member asks for metadata here."""
    breaks: float = 0.0
    errors: float = 0.0
    thawed: list[Callable[[], None]] = field(default_factory=list)
    topics: dict[str, Topic] | None = None
    """The topics as a node knows them that hears no news; None: as they are."""


class Server:
    """A cluster of three nodes. on_publish: called when readers of a partition may find something new."""

    def __init__(self, machine: Machine, rng: random.Random) -> None:
        self.machine, self.rng = machine, rng
        self.topics: dict[str, Topic] = {}
        self.links = {node: Link() for node in NODES}
        self.groups = Groups(machine.time, self._later, machine.create_future)
        self.coordinator = 1
        self.loading_until = 0.0
        self._waiting: dict[int, tuple[Any, asyncio.Future[Any]]] = {}
        """Fetch requests that wait for records, with the nodes that they are at."""
        self._numbers = 0
        self.complaints: list[str] = []

    def _later(self, seconds: float, callback: Callable[..., Any], *args: Any) -> Any:
        return self.machine.call_later(seconds, callback, *args, context=WORLD)

    def now_ms(self) -> int:
        """The nodes' wall clock."""
        return int((EPOCH + self.machine.time()) * 1000)

    # Topics, as the controller has them.

    def create(self, name: str, partitions: int, *, is_compact: bool = False) -> Topic:
        """A new one, whether or not there was one before."""
        made = Topic(UUID(int=self.rng.getrandbits(128)), [], is_compact)
        self.topics[name] = made
        self.add_partitions(name, partitions)
        return made

    def add_partitions(self, name: str, count: int) -> None:
        """To this many."""
        topic = self.topics[name]
        while len(topic.partitions) < count:
            leader = NODES[(len(topic.partitions) + len(name)) % len(NODES)]
            topic.partitions.append(Partition(leader, self._wake_fetches))

    def delete(self, name: str) -> None:
        """With the commits of all groups in it."""
        del self.topics[name]
        for group in self.groups.all.values():
            group.offsets = {place: row for place, row in group.offsets.items() if place[0] != name}
        self._wake_fetches()

    def known_to(self, node: int) -> dict[str, Topic]:
        """The topics as this node knows them."""
        stale = self.links[node].topics
        return self.topics if stale is None else stale

    def isolate(self, node: int) -> None:
        """This node hears no news until `rejoin`."""
        self.links[node].topics = {
            name: Topic(topic.id, list(topic.partitions), topic.is_compact) for name, topic in self.topics.items()
        }
        for topic in self.topics.values():
            for partition in topic.partitions:
                partition.isolate(node)

    def rejoin(self, node: int) -> None:
        """It hears everything again."""
        self.links[node].topics = None
        for topic in self.topics.values():
            for partition in topic.partitions:
                partition.stale.pop(node, None)

    def thaw(self, node: int) -> None:
        """It goes on with what arrived meanwhile."""
        link = self.links[node]
        link.is_frozen, thawed, link.thawed = False, link.thawed, []
        for go_on in thawed:
            go_on()

    # Requests.

    def arrive(self, answer: "asyncio.Future[Any]", node: int, client: str, request: Any) -> None:
        """A request is at a node."""
        link = self.links[node]
        if link.is_frozen:
            link.thawed.append(lambda: self.arrive(answer, node, client, request))
            return
        found = _HANDLERS[request.API_KEY](self, node, client, request)
        if not isinstance(found, asyncio.Future):
            self._reply(answer, found)
            return
        found.add_done_callback(
            lambda done: None if done.cancelled() else self._reply(answer, done.result()), context=WORLD
        )

    def _reply(self, answer: "asyncio.Future[Any]", result: Any) -> None:
        def arrive() -> None:
            if not answer.done():
                answer.set_result(result)

        self._later(draw_way(self.rng), arrive)

    def _then(self, waiting: "asyncio.Future[Any]", make: Callable[[Any], Any]) -> "asyncio.Future[Any]":
        made = self.machine.create_future()
        waiting.add_done_callback(
            lambda done: None if made.done() else made.set_result(make(done.result())), context=WORLD
        )
        return made

    def _partition(self, node: int, topic: str, number: int) -> tuple[int, Log | None, Partition | None]:
        """(error code, log as this node leads it, the partition)."""
        known = self.known_to(node).get(topic)
        if known is None or number >= len(known.partitions):
            return _UNKNOWN_TOPIC, None, None
        if self.rng.random() < self.links[node].errors:
            return self.rng.choice(_PARTITION_ERRORS), None, None
        partition = known.partitions[number]
        leader, log = partition.seen_by(node)
        return (0, log, partition) if leader == node else (_NOT_LEADER, None, None)

    def metadata(self, node: int, _client: str, request: Any) -> Any:
        """Metadata, versions 5 and 12."""
        known = self.known_to(node)
        asked = sorted(known) if request.topics is None else [_name(row) for row in request.topics]
        is_new = request.API_VERSION == DescribeTopicsResponse.API_VERSION
        rows: list[tuple[Any, ...]] = []
        for name in asked:
            topic = known.get(name)
            numbers = list[tuple[int, Partition]]() if topic is None else list(enumerate(topic.partitions))
            code = _UNKNOWN_TOPIC if topic is None else 0
            if not is_new:
                parts: list[Any] = [
                    (0, number, one.seen_by(node)[0], _REPLICAS, _REPLICAS, []) for number, one in numbers
                ]
                rows.append((code, name, False, parts))
                continue
            new_parts: list[Any] = [
                (0, number, leader, log.epoch, _REPLICAS, _REPLICAS, [], {})
                for number, one in numbers
                for leader, log in (one.seen_by(node),)
            ]
            rows.append((code, name, UUID(int=0) if topic is None else topic.id, False, new_parts, 0, {}))
        if is_new:
            return DescribeTopicsResponse(0, [(*one, {}) for one in _BROKERS], "sim", 1, rows, {})
        return request.RESPONSE_TYPE(0, _BROKERS, "sim", 1, rows)

    def fetch(self, node: int, _client: str, request: Any) -> Any:
        """Fetch: at once when there is something, or a failure; else when there is, or the time is over."""
        answer = self._try_fetch(node, request)
        if answer is not None:
            return answer
        self._numbers += 1
        key, waiting = self._numbers, self.machine.create_future()
        self._waiting[key] = ((node, request), waiting)
        self._later(request.max_wait_time / 1000, self._end_fetch, key)
        return waiting

    def _end_fetch(self, key: int) -> None:
        (node, request), waiting = self._waiting.pop(key, ((0, None), None))
        if waiting is not None:
            waiting.set_result(self._try_fetch(node, request, is_last=True))

    def _wake_fetches(self) -> None:
        for key, ((node, request), waiting) in list(self._waiting.items()):
            if not self.links[node].is_frozen and (answer := self._try_fetch(node, request)) is not None:
                del self._waiting[key]
                waiting.set_result(answer)

    def _try_fetch(self, node: int, request: Any, *, is_last: bool = False) -> Any:
        rows: list[tuple[Any, ...]] = []
        is_due = is_last
        left = request.max_bytes
        is_by_id = request.API_VERSION == FetchByIdStruct.API_VERSION
        names = {topic.id.int: name for name, topic in self.known_to(node).items()}
        for topic, parts, *_ in request.topics:
            found: list[tuple[Any, ...]] = []
            for number, *place in parts:
                offset, most = (place[1], place[4]) if is_by_id else place
                name = names.get(topic.int) if is_by_id else topic
                code, log, held = (_UNKNOWN_ID, None, None) if name is None else self._partition(node, name, number)
                zeros_at = None if held is None else held.zeros.get(node)
                data, aborted = b"", list[tuple[int, int]]()
                if log is not None and not log.start <= offset <= log.end:
                    code = _OUT_OF_RANGE
                elif log is not None and zeros_at is not None and zeros_at <= offset < log.stable:
                    code = _CORRUPT  # it looks for the offset batch by batch, and does not get past the zeros
                elif log is not None and left > 0:
                    is_first = left == request.max_bytes
                    data, aborted = log.read(offset, min(most, left), is_first=is_first, zeros_at=zeros_at)
                    left -= len(data)
                is_due |= bool(code or data)
                high, stable = (-1, -1) if log is None else (log.high_water, log.stable)
                if is_by_id:
                    tagged: list[tuple[Any, ...]] = [(*each, {}) for each in aborted]
                    found.append((number, code, high, stable, -1, tagged or None, -1, data, {}))
                else:
                    found.append((number, code, high, stable, aborted or None, data))
            rows.append((topic, found, {}) if is_by_id else (topic, found))
        if not is_due:
            return None
        return request.RESPONSE_TYPE(0, 0, 0, rows, {}) if is_by_id else request.RESPONSE_TYPE(0, rows)

    def list_offsets(self, node: int, _client: str, request: Any) -> Any:
        """ListOffsets, of committed records."""

        def find(topic: str, number: int, when: int) -> tuple[int, int, int, int]:
            code, log, _ = self._partition(node, topic, number)
            if log is None:
                return number, code, -1, -1
            if when == _EARLIEST:
                return number, 0, -1, log.start
            return number, 0, -1, log.stable if when == _LATEST else log.at_time(when)

        return request.RESPONSE_TYPE(
            0, [(topic, [find(topic, *row) for row in rows]) for topic, rows in request.topics]
        )

    def epoch_ends(self, node: int, _client: str, request: Any) -> Any:
        """OffsetForLeaderEpoch."""

        def find(topic: str, number: int, epoch: int) -> tuple[int, int, int, int]:
            code, log, _ = self._partition(node, topic, number)
            return (code, number, -1, -1) if log is None else (0, number, *log.epoch_end(epoch))

        rows = [(topic, [find(topic, number, epoch) for number, _, epoch in parts]) for topic, parts in request.topics]
        return request.RESPONSE_TYPE(0, rows)

    def produce(self, node: int, _client: str, request: Any) -> Any:
        """Produce: on all replicas at once."""

        def store(topic: str, number: int, data: bytes) -> tuple[int, int, int, int, int]:
            code, log, partition = self._partition(node, topic, number)
            if log is None or partition is None or log is not partition.log:
                return number, code or _NOT_LEADER, -1, -1, -1
            producer, _, sequence = read_identity(data)
            count = sum(1 for _ in MemoryRecords(bytes(data)).next_batch())
            base = partition.append(bytes(data), count, self.now_ms(), producer=producer, number=sequence)
            return number, 0, base, -1, log.start

        rows = [(topic, [store(topic, number, data) for number, data in parts]) for topic, parts in request.topics]
        return request.RESPONSE_TYPE(rows, 0)

    def new_producer(self, _node: int, _client: str, request: Any) -> Any:
        """InitProducerId."""
        self._numbers += 1
        return request.RESPONSE_TYPE(0, 0, 1000 + self._numbers, 0)

    def describe_configs(self, node: int, _client: str, request: Any) -> Any:
        """DescribeConfigs."""
        rows = []
        for kind, name, wanted in request.resources:
            is_there = kind != 2 or name in self.known_to(node)
            entries = [(each, _TOPIC_SETTINGS[each], False, False, False) for each in wanted]
            rows.append((0 if is_there else _UNKNOWN_TOPIC, None, kind, name, entries if is_there else []))
        return request.RESPONSE_TYPE(0, rows)

    def create_topics(self, _node: int, _client: str, request: Any) -> Any:
        """CreateTopics."""
        rows = []
        for name, partitions, *_, configs in request.create_topic_requests:
            if name in self.topics:
                rows.append((name, _EXISTS, None))
            else:
                self.create(name, partitions, is_compact=dict(configs).get("cleanup.policy") == "compact")
                rows.append((name, 0, None))
        return request.RESPONSE_TYPE(rows)

    # Groups.

    def find_coordinator(self, _node: int, _client: str, request: Any) -> Any:
        """FindCoordinator: a node may still name the one that was."""
        if self.machine.time() < self.loading_until and self.rng.random() < 0.3:
            return request.RESPONSE_TYPE(0, _NO_COORDINATOR, None, -1, "", -1)
        node = self.coordinator
        return request.RESPONSE_TYPE(0, 0, None, node, f"node-{node}", 9092)

    def move_coordinator(self, seconds: float) -> None:
        """Another node keeps the groups, and reads them for so long. Who waited for the old one hears so."""
        self.coordinator = self.rng.choice([node for node in NODES if node != self.coordinator])
        self.loading_until = self.machine.time() + seconds

    def _is_away(self, node: int) -> int:
        if node != self.coordinator:
            return _NOT_COORDINATOR
        return _LOADING if self.machine.time() < self.loading_until else 0

    def join(self, node: int, client: str, request: Any) -> Any:
        """JoinGroup."""
        answer = request.RESPONSE_TYPE
        if code := self._is_away(node):
            return answer(0, code, -1, "", "", "", [])
        seconds = (request.session_timeout / 1000, request.rebalance_timeout / 1000)
        found = self.groups.join(request.group, request.member_id, client, *seconds, list(request.group_protocols))
        if isinstance(found, int):
            return answer(0, found, -1, "", "", "", [])
        return self._then(
            found, lambda said: answer(0, said, -1, "", "", "", []) if isinstance(said, int) else answer(0, 0, *said)
        )

    def sync(self, node: int, _client: str, request: Any) -> Any:
        """SyncGroup."""
        answer = request.RESPONSE_TYPE
        if code := self._is_away(node):
            return answer(code, b"")
        shares = {member: bytes(share) for member, share in request.group_assignment}
        found = self.groups.sync(request.group, request.member_id, request.generation_id, shares)

        def make(said: Any) -> Any:
            return answer(said, b"") if isinstance(said, int) else answer(0, said)

        return self._then(found, make) if isinstance(found, asyncio.Future) else make(found)

    def heartbeat(self, node: int, _client: str, request: Any) -> Any:
        """Heartbeat."""
        code = self._is_away(node)
        if code == _LOADING:
            return request.RESPONSE_TYPE(0)  # it cannot know yet
        return request.RESPONSE_TYPE(
            code or self.groups.heartbeat(request.group, request.member_id, request.generation_id)
        )

    def leave(self, node: int, _client: str, request: Any) -> Any:
        """LeaveGroup."""
        return request.RESPONSE_TYPE(self._is_away(node) or self.groups.remove(request.group, request.member_id))

    def commit(self, node: int, _client: str, request: Any) -> Any:
        """OffsetCommit."""
        name = request.consumer_group
        code = self._is_away(node) or self.groups.may_commit(
            name, request.consumer_id, request.consumer_group_generation_id
        )
        topics = []
        for topic, rows in request.topics:
            for number, offset, metadata in rows if not code else ():
                if topic in self.topics:
                    self._check_commit(name, (topic, number), offset, metadata, by_member=bool(request.consumer_id))
                    self.groups.find(name).offsets[topic, number] = (offset, metadata)
            topics.append((topic, [(number, code) for number, *_ in rows]))
        return request.RESPONSE_TYPE(topics)

    def _check_commit(self, group: str, place: tuple[str, int], offset: int, metadata: str, *, by_member: bool) -> None:
        """A member's commit never goes back while the log keeps what was committed."""
        before, said = self.groups.find(group).offsets.get(place, (0, ""))
        is_same = f"topic={self.topics[place[0]].id}" in said and f"topic={self.topics[place[0]].id}" in metadata
        if by_member and is_same and offset < before and not self.topics[place[0]].partitions[place[1]].was_cut:
            self.complaints.append(f"{group} commits {offset} in {place}, where it had {before}")

    def committed(self, node: int, _client: str, request: Any) -> Any:
        """OffsetFetch."""
        if code := self._is_away(node):
            return request.RESPONSE_TYPE(0, [], code)
        offsets = self.groups.find(request.consumer_group).offsets
        topics = [
            (topic, [(number, *offsets.get((topic, number), (-1, "")), 0) for number in numbers])
            for topic, numbers in request.topics
        ]
        return request.RESPONSE_TYPE(0, topics, 0)

    def describe_groups(self, node: int, _client: str, request: Any) -> Any:
        """DescribeGroups."""
        rows = []
        for name in request.groups:
            group = self.groups.find(name)
            members = [(one.name, one.client, "/10.0.0.1", b"", b"") for one in group.members.values()]
            rows.append((self._is_away(node), name, group.state, "consumer", "roundrobin", members))
        return request.RESPONSE_TYPE(rows)


_HANDLERS: dict[int, Callable[[Server, int, str, Any], Any]] = {
    0: Server.produce,
    1: Server.fetch,
    2: Server.list_offsets,
    3: Server.metadata,
    8: Server.commit,
    9: Server.committed,
    10: Server.find_coordinator,
    11: Server.join,
    12: Server.heartbeat,
    13: Server.leave,
    14: Server.sync,
    15: Server.describe_groups,
    19: Server.create_topics,
    22: Server.new_producer,
    23: Server.epoch_ends,
    32: Server.describe_configs,
}


def _name(row: Any) -> str:
    return row if isinstance(row, str) else str(row[1])


class Connection:
    """What aiokafka uses of its connections."""

    def __init__(self, server: Server, node: int, client: str, timeout: float, on_close: Any) -> None:
        self._server, self._node, self._client, self._timeout, self._on_close = server, node, client, timeout, on_close
        self._is_open = True
        self._arrival = 0.0

    def connected(self) -> bool:
        """As there."""
        return self._is_open

    def close(self, reason: Any = None, exc: Any = None) -> "asyncio.Future[None]":
        """As there: what it returns is waited for."""
        if self._is_open:
            self._is_open = False
            if self._on_close is not None:
                self._on_close(self, reason)
        done: asyncio.Future[None] = self._server.machine.create_future()
        done.set_result(None)
        return done

    def send(self, request: Any, expect_response: bool = True) -> Awaitable[Any]:
        """As there."""
        by_name = {1: (4, 4)} if isinstance(request, FetchRequest) else {}
        return self._exchange(request.prepare(_VERSIONS | by_name))

    async def _exchange(self, request: Any) -> Any:
        server, rng, link = self._server, self._server.rng, self._server.links[self._node]
        if not self._is_open:
            raise kafka.KafkaConnectionError(f"no connection to node {self._node}")
        if (
            link.is_odd
            and self._client.startswith("penstock-p.")
            and request.API_KEY == _METADATA
            and request.API_VERSION == 5
        ):
            raise RuntimeError("the handler is closed")
        is_broken = rng.random() < link.breaks or link.is_unreachable
        answer = server.machine.create_future()
        if not is_broken or rng.random() < 0.5:
            # Requests of one connection arrive in order.
            self._arrival = max(self._arrival, server.machine.time() + draw_way(rng))
            server.machine.call_at(
                self._arrival, server.arrive, answer, self._node, self._client, request, context=WORLD
            )
        if is_broken:
            await asyncio.sleep(rng.choice((0.001, 0.3)))
            self.close(CloseReason.CONNECTION_BROKEN)
            raise kafka.KafkaConnectionError(f"the connection to node {self._node} broke")
        async with asyncio.timeout(self._timeout):
            return await answer


async def connect(
    host: str, _port: int, *, client_id: str, request_timeout_ms: int, on_close: Any = None, **_: Any
) -> Any:
    """As `create_conn`, to the server of the process whose step this is. A bootstrap address is any node."""
    process = current_process()
    assert process is not None
    server: Server = process.found["kafka"]
    node = int(host.removeprefix("node-")) if host.startswith("node-") else server.rng.choice(NODES)
    await asyncio.sleep(0.001)
    if server.links[node].is_unreachable:
        raise kafka.KafkaConnectionError(f"node {node} cannot be reached")
    return Connection(server, node, client_id, request_timeout_ms / 1000, on_close)


def replace_connections() -> None:
    """Once, before the first history."""
    assert hasattr(aiokafka.client, "create_conn")
    aiokafka.client.create_conn = connect
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
