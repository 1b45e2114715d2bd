"""Batches in doubt, refused and repeated on three real brokers: make soak ARGS="--doubt --minutes 10"

Writers send batches of equal size while followers are frozen and thawed and brokers lose each other. One topic has two
replicas that must both have a record, so that a single frozen follower makes its leader first doubt and then refuse; the other
has three, of which two must. In the end every record is read. One that was acknowledged must be there once, in the order of its
writer; one that was "not stored" must not be there. Exit status 1 when that does not hold, or when nothing was ever in doubt.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import Any

from aiokafka.record.memory_records import MemoryRecords
from aiokafka.structs import TopicPartition

from services.core.broker.contract import Broker
from services.core.broker.errors import OutcomeUnknown
from services.core.broker.kafka import KafkaBroker, Timing
from services.core.broker.kafka.appender import KafkaAppender, SequenceState
from services.core.broker.kafka.record_batch import Packed
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.broker.retry import AppendPolicy
from services.core.jvm.kafka import KafkaCluster, Node, free_ports, server_properties
from tests.support.fault_table import HEAD, Row
from tests.support.kafka import describe_partitions, make_topic
from tests.support.tcp_proxy import TcpProxy, open_proxy

PARTITIONS = 6
"""Of each topic, each with one writer: nothing travels with its batches, so that all have the same size."""
BATCH = 2
"""Records of every batch."""
PAUSE_S = 0.02
QUICK = AppendPolicy(deadline=3.0, append_timeout=4.0)
QUICK_TIMING = Timing(session=2.0, heartbeat=0.3, drain=10.0, request=3.0, metadata=1.0)
FREEZE_S = (7.5, 14.0)
"""Longer than it takes the controller to miss a node (6 s), so that its leader has too few replicas in sync."""
CUT_S = (4.0, 12.0)
REPLACED_S = 9.0
"""Longer than it takes the controller to miss a node (6 s)."""
SETTLE_S = 240.0
_PAGE = 1000


class RecordedAppender(KafkaAppender):
    """Keeps what each attempt was answered. attempts: by the values of its batch's first record."""

    attempts: dict[bytes, list[str]]

    async def _send(
        self, target: Any, state: SequenceState, packed: Packed, batch: Sequence[Record], *rest: Any
    ) -> int:
        client = await self._cluster.client()
        leader = client.cluster.leader_for_partition(TopicPartition(target.topic, target.partition))
        began, number = time.monotonic(), f"producer {state.identity.producer_id} number {state.next}"
        answer: object = "cancelled"
        try:
            offset = await super()._send(target, state, packed, batch, *rest)
        except BaseException as error:
            answer = repr(error)
            raise
        else:
            answer = f"offset {offset}"
            return offset
        finally:
            took = f"{began:.3f} to {time.monotonic():.3f}"
            texts = self.attempts.setdefault(batch[0].value or b"", [])
            texts.append(f"{took}: {len(batch)} records as {number} to node {leader}: {answer}")


@dataclass(eq=False)
class Writer:
    """One row of batches to one partition. fates: of each of its values, by number."""

    topic: str
    partition: int
    name: str
    fates: list[str] = field(default_factory=list)

    async def run(self, producer: Producer, stopping: asyncio.Event, acknowledged: Callable[[], None]) -> None:
        """Send batch after batch, each once, until told to stop."""
        while not stopping.is_set():
            first = len(self.fates)
            self.fates += ["unknown"] * BATCH
            now = (
                time.time_ns() // 1_000_000
            )  # Kafka forgets early who sent records of an old time: see test_producer_expiry
            records = [Record(b"k", b"%s-%d" % (self.name.encode(), first + n), now) for n in range(BATCH)]
            (part,) = (await producer.send_to(self.topic, {self.partition: records})).parts
            failed = dict(part.failed)
            for index in range(BATCH):
                error = failed.get(index)
                fate = "unknown" if isinstance(error, OutcomeUnknown) else "refused" if error else "acknowledged"
                self.fates[first + index] = fate
            if not failed:
                acknowledged()
            await asyncio.sleep(PAUSE_S)

    def complaints(self, found: list[int]) -> list[str]:
        """What is wrong about the numbers of its records that are stored, in their order."""
        counts = Counter(found)
        wrong = []
        for number, fate in enumerate(self.fates):
            if fate == "acknowledged" and counts[number] != 1:
                wrong.append(
                    f"{self.topic}[{self.partition}] {self.name}-{number} was acknowledged: {counts[number]} times"
                )
            elif fate == "refused" and counts[number]:
                wrong.append(
                    f"{self.topic}[{self.partition}] {self.name}-{number} was not stored: {counts[number]} times"
                )
        ordered = [number for number in found if self.fates[number] == "acknowledged"]
        if ordered != sorted(ordered):
            wrong.append(f"{self.topic}[{self.partition}] {self.name}: acknowledged records lie in another order")
        return wrong


@dataclass(eq=False)
class DoubtTrial:
    """One run. links: the proxy through which other brokers reach a node. quorum: (from, to) the proxies through which nodes
    reach each other's controllers. Both are empty without proxies."""

    cluster: KafkaCluster
    broker: Broker
    producer: Producer
    writers: list[Writer]
    seed: int
    appender: RecordedAppender
    links: dict[int, TcpProxy] = field(default_factory=dict)
    quorum: dict[tuple[int, int], TcpProxy] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    strikes: list[str] = field(default_factory=list)
    stored: dict[str, int] = field(default_factory=dict)
    acks: list[float] = field(default_factory=list)
    recovery: float = 0.0
    complaints: list[str] = field(default_factory=list)

    @property
    def strict(self) -> str:
        """The topic of which both replicas must have a record."""
        return self.writers[0].topic

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """All write meanwhile; ends when every answer is there."""
        stopping = asyncio.Event()

        def acknowledged() -> None:
            self.acks.append(time.monotonic())

        async with asyncio.TaskGroup() as group:
            for writer in self.writers:
                group.create_task(writer.run(self.producer, stopping, acknowledged))
            try:
                yield
            finally:
                stopping.set()

    async def freeze(self, node: int, seconds: float) -> None:
        """Stop one node for so long, then wait until every writer gets through again."""
        began = time.monotonic()
        pid = self.cluster.brokers[node].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.strikes.append(f"{began:.3f} to {time.monotonic():.3f}: node {node} was frozen")
        self.faults["freeze"] += 1
        await self.recover()

    async def cut(self, node: int, seconds: float) -> None:
        """No other broker reaches this one for so long; clients and the controllers do."""
        async with self._refusing(f"node {node} was cut off", [self.links[node]]):
            await asyncio.sleep(seconds)
        self.faults["cut"] += 1
        await self.recover()

    async def isolate(self, node: int, other: int, seconds: float) -> None:
        """This node and the controllers lose each other: it is replaced, and leads on without hearing of it. Clients reach it.

        Meanwhile no broker reaches another node for so long: what that node has got is in doubt, and clients that ask the old
        leader are told that it leads.
        """
        links = [link for pair, link in self.quorum.items() if node in pair]
        async with self._refusing(f"node {node} was isolated", links):
            await asyncio.sleep(REPLACED_S)
            async with self._refusing(f"node {other} was cut off", [self.links[other]]):
                await asyncio.sleep(seconds)
        self.faults["isolated"] += 1
        await self.recover()

    @asynccontextmanager
    async def _refusing(self, text: str, links: Sequence[TcpProxy]) -> AsyncIterator[None]:
        began = time.monotonic()
        for link in links:
            link.refuses = True
            link.cut()
        try:
            yield
        finally:
            for link in links:
                link.refuses = False
            self.strikes.append(f"{began:.3f} to {time.monotonic():.3f}: {text}")

    async def recover(self) -> None:
        """Until each writer has had something acknowledged again."""
        began = time.monotonic()
        sent = [len(writer.fates) for writer in self.writers]
        async with asyncio.timeout(SETTLE_S):
            while not all("acknowledged" in w.fates[n:] for w, n in zip(self.writers, sent, strict=True)):
                await asyncio.sleep(0.1)
        self.recovery = max(self.recovery, time.monotonic() - began)

    async def follower(self, partition: int) -> int:
        """The node that follows in a partition of the strict topic."""
        found = (await describe_partitions(self.cluster.bootstrap, self.strict))[partition]
        replicas: list[int] = found["replicas"]
        return next(node for node in replicas if node != found["leader"])

    async def strike_until(self, end: float, chance: random.Random) -> None:
        """Freeze and cut nodes, one after the other, until this moment (monotonic)."""
        while time.monotonic() < end:
            kind = chance.random() if self.links else 1.0
            if kind < 0.25:
                node, other = chance.sample(list(self.links), 2)
                await self.isolate(node, other, chance.uniform(*CUT_S))
            elif kind < 0.5:
                await self.cut(chance.choice(list(self.links)), chance.uniform(*CUT_S))
            else:
                await self.freeze(await self.follower(chance.randrange(PARTITIONS)), chance.uniform(*FREEZE_S))
            await asyncio.sleep(chance.uniform(0.5, 2.0))

    async def judge(self) -> Row:
        """Read everything, and compare. The trial's row; `complaints` says what is wrong."""
        for topic in {writer.topic for writer in self.writers}:
            for partition in range(PARTITIONS):
                await self._judge_partition(topic, partition)
        fates = Counter(fate for writer in self.writers for fate in writer.fates)
        if not fates["unknown"] or not fates["refused"]:
            self.complaints.append(f"nothing was in doubt, or nothing refused: the run proves nothing ({dict(fates)})")
        gaps = [later - earlier for earlier, later in zip(self.acks, self.acks[1:], strict=False)]
        acknowledged = fates.pop("acknowledged", 0)
        return Row(
            fault="22 followers frozen" + (", brokers cut off" if self.links else "") + ", equal batches",
            broker="kafka",
            acknowledged=acknowledged,
            delivered=sum(1 for count in self.stored.values() if count),
            dead=0,
            duplicates=sum(count - 1 for count in self.stored.values()),
            sent_again=0,
            lost=sum("was acknowledged: 0" in text for text in self.complaints),
            recovery=self.recovery,
            gap=max(gaps, default=None),
            peak_rss={},
            seed=self.seed,
            answers=dict(fates),
        )

    async def _judge_partition(self, topic: str, partition: int) -> None:
        found: dict[str, list[int]] = {}
        held = (await self.broker.reader.describe(topic))[partition]
        offset = held.start
        while offset < held.end and (
            batch := await self.broker.reader.read(topic, partition, offset, max_records=_PAGE)
        ):
            for record in batch.records:
                name, _, number = (record.value or b"").decode().partition("-")
                found.setdefault(name, []).append(int(number))
                self.stored[f"{name}-{number}"] = self.stored.get(f"{name}-{number}", 0) + 1
            offset = batch.offsets[-1] + 1
        for writer in self.writers:
            if (writer.topic, writer.partition) == (topic, partition):
                wrong = writer.complaints(found.get(writer.name, []))
                self.complaints += wrong
                if wrong:
                    await self._explain(writer, found.get(writer.name, []))

    async def _explain(self, writer: Writer, found: list[int]) -> None:
        """Say how what lies twice got there: what is stored under which number, and what each attempt was answered."""
        counts = Counter(found)
        leader = (await describe_partitions(self.cluster.bootstrap, writer.topic))[writer.partition]["leader"]
        folder = self.cluster.brokers[leader].data / f"{writer.topic}-{writer.partition}"
        copies: dict[bytes, list[str]] = {}
        for path in sorted(folder.glob("*.log")):
            records = MemoryRecords(path.read_bytes())
            while records.has_next():
                batch = records.next_batch()
                place = f"offset {batch.base_offset} as producer {batch.producer_id} number {batch.base_sequence}"
                for record in batch:
                    copies.setdefault(record.value, []).append(place)
        self.complaints += [f"  strike {text}" for text in self.strikes]
        for number in sorted(counts):
            if counts[number] > 1 and number % BATCH == 0:
                for near in range(number - 2 * BATCH, number + 2 * BATCH, BATCH):
                    value = b"%s-%d" % (writer.name.encode(), near)
                    self.complaints += [f"  {value!r} is stored at {text}" for text in copies.get(value, [])]
                    self.complaints += [
                        f"  {value!r} was tried {text}" for text in self.appender.attempts.get(value, [])
                    ]


@asynccontextmanager
async def open_doubt(
    cluster: KafkaCluster, seed: int, timing: Timing, policy: AppendPolicy
) -> AsyncIterator[DoubtTrial]:
    """Topics, writers and a producer on a running cluster; nobody writes yet."""
    keep = {"retention.ms": "-1", "min.insync.replicas": "2"}
    strict = await make_topic(cluster.bootstrap, "strict", partitions=PARTITIONS, replicas=2, configs=keep)
    usual = await make_topic(cluster.bootstrap, "usual", partitions=PARTITIONS, configs=keep)
    places = [(topic, partition) for topic in (strict, usual) for partition in range(PARTITIONS)]
    writers = [Writer(*place, f"w{index}") for index, place in enumerate(places)]
    async with KafkaBroker.open(cluster.bootstrap, timing=timing) as broker:
        appender = RecordedAppender(broker._sending, broker._limits)
        appender.attempts = {}
        producer = Producer(appender, policy=policy)
        yield DoubtTrial(cluster, broker, producer, writers, seed, appender)
        await producer.close()


class LinkedCluster(KafkaCluster):
    """Three nodes that reach each other through proxies only. links: the port for the broker of each node. quorum: (from, to) the
    ports for the controllers."""

    def __init__(self, folder: Path) -> None:
        often = {"leader.imbalance.check.interval.seconds": "10", "producer.id.expiration.check.interval.ms": "5000"}
        super().__init__(folder, settings={"replica.lag.time.max.ms": "4000", **often})
        taken = {port for one in self.brokers.values() for port in (one.node.port, one.node.controller_port)}
        free = [port for port in free_ports(len(taken) + len(self.brokers)) if port not in taken]
        self.inner = dict(zip(self.brokers, free, strict=False))
        self.links: dict[int, int] = {}
        self.quorum: dict[tuple[int, int], int] = {}

    def properties(self, node: Node, nodes: Sequence[Node]) -> str:
        """As without links, with a listener of its own for other brokers, that they hear of as the link's port."""
        shared = self.brokers[node.node_id].address
        listeners = f"BROKER://{shared},INNER://127.0.0.1:{self.inner[node.node_id]}"
        more = {
            "listeners": f"{listeners},CONTROLLER://127.0.0.1:{node.controller_port}",
            "advertised.listeners": f"BROKER://{shared},INNER://127.0.0.1:{self.links[node.node_id]}",
            "listener.security.protocol.map": "BROKER:PLAINTEXT,INNER:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "INNER",
            "controller.quorum.voters": ",".join(f"{to.node_id}@127.0.0.1:{self._voter(node, to)}" for to in nodes),
        }
        return server_properties(node, nodes, str(self.brokers[node.node_id].data), {**self.settings, **more})

    def _voter(self, node: Node, to: Node) -> int:
        return self.quorum.get((node.node_id, to.node_id), to.controller_port)


async def soak(minutes: float, seed: int, folder: Path) -> int:
    """Run it on a Kafka of its own and print the row. The exit status."""
    cluster = LinkedCluster(folder / "kafka")
    async with AsyncExitStack() as stack:
        links = {n: await stack.enter_async_context(open_proxy("127.0.0.1", p)) for n, p in cluster.inner.items()}
        cluster.links = {node: link.port for node, link in links.items()}
        ports = {node: one.node.controller_port for node, one in cluster.brokers.items()}
        quorum = {
            pair: await stack.enter_async_context(open_proxy("127.0.0.1", ports[pair[1]]))
            for pair in permutations(ports, 2)
        }
        cluster.quorum = {pair: link.port for pair, link in quorum.items()}
        stack.callback(cluster.stop, grace_s=0)
        await asyncio.to_thread(cluster.start)
        trial = await stack.enter_async_context(open_doubt(cluster, seed, Timing(), AppendPolicy()))
        trial.links, trial.quorum = links, quorum
        async with trial.load():
            await trial.strike_until(time.monotonic() + 60 * minutes, random.Random(seed))
        row = await trial.judge()
    print(f"{minutes:g} minutes, faults {dict(trial.faults)}, seed {seed}\n{HEAD}\n{row.text()}")
    for text in trial.complaints[:500]:
        print("FAILED:", text)
    return 1 if trial.complaints else 0


def run(minutes: float, seed: int) -> int:
    """The exit status."""
    with tempfile.TemporaryDirectory(prefix="penstock-doubt-", ignore_cleanup_errors=True) as name:
        return asyncio.run(soak(minutes, seed, Path(name)))


if __name__ == "__main__":
    sys.exit("Try: make soak ARGS=--doubt")
