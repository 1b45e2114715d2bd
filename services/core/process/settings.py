"""Settings of a service. Each is a flag, a `PENSTOCK_…` variable and a key in a file, in that order of precedence.

A field `max_body` of section `ingest` is `--max-body`, `PENSTOCK_INGEST_MAX_BODY` and `ingest: {max_body: …}`. Fields of the
shared section `fleet` are `--broker`, `PENSTOCK_BROKER` and `fleet: {broker: …}`.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from services.core.http.address import Address
from services.core.units import Duration, format_duration, format_size, parse_duration, parse_size
from services.core.yaml_source import BadConfiguration, Document, Problem, describe, load_yaml

SECTIONS = frozenset(
    {"fleet", "up", "ingest", "transform", "expel", "retrier", "observer", "table", "autoscaler", "registry"}
)
"""The sections of a settings file: `fleet` is shared, `up` belongs to the supervisor, each other one to a service."""


class Settings(BaseModel):
    """Base of every service's settings. section: the key in the file. shared: the fields of `fleet:`."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)
    section: ClassVar[str]
    shared: ClassVar[frozenset[str]] = frozenset({"broker", "pipes", "ledger", "schemas", "log_level"})

    @classmethod
    def program(cls) -> str:
        """The command that starts the service, for its help."""
        return f"python -m services.{cls.section}"

    broker: str = Field(
        "log:///var/lib/penstock",
        description="Broker URL: log:///path, kafka://host:port[,host:port] or kinesis://region[?fan_out=1]. With ?prefix=acme. "
        "(Kafka, Kinesis) all names there begin with acme.: several fleets can share a cluster or an account. "
        "With ?security=/FILE (Kafka): TLS and a login.",
    )
    pipes: Path = Field(Path("pipes.yaml"), description="The pipe file.")
    ledger: bool = Field(
        True, description="Whether to report which events were settled, for the observer (true or false)."
    )
    schemas: bool = Field(
        False,
        description="Whether the fleet has a schema registry, so that an alert fires when none answers (true or false).",
    )
    log_level: str = Field("info", pattern="^(debug|info|warning|error)$", description="debug, info, warning or error.")
    management: Address = Field(
        "127.0.0.1:0", description="host:port of /healthz, /readyz and /metrics; port 0: any free port."
    )
    drain: Duration = Field(25.0, description="Time after SIGTERM to finish the work in flight, e.g. 25s.")


Model = TypeVar("Model", bound=Settings)


def variable_name(model: type[Settings], field: str) -> str:
    middle = "" if field in model.shared else f"{model.section.upper()}_"
    return f"PENSTOCK_{middle}{field.upper()}"


def add_flags(parser: argparse.ArgumentParser, model: type[Settings]) -> None:
    """Add a flag per field, and --config for the file."""
    parser.add_argument("--config", metavar="FILE", help="settings file (YAML) [PENSTOCK_CONFIG]")
    for name in model.model_fields:
        text = flag_help(model, name).replace("%", "%%")
        switch = model.model_fields[name].annotation is bool  # the flag alone means true
        nargs, const = ("?", "true") if switch else (None, None)
        parser.add_argument(
            f"--{name.replace('_', '-')}", dest=name, metavar="VALUE", help=text, nargs=nargs, const=const
        )


def flag_help(model: type[Settings], name: str) -> str:
    """A field's description, its default and its variable."""
    field = model.model_fields[name]
    return f"{field.description or ''} Default: {default_text(field)}. [{variable_name(model, name)}]"


def default_text(field: FieldInfo) -> str:
    """A field's default, as it is written in a flag or a file."""
    default = field.get_default(call_default_factory=True)
    for item in field.metadata:
        if isinstance(item, BeforeValidator) and item.func is parse_duration and isinstance(default, float):
            return format_duration(default)
        if isinstance(item, BeforeValidator) and item.func is parse_size and isinstance(default, int):
            return format_size(default)
    if default is None or default in ("", ()):
        return "none"
    if isinstance(default, tuple):
        return ",".join(":".join(map(str, item)) if isinstance(item, tuple) else str(item) for item in default)
    return str(default).lower() if isinstance(default, bool) else str(default)


def load_settings(model: type[Model], argv: Sequence[str], environ: Mapping[str, str]) -> Model:
    """The settings from flags, variables, file and defaults. Blocking (reads the file).

    Raises BadConfiguration with all problems; SystemExit for --help and unknown flags (argparse, status 2).
    """
    parser = argparse.ArgumentParser(prog=model.program(), description=(model.__doc__ or "").split("\n")[0])
    add_flags(parser, model)
    flags = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    return resolve_settings(model, flags, environ)


def resolve_settings(model: type[Model], flags: Mapping[str, str], environ: Mapping[str, str]) -> Model:
    """As `load_settings`, with parsed flags: by field name, and `config` for the file."""
    config = flags.get("config") or environ.get("PENSTOCK_CONFIG")
    problems = _unknown_variables(model, environ)
    values: dict[str, Any] = {}
    sources: dict[str, Problem] = {}
    if config:
        _read_file(model, load_yaml(Path(config)), values, sources, problems)
    for name in model.model_fields:
        variable = variable_name(model, name)
        if variable in environ:
            values[name], sources[name] = environ[variable], Problem(variable, "", "")
        if name in flags:
            values[name], sources[name] = flags[name], Problem(f"--{name.replace('_', '-')}", "", "")
    try:
        settings = model.model_validate(values)
    except ValidationError as error:
        for item in error.errors(include_url=False, include_input=False):
            name = str(item["loc"][0]) if item["loc"] else ""
            source = sources.get(name, Problem(model.section, name, ""))
            problems.append(Problem(source.where, source.key, describe(item)))
        raise BadConfiguration(problems) from None
    if problems:
        raise BadConfiguration(problems)
    return settings


def _read_file(
    model: type[Settings],
    document: Document,
    values: dict[str, Any],
    sources: dict[str, Problem],
    problems: list[Problem],
) -> None:
    """Fill in this service's values and their lines. Other services check their own sections."""
    data = document.data or {}
    if not isinstance(data, dict):
        problems.append(document.problem((), "sections are needed, e.g. ingest:"))
        return
    unknown = [section for section in data if section not in SECTIONS]
    problems += [document.problem((name,), f"unknown section. Try one of: {_listed(SECTIONS)}") for name in unknown]
    for section in ("fleet", model.section):
        content = data.get(section) or {}
        known = {name for name in model.model_fields if (name in model.shared) == (section == "fleet")}
        if not isinstance(content, dict):
            problems.append(document.problem((section,), "keys and values are needed"))
            continue
        for name, value in content.items():
            if name in known:
                values[name], sources[name] = value, document.problem((section, name), "")
            else:
                problems.append(document.problem((section, name), f"unknown key. Try one of: {_listed(known)}"))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _unknown_variables(model: type[Settings], environ: Mapping[str, str]) -> list[Problem]:
    """Variables with this service's prefix that are no setting: most likely misspelt."""
    prefix = f"PENSTOCK_{model.section.upper()}_"
    known = {variable_name(model, name) for name in model.model_fields}
    return [
        Problem(name, "", "unknown setting")
        for name in sorted(environ)
        if name.startswith(prefix) and name not in known
    ]
