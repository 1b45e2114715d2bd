"""The services of a fleet as processes of the simulated machine: their real `start`, over a modelled broker and no socket.

What is replaced stands in `replace_seams`: the way to the broker, to the pipe file, to receivers and to ports.
The supervisor is a model: it starts what the real plan names, again whenever it dies, and stops it in order. Before a process
starts again, somebody has saved the pipe file with a typo in it: only what the real plan points to the snapshot can start.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import structlog
from prometheus_client.metrics import MetricWrapperBase

import services.core.process.lifecycle as lifecycle
import services.core.process.startup as startup
import services.core.security.key_watch as key_watch
import services.core.security.signing as signing
import services.expel.app as expel_app
import services.expel.plan as expel_plan
import services.fleet.dead.redrive as redrive_module
import services.fleet.pipes.topics as fleet_topics
import services.fleet.up.plan as fleet_plan
import services.global_retrier.app as retrier_app
import services.ingest.app as ingest_app
import services.observer.app as observer_app
from services.core import metrics
from services.core.broker.contract import Broker
from services.core.lag import LagFamily
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.snapshot import SNAPSHOT_VARIABLE
from services.core.process.lifecycle import supervise
from services.core.yaml_source import BadConfiguration, Problem
from services.expel.settings import ExpelSettings
from services.fleet.pipes.topics import PreparedTopics, prepare
from services.fleet.problem import CommandFailed
from services.fleet.up.plan import START_ORDER, make_plan
from services.fleet.up.process import ServiceSpec
from services.fleet.up.settings import UpSettings
from services.global_retrier.settings import RetrierSettings
from services.ingest.settings import IngestSettings
from services.observer.settings import ObserverSettings
from tests.simulation import clock, transform
from tests.simulation.broker import open_broker
from tests.simulation.cluster import Cluster
from tests.simulation.machine import Machine, Process, current_process
from tests.simulation.receivers import ModelClient, Receiver
from tests.simulation.rotation import Rotation, read_keys, read_private
from tests.simulation.transform import TransformSettings

DRAIN_S = 6.0
URL = "log:///simulated"
_HERE = Path("/simulated/pipes.yaml")


class Fleet:
    """One fleet, over all runs of its processes. counts: how many instances of which service."""

    def __init__(
        self,
        machine: Machine,
        rng: random.Random,
        cluster: Cluster,
        receiver: Callable[[tuple[str, str]], Receiver],
        counts: dict[str, int],
        settings: dict[str, Any],
        rotation: Rotation,
    ) -> None:
        self._machine, self._rng, self._cluster, self._receiver = machine, rng, cluster, receiver
        self._counts, self._settings, self._rotation = counts, settings, rotation
        self.pipes: PipeFile | None = None
        self.has_typo = False
        """The pipe file that operators edit; the snapshot of it is as it was at `up`."""
        self.processes: list[Process] = []
        """All that ever ran."""
        self.restarts = 0
        self.skews: dict[str, float] = {}
        """How far ahead wall clocks are, by process name."""
        self._is_stopping = False
        self._keepers: list[asyncio.Task[None]] = []

    def alive(self, service: str = "") -> list[Process]:
        """The processes of a service that run, or all."""
        return [one for one in self.processes if one.alive and one.name.startswith(service)]

    def listening(self) -> list[Process]:
        """Those that take requests, and do not stand still: a balancer would notice."""
        return [one for one in self.processes if one.alive and one.listeners]

    def found(self, what: str) -> list[Any]:
        """A part of the processes that run."""
        return [one.found[what] for one in self.processes if one.alive and what in one.found]

    async def up(self, pipes: PipeFile) -> None:
        """Provision the topics and start everything that the plan names. Raises BadConfiguration: nothing was changed."""
        topics = (await self._prepare(pipes)).topics
        self.pipes, self.has_typo = pipes, False
        self._is_stopping = False
        settings = UpSettings(**self._counts, observer="127.0.0.1:8081")
        plan = make_plan(settings, pipes, URL, None, _HERE.parent, has_retrier=topics.has_retrier)
        self._keepers = [asyncio.create_task(self._keep(spec)) for spec in plan.services if self._runs(spec.service)]

    async def _prepare(self, pipes: PipeFile) -> PreparedTopics:
        operator = Process(self._machine, "operator")
        operator.found["cluster"] = self._cluster
        while True:
            try:
                return await self._machine.create_task(prepare(URL, pipes, _HERE), context=operator.context)
            except CommandFailed as error:
                self._machine.trace(f"up: {error}")

    def _runs(self, service: str) -> bool:
        return service in _STARTS and (service != "observer" or self._settings["observed"])

    async def _keep(self, spec: ServiceSpec) -> None:
        name, failures = spec.name, 0
        while not self._is_stopping:
            process = self._start(spec)
            begun = self._machine.time()
            await process.ended.wait()
            self.has_typo = True
            self._machine.trace(f"{name} ended: {process.status}")
            if process.status == _BAD_CONFIGURATION and not self._rotation.was_broken:
                self._machine.failures.append(f"{name}: bad configuration")
            failures = 0 if self._machine.time() - begun > 20 else failures
            wait = self._rng.uniform(0.5, 1) * min(10.0, 0.2 * 2**failures)
            failures += 1
            self.restarts += 1
            await asyncio.sleep(wait)

    def _start(self, spec: ServiceSpec) -> Process:
        process = Process(self._machine, spec.name)
        process.found |= {
            "cluster": self._cluster,
            "pipes": self.pipes,
            "fleet": self,
            "environ": spec.environ,
            "receiver": self._receiver,
            "machine": self._machine,
            "rotation": self._rotation,
        }
        process.skew = self.skews.get(spec.name, 0.0)
        self._cluster.attach(process)
        self.processes.append(process)
        process.start(self._run(spec.service))
        return process

    async def _run(self, service: str) -> int:
        model, start = _STARTS[service]
        settings = model(broker=URL, pipes=_HERE, drain=f"{DRAIN_S:g}s", **self._settings.get(service, {}))

        async def begin(supervision: Any) -> None:
            await start(settings, supervision)

        try:
            return await supervise(begin, DRAIN_S)
        except BadConfiguration as error:
            self._machine.trace(f"bad configuration: {error}")
            return 2

    async def down(self) -> None:
        """Drain and stop everything, the way in first."""
        self._is_stopping = True
        for service in reversed(START_ORDER):
            stopping = self.alive(service)
            for process in stopping:
                if process.frozen:
                    process.thaw()
                process.terminate()
                self._machine.call_later(DRAIN_S + 3, process.kill)
            for process in stopping:
                await process.ended.wait()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)


_BAD_CONFIGURATION = 2
_STARTS: dict[str, tuple[Any, Any]] = {
    "observer": (ObserverSettings, observer_app.start),
    "retrier": (RetrierSettings, retrier_app.start),
    "transform": (TransformSettings, transform.start),
    "expel": (ExpelSettings, expel_app.start),
    "ingest": (IngestSettings, ingest_app.start),
}


def _open_broker(_url: str, _pipes: PipeFile | None = None) -> AbstractAsyncContextManager[Broker]:
    process = current_process()
    assert process is not None
    cluster: Cluster = process.found["cluster"]
    return open_broker(cluster, process)


def _pipes(_path: Path) -> PipeFile:
    process = current_process()
    assert process is not None
    pipes, fleet = process.found["pipes"], process.found["fleet"]
    if fleet.has_typo and SNAPSHOT_VARIABLE not in process.found["environ"]:
        raise BadConfiguration([Problem("pipes.yaml", "", "is not YAML: mapping values are not allowed here")])
    assert isinstance(pipes, PipeFile)
    return pipes


def _problems() -> list[Problem]:
    process = current_process()
    assert process is not None
    rotation: Rotation = process.found["rotation"]
    return rotation.problems()


@asynccontextmanager
async def _nothing(*_: Any, **__: Any) -> AsyncIterator[str]:
    yield "127.0.0.1:0"


def _skew() -> float:
    process = current_process()
    return 0.0 if process is None else process.skew


def _end_process() -> None:
    process = current_process()
    assert process is not None
    process.kill()


class _Parts(observer_app._Parts):
    """That can be looked into."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        process = current_process()
        assert process is not None
        process.found["observer"] = self


def _put(where: Any, **what: Any) -> None:
    for name, value in what.items():
        assert hasattr(where, name), f"{where.__name__} has no {name} any more"
        setattr(where, name, value)


def _hear(_logger: object, _name: str, event: Any) -> Any:
    """Nobody reads the logs, but who listens to a process that lives."""
    process = current_process()
    if process is not None and process.alive and process.hear is not None:
        process.hear(event)
    raise structlog.DropEvent


def replace_seams() -> None:
    """Once, before the first history."""
    for module in (expel_app, ingest_app, retrier_app, observer_app):
        _put(module, serve_management=_nothing)
    _put(startup, open_fleet_broker=_open_broker)
    _put(ingest_app, load_pipes=_pipes, raise_file_limit=lambda most: most)
    _put(retrier_app, load_pipes=_pipes)
    _put(observer_app, load_pipes=_pipes, load_files=lambda _package: {}, _listen=_nothing, _Parts=_Parts)
    _put(expel_app, raise_file_limit=lambda most: most, tune_garbage_collector=lambda: None)
    _put(
        expel_plan,
        read_pipes=lambda path: (None, _pipes(path), []),
        check_destinations=lambda *_: _problems(),
        HttpClient=ModelClient,
    )
    _put(key_watch, read_ring=read_keys)
    _put(signing, read_private=read_private)
    _put(fleet_topics, open_fleet_broker=_open_broker)
    _put(fleet_plan, copy_in=lambda _snapshot, file: file)
    _put(redrive_module, print_note=lambda *_: None)
    _put(lifecycle, _exit_now=_end_process)
    _put(clock, find_skew=_skew)
    structlog.configure(processors=[_hear], cache_logger_on_first_use=False)


def forget_metrics() -> None:
    """Those of former histories: to copy their histograms takes time, more with each history."""
    for family in vars(metrics).values():
        if isinstance(family, LagFamily):
            family._children.clear()
        elif isinstance(family, MetricWrapperBase) and family._labelnames:
            family.clear()


def show_logs(tell: Callable[[str], None]) -> None:
    """What services log becomes a part of the history that is told."""

    def render(_logger: object, level: str, event: Any) -> Any:
        process = current_process()
        if process is not None and not process.alive:  # it is thrown away, `finally` and all
            raise structlog.DropEvent
        rest = {key: value for key, value in event.items() if key not in ("event", "exc_info", "hint")}
        tell(f"    {process.name if process else 'world'} {level}: {event['event']} {rest}")
        return _hear(_logger, level, event)

    structlog.configure(processors=[render], cache_logger_on_first_use=False)
