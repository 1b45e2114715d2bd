"""A fleet under load whose services are replaced one at a time, from the last release to this version, and back.

`make soak ARGS="--upgrade --rate 1000"` runs it for as long as one wants, on Kafka and with a transform too. The order is that of
docs/upgrading.md. Between two steps one service is new and the next one old, and events get through each of these states.
"""

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from services.core.jvm.child import start_child
from services.core.jvm.kafka import KafkaCluster
from services.core.pipe_file.topic_names import dead_letter_topic, output_topic
from services.fleet.observer_client import Observer, get_json
from services.fleet.problem import CommandFailed
from tests.faults.fleet import DEADLINE, DRAIN, Service, wait_until
from tests.faults.trial import Trial, open_trial, read_dead_letters
from tests.support import early_observer
from tests.support.group_platform import GROUP, open_group_platform
from tests.support.oracle import Fate
from tests.support.ports import free_port
from tests.upgrade.release import environ_of

ORDER = ("observer", "retrier-1", "expel-1", "expel-2", "transform", "ingest-1", "ingest-2", "autoscaler")
"""Readers before writers, as docs/upgrading.md says. The way back is the reverse."""
DOOMED_EVERY, DOOMED_TRIES = 500, 2
"""Every so manieth event is refused so often before it is taken: it waits with the global retrier."""
WEBHOOK: dict[str, Any] = {
    "retry": {"attempts": 1, "base": "50ms", "max_wait": "500ms"},
    "schedule": ["1s", "1s", "2s", "2s", "2s"],
}
ALLOW = ("--allow-networks", "127.0.0.0/8")
FALSE_ALARM = "commits of offsets are missing"
"""0.1.0 says so, and nothing is missing, when another process commits while it opens the groups of the embedded log."""
COLUMNS, SQL = "id STRING, key STRING, time BIGINT, fill STRING", "SELECT event, id, `key`, time, fill FROM `{stream}`"


@dataclass
class VersionedService(Service):
    """Of the last release (`old`) or of this version (`new`)."""

    version: str = "old"

    async def start(self) -> None:
        assert not self.is_running, f"{self.name} runs"
        self.management = f"127.0.0.1:{free_port()}"
        command = [
            *program(self.version, self.folder),
            "-m",
            self.module,
            *self.arguments,
            "--management",
            self.management,
            "--drain",
            DRAIN,
        ]
        self._process = await asyncio.to_thread(start_child, command, log=self.log)
        self.starts += 1

    async def replace(self, version: str) -> None:
        """Stop it in good order, and start the other version in its place."""
        assert self._process is not None
        self.sample()
        self._process.terminate()
        status = await self.wait_end()
        assert status == 0, f"{self.name} ({self.version}) was not drained: {status}, {self.log.read_text()[-2000:]}"
        self.version = version
        await self.start()
        await self.wait_ready()


def program(version: str, folder: Path) -> list[str]:
    """Python with the code of one version, and of no other. It begins in `folder`: Spark's workers put that first."""
    path = environ_of(version)["PYTHONPATH"]
    return ["/usr/bin/env", "-C", str(folder), f"PYTHONPATH={path}", sys.executable, "-P"]


@dataclass
class Rolling:
    """One run. states: the versions of all services after each step."""

    trial: Trial
    services: dict[str, VersionedService] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)

    async def start(self, scaling: list[str], *, transform: bool) -> None:
        """All services of the last release. The topics are the release's, too. scaling: the flags of the autoscaler."""
        trial = self.trial
        if transform:
            await asyncio.to_thread(self._add_transform)
        await self.apply("old")
        shared = ["--broker", trial.url, "--pipes", str(self.pipes)]
        expel = [*shared, *ALLOW, "--commit-interval", "100ms", "--lane-events", "500"]
        observer = f"127.0.0.1:{free_port()}"
        arguments = {
            "observer": ("services.observer", [*shared, "--listen", observer]),
            "retrier-1": ("services.global_retrier", shared[:2]),
            "expel-1": ("services.expel", expel),
            "expel-2": ("services.expel", expel),
            "transform": ("spark", [*shared, "--data", str(trial.folder / "data")]),
            "ingest-1": ("services.ingest", [*shared, "--listen", trial.listen]),
            "ingest-2": ("services.ingest", [*shared, "--listen", trial.listen]),
            "autoscaler": (
                "services.autoscaler",
                [*shared, *scaling, "--observer", observer, "--targets", str(self.targets)],
            ),
        }
        await asyncio.to_thread(self._write_targets)
        for name in (one for one in ORDER if transform or one != "transform"):
            module, flags = arguments[name]
            service = VersionedService(name, module, flags, trial.folder)
            self.services[name] = service
            await trial.fleet.add(service, ready=False)
        for service in self.services.values():
            await service.wait_ready()
        await asyncio.to_thread(self._write_targets)

    @property
    def targets(self) -> Path:
        """The list of processes that write to streams, for the autoscaler."""
        return self.trial.folder / "targets.json"

    def _write_targets(self) -> None:
        ingest = [one.management for name, one in self.services.items() if name.startswith("ingest")]
        self.targets.write_bytes(orjson.dumps([{"targets": ingest, "labels": {"component": "ingest"}}]))

    def expels(self) -> dict[str, str]:
        """The instances of the group, as the platform lists them."""
        return {name: one.management for name, one in self.services.items() if name.startswith(GROUP)}

    @property
    def pipes(self) -> Path:
        """The pipe file, which both versions read."""
        return self.trial.folder / "pipes.yaml"

    def _add_transform(self) -> None:
        document = orjson.loads(self.pipes.read_bytes())
        document["streams"][self.trial.stream]["columns"] = COLUMNS
        document["pipes"][self.trial.pipe]["transform"] = {"sql": SQL.format(stream=self.trial.stream)}
        self.pipes.write_bytes(orjson.dumps(document))

    async def roll(self, version: str, order: list[str], between: Callable[[], Any]) -> None:
        """Replace one service after the other; an event gets through each mixed state. The autoscaler decides from the figures
        of all others, before it is replaced and after that."""
        for name in order:
            if name == "autoscaler":
                await self._decides()
            await self.services[name].replace(version)
            await asyncio.to_thread(self._write_targets)
            if name == "autoscaler":
                await self._decides()
            number = await self.trial.sender.insist_on_one()
            await wait_until(lambda n=number: self.trial.ledger.arrived(n))
            self.states.append(", ".join(f"{one.name} {one.version}" for one in self.services.values()))
            await between()

    async def _decides(self) -> None:
        """Until the autoscaler has decided twice more, knows the CPU of each expel, and had an answer of the observer."""
        service = self.services["autoscaler"]

        def decisions() -> list[dict[str, Any]]:
            lines = service.log.read_bytes().splitlines()
            return [orjson.loads(one) for one in lines if b'"group_decision"' in one and one.endswith(b"}")]

        def knows(decision: dict[str, Any]) -> bool:
            instances = decision["instances"]
            is_whole = instances.keys() == self.expels().keys() and None not in instances.values()
            return is_whole and "does not answer" not in str(decision["under_way"])

        before = len(decisions())
        try:
            await wait_until(lambda: any(map(knows, decisions()[before + 1 :])))
        except AssertionError:
            raise AssertionError(f"the {service.version} autoscaler decides blindly: {decisions()[-3:]}") from None

    async def penstock(self, version: str, *arguments: str) -> str:
        """A command of one version; what it printed. Fails when it does. One of the last release is repeated after its false
        alarm, as docs/upgrading.md says.
        """
        while True:
            status, printed = await self._run(version, *arguments)
            if status == 0:
                return printed
            assert version == "old", f"{version}: {arguments}: {printed}"
            assert FALSE_ALARM in printed, f"{version}: {arguments}: {printed}"

    async def _run(self, version: str, *arguments: str) -> tuple[int | None, str]:
        command = [*program(version, self.trial.folder), "-m", "services.fleet", *arguments]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_UP")}
        process = await asyncio.create_subprocess_exec(
            *command, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        async with asyncio.timeout(DEADLINE):
            printed, _ = await process.communicate()
        return process.returncode, printed.decode()

    async def apply(self, version: str) -> None:
        """`penstock apply`, which every change of version begins or ends with."""
        await self.penstock(version, "apply", "-f", str(self.pipes), "--broker", self.trial.url, *ALLOW)

    async def set_paused(self, version: str, *, paused: bool) -> None:
        """Pause or resume the destination with the command line of one version."""
        trial = self.trial
        verb, more = ("pause", ["--reason", "an upgrade"]) if paused else ("resume", [])
        where = ["--broker", trial.url, "-f", str(self.pipes)]
        await self.penstock(version, "destination", verb, "hook", "--pipe", trial.pipe, *where, *more)

    async def settle(self) -> None:
        """Until everything that was acknowledged was delivered."""
        trial, group = self.trial, self.trial.group
        await trial.sender.insist_on_one()
        await wait_until(lambda: not trial.ledger.lost())
        source = output_topic(trial.pipe) if "transform" in self.services else trial.stream

        async def is_settled() -> bool:
            lags = await trial.broker.admin.group_lag(group, source)
            return not any(lag.records for lag in lags.values())

        await wait_until(is_settled)
        await read_dead_letters(trial.broker, dead_letter_topic(trial.pipe), trial.ledger)

    async def judge(self) -> None:
        """The promise, and the observers' tables of both versions: no minute is final with anything missing."""
        ledger, started = self.trial.ledger, sum(one.starts for one in self.services.values() if "expel" in one.name)
        complaints = ledger.complaints()
        assert not complaints, complaints
        own, _ = ledger.duplicates()
        assert own <= (started - 2) * 500, f"{own} came twice: more than was in flight"
        for version in ("new", "old"):
            rows = await self._look(version)
            wrong = [row for row in rows if row["missing"] or row["late"]]
            assert not wrong, f"the {version} observer reports a loss that is none: {wrong}"

    async def _look(self, version: str) -> list[dict[str, Any]]:
        """The rows of an observer of this version, once all are final and have every event."""
        address = f"127.0.0.1:{free_port()}"
        flags = ["--broker", self.trial.url, "--pipes", str(self.pipes), "--listen", address]
        service = VersionedService(
            f"early-{version}", early_observer.__name__, flags, self.trial.folder, version=version
        )
        rows: list[dict[str, Any]] = []

        async def is_final() -> bool:
            try:
                body = await get_json(Observer(address), f"/v1/pipes/{self.trial.pipe}/loss", {"from": "23h"})
            except CommandFailed:
                return False
            rows[:] = body["minutes"]
            accepted = sum(row["accepted"] for row in rows)
            is_whole = not body["catching_up"] and accepted >= self.trial.ledger.count(Fate.OBLIGED)
            return is_whole and all(row["final"] for row in rows)

        await self.trial.fleet.add(service)
        try:
            await wait_until(is_final)
        except AssertionError:
            raise AssertionError(f"the table of the {version} observer is not final: {rows}") from None
        finally:
            await service.kill()
        return rows


async def run(
    url: str, folder: Path, *, rate: float, seconds: float, transform: bool = False, seed: int | None = None
) -> Rolling:
    """From the last release to this version and back, under load; then the checks. seconds: after each step, under load."""
    async with _open(url, folder, rate=rate, transform=transform, seed=seed) as rolling:

        async def pause_between() -> None:
            await asyncio.sleep(seconds)

        there = [name for name in ORDER if name in rolling.services]
        async with rolling.trial.load():
            await rolling.apply("new")
            await rolling.set_paused("new", paused=True)
            await asyncio.sleep(1 + seconds)
            await rolling.set_paused("old", paused=False)
            await rolling.roll("new", there, pause_between)
            await rolling.set_paused("old", paused=True)
            await asyncio.sleep(1 + seconds)
            await rolling.set_paused("new", paused=False)
            await rolling.roll("old", there[::-1], pause_between)
            await rolling.apply("old")
        await rolling.settle()
        await rolling.judge()
        return rolling


@asynccontextmanager
async def _open(url: str, folder: Path, *, rate: float, transform: bool, seed: int | None) -> AsyncIterator[Rolling]:
    async with open_trial(
        "upgrade and back", url, folder, seed=seed, rate=rate, batch=50, workers=8, **WEBHOOK
    ) as trial:
        sink = trial.sink
        sink.by_value = transform
        sink.dooms = lambda number: number % DOOMED_EVERY == 0 and len(sink.tries[number]) < DOOMED_TRIES
        rolling = Rolling(trial)
        async with open_group_platform(folder / "platform", rolling.expels) as scaling:
            await rolling.start(scaling, transform=transform)
            yield rolling


def describe(rolling: Rolling, began: float) -> str:
    """The figures, on one line."""
    trial = rolling.trial
    own, again = trial.ledger.duplicates()
    took = time.monotonic() - began
    return (
        f"{trial.ledger.count(Fate.OBLIGED)} events acknowledged in {took:.0f} s, {len(rolling.states)} steps, "
        f"{len(trial.ledger.lost())} lost, {own} delivered twice, {again} more of requests that were repeated; answers "
        f"{dict(trial.sender.answers)}"
    )


def main(minutes: float, rate: float, seed: int, *, kafka: bool, transform: bool) -> int:
    """`make soak ARGS="--upgrade"`. minutes: of load, at least. The exit status."""

    async def carry(folder: Path) -> None:
        cluster = await asyncio.to_thread(KafkaCluster, folder / "kafka") if kafka else None
        try:
            if cluster is not None:
                await asyncio.to_thread(cluster.start)
            url = f"log://{folder / 'log'}" if cluster is None else f"kafka://{cluster.bootstrap}"
            seconds, began = 60 * minutes / (2 * len(ORDER)), time.monotonic()
            done = await run(url, folder, rate=rate, seconds=seconds, transform=transform, seed=seed)
            print(describe(done, began))
        finally:
            if cluster is not None:
                await asyncio.to_thread(cluster.stop, grace_s=0)

    folder = Path(tempfile.mkdtemp(prefix="penstock-upgrade-"))
    try:
        asyncio.run(carry(folder))
    except AssertionError as error:
        print(f"FAILED: {error}\nthe services' logs are in {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return 0
