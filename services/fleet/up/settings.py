"""The settings of `penstock up`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from services.core.http.address import Address
from services.core.http.net_guard import parse_networks
from services.core.process.settings import Settings
from services.core.units import Duration
from services.core.yaml_source import BadConfiguration, Problem, load_yaml


def _networks(text: str) -> str:
    parse_networks(text)
    return text


class UpSettings(Settings):
    """A fleet on one machine: a process per service, under one supervisor."""

    section: ClassVar[str] = "up"

    broker: str = Field(
        "log",
        description="log: the embedded log in the data folder. kafka: a real Kafka, started here, with its data in the data "
        "folder. Or a URL: log:///path, kafka://host:port[,host:port][?prefix=acme.], kinesis://region[?prefix=acme.].",
    )
    data: Path = Field(Path("data"), description="The data folder: embedded log, checkpoints, service logs, state.")
    listen: Address = Field("127.0.0.1:8080", description="host:port on which ingest receives events.")
    observer: Address = Field(
        "127.0.0.1:0",
        description="host:port of the observer's API; beyond loopback it requires the token in the data folder's observer.token. "
        "Port 0: any free port.",
    )
    registry: Address | None = Field(
        None,
        description="host:port of a schema registry, e.g. 127.0.0.1:8084, with its data in the data folder; empty: no registry. "
        "Beyond loopback it needs PENSTOCK_REGISTRY_KEYS.",
    )
    tables: Address = Field(
        "127.0.0.1:8082", description="host:port of the tables, if the pipe file has compacted streams."
    )
    allow_networks: Annotated[str, AfterValidator(_networks)] = Field(
        "", description="Private networks that webhooks may reach, comma-separated; 127.0.0.0/8 for this machine."
    )
    ingest: int = Field(1, ge=1, le=64, description="Ingest processes; they share the port.")
    expel: int = Field(1, ge=1, le=64, description="Expel processes; they share the work.")
    autoscale: bool = Field(
        False,
        description="Whether the autoscaler runs: it changes shards and groups as its settings say (true or false).",
    )
    ready_within: Duration = Field(240.0, description="How long the services may take to become ready.")


SERVICES = ("ingest", "transform", "expel", "retrier", "observer", "table", "autoscaler", "registry")
OVERRULED = {
    ("ingest", "listen"): "up.listen",
    ("ingest", "reuse_port"): "up.ingest",
    ("observer", "listen"): "up.observer",
    ("table", "listen"): "up.tables",
    ("table", "data"): "up.data",
    ("transform", "data"): "up.data",
    ("expel", "allow_networks"): "up.allow_networks",
    ("expel", "own_addresses"): "up.listen",
    ("autoscaler", "group_driver"): "up.autoscale",
    ("observer", "token_file"): "up.data",
    ("registry", "listen"): "up.registry",
    ("registry", "store"): "up.data",
    ("autoscaler", "observer"): "up.observer",
    ("autoscaler", "observer_token_file"): "up.data",
    ("autoscaler", "targets"): "up.data",
    **{(service, "drain"): "up.drain" for service in SERVICES},
    **{(service, "management"): "a free port each" for service in SERVICES},
}
"""The settings of services that `penstock up` decides, and their source. It refuses them in a service's section: it would
overrule them silently."""


def refuse_overruled(config: str | None, environ: Mapping[str, str]) -> None:
    """Raise BadConfiguration for each setting of a service that `penstock up` decides itself. Blocking."""
    document = load_yaml(Path(config)) if config else None
    data = document.data if document is not None and isinstance(document.data, dict) else {}
    problems = []
    for (section, key), ours in OVERRULED.items():
        remedy = f". Try: {ours} or PENSTOCK_{ours.replace('.', '_').upper()}" if "." in ours else f": {ours}"
        message = f"penstock up decides this itself{remedy}"
        if (variable := f"PENSTOCK_{section}_{key}".upper()) in environ:
            problems.append(Problem(variable, "", message))
        if document is not None and isinstance(data.get(section), dict) and key in data[section]:
            problems.append(document.problem((section, key), message))
    if problems:
        raise BadConfiguration(problems)


def keys_of_ingest(config: Path | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The absolute path of the keys file that ingest gets by variable or settings file; None without one. Blocking."""
    named = _setting_of("ingest", "keys", config, environ)
    return None if named is None else str(Path(named).absolute())


def master_of_transforms(config: Path | None) -> str:
    """Spark's master that the transforms get by variable or settings file; `auto` without one. Blocking."""
    return _setting_of("transform", "master", config) or "auto"


def networks_of_webhooks(config: Path | None) -> str | None:
    """The private networks that webhooks of `penstock up` may reach by variable or settings file; None without one. Blocking."""
    return _setting_of("up", "allow_networks", config)


def _setting_of(service: str, name: str, config: Path | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The text of one setting of a service, as it is written; None when neither a variable nor the file has it."""
    data = load_yaml(config).data if config is not None else None
    section = data.get(service) if isinstance(data, dict) else None
    named = environ.get(f"PENSTOCK_{service}_{name}".upper())
    named = named or (section.get(name) if isinstance(section, dict) else None)
    return named if isinstance(named, str) else None
