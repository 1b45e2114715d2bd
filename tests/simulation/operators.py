"""What operators do in a week, with the code that their commands run."""

import asyncio
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from services.core.broker.errors import BrokerError
from services.core.broker.producer import Producer
from services.core.pauses import OPERATOR, Pause, Pauses, write_pause
from services.core.pipes import PipeFile, delivery_group, delivery_topics
from services.core.yaml_source import BadConfiguration
from services.fleet.dead.aim import Aim
from services.fleet.dead.audit import Auditor
from services.fleet.dead.filter import Filter
from services.fleet.dead.found import Found
from services.fleet.dead.redrive import Redrive
from tests.simulation.broker import ModelBroker
from tests.simulation.machine import Process

if TYPE_CHECKING:
    from tests.simulation.history import History


class Operator:
    """One who never fails: commands are tried until they work."""

    def __init__(self, history: "History") -> None:
        self._history = history
        self._broker = ModelBroker(history.cluster, Process(history.machine, "operator"))
        self._is_redriving = "redrive" in history.choice.operators
        self._schedules: dict[str, Any] = {}

    async def act(self, kind: str) -> None:
        """One of `history.OPERATORS`."""
        history = self._history
        lanes = [f"{pipe}/{name}" for pipe, name in sorted(history.oracle.routes)]
        lane = history.rng.choice(lanes)
        history.trace(f"operator: {kind} {lane}")
        match kind:
            case "pause":
                await self._pause(lane, "paused")
                history.machine.create_task(self._resume_later(lane))
            case "redrive":
                await self.redrive_all()
            case "remake":
                await self._remake(list(history.pipes.streams))
            case "remake_inner":
                await self._remake(
                    ["p.parked", "p.retry", "p.dead", "penstock.retry-in", "penstock.delay-1s", "penstock.delay-4s"]
                )
            case "schedule_off":
                await self._restart(schedule=[])
            case "restart":
                await self._restart(schedule=None)
            case "rewind":
                await self._rewind(lane)
            case "remove":
                await self._remove(lane)

    async def put_right(self) -> None:
        """Resume what is paused, by whomever."""
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
        pauses = Pauses(self._broker.admin)
        while True:
            try:
                await pauses.refresh()
                break
            except BrokerError:
                await asyncio.sleep(0.5)
        if lane in pauses.paused():
            await self._pause(lane, "resumed")

    async def _resume_later(self, lane: str) -> None:
        await asyncio.sleep(self._history.rng.uniform(0.5, 8.0))
        await self._pause(lane, "resumed")

    async def _pause(self, lane: str, state: Any) -> None:
        at = self._history.cluster.store.wall_ms()
        await self._write(lambda producer: write_pause(producer, lane, Pause(state, OPERATOR, "me", at)))

    async def _write(self, command: Any) -> None:
        while True:
            try:
                async with Producer(self._broker.driver) as producer:
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
            found = await Found.look(self._broker.admin, Filter())
            aim = Aim(history.pipes, to_stream=False, by_event_time=history.choice.kind.by_event_time)
            await Redrive(aim, producer, Auditor(producer, "me", {}), 1000.0).run(found.pages())

        await self._write(command)

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
        await history.fleet.down()
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

    async def _remove(self, lane: str) -> None:
        """A destination is taken out of the pipe file, what waits for it is buried, and later it is put back."""
        history, before = self._history, self._history.document
        pipe, _, name = lane.partition("/")
        document = copy.deepcopy(before)
        kept = [one for one in document["pipes"][pipe]["destinations"] if one["name"] != name]
        if not kept:
            return
        document["pipes"][pipe]["destinations"] = kept
        await history.fleet.down()
        try:
            await history.fleet.up(PipeFile.model_validate(document))
        except BadConfiguration:
            document["removed"] = {lane: {"bury": "it was removed"}}
            await history.fleet.up(PipeFile.model_validate(document))
        await asyncio.sleep(history.rng.uniform(0.0, 6.0))
        await history.fleet.down()
        await history.fleet.up(history.pipes)

    async def _restart(self, schedule: list[float] | None) -> None:
        history = self._history
        await history.fleet.down()
        if schedule is not None:
            document = copy.deepcopy(history.document)
            for pipe in document["pipes"].values():
                for destination in pipe["destinations"]:
                    destination["webhook"]["schedule"] = schedule
            history.document, history.pipes = document, PipeFile.model_validate(document)
            history.route_all()
        await history.fleet.up(history.pipes)
