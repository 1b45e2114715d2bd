"""One history of readers: a seed chooses a backend, its faults and some processes that read; it runs, is calmed, and is judged.

The reading code of the backend is the real one, under the real loop of services (`GroupMember`). There are no other services
here: histories of the whole fleet have a model of the groups in its place (tests/simulation/consumer.py).
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from services.core.broker.contract import Broker, Start
from services.core.broker.errors import BrokerError
from services.core.broker.record import Batch
from tests.simulation.history import History
from tests.simulation.machine import Process
from tests.simulation.readers.kafka_world import KafkaWorld
from tests.simulation.readers.kinesis_world import KinesisWorld
from tests.simulation.readers.log_world import LogWorld
from tests.simulation.readers.member import DRAIN_S, Work, run_process
from tests.simulation.readers.oracle import Oracle
from tests.simulation.readers.watch import Watch
from tests.simulation.readers.world import World

STREAM, WAITING = "orders", "p.retry"
EARLY, LATE = "p.early", "p.late"
RECORD_BYTES = 40_000
"""Of each record, in histories about memory."""
SETTLE_S = 150.0
"""Without faults every group must have everything by then."""
WORLDS: tuple[type[World], ...] = (*(KafkaWorld, KinesisWorld) * 3, KafkaWorld, LogWorld)
_PROCESS_FAULTS = ("kill", "freeze", "terminate")
SUBJECTS = ("depose", "bulk", "zeros", "marks", "depose", "odd", "zeros", "marks")
"""Of every 32nd seed in turn. depose: leaders that are cut off while others are elected, uncleanly. bulk: many partitions and
large batches; what members hold ahead is bounded. zeros: blocks of zeros in leaders' files. marks: logs are cut off where
transactions end. odd: aiokafka meets errors that it does not expect, and memberships end."""
DIRECTED = 27
"""The rest of these seeds by 32: the histories of one of `WORLDS`, which is Kafka's."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a seed chooses. away: what happens while all processes are stopped."""

    world: type[World]
    faults: tuple[str, ...]
    away: tuple[str, ...]
    process_faults: tuple[str, ...]
    weights: dict[str, int]
    groups: dict[str, Start]
    partitions: int
    processes: int
    seconds: float
    pace: float
    subject: str = ""
    """What a history of Kafka's readers is about: one of `SUBJECTS`, or everything."""

    @property
    def words(self) -> frozenset[str]:
        """What it has that a fault may need."""
        kind = self.world.__name__.removesuffix("World").lower()
        away = {f"away: {each}" for each in self.away}
        subject = {f"subject: {self.subject}"} if self.subject else set()
        return frozenset({"readers", kind, *self.faults, *self.process_faults, *self.groups, *away, *subject})


def choose(seed: int) -> Choice:
    """The same for the same seed."""
    rng = random.Random(seed)
    world = WORLDS[seed // 4 % len(WORLDS)]
    often = rng.sample(world.faults, 2)  # a few kinds that meet often
    faults = tuple(each for each in world.faults if each in often or rng.random() < 0.15)
    process_faults = tuple(each for each in _PROCESS_FAULTS if rng.random() < 0.4)
    away = tuple(each for each in world.away if rng.random() < 0.3)
    kinds = [*faults, *process_faults, *["away"] * bool(away)]
    weights = {each: 6 if each in often else rng.choice((1, 2)) for each in kinds}
    groups: dict[str, Start] = {EARLY: "earliest"} if rng.random() < 0.5 else {LATE: "latest"}
    if rng.random() < 0.3:
        groups = {EARLY: "earliest", LATE: "latest"}
    chosen = Choice(
        world,
        faults,
        away,
        process_faults,
        weights,
        groups,
        rng.randint(1, 3),
        rng.choice((1, 2, 2, 3)),
        rng.uniform(8.0, 20.0),
        rng.choice((0.2, 0.5, 1.0)),
    )
    return _direct(chosen, SUBJECTS[seed // 32 % len(SUBJECTS)]) if seed % 32 == DIRECTED else chosen


def _direct(choice: Choice, subject: str) -> Choice:
    by_subject: dict[str, tuple[str, ...]] = {
        "zeros": ("zeros",),
        "depose": ("depose",),
        "marks": ("transact", "unclean"),
        "odd": ("odd",),
    }
    often = by_subject.get(subject, ())
    if subject in ("depose", "marks"):  # nothing else
        return replace(
            choice, subject=subject, faults=often, away=(), weights=dict.fromkeys((*often, *choice.process_faults), 1)
        )
    faults = (*choice.faults, *often)
    return replace(
        choice,
        subject=subject,
        faults=faults,
        weights=choice.weights | dict.fromkeys(often, 6),
        partitions=24 if subject == "bulk" else choice.partitions,
        pace=0.1 if subject == "bulk" else choice.pace,
    )


class ReaderHistory(History):
    """The world of one seed."""

    def __init__(self, seed: int, tell: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, seed * 7919 + 5, tell)
        self.choice = choose(seed)
        self.oracle = Oracle()
        self.world = self.choice.world(self.machine, self.rng, self.oracle, self.trace)
        self.world.record_bytes = RECORD_BYTES if self.choice.subject == "bulk" else 1
        self.topics = {STREAM: self.choice.partitions, WAITING: 1}
        self._processes: list[Process] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._is_stopping = False
        self._works: dict[tuple[str, str], Work] = {}
        """The newest of each process and group."""
        self._watches: dict[tuple[str, str], Watch] = {}
        self._operator = Process(self.machine, "operator")
        self.world.attach(self._operator)

    def _all_processes(self) -> list[Process]:
        return [*self._processes, self._operator]

    def _throw_away(self) -> None:
        super()._throw_away()
        self.world.close()

    def _failures(self) -> list[str]:
        # aiokafka leaves the error of a request for commits behind, which it repeats.
        return [one for one in super()._failures() if "exception was never retrieved" not in one]

    # Processes.

    def _up(self) -> None:
        self._is_stopping = False
        self._keepers = [
            self.machine.create_task(self._keep(f"reader-{number}")) for number in range(self.choice.processes)
        ]

    async def _keep(self, name: str) -> None:
        while not self._is_stopping:
            process = Process(self.machine, name)
            self.world.attach(process)
            self._processes.append(process)
            watch = Watch(process, self.oracle, self.machine.time, self.world.largest_batch)
            make_work = partial(self._make_work, name, watch)
            open_broker = partial(self._open, watch)
            process.start(run_process(process, open_broker, self.choice.groups, self.topics, make_work))
            await process.ended.wait()
            self.trace(f"{name} ended: {process.status}")
            await asyncio.sleep(self.rng.uniform(0.1, 2.0))

    def _open(self, watch: Watch) -> AbstractAsyncContextManager[Broker]:
        return watch.open(self.world.open_broker())

    def _make_work(self, name: str, watch: Watch, group: str) -> Work:
        def processed(batch: Batch, index: int) -> None:
            number = int(batch.records[index].value or b"-1")
            self.trace(f"{name} {group} processed e{number} at {batch.topic}[{batch.partition}] {batch.offsets[index]}")
            self.oracle.process(group, number)

        work = Work(self.rng, processed, lambda: self.world.is_calm, partial(watch.record_batch, group))
        self._works[name, group] = work
        self._watches[name, group] = watch
        return work

    def _alive(self) -> list[Process]:
        return [one for one in self._processes if one.alive]

    async def _down(self) -> None:
        self._is_stopping = True
        for process in self._alive():
            if process.frozen:
                process.thaw()
            process.terminate()
            self.machine.call_later(DRAIN_S + 12.0, process.kill)
        for process in self._alive():
            await process.ended.wait()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    # Operators.

    async def _ask(self, command: Callable[[Broker], Any]) -> Any:
        """An operator's command, tried until it works."""

        async def work() -> Any:
            while True:
                try:
                    async with self.world.open_broker() as broker:
                        return await command(broker)
                except BrokerError as error:
                    self.trace(f"operator: {error}")
                    await asyncio.sleep(0.5)

        return await self.machine.create_task(work(), context=self._operator.context)

    async def _step_over(self) -> None:
        """As docs/operating.md says under "When a partition stops": stop, move what stopped to the oldest record, start."""
        await self._down()
        await self._ask(self._move_on)
        self._up()

    async def _move_on(self, broker: Broker) -> None:
        for group in self.choice.groups:
            for topic in self.topics:
                admin, held = broker.admin, await broker.reader.describe(topic)
                now = await admin.positions(group, topic)
                begun = await admin.has_begun(group, topic)
                marks = {
                    number: one.start - 1
                    for number, one in held.items()
                    if (begun and number not in now and self.world.expires) or now.get(number, one.start) < one.start
                }
                if marks:
                    self.trace(f"operator: moves {group} in {topic} behind {marks}")
                    await admin.set_committed(group, topic, marks)

    async def _go_away(self) -> None:
        """All stop, something happens, and they come back."""
        await self._down()
        await asyncio.sleep(self.rng.uniform(0.0, 6.0))
        for fault in self.rng.sample(self.choice.away, self.rng.randint(1, len(self.choice.away))):
            self.world.strike(fault)
        if self.rng.random() < 0.5:
            await self._ask(self._move_on)
            for fault in self.rng.sample(self.choice.away, self.rng.randint(0, min(2, len(self.choice.away)))):
                self.world.strike(fault)
        self._up()

    async def _has_begun(self) -> bool:
        async def ask(broker: Broker) -> bool:
            for group in self.choice.groups:
                for topic, count in self.topics.items():
                    if not await self.world.has_begun(broker, group, topic, count):
                        return False
            return True

        return bool(await self._ask(ask))

    async def _lags(self) -> dict[str, int]:
        async def ask(broker: Broker) -> dict[str, int]:
            found = {}
            for group in self.choice.groups:
                for topic in self.topics:
                    lags = await broker.admin.group_lag(group, topic)
                    if behind := sum(lag.records for lag in lags.values()):
                        found[f"{group} in {topic}"] = behind
            return found

        return dict(await self._ask(ask))

    # The history.

    async def _live(self) -> None:
        choice, rng = self.choice, self.rng
        self.trace(f"seed {self.seed}: {choice}")
        self.world.make_topics(self.topics)
        for _ in range(rng.randrange(4)):
            self.world.write(STREAM)
        for event in self.oracle.events:
            event.is_old = True
        for _ in range(rng.randrange(3)):
            self.world.write(WAITING)  # it waits for its group, wherever that begins
        self._up()
        while not await self._has_begun():
            await asyncio.sleep(0.5)
        until = self.machine.time() + choice.seconds
        watching = asyncio.create_task(self._watch_memory()) if choice.subject == "bulk" else None
        writing = asyncio.create_task(self._write(until))
        await self._trouble(until)
        await writing
        await self._end_well()
        if watching is not None:
            watching.cancel()
        await self._down()
        self.verdict.figures = {
            "events": len(self.oracle.events),
            "repeated": self.oracle.repeated,
            "processes": len(self._processes),
        }

    async def _end_well(self) -> None:
        """Without faults everything must be read."""
        complaints = self.verdict.complaints
        self.trace("calm")
        self.world.calm()
        for process in self._alive():
            process.kill_at = -1
        if self.rng.random() < 0.5:
            await self._step_over()  # else whatever stands still must go on without a restart
        if not await self._settle():
            complaints.append(f"never read: {self._first_missing()}")
        else:
            for topic in self.topics:
                self.world.write(topic)
            if not await self._settle():
                complaints.append(f"fresh records are not read: {self._first_missing()}")
        if not complaints and not self.oracle.complaints and (behind := await self._still_behind()):
            complaints.append(f"behind, with nothing left to read: {behind}")
        complaints += self.oracle.complaints

    async def _watch_memory(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            for key, work in self._works.items():
                self._watches[key].check_fetched(work.consumer)

    async def _write(self, until: float) -> None:
        while self.machine.time() < until:
            await asyncio.sleep(self.rng.expovariate(1 / self.choice.pace))
            self.world.write(self.rng.choice((STREAM, STREAM, WAITING)))

    async def _trouble(self, until: float) -> None:
        rng, weights = self.rng, self.choice.weights
        while self.machine.time() < until:
            await asyncio.sleep(rng.expovariate(1.0))
            kind = rng.choices(list(weights), list(weights.values()))[0]
            if kind == "away":
                await self._go_away()
            elif kind in _PROCESS_FAULTS:
                self._strike_process(kind)
            else:
                self.world.strike(kind)

    def _strike_process(self, kind: str) -> None:
        process = self.strike_one(kind, self._alive())
        if process is None:
            return
        if kind == "terminate":
            process.terminate()
            self.machine.call_later(DRAIN_S + 12.0, process.kill)
        elif kind == "freeze" and not process.frozen:
            process.freeze()
            self.machine.call_later(self.rng.choice((0.5, 3.0, 7.0)), process.thaw)

    async def _settle(self) -> bool:
        until = self.machine.time() + SETTLE_S
        while self.oracle.missing(self.choice.groups):
            if self.machine.time() > until:
                return False
            if any(work.has_stopped for work in self._works.values()):
                self.world.mend()
                await self._step_over()
            await asyncio.sleep(0.5)
        return True

    async def _still_behind(self) -> dict[str, int]:
        until = self.machine.time() + 30.0
        while behind := await self._lags():
            if self.machine.time() > until:
                return behind
            await asyncio.sleep(2.0)
        return {}

    def _first_missing(self) -> str:
        events = self.oracle.events
        return "; ".join(
            f"{group}: {len(left)}, first e{left[0]} at {events[left[0]].topic}[{events[left[0]].line}] {events[left[0]].offset}"
            for group, left in self.oracle.missing(self.choice.groups).items()
        )
