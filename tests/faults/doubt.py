"""Batches in doubt, refused and repeated on three real brokers: the fleet's first half, its clients, and what strikes it.

Two ingest write to two topics. One topic has two replicas that must both have a record, so that a single frozen follower makes
its leader first doubt and then refuse; the other has three, of which two must. For each ingest and partition one client sends
batches of equal size over HTTP, each once, and notes every answer. `doubt_oracle` says what must hold in the end.
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import aiohttp
import orjson

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker
from services.core.broker.partitioner import choose_partition
from services.core.jvm.kafka import KafkaCluster
from services.core.pipe_file.pipes import load_pipes
from services.core.provision import ensure_topics
from tests.faults.fleet import DEADLINE, Fleet, Service, open_fleet, wait_until
from tests.faults.sender import CLIENT_TIMEOUT
from tests.support.kafka import describe_partitions, make_topic, unique_name
from tests.support.oracle import Fate, Ledger
from tests.support.ports import free_port
from tests.support.tcp_proxy import TcpProxy, open_proxy

PARTITIONS = 6
"""Of each topic, each with one client of each ingest: nothing travels with its batches, so that all have the same size."""
BATCH = 2
"""Events of every batch."""
PAUSE_S = 0.1
PIPE = "doubt"
CUT_S = (4.0, 12.0)
REPLACED_S = 9.0
"""Longer than it takes the controller to miss a node (6 s)."""


@dataclass(eq=False)
class Client:
    """Sends one row of batches to one ingest; all events have one key. numbers: of its events, in their order."""

    topic: str
    partition: int
    url: str
    key: str
    numbers: list[int] = field(default_factory=list)
    acknowledged_at: float = 0.0

    async def run(self, trial: "DoubtTrial", session: aiohttp.ClientSession, stopping: asyncio.Event) -> None:
        """Send batch after batch, each once, until told to stop."""
        ledger = trial.ledger
        while not stopping.is_set():
            numbers = ledger.issue(BATCH)
            self.numbers += numbers
            ledger.sending(numbers)
            events = [self._event(ledger.event_id(number)) for number in numbers]
            try:
                async with session.post(self.url, json=events) as answer:
                    status, body = answer.status, await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError):
                status, body = 0, b""
            ledger.note_answer(numbers, status, body)
            trial.answers[status] += 1
            if status == 200:
                self.acknowledged_at = time.monotonic()
                trial.acks.append(self.acknowledged_at)
            await asyncio.sleep(PAUSE_S)

    def _event(self, event_id: str) -> dict[str, object]:
        """Of today: see tests/kafka/test_producer_expiry.py. All have the same size."""
        return {
            "id": event_id,
            "key": self.key,
            "time": time.time_ns() // 1_000_000,
            "fill": "x" * (40 - len(event_id)),
        }


@dataclass(eq=False)
class DoubtTrial:
    """One run. doors: the proxy between the clients and each ingest, by its name. answers: how often each status was seen (0: no
    answer).

    links: the proxy through which other brokers reach a node. quorum: (from, to) the proxies through which nodes reach each
    other's controllers. Both are empty without proxies.
    """

    cluster: KafkaCluster
    broker: Broker
    fleet: Fleet
    pipes: Path
    topics: tuple[str, str]
    seed: int
    ledger: Ledger
    doors: dict[str, TcpProxy] = field(default_factory=dict)
    clients: list[Client] = field(default_factory=list)
    links: dict[int, TcpProxy] = field(default_factory=dict)
    quorum: dict[tuple[int, int], TcpProxy] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    strikes: list[str] = field(default_factory=list)
    answers: Counter[int] = field(default_factory=Counter)
    acks: list[float] = field(default_factory=list)
    recovery: float = 0.0

    @property
    def strict(self) -> str:
        """The topic of which both replicas must have a record."""
        return self.topics[0]

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """All clients send meanwhile; ends when every answer is there."""
        stopping = asyncio.Event()
        limits = {"timeout": aiohttp.ClientTimeout(total=CLIENT_TIMEOUT), "connector": aiohttp.TCPConnector(limit=0)}
        async with aiohttp.ClientSession(**limits) as session, asyncio.TaskGroup() as group:  # type: ignore[arg-type]
            for client in self.clients:
                group.create_task(client.run(self, session, stopping))
            try:
                await self.recover()
                yield
            finally:
                stopping.set()

    async def stop_ingest(self) -> None:
        """Drained: each has reported everything."""
        for service in self.fleet.of("ingest"):
            service.send(signal.SIGTERM)
        for service in self.fleet.services.values():
            if "ingest" in service.module:
                assert await service.wait_end() == 0, service.log.read_text()[-2000:]

    async def freeze(self, node: int, seconds: float) -> None:
        """Stop one node for so long, then wait until every client gets through again."""
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
        """No other broker reaches this one for so long; ingest and the controllers do."""
        async with self._refusing(f"node {node} was cut off", [self.links[node]]):
            await asyncio.sleep(seconds)
        self.faults["cut"] += 1
        await self.recover()

    async def isolate(self, node: int, other: int, seconds: float) -> None:
        """This node and the controllers lose each other: it is replaced, and leads on without hearing of it. Ingest reaches it.

        Meanwhile no broker reaches another node for so long: what that node has got is in doubt, and an ingest that asks the old
        leader is told that it leads.
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

    def hang_up(self, name: str) -> None:
        """The connections of the clients of one ingest are lost, with the answers that were to come."""
        self.doors[name].cut()
        self.faults["hang up"] += 1

    async def kill_ingest(self, name: str) -> None:
        """Kill -9, and start it again. What it had in doubt, nobody repeats."""
        service = self.fleet.services[name]
        await service.kill()
        await service.start()
        self.strikes.append(f"{time.monotonic():.3f}: {name} was killed")
        self.faults["kill ingest"] += 1

    async def recover(self) -> None:
        """Until each client has had a batch acknowledged that it sent after now."""
        began = time.monotonic()
        sent = [len(client.numbers) for client in self.clients]

        def all_do() -> bool:
            return all(
                any(self.ledger.fate[number] == Fate.OBLIGED for number in client.numbers[before:])
                for client, before in zip(self.clients, sent, strict=True)
            )

        await wait_until(all_do, DEADLINE)
        self.recovery = max(self.recovery, time.monotonic() - began)

    async def follower(self, partition: int) -> int:
        """The node that follows in a partition of the strict topic."""
        found = (await describe_partitions(self.cluster.bootstrap, self.strict))[partition]
        replicas: list[int] = found["replicas"]
        return next(node for node in replicas if node != found["leader"])

    async def strike_until(self, end: float, chance: random.Random, freeze_s: tuple[float, float]) -> None:
        """Freeze and cut nodes, one after the other, until this moment (monotonic); beside half of it strike an ingest."""
        while time.monotonic() < end:
            kind = chance.random()
            async with asyncio.TaskGroup() as group:
                if chance.random() < 0.5:
                    group.create_task(self._strike_ingest(chance.choice(sorted(self.doors)), chance))
                if kind < 0.25:
                    node, other = chance.sample(list(self.links), 2)
                    await self.isolate(node, other, chance.uniform(*CUT_S))
                elif kind < 0.5:
                    await self.cut(chance.choice(list(self.links)), chance.uniform(*CUT_S))
                else:
                    await self.freeze(await self.follower(chance.randrange(PARTITIONS)), chance.uniform(*freeze_s))
            await asyncio.sleep(chance.uniform(0.5, 2.0))

    async def _strike_ingest(self, name: str, chance: random.Random) -> None:
        await asyncio.sleep(chance.uniform(0.5, 9.0))
        if chance.random() < 0.5:
            self.hang_up(name)
        else:
            await self.kill_ingest(name)


@asynccontextmanager
async def open_doubt(
    cluster: KafkaCluster, folder: Path, seed: int, ingest: str = "services.ingest"
) -> AsyncIterator[DoubtTrial]:
    """Topics, two ingest and their clients on a running cluster; nobody sends yet. ingest: the module that runs."""
    keep = {"retention.ms": "-1", "min.insync.replicas": "2"}
    strict = await make_topic(cluster.bootstrap, "strict", partitions=PARTITIONS, replicas=2, configs=keep)
    usual = await make_topic(cluster.bootstrap, "usual", partitions=PARTITIONS, configs=keep)
    url = f"kafka://{cluster.bootstrap}"
    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(open_broker(url))
        pipes = await asyncio.to_thread(_write_pipes, folder, (strict, usual))
        await ensure_topics(broker.admin, await asyncio.to_thread(load_pipes, pipes))
        fleet = await stack.enter_async_context(open_fleet())
        trial = DoubtTrial(cluster, broker, fleet, pipes, (strict, usual), seed, Ledger(unique_name("doubt")))
        for name in ("ingest-1", "ingest-2"):
            port = free_port()
            arguments = ["--broker", url, "--pipes", str(pipes), "--listen", f"127.0.0.1:{port}"]
            await fleet.add(Service(name, ingest, arguments, folder), ready=False)
            door = trial.doors[name] = await stack.enter_async_context(open_proxy("127.0.0.1", port))
            trial.clients += [
                _make_client(topic, partition, door) for topic in trial.topics for partition in range(PARTITIONS)
            ]
        for service in fleet.services.values():
            await service.wait_ready()
        yield trial


def _make_client(topic: str, partition: int, door: TcpProxy) -> Client:
    key = next(key for n in count() if choose_partition((key := f"k{n}").encode(), PARTITIONS) == partition)
    return Client(topic, partition, f"http://127.0.0.1:{door.port}/v1/streams/{topic}/events", key)


def _write_pipes(folder: Path, topics: tuple[str, str]) -> Path:
    """Nobody delivers: the trial ends at the topics."""
    stream = {"partitions": PARTITIONS, "id": "id", "key": "key", "time": "time"}
    hook = {"name": "hook", "webhook": {"url": "http://127.0.0.1:9/", "schedule": []}}
    pipes = {PIPE: {"sources": list(topics), "destinations": [hook]}}
    path = folder / "doubt.yaml"
    path.write_bytes(orjson.dumps({"streams": dict.fromkeys(topics, stream), "pipes": pipes}))
    return path
