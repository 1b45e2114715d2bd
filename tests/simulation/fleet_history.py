"""One history of a fleet: a seed chooses it, its faults and its operators; it runs, is calmed, settles, and is judged."""

import asyncio
from collections.abc import Callable

import orjson

import services.core.broker.producer as producer_module
import services.core.broker.retry as retry_module
from services.core.broker.contract import MAX_APPEND_BYTES
from services.core.broker.record import Record, TopicPartition
from services.core.event import ID
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import (
    CONTROL,
    RETRIER_DEAD,
    RETRIER_GROUP,
    dead_letter_topic,
    delivery_group,
    delivery_topics,
)
from services.core.undelivered.dead_letter import PREFIX as DEAD_PREFIX
from services.core.undelivered.retry_state import PREFIX as RETRY_PREFIX
from tests.simulation.choice import PROCESS_FAULTS, STREAM, choose
from tests.simulation.cluster import Cluster
from tests.simulation.fleet import DRAIN_S, Fleet
from tests.simulation.history import History
from tests.simulation.machine import Process
from tests.simulation.operators import Operator
from tests.simulation.oracle import Oracle, Route
from tests.simulation.receivers import Receiver
from tests.simulation.rotation import KEYS_FILE, Rotation
from tests.simulation.senders import Senders
from tests.simulation.transform import transform_group
from tests.simulation.truth import FINAL_AFTER, is_final_for, judge_ledger
from tests.simulation.weather import Weather
from tests.support.oracle import Fate

SETTLE_S = 240.0
"""Without faults everything must be settled by then: longest schedule, session time-outs and back-offs."""


class FleetHistory(History):
    """The world of one seed."""

    def __init__(self, seed: int, tell: Callable[[str], None] | None = None) -> None:
        super().__init__(seed, seed * 7919 + 1, tell)
        self.choice = choose(seed)
        self.weather = Weather(self.rng, self.machine.time, self.choice.broker_faults)
        self.cluster = Cluster(self.machine, self.rng, self.choice.kind, self.weather)
        self.oracle = Oracle(is_dated=self.choice.is_dated)
        self.receivers: dict[tuple[str, str], Receiver] = {}
        self.deaf_until = 0.0
        """Until when some process may not follow what is paused, and which files have changed."""
        self.rotation = Rotation(self)
        self.fleet = Fleet(
            self.machine,
            self.rng,
            self.cluster,
            self.receiver,
            self.choice.counts,
            {
                "observed": self.choice.observed,
                "observer": {"final_after": FINAL_AFTER},
                "ingest": {"keys": KEYS_FILE if self.choice.has_keys else None},
            },
            self.rotation,
        )
        self.senders = Senders(
            self.machine,
            self.rng,
            self.oracle,
            self.fleet.listening,
            self.rotation,
            [STREAM],
            gives_up=self.choice.theme.gives_up,
        )
        self.operator = Operator(self)
        self.document = self.choice.pipes
        self.pipes = PipeFile.model_validate(self.document)
        self.route_all()

    def receiver(self, route: tuple[str, str]) -> Receiver:
        """The one behind a destination."""
        if route not in self.receivers:
            self.receivers[route] = Receiver(
                self.machine, self.rng, self.oracle, route, self._disturbed_until, self.rotation.judge_request
            )
        return self.receivers[route]

    def _disturbed_until(self) -> float:
        """Until when somebody may not have heard of a pause."""
        late = 6.0  # an answer that takes as long as one may, and the next look
        hidden = max(self.weather.hidden_until.get(topic, 0.0) for topic in ("", CONTROL))
        return max(hidden + late, self.deaf_until)

    def record_deaf(self, seconds: float) -> None:
        """Some process does not follow what is paused for so long."""
        self.deaf_until = max(self.deaf_until, self.machine.time() + seconds)

    def route_all(self) -> None:
        """Tell the oracle of the destinations that the pipe file has."""
        for name, pipe in self.pipes.pipes.items():
            for destination in pipe.destinations:
                webhook = destination.webhook
                in_order = webhook is not None and webhook.order == "key"
                route = self.oracle.routes.get((name, destination.name))
                if route is None:
                    route = Route(name, destination.name, STREAM, in_order, is_transformed=pipe.transform is not None)
                    self.oracle.routes[name, destination.name] = route
                elif not in_order:
                    route.in_order = False

    def _all_processes(self) -> list[Process]:
        return self.fleet.processes

    def _throw_away(self) -> None:
        super()._throw_away()
        _limit_appends(MAX_APPEND_BYTES)  # the next history may be one of readers

    def _record_stored(self, source: TopicPartition) -> None:
        store = self.cluster.store
        self.trace(f"stored {source.topic}[{source.partition}] to {store.partition(*source).end}")
        if source.topic != CONTROL:
            return
        for record in store.appends[-1].records:
            pipe, _, name = (record.key or b"").decode().removeprefix("pause:").partition("/")
            if (route := self.oracle.routes.get((pipe, name))) is not None:
                is_paused = orjson.loads(record.value or b"{}").get("state") == "paused"
                route.paused_at = (route.paused_at or self.machine.time()) if is_paused else None

    async def _live(self) -> None:
        choice, verdict = self.choice, self.verdict
        _limit_appends(choice.chunk_bytes)
        self.trace(f"seed {self.seed}: {choice}")
        self.cluster.store.on_append.append(self._record_stored)
        await self.fleet.up(self.pipes)
        await self.wait_for(self._is_up, 60.0)
        until = self.machine.time() + choice.seconds
        sending = [
            asyncio.create_task(self.senders.run(client, until, choice.pace, choice.batch))
            for client in range(choice.clients)
        ]
        await self._trouble(until)
        await self._calm()
        await asyncio.gather(*sending)
        settled = await self.wait_for(self._is_settled, SETTLE_S)
        await self.operator.redrive_all()
        await self.wait_for(self._is_settled, SETTLE_S)
        if "redrive" in choice.operators:
            verdict.complaints += self._judge_redriven()
        fresh = [self.oracle.issue(STREAM, f"fresh-{number}") for number in range(2)]
        for _ in range(20):
            await self.senders.send(fresh)
            if await self.wait_for(lambda: self._is_settled() and all(one.fate is Fate.OBLIGED for one in fresh), 5.0):
                break
        else:
            verdict.complaints.append(f"fresh events do not come through: {[one.fate.name for one in fresh]}")
        self._read_letters()
        for consumer in self.cluster.consumers:
            self.trace(f"at the end {consumer.describe()}")
        verdict.complaints += self.oracle.judge()
        if not verdict.complaints and not (settled and self._is_settled()):
            verdict.complaints.append(f"not settled: {self._unsettled()}")
        if choice.observed and not verdict.complaints and len(self.oracle.routes) > 1:
            verdict.complaints += await self._judge_beside_one_that_is_down()
        if choice.observed and not verdict.complaints:
            verdict.complaints += await judge_ledger(self)
        await self.fleet.down()
        self.trace("over")
        verdict.figures = {
            "events": len(self.oracle.events),
            "deliveries": sum(route.deliveries for route in self.oracle.routes.values()),
            "dead": sum(len(route.dead) for route in self.oracle.routes.values()),
            "restarts": self.fleet.restarts,
            "faults": self.weather.bitten + sum(one.failures for one in self.receivers.values()),
        }

    async def _judge_beside_one_that_is_down(self) -> list[str]:
        """While one destination is behind, the others' minutes become final all the same."""
        down, *others = sorted(self.oracle.routes)
        if not self.oracle.routes[down].in_order:  # what is not in order is handed over, and nobody is behind
            return []
        self.receivers[down].begin(10_000.0, ("500",))
        await self.senders.send([self.oracle.issue(STREAM, "beside") for _ in range(2)])
        await asyncio.sleep(130.0)
        pipe = down[0]
        names = {name for _, name in others}
        is_final = await self.wait_for(lambda: is_final_for(self, pipe, names), 240.0)
        self.receivers[down].modes = ("ok",)
        await self.wait_for(self._is_settled, SETTLE_S)
        return [] if is_final else [f"the ledger: {names} wait for {down[1]}"]

    def _judge_redriven(self) -> list[str]:
        """Every letter that is there was redriven by now, and must have arrived."""
        found = []
        for pipe in self.pipes.pipes:
            for partition in self.cluster.store.topic(dead_letter_topic(pipe)).partitions:
                for record in partition.records:
                    route = self.oracle.routes.get((pipe, (record.header(DEAD_PREFIX + "destination") or b"").decode()))
                    number = event_of(record.value)
                    if route is not None and number not in route.arrived and number not in route.excused:
                        found.append(f"e{number} to {route.name}")
        return [f"{len(found)} redriven and lost: {found[:8]}"] if found else []

    def _is_up(self) -> bool:
        return bool(self.fleet.listening()) and all(
            self.cluster.coordinator.members(delivery_group(name, one.name))
            for name, pipe in self.pipes.pipes.items()
            for one in pipe.destinations
        )

    async def _trouble(self, until: float) -> None:
        choice, rng = self.choice, self.rng
        kinds, weights = list(choice.weights), list(choice.weights.values())
        while self.machine.time() < until:
            await asyncio.sleep(rng.expovariate(1 / 0.7))
            if kinds:
                await self._strike(*rng.choices(kinds, weights))

    async def _strike(self, kind: str) -> None:
        rng = self.rng
        if kind == "weather":
            topic = rng.choice((None, STREAM, CONTROL, rng.choice(sorted(self.cluster.store.topics))))
            self.trace(f"weather on {topic}")
            self.weather.begin(topic, rng.uniform(0.2, self.choice.theme.longest_window), reads=rng.random() < 0.4)
        elif kind == "receiver":
            modes = tuple(
                rng.sample(self.choice.receiver_faults, min(len(self.choice.receiver_faults), rng.randint(1, 2)))
            )
            modes = (*modes, *["ok"] * rng.randint(0, 2))
            route = rng.choice(sorted(self.receivers))
            self.trace(f"receiver {route}: {modes}")
            self.receivers[route].begin(rng.uniform(0.2, 5.0), modes)
        elif kind == "nodes":
            self.cluster.strike(rng.choice(self.choice.node_faults))
        elif kind in PROCESS_FAULTS:
            self._strike_process(kind)
        else:
            await self.operator.act(kind)

    def _strike_process(self, kind: str) -> None:
        rng = self.rng
        if kind == "expire":
            members = self.cluster.coordinator.groups()
            if members:
                self.cluster.coordinator.expire(*rng.choice(members))
            return
        process = self.strike_one(kind, self.fleet.alive())
        if process is None:
            return
        if kind == "clock":
            process.skew = self.fleet.skews[process.name] = rng.choice((-30.0, -2.0, 0.0, 2.0, 30.0))
        elif kind == "terminate":
            process.terminate()
            self.record_deaf(DRAIN_S + 2.0)  # what it drains it still sends
            self.machine.call_later(12.0, process.kill)
        elif kind == "freeze" and not process.frozen:
            process.freeze()
            self.cluster.record_freeze(process)
            seconds = rng.choice((0.5, 4.0, 9.0))
            self.record_deaf(seconds + 2.0)
            self.machine.call_later(seconds, process.thaw)

    async def _calm(self) -> None:
        self.trace("calm")
        self.cluster.calm()
        self.rotation.calm()
        for receiver in self.receivers.values():
            receiver.modes = ("ok",)
        for process in self.fleet.alive():
            process.kill_at = -1
        await self.operator.put_right()

    def _is_settled(self) -> bool:
        return not self._unsettled()

    def _unsettled(self) -> str:
        """What the fleet has still to do, for a person; empty when there is nothing."""
        store = self.cluster.store
        for name, pipe in self.pipes.pipes.items():
            for source in pipe.sources if pipe.transform is not None else ():
                if behind := self._behind(transform_group(name), source):
                    return f"the transform of {name} is behind by {behind}"
            for destination in pipe.destinations:
                group = delivery_group(name, destination.name)
                for topic in store.topics:
                    if topic in (*delivery_topics(name, pipe), f"{name}.retry", f"{name}.parked") and (
                        behind := self._behind(group, topic)
                    ):
                        return f"{group} is behind by {behind} in {topic}"
        for topic in store.topics:
            if topic.startswith(("penstock.retry-in", "penstock.delay")) and (
                behind := self._behind("penstock.retrier", topic)
            ):
                return f"{behind} wait in {topic}"
        return ""

    def _behind(self, group: str, topic: str) -> int:
        store = self.cluster.store
        return sum(
            store.lag(group, TopicPartition(topic, number)).records
            for number in range(len(store.topic(topic).partitions))
        )

    def take_away(self, topic: str) -> None:
        """Somebody deletes a topic and makes it anew: what lies in it and is not committed is lost by that."""
        store = self.cluster.store
        if not topic.endswith(".dead"):  # what was buried has been with the dead letters
            self.excuse(topic, lambda _partition, _offset: True)
        store.delete(topic)

    def excuse(self, topic: str, is_lost: Callable[[int, int], bool]) -> None:
        """What is lost of a topic, by partition and offset, and what its readers have not committed, need not arrive."""
        store = self.cluster.store
        life = store.topics[topic].life
        for stored in store.appends:
            if (stored.topic, stored.life) != (topic, life):
                continue
            source = TopicPartition(topic, stored.partition)
            for offset, record in zip(stored.offsets, stored.records, strict=True):
                if not is_lost(stored.partition, offset):
                    continue
                for key in self._lanes_of(record):
                    group = store.groups.get(self._reader_of(topic, key))
                    if group is None or offset > group.committed.get(source, -1):
                        self.oracle.routes[key].excused.add(event_of(record.value))

    def _reader_of(self, topic: str, lane: tuple[str, str]) -> str:
        """Which group must have read a record of a topic, for a destination."""
        if topic.startswith("penstock."):
            return RETRIER_GROUP
        pipe = self.pipes.pipes[lane[0]]
        is_source = topic in pipe.sources and pipe.transform is not None
        return transform_group(lane[0]) if is_source else delivery_group(*lane)

    def _lanes_of(self, record: Record) -> list[tuple[str, str]]:
        """Whom it is for."""
        pipe, name = record.header(RETRY_PREFIX + "pipe"), record.header(RETRY_PREFIX + "destination")
        if pipe is None or name is None:
            return list(self.oracle.routes)
        return [(pipe.decode(), name.decode())]

    def _read_letters(self) -> None:
        for stored in self.cluster.store.appends:
            if stored.topic not in (RETRIER_DEAD, *map(dead_letter_topic, self.pipes.pipes)):
                continue
            for record in stored.records:
                event_id = record.header(ID) or b"?"
                pipe, name = record.header(DEAD_PREFIX + "pipe"), record.header(DEAD_PREFIX + "destination")
                self.oracle.bury((pipe or b"").decode(), (name or b"").decode(), event_id.decode(), record.timestamp)


def _limit_appends(size: int) -> None:
    for module in (retry_module, producer_module):
        module.__dict__["MAX_APPEND_BYTES"] = size


def event_of(value: bytes | None) -> int:
    """The number of the event whose payload this is; -1 for none of ours."""
    try:
        found = orjson.loads(value or b"")["id"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return -1
    return int(found[1:])
