"""A small fleet under the eyes of a real Prometheus, with the project's own rules, for incidents (`soak_incidents.py`).

Two streams and two pipes: `shop` delivers orders to `crm`, `audit` delivers clicks to `archive`. With Spark a third pipe,
`large`, has a transform. With tables a third stream, `latest`, is compacted. A client sends some events a second to each stream,
and does not mind errors.
"""

import asyncio
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import yaml
from aiohttp import web

from infra.prometheus.targets import list_targets
from services.core.jvm.child import start_child, stop_child
from services.core.jvm.kafka import KafkaCluster
from services.core.security.bearer import make_token
from services.fleet.folder import STATE_FILE, ProcessState, read_state
from tests.faults.fleet import Service, wait_until
from tests.support.group_platform import open_group_platform
from tests.support.ports import free_port

RULES = Path(__file__).parents[2] / "infra" / "prometheus"
SCRAPE_S = 15
READY_S = 600.0
SEND_EVERY_S = 0.5
JSON = {"Content-Type": "application/json"}
SQL = "SELECT event, id, key, time, amount FROM orders WHERE amount >= 0"
MODULES = {
    "ingest": "services.ingest",
    "expel": "services.expel",
    "retrier": "services.global_retrier",
    "observer": "services.observer",
    "transform": "spark",
    "table": "services.table",
    "registry": "services.registry",
    "autoscaler": "services.autoscaler",
}


@dataclass
class Receiver:
    """One endpoint. status: of its answers. hangs: it answers nobody."""

    status: int = 200
    hangs: bool = False
    requests: int = 0
    port: int = 0
    _runner: web.AppRunner | None = None

    async def open(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen, on the same port after `close`."""

        async def answer(request: web.Request) -> web.Response:
            await request.read()
            self.requests += 1
            if self.hangs:
                await asyncio.sleep(3600)
            return web.Response(status=self.status)

        app = web.Application()
        app.router.add_post("/hook", answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self.port = self.port or free_port()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=tls).start()

    async def close(self) -> None:
        """Refuse connections."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None


@dataclass
class IncidentFleet:
    """apart: no supervisor, each service is a process of its own, as on a platform. Made by `open_incident_fleet`.

    observer: the address of its API, and token: its token file, of a fleet that is apart. scaling: the autoscaler's flags.
    registry: the address of the schema registry, of a fleet that has one; its store is `schemas`. tables: a folder, of one that
    is apart.
    services: by name, of a fleet that is apart. up: the supervisor of another. poison: fields of one order in five from now on.
    tasks: ended with the fleet.
    """

    folder: Path
    data: Path
    broker: str
    listen: str
    prometheus: str
    apart: bool
    crm: Receiver
    archive: Receiver
    cluster: KafkaCluster | None
    observer: str
    registry: str
    scaling: list[str] = field(default_factory=list)
    services: dict[str, Service] = field(default_factory=dict)
    up: subprocess.Popen[bytes] | None = None
    poison: dict[str, object] = field(default_factory=dict)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    pipes: dict[str, Any] = field(default_factory=dict)
    sent: int = 0
    accepted: int = 0

    @property
    def targets(self) -> Path:
        return self.folder / "targets.json"

    @property
    def token(self) -> Path:
        return self.folder / "observer.token"

    @property
    def schemas(self) -> Path:
        return self.data / "schemas"

    @property
    def tables(self) -> Path:
        return self.folder / "tables"

    @property
    def pipe_file(self) -> Path:
        return self.folder / "pipes.yaml"

    def write_pipes(self) -> None:
        self.pipe_file.write_text(yaml.safe_dump(self.pipes))

    def process(self, service: str) -> ProcessState:
        """The one process of a service under the supervisor."""
        state = read_state(self.data)
        assert state is not None
        [found] = [one for one in state.processes if one.service == service]
        return found

    def signal(self, service: str, number: signal.Signals) -> None:
        """Send it to the service's process; nothing when there is none now."""
        pid = self.services[service].pid if self.apart else self.process(service).pid
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    async def alerts(self) -> dict[str, str]:
        """The alerts that fire now, with their severity, without the one that always does."""
        async with aiohttp.ClientSession() as session, session.get(f"http://{self.prometheus}/api/v1/alerts") as answer:
            found = orjson.loads(await answer.read())["data"]["alerts"]
        return {
            one["labels"]["alertname"]: one["labels"]["severity"]
            for one in found
            if one["state"] == "firing" and one["labels"]["alertname"] != "PenstockWatchdog"
        }

    async def doctor(self) -> dict[str, Any]:
        """The answer of `penstock doctor --json`."""
        command = [sys.executable, "-m", "services.fleet", "doctor", "--json", "--data", str(self.data)]
        if self.apart:
            command += ["--targets", str(self.targets), "--broker", self.broker, "-f", str(self.pipe_file)]
        if self.scaling:
            command += ["--observer", self.observer, "--observer-token-file", str(self.token)]
        process = await asyncio.create_subprocess_exec(
            *command, cwd=self.folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        try:
            found: dict[str, Any] = orjson.loads(out)
        except orjson.JSONDecodeError:
            return {"causes": [], "failed": err.decode()[-500:]}
        return found

    def write_targets(self) -> None:
        """For Prometheus, as discovery does: a process that is gone has no target."""
        if self.apart:
            found = [
                {"targets": [one.management], "labels": {"component": name, "process": f"{name}-1"}}
                for name, one in self.services.items()
                if one.is_running
            ]
        else:
            try:
                state = orjson.loads((self.data / STATE_FILE).read_bytes())
            except (OSError, orjson.JSONDecodeError):
                return
            found = list_targets(state)
        new = self.targets.with_suffix(".new")
        new.write_bytes(orjson.dumps(found))
        new.rename(self.targets)

    async def start_service(self, name: str, module: str = "") -> Service:
        """Of a fleet that is apart: start the service, without waiting. module: runs the service's own, its first argument."""
        arguments = ["--broker", self.broker, "--pipes", str(self.pipe_file)]
        arguments += ["--schemas", "true"] if self.registry else []
        if name == "ingest":
            arguments += ["--listen", self.listen]
        if name == "expel":
            arguments += ["--allow-networks", "127.0.0.0/8"]
        if name == "observer":
            arguments += ["--listen", self.observer, *(["--token-file", str(self.token)] if self.scaling else [])]
        if name == "autoscaler":
            arguments += [*self.scaling, "--targets", str(self.targets)]
            arguments += ["--observer", self.observer, "--observer-token-file", str(self.token)]
        if name == "table":
            arguments += ["--listen", f"127.0.0.1:{free_port()}", "--data", str(self.tables)]
        if name == "registry":
            arguments += ["--listen", self.registry, "--store", f"file://{self.schemas}"]
        if name == "transform":
            arguments += ["--data", str(self.data)]
        begin = [MODULES[name]] if module else []
        service = Service(name, module or MODULES[name], [*begin, *arguments], self.folder)
        await service.start()
        self.services[name] = service
        return service

    def close_services(self) -> None:
        for service in self.services.values():
            service.close()

    async def keep_writing_targets(self) -> None:
        while True:
            await asyncio.to_thread(self.write_targets)
            await asyncio.sleep(5)

    async def send(self) -> None:
        """Some events a second to each stream, until cancelled."""
        timeout = aiohttp.ClientTimeout(total=5)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                began = time.monotonic()
                numbers = range(self.sent, self.sent + 5)
                self.sent += 5
                now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                orders: list[dict[str, object]] = [
                    {"id": f"o-{number}", "key": "k", "time": now, "amount": 5.0} for number in numbers
                ]
                orders[0].update(self.poison)
                clicks = [{"id": f"c-{number}", "key": "k", "time": now} for number in numbers]
                latest = [{"id": f"l-{number}", "key": f"k{number % 50}", "time": now} for number in numbers]
                for stream, events in (("orders", orders), ("clicks", clicks), ("latest", latest)):
                    if stream not in self.pipes["streams"]:
                        continue
                    with suppress(aiohttp.ClientError, TimeoutError, OSError):
                        url = f"http://{self.listen}/v1/streams/{stream}/events"
                        async with session.post(url, data=orjson.dumps(events), headers=JSON) as answer:
                            self.accepted += answer.ok * len(events)
                await asyncio.sleep(max(0.0, SEND_EVERY_S - (time.monotonic() - began)))


@asynccontextmanager
async def open_incident_fleet(
    folder: Path,
    *,
    apart: bool,
    spark: bool,
    kafka: bool,
    autoscaler: bool,
    table: bool,
    registry: bool,
    change: Callable[[IncidentFleet], Awaitable[None]] | None,
) -> AsyncIterator[IncidentFleet]:
    """The fleet, ready, under load, watched by Prometheus. change: the pipe file before the start.

    autoscaler: with one. In a fleet that is apart it looks at a group of instances, and orders nothing. table: with a table.
    registry: with one, that has a schema.
    """
    async with AsyncExitStack() as stack:
        cluster = None
        if kafka:
            cluster = KafkaCluster(folder / "kafka", brokers=1)
            stack.callback(cluster.stop, grace_s=0)
            await asyncio.to_thread(cluster.start)
        crm, archive = Receiver(), Receiver()
        for receiver in (crm, archive):
            await receiver.open()
            stack.push_async_callback(receiver.close)
        data = folder / "data"
        data.mkdir(exist_ok=True)
        broker = f"kafka://{cluster.bootstrap}" if cluster is not None else f"log://{data / 'log'}"
        listen, prometheus, observer = (f"127.0.0.1:{free_port()}" for _ in range(3))
        schemas = f"127.0.0.1:{free_port()}" if registry else ""
        fleet = IncidentFleet(folder, data, broker, listen, prometheus, apart, crm, archive, cluster, observer, schemas)
        fleet.pipes = _pipes(crm.port, archive.port, spark=spark, table=table)
        if change is not None:
            await change(fleet)
        fleet.write_pipes()
        if apart:
            await _start_apart(fleet, stack, spark=spark, autoscaler=autoscaler, table=table)
        else:
            await _start_up(fleet, stack, autoscaler=autoscaler)
        if registry:
            await _register(fleet)
        fleet.write_targets()
        stack.callback(lambda: [task.cancel() for task in fleet.tasks])
        for work in (fleet.keep_writing_targets(), fleet.send()):
            fleet.tasks.append(asyncio.create_task(work))
        watching = await asyncio.to_thread(_start_prometheus, fleet)
        stack.callback(stop_child, watching, grace_s=0)
        await wait_until(lambda: _answers(fleet.prometheus), READY_S)
        await wait_until(lambda: crm.requests > 5 and archive.requests > 5, READY_S)
        yield fleet


async def _register(fleet: IncidentFleet) -> None:
    """One schema, so that the store is not empty."""
    body = orjson.dumps({"schema": '{"type": "record", "name": "Order", "fields": []}'})
    url = f"http://{fleet.registry}/subjects/orders-value/versions"
    async with aiohttp.ClientSession() as session, session.post(url, data=body, headers=JSON) as answer:
        assert answer.status == 200, await answer.text()


def _pipes(crm: int, archive: int, *, spark: bool, table: bool) -> dict[str, Any]:
    def hook(name: str, port: int) -> dict[str, Any]:
        webhook = {"url": f"http://127.0.0.1:{port}/hook", "retry": {"attempts": 2}, "timeout": "5s"}
        return {"name": name, "webhook": webhook}

    columns = "id STRING, key STRING, time STRING, amount DOUBLE"
    stream = {"partitions": 2, "id": "id", "key": "key", "time": "time"}
    pipes: dict[str, Any] = {
        "shop": {"sources": ["orders"], "destinations": [hook("crm", crm)]},
        "audit": {"sources": ["clicks"], "destinations": [hook("archive", archive)]},
    }
    if spark:
        pipes["large"] = {"sources": ["orders"], "transform": {"sql": SQL}, "destinations": [hook("archive", archive)]}
    streams = {"orders": {**stream, "columns": columns}, "clicks": stream}
    if table:
        streams["latest"] = {**stream, "compact": True}
    return {"version": 1, "streams": streams, "pipes": pipes}


async def _start_up(fleet: IncidentFleet, stack: AsyncExitStack, *, autoscaler: bool) -> None:
    command = [sys.executable, "-m", "services.fleet", "up", "--broker", fleet.broker, "--data", str(fleet.data)]
    command += ["--pipes", str(fleet.pipe_file), "--listen", fleet.listen, "--allow-networks", "127.0.0.0/8"]
    command += ["--tables", f"127.0.0.1:{free_port()}"]
    command += ["--autoscale", "true"] if autoscaler else []
    command += ["--registry", fleet.registry] if fleet.registry else []
    log = fleet.folder / "up.log"
    fleet.up = await asyncio.to_thread(start_child, command, log=log)
    stack.push_async_callback(asyncio.to_thread, stop_child, fleet.up, grace_s=1.0)

    def runs() -> bool:
        assert fleet.up is not None
        assert fleet.up.poll() is None, log.read_text()[-3000:]
        return "Penstock runs" in log.read_text()

    await wait_until(runs, READY_S)


async def _start_apart(
    fleet: IncidentFleet, stack: AsyncExitStack, *, spark: bool, autoscaler: bool, table: bool
) -> None:
    command = [sys.executable, "-m", "services.fleet", "apply", "--broker", fleet.broker, "-f", str(fleet.pipe_file)]
    done = await asyncio.to_thread(
        subprocess.run, [*command, "--allow-networks", "127.0.0.0/8"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if autoscaler:
        fleet.token.touch(0o600)
        fleet.token.write_text(make_token())
        platform = open_group_platform(
            fleet.folder / "platform", lambda: {"expel-1": fleet.services["expel"].management}
        )
        fleet.scaling = await stack.enter_async_context(platform)
    stack.callback(fleet.close_services)
    asked = {"transform": spark, "autoscaler": autoscaler, "table": table, "registry": bool(fleet.registry)}
    absent = {name for name, wanted in asked.items() if not wanted}
    for name in [one for one in MODULES if one not in absent]:
        await fleet.start_service(name)
    for service in fleet.services.values():
        await service.wait_ready()


def _start_prometheus(fleet: IncidentFleet) -> subprocess.Popen[bytes]:
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(RULES / "recording.yml"), str(RULES / "alerts.yml")],
        "scrape_configs": [
            {"job_name": "penstock", "file_sd_configs": [{"files": [str(fleet.targets)], "refresh_interval": "5s"}]}
        ],
    }
    path = fleet.folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    program = shutil.which("prometheus")
    assert program is not None, "Prometheus is missing. Try: apt-get install prometheus"
    options = [
        f"--config.file={path}",
        f"--storage.tsdb.path={fleet.folder / 'tsdb'}",
        f"--web.listen-address={fleet.prometheus}",
        "--log.level=warn",
    ]
    return start_child([program, *options], log=fleet.folder / "prometheus.log")


async def _answers(address: str) -> bool:
    with suppress(aiohttp.ClientError, OSError):
        async with aiohttp.ClientSession() as session, session.get(f"http://{address}/-/ready") as answer:
            return answer.status == 200
    return False
