"""Kafka's writing side in the simulation: three nodes with leaders and followers, and the real appender's connection to them.

The leaders are those of `tests/support/kafka_leader.py`, one for each partition of the store. A batch is in the store, and can
be read, once its leader's high-water mark has passed it: so readers never see a record that a change of leaders cuts off.
The bytes of requests and batches are the real ones.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from aiokafka import errors as kafka
from aiokafka.client import AIOKafkaClient

from services.core.broker.kafka.appender import KafkaAppender
from services.core.broker.kafka.cluster import Cluster as KafkaCluster
from services.core.broker.kafka.cluster import Timing
from services.core.broker.kafka.record_batch import MAX_BATCH_BYTES, make_batch, readable_rows
from services.core.broker.kafka.topic_settings import TopicLimits
from services.core.broker.record import TopicPartition
from tests.simulation.machine import WORLD
from tests.support.kafka_leader import NONE, REQUEST_TIMED_OUT, UNKNOWN_TOPIC, Nodes, Partition, StoredBatch
from tests.support.kafka_wire import read_identity

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

FAULTS = ("freeze_node", "isolate", "cut", "elect", "unreachable", "forget_producers", "move_coordinator")
"""freeze_node: a node stands still, and may be counted out. isolate: it does not hear the controller, and may go on as a leader
that has been replaced. cut: two nodes, or a leader and all others, lose each other. elect: leaders change. unreachable: no
client can connect to a node. forget_producers: the numbers of all batches have expired. move_coordinator: another node keeps
the groups, and answers nobody until it has read them."""

Row = tuple[str, int, bytes]
"""Topic, partition, record batch."""
_PRODUCE_7 = {0: (3, 7)}
_REFUSED = {"refused": (19, 19, 5, 3, 6), "throttled": (89,), "full": (56,), "denied": (29,)}
_AFTER = (7, 20, 6, 56)
"""Codes that may come although the batch was appended."""


class _Partition(Partition):
    """One that hands to readers what its leader has settled."""

    def __init__(
        self, nodes: Nodes, leader: int, publish: Callable[[StoredBatch], None], *, first: int, forgetful: bool
    ) -> None:
        super().__init__(nodes, leader, forgetful=forgetful)
        self._publish, self._published = publish, first

    def _confirm(self, leader: Any) -> None:
        super()._confirm(leader)
        if leader.high_water <= self._published:
            return
        due = []
        for batch in reversed(leader.log):
            if batch.offset < self._published:
                break
            if batch.after <= leader.high_water:
                due.append(batch)
        for batch in reversed(due):
            self._published = batch.after
            self._publish(batch)


class KafkaNodes:
    """The nodes of one cluster, and the faults that befall them."""

    def __init__(self, cluster: "Cluster", rng: random.Random) -> None:
        self.cluster, self.rng = cluster, rng
        self.nodes = Nodes()
        self.unreachable: set[int] = set()
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._is_forgetful = rng.random() < 0.3
        self._producers = 0
        self._is_calm = False
        cluster.store.on_delete.append(self._drop)

    def partition(self, topic: str, number: int) -> Partition | None:
        """None: there is none."""
        store = self.cluster.store
        known = self._partitions.get((topic, number))
        if known is None:
            held = store.topics.get(topic)
            if held is None or number >= len(held.partitions):
                return None
            names = self.nodes.names
            leader = names[(len(self._partitions) + number) % len(names)]

            def publish(batch: StoredBatch) -> None:
                first, _ = store.append(topic, number, batch.values)
                assert first == batch.offset, f"{topic}[{number}]: {first} is not {batch.offset}"

            known = _Partition(self.nodes, leader, publish, first=0, forgetful=self._is_forgetful)
            self._partitions[topic, number] = known
        return known

    def _drop(self, topic: str) -> None:
        """Nothing is left of a topic that was deleted; what waits hears so."""
        for place in [place for place in self._partitions if place[0] == topic]:
            self._partitions.pop(place).make_anew()

    def new_producer(self) -> int:
        """An id that nobody had."""
        self._producers += 1
        return 1000 + self._producers

    def arrive(self, answer: "asyncio.Future[Any]", node: int, rows: Sequence[Row], kinds: Sequence[str]) -> None:
        """A produce request is at a node. The answer is resolved there; who waits for it hears it later."""
        patience = Timing().request - 1.0
        working = self.cluster.machine.create_task(self._work(answer, node, rows, kinds, patience), context=WORLD)
        working.add_done_callback(self._record_failure, context=WORLD)

    def _record_failure(self, working: "asyncio.Task[None]") -> None:
        if not working.cancelled() and (error := working.exception()) is not None:
            self.cluster.machine.failures.append(f"the model of Kafka failed: {error!r}")
            self.cluster.machine.trace(f"the model of Kafka failed: {error!r}")

    async def _work(
        self, answer: "asyncio.Future[Any]", node: int, rows: Sequence[Row], kinds: Sequence[str], patience: float
    ) -> None:
        await self.nodes.until_thawed(node)
        begun = [self._append(node, row, kind) for row, kind in zip(rows, kinds, strict=True)]
        if waiting := [each[1] for each in begun if not isinstance(each, int) and not each[1].done()]:
            await asyncio.wait(waiting, timeout=patience)
            await self.nodes.until_thawed(node)
        topics: dict[str, list[tuple[int, int, int]]] = {}
        for (topic, number, _), kind, found in zip(rows, kinds, begun, strict=True):
            code, offset = _settle(found)
            if kind == "partial" and code == NONE:
                code, offset = self.rng.choice(_AFTER), -1
            topics.setdefault(topic, []).append((number, code, offset))
        throttle = 200 if "throttled" in kinds and self.rng.random() < 0.5 else 0
        if not answer.done():
            answer.set_result(SimpleNamespace(topics=list(topics.items()), throttle_time_ms=throttle))

    def _append(self, node: int, row: Row, kind: str) -> "int | tuple[int, asyncio.Future[int]]":
        topic, number, data = row
        if kind in _REFUSED:
            return self.rng.choice(_REFUSED[kind])
        partition = self.partition(topic, number)
        if partition is None:
            return UNKNOWN_TOPIC
        records = make_batch(TopicPartition(topic, number), list(readable_rows(bytes(data), 0))).records
        return partition.append(node, StoredBatch(*read_identity(data), tuple(records), len(data)))

    # Faults.

    def strike(self, fault: str) -> None:
        """One of FAULTS; it ends after some seconds."""
        rng, nodes, machine = self.rng, self.nodes, self.cluster.machine
        node, seconds = rng.choice(nodes.names), rng.choice((rng.uniform(0.1, 2.0), rng.uniform(2.0, 12.0)))
        machine.trace(f"kafka: {fault} {node} for {seconds:.1f} s")
        match fault:
            case "freeze_node" | "isolate":
                troubled = nodes.frozen if fault == "freeze_node" else nodes.isolated
                troubled.add(node)
                machine.call_later(rng.uniform(0.05, 2.0), self._count_out, node, context=WORLD)
                machine.call_later(seconds, self._end, troubled, {node}, context=WORLD)
            case "cut":
                pairs = {frozenset((node, other)) for other in nodes.names if other != node}
                if rng.random() < 0.5:
                    pairs = set(sorted(pairs, key=sorted)[:1])
                nodes.cut |= pairs
                machine.call_later(rng.uniform(0.05, 2.0), self._count_out, None, context=WORLD)
                machine.call_later(seconds, self._end, nodes.cut, pairs, context=WORLD)
            case "elect":
                for place in sorted(self._partitions):
                    self._partitions[place].elect(node)
            case "unreachable":
                self.unreachable.add(node)
                machine.call_later(seconds, self.unreachable.discard, node, context=WORLD)
            case "move_coordinator":
                self.cluster.coordinator.move(min(seconds, 5.0))
            case "forget_producers":
                for partition in self._partitions.values():
                    partition.forget_producers()

    def _count_out(self, node: int | None) -> None:
        """The controller misses this node, if it still does; and leaders count out those that do not follow."""
        if self._is_calm:
            return
        for place in sorted(self._partitions):
            if node is not None and not self.nodes.hears(node):
                self._partitions[place].fence(node)
            self._partitions[place].shrink()

    def _end(self, troubled: set[Any], which: set[Any]) -> None:
        troubled -= which
        self._spread()

    def calm(self) -> None:
        """All faults end, for good."""
        self._is_calm = True
        self.unreachable.clear()
        for troubled in (self.nodes.frozen, self.nodes.isolated, self.nodes.cut):
            cast("set[Any]", troubled).clear()
        self._spread()

    def _spread(self) -> None:
        self.nodes.thawed.set()
        for place in sorted(self._partitions):
            partition = self._partitions[place]
            partition.spread()
            if partition.view.leader is None:
                partition.elect()


def _settle(begun: "int | tuple[int, asyncio.Future[int]]") -> tuple[int, int]:
    """(code, base offset) of one batch, now that the node's patience is over."""
    if isinstance(begun, int):
        return begun, -1
    offset, settled = begun
    code = settled.result() if settled.done() else REQUEST_TIMED_OUT
    return code, offset if code == NONE else -1


_METADATA_AGE = Timing().metadata


class Wire(KafkaCluster):
    """What the appender uses of `kafka.cluster.Cluster`: one process's connections and metadata."""

    def __init__(self, kafka_nodes: KafkaNodes) -> None:
        super().__init__("simulated", "wire", Timing())
        self._kafka = kafka_nodes
        self._world, self._machine = kafka_nodes.cluster, kafka_nodes.cluster.machine
        self._known: dict[str, list[int | None]] = {}
        self._known_at = 0.0

    async def client(self) -> AIOKafkaClient:
        """As there; this is the client as well, and its metadata."""
        return cast("AIOKafkaClient", self)

    @property
    def cluster(self) -> "Wire":
        """Of aiokafka's client."""
        return self

    def _refresh(self) -> None:
        """Metadata up to some seconds old, and from a node that may have heard nothing new itself."""
        now = self._machine.time()
        if now - self._known_at < _METADATA_AGE:
            return
        kafka_nodes = self._kafka
        asked = [node for node in kafka_nodes.nodes.names if node not in kafka_nodes.nodes.frozen]
        asked = [node for node in asked if node not in kafka_nodes.unreachable]
        if not asked:
            return
        node, self._known, self._known_at = kafka_nodes.rng.choice(asked), {}, now
        for topic in sorted(self._tracked):
            held = self._world.store.topics.get(topic)
            if held is not None:
                self._known[topic] = [self._leader(topic, number, node) for number in range(len(held.partitions))]

    def _leader(self, topic: str, number: int, asked: int) -> int | None:
        partition = self._kafka.partition(topic, number)
        return None if partition is None else partition.replicas[asked].view.leader

    def partitions_for_topic(self, topic: str) -> set[int] | None:
        """Of aiokafka's metadata."""
        self._refresh()
        known = self._known.get(topic)
        return None if known is None else set(range(len(known)))

    def leader_for_partition(self, place: tuple[str, int]) -> int | None:
        """Of aiokafka's metadata."""
        self._refresh()
        known = self._known.get(place[0], [])
        return known[place[1]] if place[1] < len(known) else None

    def force_metadata_update(self) -> None:
        """Of aiokafka's client."""
        self._known_at = 0.0

    async def track(self, topic: str) -> bool:
        """As there."""
        if not await self._world.call(lambda: topic in self._world.store.topics, topic):
            self._tracked.discard(topic)
            return False
        self._tracked.add(topic)
        self.force_metadata_update()
        return True

    async def describe(self, topics: Sequence[str] | None = None) -> dict[str, Any]:
        """As there, for who asks whether a topic exists."""
        return await self._world.call(
            lambda: {name: None for name in topics or () if name in self._world.store.topics}, None
        )

    async def ask_any(self, request: Any) -> Any:
        """As there, for the two requests that the appender makes."""
        if type(request).__name__ == "InitProducerIdRequest":
            number = await self._world.call(self._kafka.new_producer, None)
            return SimpleNamespace(error_code=0, producer_id=number, producer_epoch=0)
        ((_, topic, _),) = request._resources
        exists = await self._world.call(lambda: topic in self._world.store.topics, topic)
        entries = [("max.message.bytes", str(MAX_BATCH_BYTES)), ("min.insync.replicas", "2")]
        return SimpleNamespace(resources=[(NONE if exists else UNKNOWN_TOPIC, "", 2, topic, entries)])

    async def ready(self, node: int) -> bool:
        """Of aiokafka's client."""
        await asyncio.sleep(self._world.weather.delay())
        return node not in self._kafka.unreachable

    async def send(self, node: int, request: Any) -> Any:
        """Of aiokafka's client: one produce request. Its connection may break before, while, or after it is worked off."""
        topics = request.prepare(_PRODUCE_7).topics
        rows: list[Row] = [(topic, number, data) for topic, parts in topics for number, data in parts]
        weather, rng, machine = self._world.weather, self._kafka.rng, self._machine
        kinds = [weather.draw(topic, writes=True) for topic, _, _ in rows]
        whole = next((kind for kind in kinds if kind in ("answer_lost", "never_arrived", "late", "slow")), "ok")
        answer = machine.create_future()
        wait = rng.choice((0.01, rng.uniform(0.05, self.timing.request)))
        if whole != "never_arrived":
            after = weather.delay(whole) if whole != "late" else wait + rng.uniform(0.0, 3.0)
            machine.call_later(after, self._kafka.arrive, answer, node, rows, kinds, context=WORLD)
        if whole in ("answer_lost", "never_arrived", "late"):
            await asyncio.sleep(wait)
            raise kafka.KafkaConnectionError(f"node {node}: reset")
        try:
            async with asyncio.timeout(self.timing.request):
                found = await answer
                await asyncio.sleep(weather.delay(whole))
        except TimeoutError:
            raise kafka.RequestTimedOutError from None
        return found


def make_appender(kafka_nodes: KafkaNodes) -> KafkaAppender:
    """The real one, with connections of its own."""
    wire = Wire(kafka_nodes)
    return KafkaAppender(wire, TopicLimits(wire))
