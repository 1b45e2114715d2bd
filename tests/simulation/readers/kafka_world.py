"""Kafka as readers meet it: appends that wait for replicas, transactions, elections, retention, coordinators that move.

The faults, by name. elect: a clean election; what the followers lack is cut off. unclean: one below the high-water mark.
hold_up: followers lag, and the newest records cannot be read. transact: somebody writes in transactions and rolls some back.
isolate: a node hears no news, and answers as it knows. freeze_node, unreachable, breaks: nodes and connections. errors: answers
about single partitions fail. move_coordinator, expire_member: groups. outrun: retention passes what is not read. remake: a topic
is deleted and made anew. grow: partitions are added. expire_offsets: Kafka forgets the commits of a group without members.

Those of single subjects: depose: a leader hears no news any more, and another one is elected uncleanly. zeros: on a leader's disk
a batch becomes a block of zeros; other replicas are intact. odd: a node's connections raise an error that aiokafka does not
expect when it asks for metadata, as those of uvloop did (aio-libs/aiokafka#1038).
"""

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from services.core.broker.contract import Broker
from services.core.broker.kafka.broker import KafkaBroker
from services.core.broker.kafka.cluster import Timing
from services.core.broker.record import Record
from tests.simulation.machine import WORLD, Process
from tests.simulation.readers.kafka_log import Partition, pack_batch
from tests.simulation.readers.kafka_server import NODES, Server
from tests.simulation.readers.oracle import Event
from tests.simulation.readers.world import World

_TIMING = Timing(session=4.0, heartbeat=1.0, drain=8.0, request=3.0, metadata=3.0)
_MOST_PARTITIONS = 4
_MOST_RECORDS = 8


class KafkaWorld(World):
    """One cluster."""

    faults = (
        "elect",
        "unclean",
        "hold_up",
        "transact",
        "isolate",
        "freeze_node",
        "unreachable",
        "breaks",
        "errors",
        "move_coordinator",
        "expire_member",
        "outrun",
        "remake",
        "grow",
    )
    expires = True
    away = ("expire_offsets", "unclean", "remake", "grow", "outrun")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.server = Server(self.machine, self.rng)
        self.server.complaints = self.oracle.complaints
        self._waiting: dict[Partition, list[Event]] = {}
        self._transactions = 0

    def attach(self, process: Process) -> None:
        """As there."""
        process.found["kafka"] = self.server

    def open_broker(self) -> AbstractAsyncContextManager[Broker]:
        """As there."""
        return KafkaBroker.open("any:9092", timing=_TIMING)

    def make_topics(self, topics: Mapping[str, int]) -> None:
        """As there."""
        for name, count in topics.items():
            self.server.create(name, count)

    async def has_begun(self, broker: Broker, group: str, topic: str, count: int) -> bool:
        """As there."""
        return len(await broker.admin.positions(group, topic)) >= count

    @property
    def largest_batch(self) -> int:  # type: ignore[override]  # here it follows from the records
        """As there."""
        return _MOST_RECORDS * (self.record_bytes + 100)

    def _pick(self, topic: str) -> tuple[int, Partition, int]:
        """(number of a partition, the partition, the life of its topic)."""
        held = self.server.topics[topic]
        number = self.rng.randrange(len(held.partitions))
        return number, held.partitions[number], held.id.int

    def write(self, topic: str) -> None:
        """As there."""
        number, partition, life = self._pick(topic)
        self._append(topic, life, number, partition, self.rng.choice((1, 1, 3, _MOST_RECORDS)))

    def _append(self, topic: str, life: int, line: int, partition: Partition, count: int, **how: Any) -> list[Event]:
        base, now = partition.log.end, self.server.now_ms()
        events = [self.oracle.issue(topic, life, line, base + index) for index in range(count)]
        records = [Record(b"k" * self.record_bytes, b"%d" % event.number, now) for event in events]
        self._waiting.setdefault(partition, []).extend(events)
        self.trace(f"append e{events[0].number}.. to {topic}[{line}] at {base}, {count}")
        partition.append(pack_batch(records, **how), count, now, **how)
        self._record_stored(partition)
        return events

    def _record_stored(self, partition: Partition) -> None:
        """Below the last stable offset: readers may have it, and must get it."""
        stable, still = partition.log.stable, []
        for event in self._waiting.get(partition, []):
            if event.state == "waiting" and event.offset < stable:
                event.state = "stored"
            if event.state == "waiting":
                still.append(event)
        self._waiting[partition] = still

    def strike(self, fault: str) -> None:
        """As there."""
        seconds = self.rng.choice((self.rng.uniform(0.1, 2.0), self.rng.uniform(2.0, 8.0)))
        node = self.rng.choice(NODES)
        if fault in ("isolate", "freeze_node", "unreachable", "breaks", "errors", "odd"):
            self.trace(f"kafka: {fault} node {node} for {seconds:.1f} s")
            self._strike_node(fault, node, seconds)
        elif fault in ("move_coordinator", "expire_member", "expire_offsets"):
            self.trace(f"kafka: {fault}")
            self._strike_groups(fault, seconds)
        else:
            topic = self.rng.choice(sorted(name for name in self.server.topics if not name.startswith("penstock.")))
            self.trace(f"kafka: {fault} {topic} for {seconds:.1f} s")
            self._strike_topic(fault, topic, node, seconds)

    def _strike_node(self, fault: str, node: int, seconds: float) -> None:
        server, link, later = self.server, self.server.links[node], self.machine.call_later
        if fault == "isolate":
            server.isolate(node)
            later(min(seconds, 3.0), server.rejoin, node, context=WORLD)
        elif fault == "freeze_node":
            link.is_frozen = True
            later(seconds, server.thaw, node, context=WORLD)
        elif fault == "odd":
            link.is_odd = True
            later(min(seconds, 2.0), setattr, link, "is_odd", False, context=WORLD)
        elif fault == "unreachable":
            link.is_unreachable = True
            later(seconds, setattr, link, "is_unreachable", False, context=WORLD)
        else:
            setattr(link, fault, self.rng.choice((0.2, 0.5, 1.0)))
            later(seconds, setattr, link, fault, 0.0, context=WORLD)

    def _strike_groups(self, fault: str, seconds: float) -> None:
        groups = list(self.server.groups.all.values())
        members = [(group.name, name) for group in groups for name in group.members]
        empty = [group for group in groups if not group.members]
        if fault == "move_coordinator":
            self.server.move_coordinator(min(seconds, 4.0))
        elif fault == "expire_member" and members:
            self.server.groups.remove(*self.rng.choice(members))
        elif fault == "expire_offsets" and empty:
            group = self.rng.choice(empty)
            self.trace(f"the commits of {group.name} expire")
            group.offsets.clear()
            self.oracle.displaced.add(group.name)

    def _strike_topic(self, fault: str, topic: str, node: int, seconds: float) -> None:
        match fault:
            case "elect" | "unclean":
                self._elect(topic, node, is_clean=fault == "elect")
            case "depose":
                self._depose(topic, seconds)
            case "zeros":
                self._damage(topic)
            case "hold_up":
                _, partition, _ = self._pick(topic)
                partition.is_held_up = True
                self.machine.call_later(seconds, self._catch_up, partition, context=WORLD)
            case "transact":
                self._transact(topic, seconds)
            case "outrun":
                self._outrun(topic)
            case "remake":
                self._remake(topic)
            case "grow":
                self._grow(topic)

    def _catch_up(self, partition: Partition) -> None:
        partition.catch_up()
        self._record_stored(partition)

    def _elect(self, topic: str, leader: int, *, is_clean: bool) -> None:
        """Unclean: some of what was stored is cut off, and often at once something else is stored there."""
        number, partition, life = self._pick(topic)
        log = partition.log
        if is_clean:
            cut = self.rng.choice((log.high_water, log.end))
        elif log.end == log.start:
            return
        else:
            cut = self.rng.randint(max(log.start, log.end - 12), log.end - 1)
        self._cut(topic, number, leader, cut, is_clean=is_clean)
        if not is_clean:
            for _ in range(self.rng.randrange(4)):
                self._append(topic, life, number, partition, self.rng.choice((1, 3, 8)))

    def _cut(self, topic: str, number: int, leader: int, cut: int, *, is_clean: bool = False) -> None:
        """A new leader's log ends there, or before."""
        held = self.server.topics[topic]
        life, partition = held.id.int, held.partitions[number]
        end = partition.elect(leader, max(cut, partition.log.start))
        self.trace(f"{topic}[{number}] is cut off at {end}")
        if not is_clean:
            self.oracle.unordered.add((topic, life, number))
        self.oracle.lose(
            self.oracle.of(topic, life, number), lambda event: event.offset >= end and event.offset < 1 << 40
        )
        for event in self.oracle.of(topic, life, number):
            if event.state in ("gone", "forbidden") and event.offset >= end:
                event.offset += 1 << 40  # what is stored here later is something else
        self._record_stored(partition)

    def _depose(self, topic: str, seconds: float) -> None:
        """Often the new leader stores as many records as were lost, and nothing behind them."""
        number, partition, life = self._pick(topic)
        log, former = partition.log, partition.leader
        if log.end == log.start:
            return
        self.server.isolate(former)
        self.machine.call_later(seconds, self.server.rejoin, former, context=WORLD)
        end = log.end
        self._cut(
            topic, number, self.rng.choice([node for node in NODES if node != former]), end - self.rng.randint(1, 4)
        )
        lost = end - partition.log.end
        for count in self.rng.choice(((lost,), (lost,), (), (lost, 1), (1,))):
            self._append(topic, life, number, partition, count)

    def _damage(self, topic: str) -> None:
        number, partition, _ = self._pick(topic)
        bases = [held.base for held in partition.log.batches if held.after <= partition.log.high_water]
        if bases and not partition.zeros:  # other replicas are intact
            base = partition.zeros[partition.leader] = self.rng.choice(bases[-3:])
            self.oracle.harmed.add((topic, number))
            self.trace(f"{topic}[{number}]: zeros at {base} on node {partition.leader}")

    def mend(self) -> None:
        """Where the leader's file is damaged, another replica becomes the leader (kafka-reassign-partitions)."""
        for name, topic in self.server.topics.items():
            for number, partition in enumerate(topic.partitions):
                if partition.leader in partition.zeros:
                    node = next(each for each in NODES if each not in partition.zeros)
                    partition.elect(node, partition.log.end)
                    self._record_stored(partition)
                    self.trace(f"operator: node {node} leads {name}[{number}]")

    def _transact(self, topic: str, seconds: float) -> None:
        number, partition, life = self._pick(topic)
        self._transactions += 1
        producer = 5000 + self._transactions
        is_commit = self.rng.random() < 0.5
        events: list[Event] = []
        for index in range(self.rng.randint(1, 3)):
            new = self._append(
                topic,
                life,
                number,
                partition,
                self.rng.choice((1, 3)),
                producer=producer,
                number=10 * index,
                in_transaction=True,
            )
            events += new

        def end() -> None:
            if self.server.topics.get(topic) is None or self.server.topics[topic].id.int != life:
                return
            partition.end_transaction(producer, is_commit=is_commit, time=self.server.now_ms())
            self.trace(f"{topic}[{number}]: a transaction of e{events[0].number}.. ends, {is_commit=}")
            if not is_commit:
                self.oracle.lose(events)
            self._record_stored(partition)

        self.machine.call_later(self.rng.choice((0.0, seconds)), end, context=WORLD)

    def _outrun(self, topic: str) -> None:
        number, partition, life = self._pick(topic)
        begun = partition.log.start
        before = self.rng.randint(begun, partition.log.end)
        partition.expire(before)
        start = partition.log.start
        if start > begun:
            self.oracle.harmed.add((topic, number))
        self.trace(f"retention passes {topic}[{number}] up to {start}")
        self.oracle.lose(self.oracle.of(topic, life, number), lambda event: event.offset < start)

    def _remake(self, topic: str) -> None:
        held = self.server.topics[topic]
        self.oracle.lose(self.oracle.of(topic, held.id.int))
        count = len(held.partitions)
        self.server.delete(topic)
        self.server.create(topic, count)
        for _ in range(self.rng.randrange(4)):
            self.write(topic)

    def _grow(self, topic: str) -> None:
        """Writers use a new partition at once."""
        held = self.server.topics[topic]
        number = len(held.partitions)
        if number >= _MOST_PARTITIONS:
            return
        self.server.add_partitions(topic, number + 1)
        for _ in range(self.rng.randrange(3)):
            self._append(topic, held.id.int, number, held.partitions[number], self.rng.choice((1, 3, 8)))

    def calm(self) -> None:
        """As there."""
        self.is_calm = True
        for node in NODES:
            link = self.server.links[node]
            link.is_unreachable, link.is_odd, link.breaks, link.errors = False, False, 0.0, 0.0
            self.server.rejoin(node)
            self.server.thaw(node)
        for topic in self.server.topics.values():
            for partition in topic.partitions:
                self._catch_up(partition)

    def close(self) -> None:
        """As there."""
