"""A pipe that loses chosen events at one node, while processes are killed, a group is rewound and events come late: what does a
real observer say?
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker
from services.core.broker.errors import Unavailable
from services.core.ledger.report import TELEMETRY, Node, decode_report, unpack_numbers
from services.core.pipe_file.pipes import load_pipes
from services.core.provision import ensure_topics
from services.fleet.observer_client import Observer, get_json
from tests.faults.fleet import Service, wait_until
from tests.support import early_observer, lossy
from tests.support.ports import free_port
from tests.support.raw_http import Client, make_request
from tests.unit.expel.receiver import DEADLINE, Received, open_receiver

ROUNDS, REQUEST = 3, 100
MEDIA = "application/cloudevents-batch+json"
LATE_EVERY, LATE_TIMES = 50, 2
"""Every so manieth event is refused so often before it is taken: it goes through the global retrier."""
MODULES = {"ingest": "services.ingest", "expel": "services.expel", "retrier": "services.global_retrier"}
SEEN_AT: dict[Node, Node] = {"ingest": "expel", "transform": "transform", "expel": "expel", "retrier": "retrier"}
"""Where events are missing that this node loses: what ingest told of and did not store, the next one never got."""


@dataclass(frozen=True)
class Verdict:
    """lost, named: ids, or origins of what was never stored. missing: by node. refused: requests' events that were not taken."""

    node: Node
    sent: int
    lost: list[str]
    received: int
    refused: int
    accepted: int
    missing: dict[Node, int]
    named: list[str]

    def complaints(self) -> list[str]:
        """What is not as it must be; nothing, or the ledger is wrong."""
        found = []
        if self.received <= self.sent - len(self.lost):
            found.append("nothing came twice: the run shows less than it should")
        if self.accepted != self.sent:
            found.append(f"{self.accepted} of {self.sent} events are accepted")
        if {node: count for node, count in self.missing.items() if count} != {SEEN_AT[self.node]: len(self.lost)}:
            found.append(f"{len(self.lost)} were lost at {self.node}; missing are {self.missing}")
        if self.named != self.lost:
            found.append(f"{sorted({*self.named} ^ {*self.lost})[:10]} are named or lost, not both")
        return [f"{self.node}: {one}" for one in found]


@dataclass
class Trial:
    """One run. events: a multiple of 300. crashes: whether a transform is killed, too, which takes it long."""

    folder: Path
    url: str
    name: str
    node: Node
    events: int
    lost: int
    seed: int
    crashes: bool = False
    services: dict[str, Service] = field(default_factory=dict)
    address: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    """The observer's."""
    port: int = field(default_factory=free_port)
    refusals: Counter[str] = field(default_factory=Counter)

    async def run(self) -> Verdict:
        """Send, lose, kill -9 everything three times, rewind, and ask the observer."""
        numbers = sorted(random.Random(self.seed).sample(range(self.events), self.lost))
        bodies = _make_bodies(self.events, numbers)
        async with open_receiver(self._answer) as receiver, open_broker(self.url) as broker:
            pipes = await asyncio.to_thread(self._write_pipes, receiver.url)
            await ensure_topics(broker.admin, await asyncio.to_thread(load_pipes, pipes))
            async with self._services(pipes):
                each = len(bodies) // ROUNDS
                for number in range(ROUNDS):
                    await self._start()
                    await self._send(bodies[number * each : (number + 1) * each])
                    enough = (number + 1) * each * REQUEST * 2 // 3
                    await receiver.wait_for(lambda seen, enough=enough: len(seen.accepted) >= enough)  # type: ignore[misc]
                    await self._kill(broker, (number + 1) * each * REQUEST, last=number == ROUNDS - 1)
                if self.node != "transform":
                    await _rewind(broker, f"{self.name}.hook", self.name)
                await self._start()
                await receiver.wait_for(lambda seen: len({*seen.accepted}) == self.events - self.lost)
                rows = await self._look()
                named = await self._explain(rows)
        lost = [f"e{number:06d}" for number in numbers]
        if self.node == "ingest":  # nobody has a record of them
            lost = sorted({*(self.folder / "origins").read_text().split()})  # an append may be tried twice
        missing: Counter[Node] = Counter()
        for step in (step for row in rows for step in row["steps"]):
            missing[step["node"]] += step["missing"]
        accepted, refused = sum(row["accepted"] for row in rows), self.refusals.total()
        return Verdict(
            self.node, self.events, lost, len(receiver.accepted), refused, accepted, dict(missing), sorted(named)
        )

    def _answer(self, received: Received) -> web.Response:
        """Some come late; what the retrier is to lose is never taken."""
        failed = []
        for event in received.events:
            number, name = int(str(event["id"])[1:]), str(event["id"])
            data: Any = event["data"]
            is_late = number % LATE_EVERY == 0 and self.refusals[name] < LATE_TIMES
            if is_late or (self.node == "retrier" and data["lost"]):
                self.refusals[name] += 1
                failed.append({"id": name})
        return web.json_response({"failed": failed})

    def _write_pipes(self, url: str) -> Path:
        path = self.folder / "lossy.yaml"
        webhook = {
            "url": url,
            "schedule": ["1s"] * 8,
            "retry": {"attempts": 1, "base": "50ms"},
            "batch": {"max_wait": "20ms"},
        }
        pipe: dict[str, Any] = {"sources": [self.name], "destinations": [{"name": "hook", "webhook": webhook}]}
        if self.node == "transform":
            pipe["transform"] = {"sql": f"SELECT event, n, lost FROM `{self.name}`", "interval": "200ms"}
        streams = {self.name: {"columns": "n INT, lost BOOLEAN"}}
        path.write_bytes(orjson.dumps({"streams": streams, "pipes": {self.name: pipe}}))
        return path

    @asynccontextmanager
    async def _services(self, pipes: Path) -> AsyncIterator[None]:
        """Not started yet; killed at the end."""
        shared = ["--broker", self.url, "--pipes", str(pipes)]
        own = {
            "ingest": [*shared, "--listen", f"127.0.0.1:{self.port}"],
            "expel": [*shared, "--allow-networks", "127.0.0.0/8", "--commit-interval", "100ms"],
            "retrier": ["--broker", self.url],
        }
        if self.node == "transform":
            own["transform"] = [*shared, "--data", str(self.folder)]
        for name, arguments in own.items():
            if name == self.node:
                self.services[name] = Service(name, lossy.__name__, [name, str(self.folder), *arguments], self.folder)
            else:
                self.services[name] = Service(name, MODULES[name], arguments, self.folder)
        observer = [*shared, "--listen", self.address]
        self.services["observer"] = Service("observer", early_observer.__name__, observer, self.folder)
        try:
            yield
        finally:
            for service in self.services.values():
                service.close()

    async def _start(self) -> None:
        """All but the observer that do not run."""
        idle = [one for name, one in self.services.items() if name != "observer" and not one.is_running]
        for service in idle:
            await service.start()
        for service in idle:
            await service.wait_ready()

    async def _send(self, bodies: Sequence[bytes]) -> None:
        for body in bodies:
            async with Client(self.port) as client:
                path = f"/v1/streams/{self.name}/events"
                answer = await client.request(make_request(path, body, media=MEDIA))
                if answer.status == 503:
                    raise TimeoutError(f"the log stood still for longer than ingest waits: {answer}")
                assert answer.status == 200, answer

    async def _kill(self, broker: Broker, sent: int, *, last: bool) -> None:
        if self.node == "ingest":  # of what it did not store, nobody can say later what it did not tell
            async with asyncio.timeout(DEADLINE):
                while await _count_told(broker, self.name) < sent:
                    await asyncio.sleep(0.1)
        for name, service in self.services.items():
            if service.is_running and (name != "transform" or (self.crashes and not last)):
                await service.kill()

    async def _look(self) -> list[dict[str, Any]]:
        """The observer's rows, once all are final and it knows of every event, and the retrier's and expel's losses are due."""
        await self.services["observer"].start()
        await self.services["observer"].wait_ready()
        rows: list[dict[str, Any]] = []

        async def is_settled() -> bool:
            body = await get_json(Observer(self.address), f"/v1/pipes/{self.name}/loss", {"from": "23h"})
            rows[:] = body["minutes"]
            is_final = not body["catching_up"] and all(row["final"] for row in rows)
            accepted, missing = (sum(row[name] for row in rows) for name in ("accepted", "missing"))
            return is_final and accepted >= self.events and missing == self.lost

        try:
            await wait_until(is_settled)
        except AssertionError:
            print(f"not settled: {rows}")
        return rows

    async def _explain(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        named: list[str] = []
        for row in rows:
            said = await get_json(Observer(self.address), f"/v1/pipes/{self.name}/loss/{row['minute']}/explain", {})
            assert said["complete"]
            named += [one["event_id"] or one["origin"] for one in said["named"]]
        return named


async def _rewind(broker: Broker, group: str, stream: str) -> None:
    """Let the group read everything again, once its killed member is gone."""
    partitions = await broker.admin.committed(group, stream)
    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                return await broker.admin.set_committed(group, stream, dict.fromkeys(partitions, 0))
            except Unavailable:
                await asyncio.sleep(0.2)


async def _count_told(broker: Broker, stream: str) -> int:
    """How many events ingest told of."""
    offset, told = 0, Counter[tuple[str, int]]()
    while (batch := await broker.reader.read(TELEMETRY, 0, offset, max_records=1000)) is not None:
        for report in (decode_report(record.value) for record in batch.records):
            if (report.node, report.pipe) == ("ingest", stream):
                for one in report.sets:
                    numbers = unpack_numbers(one.numbers)
                    told[one.incarnation, one.partition] = max(told[one.incarnation, one.partition], 1 + numbers.max())
        offset = batch.offsets[-1] + 1
    return told.total()


def _make_bodies(count: int, lost: Sequence[int]) -> list[bytes]:
    """Requests of events with ids of their own."""
    chosen = set(lost)
    events = [
        {"specversion": "1.0", "type": "t", "source": "s", "id": f"e{n:06d}", "data": {"n": n, "lost": n in chosen}}
        for n in range(count)
    ]
    return [orjson.dumps(events[start : start + REQUEST]) for start in range(0, count, REQUEST)]
