"""One history of a stream that moves: writers, readers and several commands at once, over models of two brokers.

The code of the migration is the real one, and so are the homes that every process follows, the producer and the loop of
readers. Commands, writers and readers are killed between any two of their steps, and frozen; requests are refused, late or lost.
Operators begin a second command beside the first, give moves up, move back and delete former topics. Then all is calmed, somebody
completes the move, and the history is judged: every acknowledged event was received, and those of a key in order.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import BrokerError, Unavailable, UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record
from services.core.broker.several.broker import SeveralBrokers
from services.core.control.homes import Homes
from services.core.event import ID, ORIGIN, Origin
from services.core.fleet_broker import open_over
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import CONTROL
from services.fleet.migrate.steps import Migration
from services.fleet.problem import CommandFailed
from tests.simulation.broker import ModelAdmin, open_broker
from tests.simulation.cluster import KINDS, Cluster
from tests.simulation.history import History
from tests.simulation.machine import Process
from tests.simulation.readers.member import Work, run_process
from tests.simulation.weather import KINDS as FAULTS
from tests.simulation.weather import Weather

STREAM, GROUP = "orders", "shop.crm"
NAMES = ("default", "second")
SETTLE_S = 300.0
COMMAND_S = 200.0
"""Longer than any wait of a command."""
_TRIES = 40
_ACTS = ("move", "move", "move", "move", "move", "undo", "finish")
"""What operators give: `--to` the other broker, `--undo`, `--finish`."""


class MigrationHistory(History):
    """The world of one seed."""

    def __init__(self, seed: int, tell: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, seed * 6007 + 3, tell)
        rng = self.rng
        log, kafka, _kinesis = KINDS
        kinds = (rng.choice((log, kafka)), rng.choice(KINDS))
        self.keeps_order = rng.random() < 0.6
        """Else readers are frozen, too: who wakes up delivers what it had read, beside its partitions' next owner."""
        self.has_rivals = rng.random() < 0.6
        """Several operators move the stream at once, and their commands are frozen."""
        faults = tuple(rng.sample(FAULTS, rng.randint(0, 3)))
        self.weather = [Weather(rng, self.machine.time, faults) for _ in NAMES]
        self.clusters = [
            Cluster(self.machine, rng, kind, weather) for kind, weather in zip(kinds, self.weather, strict=True)
        ]
        partitions = rng.randint(1, 3)
        self.clusters[0].store.create(TopicSpec(CONTROL, 1))
        self.clusters[0].store.create(TopicSpec(STREAM, partitions))
        self.pipes = PipeFile.model_validate(
            {
                "brokers": {"second": "log:///simulated"},
                "streams": {STREAM: {"partitions": partitions}},
                "pipes": {
                    "shop": {
                        "sources": [STREAM],
                        "destinations": [{"name": "crm", "webhook": {"url": "https://x.example/"}}],
                    }
                },
            }
        )
        self.acknowledged: dict[str, list[int]] = defaultdict(list)
        self.received: dict[str, list[int]] = defaultdict(list)
        self._next: dict[str, int] = defaultdict(int)
        self.processes: list[Process] = []
        self.is_over = self.is_calm = self.is_down = False
        self.goes_down = rng.random() < 0.2
        """The receiver does not answer from some time on, until the move is complete."""
        self.kills = self.moves = 0
        self.moves_to = NAMES[0]

    def _all_processes(self) -> list[Process]:
        return self.processes

    async def _live(self) -> None:
        rng = self.rng
        keeping = [asyncio.create_task(self._keep(f"writer {number}", self._write)) for number in range(2)]
        keeping += [asyncio.create_task(self._keep(f"reader {number}", self._read)) for number in range(2)]
        await asyncio.sleep(rng.uniform(0.5, 3.0))
        until = self.machine.time() + rng.uniform(10.0, 40.0)
        operators = [asyncio.create_task(self._operate(until)) for _ in range(3 if self.has_rivals else 1)]
        if self.goes_down:
            self.machine.call_later(rng.uniform(0.0, 5.0), setattr, self, "is_down", True)
        await self._trouble(until)
        await asyncio.gather(*operators)
        self._calm()
        await self._complete()
        self.is_down = False
        await asyncio.sleep(5.0)
        self.is_over = True
        await asyncio.sleep(5.0)  # the last answers
        await self.wait_for(lambda: not self._missing(), SETTLE_S)
        self._judge()
        for cluster in self.clusters:
            for consumer in cluster.consumers:
                self.trace(f"at the end {consumer.describe()}")
        if not self.verdict.complaints:
            await self._finish()
        for task in keeping:
            task.cancel()
        self.verdict.figures = {
            "events": sum(map(len, self.acknowledged.values())),
            "received": sum(map(len, self.received.values())),
            "moves": self.moves,
            "kills": self.kills,
            "faults": sum(weather.bitten for weather in self.weather),
        }

    # Processes.

    def _start(self, name: str, main: Callable[[Process], object]) -> Process:
        process = Process(self.machine, name)
        self.processes.append(process)
        for cluster in self.clusters:
            cluster.attach(process)
        process.start(main(process))  # type: ignore[arg-type]
        return process

    async def _keep(self, name: str, main: Callable[[Process], object]) -> None:
        """A process, started again whenever it ends."""
        while True:
            process = self._start(name, main)
            await process.ended.wait()
            self.trace(f"{name} ended: {process.status}")
            await asyncio.sleep(self.rng.uniform(0.1, 2.0))

    def _open(self, process: Process) -> AbstractAsyncContextManager[Broker]:
        own, second = (
            partial(_open_model, cluster, name, process) for cluster, name in zip(self.clusters, NAMES, strict=True)
        )
        noncontiguous = ["second"] if self.clusters[1].kind.gaps else []
        return open_over(own(), {"second": second}, {STREAM: "default"}, {}, noncontiguous)

    async def _write(self, process: Process) -> int:
        """As ingest: a client sends an event of a key when the one before it was answered for, or has failed."""
        try:
            async with self._open(process) as broker, Producer(broker.appender) as producer:
                await asyncio.gather(*(self._write_key(producer, f"{process.name[-1]}{key}") for key in range(2)))
        except BrokerError as error:
            self.trace(f"{process.name}: {error}")
        return 0

    async def _write_key(self, producer: Producer, key: str) -> None:
        while not self.is_over:
            number, self._next[key] = self._next[key], self._next[key] + 1
            headers = ((ID, f"{key}-{number}".encode()), (ORIGIN, Origin(f"run{key}", 0, number).pack()))
            sent = await producer.send(STREAM, [Record(key.encode(), b"%d" % number, 1000 + number, headers)])
            if not sent.failed:
                self.acknowledged[key].append(number)
            await asyncio.sleep(self.rng.choice((0.1, 0.5)))
        await asyncio.Event().wait()

    async def _read(self, process: Process) -> int:
        def make_work(_group: str) -> Work:
            return Work(self.rng, self._receive, lambda: self.is_calm, lambda _batch: None, lambda: self.is_down)

        return await run_process(process, partial(self._open, process), {GROUP: "earliest"}, [STREAM], make_work)

    def _receive(self, batch: Batch, index: int) -> None:
        record = batch.records[index]
        self.received[(record.key or b"").decode()].append(int(record.value or b"0"))

    async def _command(self, act: str, process: Process) -> int:
        """Returns its exit status."""
        try:
            async with self._open(process) as broker:
                assert isinstance(broker, SeveralBrokers)
                places = broker.brokers.places
                assert isinstance(places, Homes)
                migration = Migration(broker, places, lambda _to: self.pipes, STREAM, process.name)
                if act == "undo":
                    await migration.undo()
                elif act == "finish":
                    await migration.finish()
                else:
                    await migration.run(act)
                    self.moves += 1
                    self.moves_to = act
                self.trace(f"{process.name} has done {act}: {places.home(STREAM)}")
        except (BrokerError, CommandFailed) as error:
            self.trace(f"{process.name}, {act}: {error}")
            if "still read" in str(error):
                self.verdict.complaints.append(f"{process.name}, {act}: {error}")
            return 1
        return 0

    # Trouble, and its end.

    async def _operate(self, until: float) -> None:
        """Gives one command after the other. Some are killed; of some nobody waits for the end."""
        rng = self.rng
        while self.machine.time() < until:
            act = rng.choice(_ACTS)
            if act == "move":
                act = self._other
            process = self._start(f"command {len(self.processes)}", partial(self._command, act))
            self.trace(f"{process.name}: {act}")
            if rng.random() < 0.3:
                process.kill_at = rng.choice((rng.randint(1, 60), rng.randint(1, 1500)))
                self.kills += 1
            limit = rng.choice((1.0, 6.0, 30.0, COMMAND_S))
            await _wait(process.ended, min(limit, until - self.machine.time()))
            if not process.ended.is_set() and rng.random() < 0.3:
                process.kill()
                self.kills += 1
            await asyncio.sleep(rng.uniform(0.0, 3.0))

    @property
    def _other(self) -> str:
        """The broker that the stream was not moved to last."""
        return NAMES[self.moves_to == NAMES[0]]

    async def _trouble(self, until: float) -> None:
        rng = self.rng
        kinds = ["weather", "kill", "freeze", "expire", *["freeze"] * 3 * self.has_rivals]
        while self.machine.time() < until:
            await asyncio.sleep(rng.expovariate(1 / 1.5))
            self._strike(rng.choice(kinds))

    def _strike(self, kind: str) -> None:
        rng = self.rng
        if kind == "weather":
            topic = rng.choice((None, STREAM, CONTROL))
            weather = rng.choice(self.weather)
            self.trace(f"weather on {topic}")
            weather.begin(topic, rng.uniform(0.2, 5.0), reads=rng.random() < 0.4)
            return
        if kind == "expire":
            self._expire()
            return
        names: tuple[str, ...] = (
            ("writer", "command") if self.keeps_order and kind == "freeze" else ("writer", "command", "reader")
        )
        if self.has_rivals and rng.random() < 0.7:
            names = ("command",)
        alive = [one for one in self.processes if one.alive and not one.frozen and one.name.startswith(names)]
        if not alive:
            return
        process = rng.choice(alive)
        self.trace(f"{kind} {process.name}")
        if kind == "kill":
            process.kill_at = process.steps + rng.randint(1, 100)
            self.kills += 1
            return
        process.freeze()
        for cluster in self.clusters:
            cluster.record_freeze(process)
        self.machine.call_later(rng.choice((0.3, 1.0, 3.0, 3.5, 5.0, 12.0, 30.0)), process.thaw)

    def _expire(self) -> None:
        """Retention removes some of what the group has committed."""
        for cluster in self.clusters:
            group = cluster.store.groups.get(GROUP)
            if group is None or STREAM not in cluster.store.topics:
                continue
            for source, mark in group.committed.items():
                if source.topic == STREAM and self.rng.random() < 0.3:
                    offsets = [one for one in cluster.store.partition(*source).offsets if one <= mark]
                    if offsets:
                        cluster.store.expire(STREAM, source.partition, self.rng.choice(offsets) + 1)

    def _calm(self) -> None:
        self.trace("calm")
        self.is_calm = True
        for cluster in self.clusters:
            cluster.calm()
        for process in self.processes:
            process.kill_at = -1
            if process.alive and process.frozen:
                process.thaw()

    async def _complete(self) -> None:
        """As an operator who gives the command again, and does what its errors say, until the stream is somewhere."""
        for process in self.processes:
            if process.name.startswith("command"):
                await _wait(process.ended, COMMAND_S)
        for number in range(_TRIES):
            acts = ("second", "undo", "default", "finish")
            process = self._start(f"last {number}", partial(self._command, act := acts[number % len(acts)]))
            await _wait(process.ended, COMMAND_S * 2)
            if not process.ended.is_set():
                self.verdict.complaints.append(f"{act} has not ended after {COMMAND_S * 2:g} s")
                return
            if process.status == 0 and act in NAMES:
                return
        self.verdict.complaints.append("the move cannot be completed")

    async def _finish(self) -> None:
        process = self._start("finish", partial(self._command, "finish"))
        await _wait(process.ended, COMMAND_S)
        there = [name for name, cluster in zip(NAMES, self.clusters, strict=True) if STREAM in cluster.store.topics]
        if process.status == 0 and len(there) != 1:
            self.verdict.complaints.append(f"finished, and the topic is on {there}")

    # The promises.

    def _missing(self) -> list[str]:
        return [
            f"{key}-{number}"
            for key, numbers in self.acknowledged.items()
            for number in sorted(set(numbers) - set(self.received[key]))
        ]

    def _judge(self) -> None:
        if missing := self._missing():
            self.verdict.complaints.append(f"{len(missing)} acknowledged and not received: {missing[:8]}")
        for key, numbers in self.acknowledged.items():
            acknowledged = set(numbers)
            first = [number for number in dict.fromkeys(self.received[key]) if number in acknowledged]
            if self.keeps_order and first != sorted(first):
                late = next(one for one, other in zip(first, sorted(first), strict=True) if one != other)
                self.verdict.complaints.append(f"key {key} is out of order at {late}: {first}")


class _Admin(ModelAdmin):
    """Topics are deleted and made again here. name: of the broker."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        super().__init__(cluster)
        self._name = name

    async def incarnation(self, topic: str) -> str:
        """As in the contract."""
        return await self._cluster.call(lambda: self._incarnation(topic), topic)

    def _incarnation(self, topic: str) -> str:
        return f"{self._name}.{self._store.topic(topic).life}"

    async def delete_topic(self, topic: str, incarnation: str | None = None) -> None:
        """As in the contract. Kinesis has no request for it."""
        if self._cluster.kind.gaps and incarnation is not None:
            began = self._cluster.machine.time()
            if await self.incarnation(topic) != incarnation:
                raise UnknownTopic(topic)
            if self._cluster.machine.time() > began + 2.0:
                raise Unavailable(topic)
            incarnation = None

        def delete() -> None:
            if incarnation not in (None, self._incarnation(topic)):
                raise UnknownTopic(topic)
            self._store.delete(topic)

        await self._cluster.call(delete, topic)


@asynccontextmanager
async def _open_model(cluster: Cluster, name: str, process: Process) -> AsyncIterator[Broker]:
    async with open_broker(cluster, process) as broker:
        broker.admin = broker.reader = _Admin(cluster, name)
        yield broker


async def _wait(ended: asyncio.Event, seconds: float) -> None:
    """Until it is set, or for so long."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await ended.wait()
    except TimeoutError:
        pass
