"""Plans the processes of a fleet from its settings and pipe file."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from services.core.http.address import parse_address
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.snapshot import SNAPSHOT_VARIABLE, copy_in
from services.core.units import format_duration
from services.fleet.backup.manifest import SCHEMAS
from services.fleet.folder import OBSERVER_TOKEN_FILE, STATE_FILE, TABLES_FOLDER
from services.fleet.up.ports import free_port
from services.fleet.up.process import ServiceSpec
from services.fleet.up.settings import UpSettings

START_ORDER = ("registry", "observer", "retrier", "expel", "transform", "table", "ingest", "autoscaler")
"""Ingest starts after the services behind it, so that they are ready for its first event. Stopping uses the reverse order: the
autoscaler ends first, so that it does not resize a stopping fleet."""


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The processes of one fleet. data: absolute. broker: a URL. listen, observer: the addresses of ingest and the observer.
    keys: the API keys that ingest reads, an absolute path, or None. tables: of the table service, None without one.
    registry: the address of the schema registry, or empty. allow_networks: as in `UpSettings`.

    pipes: the pipe file, or its copy in the fleet's snapshot.
    """

    data: Path
    broker: str
    pipes: Path
    listen: str
    observer: str
    services: tuple[ServiceSpec, ...]
    ready_within: float
    drain: float
    keys: str | None = None
    registry: str = ""
    tables: str | None = None
    allow_networks: str = ""


def has_registry(settings: UpSettings) -> bool:
    """Whether the fleet has a registry: its own, or one that runs elsewhere."""
    return settings.schemas or settings.registry is not None


def broker_url(settings: UpSettings, kafka: str | None) -> str:
    """The broker's URL. kafka: the bootstrap servers of the Kafka that was started here."""
    if settings.broker == "log":
        return f"log://{settings.data.absolute() / 'log'}"
    return f"kafka://{kafka}" if kafka is not None else settings.broker


def make_plan(
    settings: UpSettings,
    pipes: PipeFile,
    broker: str,
    config: str | None,
    snapshot: Path,
    *,
    has_retrier: bool,
    keys: str | None = None,
) -> FleetPlan:
    """The processes with their arguments. snapshot: the folder of the configuration that they read (`core.pipe_file.snapshot`).

    has_retrier: whether the retrier's topics exist (`Provisioned.has_retrier`). If so it runs, even if the pipe file needs none.
    """
    shared = ["--broker", broker, "--pipes", str(settings.pipes.absolute()), "--log-level", settings.log_level]
    shared += ["--drain", format_duration(settings.drain), "--ledger", str(settings.ledger).lower()]
    shared += ["--schemas", str(has_registry(settings)).lower()]
    if config:
        shared += ["--config", config]
    data = settings.data.absolute()
    token = str(data / OBSERVER_TOKEN_FILE)
    listen, observer = _with_port(settings.listen), _with_port(settings.observer)
    registry = None if settings.registry is None else _with_port(settings.registry)
    services = []
    if registry is not None:
        store = f"file://{quote(str(data / SCHEMAS))}"
        services.append(_spec("registry", 1, "services.registry", [*shared, "--listen", registry, "--store", store]))
    services += [_spec("observer", 1, "services.observer", [*shared, "--listen", observer, "--token-file", token])]
    if has_retrier:
        services.append(_spec("retrier", 1, "services.global_retrier", shared))
    reach = ["--own-addresses", listen, "--allow-networks", settings.allow_networks]
    services += [_spec("expel", number, "services.expel", [*shared, *reach]) for number in range(1, settings.expel + 1)]
    if any(pipe.transform is not None for pipe in pipes.pipes.values()):
        services.append(_spec("transform", 1, "spark", [*shared, "--data", str(data)]))
    tables = None
    if any(stream.compact for stream in pipes.streams.values()):
        tables = _with_port(settings.tables)
        services.append(
            _spec("table", 1, "services.table", [*shared, "--listen", tables, "--data", str(data / TABLES_FOLDER)])
        )
    shares_port = ["--reuse-port", "true"] if settings.ingest > 1 or settings.autoscale else []
    services += [
        _spec("ingest", number, "services.ingest", [*shared, "--listen", listen, *shares_port])
        for number in range(1, settings.ingest + 1)
    ]
    if settings.autoscale:
        groups = [
            "--group-driver",
            f"fleet://{quote(str(data))}",
            "--observer",
            observer,
            "--observer-token-file",
            token,
        ]
        targets = ["--targets", str(data / STATE_FILE)]
        services.append(_spec("autoscaler", 1, "services.autoscaler", [*shared, *groups, *targets]))
    services = [replace(spec, environ={**spec.environ, SNAPSHOT_VARIABLE: str(snapshot)}) for spec in services]
    return FleetPlan(
        data,
        broker,
        copy_in(snapshot, settings.pipes),
        listen,
        observer,
        tuple(services),
        settings.ready_within,
        settings.drain,
        keys,
        registry or "",
        tables,
        settings.allow_networks,
    )


def _with_port(address: str) -> str:
    """The address with a free port in place of port 0: several processes and every client must know it."""
    return address if parse_address(address)[1] else f"{address.removesuffix('0')}{free_port()}"


def _spec(service: str, number: int, module: str, arguments: list[str]) -> ServiceSpec:
    # Spark's workers import our packages, too, from any working directory.
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH")]))
    return ServiceSpec(f"{service}-{number}", service, module, tuple(arguments), {"PYTHONPATH": path})
