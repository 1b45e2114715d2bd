"""What operators do in a week, with the code that their commands run."""

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from services.core.broker.errors import BrokerError
from services.core.broker.producer import Producer
from services.core.broker.record import TopicPartition
from services.core.control.pauses import OPERATOR, Pause, Pauses, write_pause
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import CONTROL, delivery_group, delivery_topics
from services.core.yaml_source import BadConfiguration
from services.fleet.dead.audit import Auditor
from services.fleet.dead.found import DeadLetterSearch, Filter
from services.fleet.dead.redrive import Redrive, RedriveTargets
from tests.simulation.broker import ModelBroker
from tests.simulation.fleet import DRAIN_S
from tests.simulation.machine import Process

if TYPE_CHECKING:
    from tests.simulation.fleet_history import FleetHistory

_INNER = ("p.parked", "p.retry", "p.dead", "penstock.retry-in", "penstock.delay-1s", "penstock.delay-4s")


class Operator:
    """One who never fails: commands are tried until they work."""

    def __init__(self, history: "FleetHistory") -> None:
        self._history = history
        self._broker = ModelBroker(history.cluster, Process(history.machine, "operator"))
        self._is_redriving = "redrive" in history.choice.operators
        self._is_right = False

    async def act(self, kind: str) -> None:
        """One of `choice.OPERATORS`."""
        history = self._history
        lanes = [f"{pipe}/{name}" for pipe, name in sorted(history.oracle.routes)]
        lane = history.rng.choice(lanes)
        history.trace(f"operator: {kind} {lane}")
        actions: dict[str, Callable[[], Awaitable[None]]] = {
            "pause": lambda: self._pause_for_a_while(lane),
            "redrive": self._redrive,
            "remake": lambda: self._remake(list(history.pipes.streams)),
            "remake_inner": lambda: self._remake(_INNER),
            "restart": lambda: self._restart(schedule=None),
            "schedule_off": lambda: self._restart(schedule=[]),
            "rewind": lambda: self._rewind(lane),
            "repair": self._repair,
            "retention": self._pass_retention,
            "outrun": self._outrun,
            "damage": self._damage,
            "rotate_keys": history.rotation.rotate_keys,
            "rotate_secret": history.rotation.rotate_secret,
            "remove": lambda: self._remove(lane),
        }
        await actions[kind]()

    async def _pause_for_a_while(self, lane: str) -> None:
        await self._pause(lane, "paused")
        self._history.machine.create_task(self._resume_later(lane))

    async def put_right(self) -> None:
        """Resume what is paused, by whomever."""
        self._is_right = True
        await self._step_over()
        for pipe, name in sorted(self._history.oracle.routes):
            await self._resume_if_paused(f"{pipe}/{name}")
        self._history.machine.create_task(self._keep_resumed())

    async def _keep_resumed(self) -> None:
        """A 410 may be on record later than all is calm."""
        for _ in range(60):
            await asyncio.sleep(2.0)
            for pipe, name in sorted(self._history.oracle.routes):
                await self._resume_if_paused(f"{pipe}/{name}")

    async def _resume_if_paused(self, lane: str) -> None:
        pauses = Pauses(self._broker.reader)
        while True:
            try:
                await pauses.refresh()
                break
            except BrokerError:
                await asyncio.sleep(0.5)
        if lane in pauses.paused():
            await self._pause(lane, "resumed")

    async def _resume_later(self, lane: str) -> None:
        """Often not for good: what was parked is being replayed when it is paused again."""
        rng = self._history.rng
        while True:
            await asyncio.sleep(rng.uniform(0.5, 5.0))
            self._disturb(lane)
            await self._pause(lane, "resumed")
            if self._is_right or rng.random() < 0.5:
                return
            await asyncio.sleep(rng.uniform(0.2, 3.0))
            await self._pause(lane, "paused")

    def _disturb(self, lane: str) -> None:
        """A resume is where faults matter: those that hear of it fail to read on, and the receiver is down once more."""
        history, rng = self._history, self._history.rng
        if self._is_right:
            return
        if "weather" in history.choice.weights and rng.random() < 0.4:
            history.weather.begin(CONTROL, rng.uniform(1.0, 3.0), reads=True, kinds=("refused", "ok"))
        if "receiver" in history.choice.weights and rng.random() < 0.4:
            pipe, _, name = lane.partition("/")
            history.receiver((pipe, name)).begin(rng.uniform(1.0, 6.0), (rng.choice(("500", "503", "hang", "reset")),))

    async def _pause(self, lane: str, state: Any) -> None:
        at = self._history.cluster.store.wall_ms()
        await self._write(lambda producer: write_pause(producer, lane, Pause(state, OPERATOR, "me", at)))

    async def _write(self, command: Any) -> None:
        while True:
            try:
                async with Producer(self._broker.appender) as producer:
                    await command(producer)
            except BrokerError:
                await asyncio.sleep(0.5)
            else:
                return

    async def redrive_all(self) -> None:
        """Every letter that nobody acted upon."""
        if not self._is_redriving:
            return

        async def command(producer: Producer) -> None:
            history = self._history
            found = await DeadLetterSearch.open(self._broker, Filter())
            aim = RedriveTargets(history.pipes, to_stream=False)
            await Redrive(aim, producer, Auditor(producer, "me", {}), 1000.0).run(found.pages())

        await self._write(command)

    async def _down(self) -> None:
        self._history.record_deaf(2 * DRAIN_S)  # what is drained is still sent
        await self._history.fleet.down()

    async def _redrive(self) -> None:
        await self.redrive_all()
        if "remake_inner" in self._history.choice.operators and self._history.rng.random() < 0.5:
            await self._remake(["p.dead"])  # the next letters lie where those lay

    async def _remake(self, topics: Sequence[str]) -> None:
        """A topic is deleted and made again: what was still to be done of it is lost by the operator's will."""
        history, store = self._history, self._history.cluster.store
        there = [topic for topic in topics if topic in store.topics]
        if not there:
            return
        name = history.rng.choice(there)
        history.trace(f"operator: {name} is made anew")
        if history.rng.random() < 0.5:
            history.weather.begin("penstock.telemetry", 6.0, kinds=("slow", "never_arrived"))
        spec = store.topics[name].spec
        await asyncio.sleep(history.rng.uniform(0.0, 1.0))
        if name not in store.topics:
            return
        history.take_away(name)
        await asyncio.sleep(history.rng.choice((0.0, 0.3, 2.0)))
        store.create(spec)

    async def _rewind(self, lane: str) -> None:
        """Everything that the broker still has goes out once more."""
        history, admin = self._history, self._broker.admin
        pipe, _, name = lane.partition("/")
        group = delivery_group(pipe, name)
        await self._down()
        for topic in delivery_topics(pipe, history.pipes.pipes[pipe]):
            while True:
                try:
                    held = await admin.describe(topic)
                    await admin.set_committed(group, topic, {number: one.start - 1 for number, one in held.items()})
                except BrokerError:  # its members have not run out yet
                    await asyncio.sleep(0.5)
                else:
                    break
        await history.fleet.up(history.pipes)

    async def _repair(self) -> None:
        """A damaged file of offsets is repaired: one group's rows are gone."""
        history, store = self._history, self._history.cluster.store
        await self._down()
        group = history.rng.choice(sorted(store.groups))
        history.trace(f"operator: the rows of {group} are lost")
        while history.cluster.coordinator.members(group):  # they have not run out yet, and would still commit
            await asyncio.sleep(0.5)
        store.forget_group(group)
        await history.fleet.up(history.pipes)

    async def _pass_retention(self) -> None:
        """What every group has settled goes, as far as the dice say."""
        history, store = self._history, self._history.cluster.store
        for topic in (*history.pipes.streams, "p.out", "p.retry", "p.parked", "penstock.retry-in", "penstock.delay-1s"):
            for number in range(len(store.topics[topic].partitions) if topic in store.topics else 0):
                groups = [group for group, known in store.groups.items() if topic in known.began]
                settled = min((store.position(group, TopicPartition(topic, number)) for group in groups), default=0)
                store.expire(topic, number, history.rng.choice((settled, history.rng.randint(0, settled))))

    async def _outrun(self) -> None:
        """Retention passes what groups have not read yet: that is lost, and they stop until somebody moves them on."""
        history, store = self._history, self._history.cluster.store
        name = history.rng.choice([name for name in (*history.pipes.streams, "p.out") if name in store.topics])
        number = history.rng.randrange(len(store.topics[name].partitions))
        held = store.partition(name, number)
        if not held.offsets:
            return
        before = history.rng.choice((held.end, history.rng.choice(held.offsets)))
        history.trace(f"retention passes {name}[{number}] up to {before}")
        history.excuse(name, lambda partition, offset: partition == number and offset < before)
        store.expire(name, number, before)
        if history.rng.random() < 0.5:
            await asyncio.sleep(history.rng.uniform(0.0, 4.0))
            await self._step_over()

    async def _damage(self) -> None:
        """A page in the middle of a topic of the log, or its end, cannot be read any more."""
        history, store = self._history, self._history.cluster.store
        wanted = (*history.pipes.streams, "p.out", "p.retry", "p.parked", "penstock.retry-in", "penstock.delay-1s")
        places = [
            (name, number)
            for name in wanted
            if name in store.topics
            for number, held in enumerate(store.topics[name].partitions)
            if held.offsets and not held.damaged
        ]
        if history.choice.kind.name != "log" or not places:
            return
        name, number = history.rng.choice(places)
        offsets = store.partition(name, number).offsets
        at = max(0, len(offsets) - history.rng.randint(1, 4)) if history.rng.random() < 0.5 else 0
        first = history.rng.choice(offsets[at:])
        last = offsets[-1] if at else offsets[min(len(offsets) - 1, offsets.index(first) + history.rng.randint(0, 3))]
        history.trace(f"{name}[{number}]: {first} to {last} are damaged")
        history.excuse(name, lambda partition, offset: partition == number and first <= offset <= last)
        store.damage(name, number, first, last)
        if history.rng.random() < 0.5:
            await asyncio.sleep(history.rng.uniform(0.0, 4.0))
            await self._step_over()

    async def _step_over(self) -> None:
        """What docs/operating.md says under "When a partition stops": stop, repair or move the groups on, start."""
        history, store = self._history, self._history.cluster.store
        is_damaged = any(held.damaged for topic in store.topics.values() for held in topic.partitions)
        if not is_damaged and not self._stopped_groups():
            return
        history.trace("operator: steps over what is missing")
        await self._down()
        store.repair()
        while stopped := self._stopped_groups():
            group, topic, marks = stopped[0]
            try:
                await self._broker.admin.set_committed(group, topic, marks)
            except BrokerError:  # its members have not run out yet
                await asyncio.sleep(0.5)
        await history.fleet.up(history.pipes)

    def _stopped_groups(self) -> list[tuple[str, str, dict[int, int]]]:
        """Groups whose position retention has passed, by topic: the offsets behind which they go on."""
        store, found = self._history.cluster.store, []
        for group, known in sorted(store.groups.items()):
            for topic in sorted({*known.began, *(source.topic for source in known.committed)} & store.topics.keys()):
                marks = {
                    number: held.start - 1
                    for number, held in enumerate(store.topics[topic].partitions)
                    if store.position(group, TopicPartition(topic, number)) < held.start
                }
                if marks:
                    found.append((group, topic, marks))
        return found

    async def _remove(self, lane: str) -> None:
        """A destination is taken out of the pipe file, what waits for it is buried, and later it is put back."""
        history, before = self._history, self._history.document
        pipe, _, name = lane.partition("/")
        document = copy.deepcopy(before)
        kept = [one for one in document["pipes"][pipe]["destinations"] if one["name"] != name]
        if not kept:
            return
        document["pipes"][pipe]["destinations"] = kept
        await self._down()
        try:
            await history.fleet.up(PipeFile.model_validate(document))
        except BadConfiguration:
            document["removed"] = {lane: {"bury": "it was removed"}}
            await history.fleet.up(PipeFile.model_validate(document))
        await asyncio.sleep(history.rng.uniform(0.0, 6.0))
        await self._down()
        await history.fleet.up(history.pipes)

    async def _restart(self, schedule: list[float] | None) -> None:
        history = self._history
        await self._down()
        if schedule is not None:
            document = copy.deepcopy(history.document)
            for pipe in document["pipes"].values():
                for destination in pipe["destinations"]:
                    destination["webhook"]["schedule"] = schedule
            history.document, history.pipes = document, PipeFile.model_validate(document)
            history.route_all()
        await history.fleet.up(history.pipes)
