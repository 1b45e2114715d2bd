"""`penstock init`, `check`, `schema` and `apply`: write, check and apply a pipe file."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from services.core.broker.connect import BadBrokerUrl
from services.core.fleet_broker import open_fleet_broker
from services.core.pipe_file.existing_topics import existing_topics
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import removed_lanes, removed_pipes
from services.core.undelivered.waiting import WaitingEvents
from services.core.units import DURATION_PATTERN, SIZE_PATTERN, format_count, format_duration, format_size
from services.core.yaml_source import BadConfiguration, Problem
from services.fleet.access import find_broker, find_networks
from services.fleet.console import OUT, print_note
from services.fleet.pipes.check import check_pipe_file, find_warnings
from services.fleet.pipes.expected_modes import describe_modes, expected_modes
from services.fleet.pipes.state_check import check_states
from services.fleet.pipes.topics import (
    Checked,
    check_broker,
    check_changes,
    count_from_storing,
    describe_removed,
    name_unclaimed,
    prepare,
)
from services.fleet.problem import CommandFailed
from services.fleet.up.settings import master_of_transforms, networks_of_webhooks
from services.fleet.verbs.app import APP, AsJson, BrokerUrl, Data, example

STARTER = """\
# yaml-language-server: $schema=./pipes.schema.json
# (penstock schema > pipes.schema.json, then editors complete and check this file)
version: 1

# A stream is where clients send events: POST /v1/streams/orders/events
streams:
  orders:
    partitions: 4        # more partitions, more parallel work; keys keep their order within one
    retention: 7d        # every duration carries its unit: ms, s, m, h, d
    id: id               # payload field with the event's id, not its customer's or device's; without the field: a new id
    key: customer        # payload field with the ordering key
    time: time           # payload field with the event time (RFC 3339, or a number of s or ms)
    # For transforms: the fields of the payload as columns, in Spark's DDL. A field that an event lacks is null. With NOT NULL
    # such an event is a dead letter instead: otherwise WHERE would silently drop an order without amount.
    columns: id STRING, time STRING, customer STRING, amount DOUBLE NOT NULL

# A pipe carries events from its sources through a transform, if it has one, to its destinations.
pipes:
  large-orders:
    sources: [orders]
    transform:
      # `event` identifies the event and keeps its id and time; the other columns become the new payload
      sql: SELECT event, id, customer, amount, round(amount * 0.19, 2) AS vat FROM orders WHERE amount >= 100
    destinations:
      - name: billing
        webhook:
          url: http://127.0.0.1:9000/hook   # penstock listen --port 9000
          secret: {file: webhook.secret}    # penstock keys secret webhook.secret
          # auth: {bearer: {file: billing.token}}   # or header, oauth: for receivers that ask for a token
          # body: cloudevents               # or json, ndjson
          # order: key                      # events of one key in order; default: none
          # batch: {max_events: 100, max_bytes: 1MB, max_wait: 50ms}
          # rate: 500                       # events a second at most
          # While the receiver fails: the waits before further rounds of attempts. Without this key: 5s, 5m, 30m, …
          schedule: [5s, 1m, 5m, 30m, 2h, 5h, 10h, 14h, 20h, 1d]
"""


def pipe_schema() -> str:
    """The JSON Schema as text, as in `schema/pipes.schema.json`. The same models always give the same text."""
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_as_written(PipeFile.model_json_schema()),
        "title": "Penstock pipe file",
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _as_written(node: Any) -> Any:
    """The schema with defaults as in the file: `7d`, not 604800.0. Omits defaults that are objects."""
    if isinstance(node, list):
        return [_as_written(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {
        key: _as_written(value)
        for key, value in node.items()
        if not (key == "default" and (value is None or isinstance(value, dict)))
        and not (key == "title" and isinstance(value, str))
    }
    if "patternProperties" in kept:
        kept["additionalProperties"] = False  # every key must match the name pattern
    default, pattern = kept.get("default"), kept.get("pattern")
    if pattern == DURATION_PATTERN and isinstance(default, int | float):
        kept["default"] = format_duration(default)
    items = kept.get("items")
    if isinstance(items, dict) and items.get("pattern") == DURATION_PATTERN and isinstance(default, list):
        kept["default"] = [format_duration(seconds) for seconds in default]
    if pattern == SIZE_PATTERN and isinstance(default, int):
        kept["default"] = format_size(default)
    return kept


PipeFilePath = Annotated[Path, typer.Option("--pipes", "-f", envvar="PENSTOCK_PIPES", help="The pipe file.")]
Allowed = Annotated[
    str | None,
    typer.Option(
        "--allow-networks",
        envvar="PENSTOCK_UP_ALLOW_NETWORKS",
        help="Private networks that webhooks may reach, as for penstock up. Default: those of the running fleet on --data.",
    ),
]


@APP.command(
    epilog=example(
        "penstock init\npenstock keys secret webhook.secret\npenstock check -f pipes.yaml --allow-networks 127.0.0.0/8"
    )
)
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = Path("pipes.yaml"),
) -> None:
    """Write a first pipe file, with comments. An existing file is not changed."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(STARTER)
    except FileExistsError as error:
        raise CommandFailed(f"{path} exists already and was not changed", f"penstock init other-{path.name}") from error
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}", "another folder") from error
    print_note(f"Wrote {path}. Try, for its webhook on this machine:")
    print_note("  penstock keys secret webhook.secret")
    print_note(f"  penstock check -f {path} --allow-networks 127.0.0.0/8")


@APP.command(
    epilog=example(
        "penstock check -f pipes.yaml --allow-networks 127.0.0.0/8\npenstock check --broker kafka://127.0.0.1:9092"
    )
)
def check(
    pipes: PipeFilePath = Path("pipes.yaml"),
    allow_networks: Allowed = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            envvar="PENSTOCK_CONFIG",
            metavar="FILE",
            help="The settings file of penstock up. Its allowed networks and the Spark master of the transforms are used.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a pipe file, and the secrets and files that it names. Prints every mistake with file, line and key. Status 2 when
    there is one.

    It reads the names and types in `columns`, but does not analyse transforms: `penstock try` does. `not_analysed` in --json
    lists the pipes with a transform, and `modes` their modes, as far as known without Spark. A changed transform over several
    events is compared with the state that the former one left, which takes Spark some seconds.

    With a broker, also show the effects of the file there: new destinations with the events that they will receive, and
    removed destinations and pipes with the events and dead letters that they leave. `partitions` in --json lists the topics
    with more partitions than the file asks for, and who added them.
    """
    try:
        master = master_of_transforms(config)
        given = networks_of_webhooks(config) if allow_networks is None else allow_networks
        networks = find_networks(given, data)
        found = check_pipe_file(pipes, allow_networks=networks, master=master)
        known = _check_broker(broker, data, found, pipes)
        if isinstance(known, Checked):
            problems = name_unclaimed(known.waiting, found, pipes) + known.changes.problems(pipes)
            if problems:
                raise BadConfiguration(problems)
            unknown = check_states(pipes, known.changes.states)
            known = known._replace(changes=replace(known.changes, lines=[*known.changes.lines, *unknown]))
    except BadConfiguration as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"problems": [problem.as_json() for problem in error.problems]}))
        raise typer.Exit(2) from None
    url = _url_of(broker, data)
    modes = expected_modes(found, url, master)
    summary = {
        "streams": len(found.streams),
        "pipes": len(found.pipes),
        "destinations": sum(len(pipe.destinations) for pipe in found.pipes.values()),
    }
    if as_json:
        if isinstance(known, str):
            result: dict[str, Any] = {"waiting": {"unknown": known}, "changes": None, "partitions": None}
        else:
            changes = [change.as_json() for change in known.changes.lines]
            grown = [one.as_json() for one in known.grown]
            result = {"waiting": {"removed": _by_name(known.waiting, found)}, "changes": changes, "partitions": grown}
        warnings = [problem.as_json() for problem in find_warnings(pipes)]
        result |= {"not_analysed": list(modes), "modes": {name: mode._asdict() for name, mode in modes.items()}}
        typer.echo(json.dumps({**summary, "problems": [], "warnings": warnings, **result}))
        return
    _print_warnings(pipes)
    counts = ", ".join(format_count(count, what.removesuffix("s")) for what, count in summary.items())
    OUT.print(f"{pipes} is good: {counts}", style="green")
    for line in describe_modes(modes, is_known=url is not None):
        print_note(f"note: {line}", "dim")
    _print_not_analysed(pipes, list(modes))
    if isinstance(known, Checked):
        _print_effects(known, found)
    elif broker is not None or data != Path("data") or data.exists():  # else nothing was ever started here
        print_note(f"the effects on stored events are not known: {known}", "yellow")


def _print_effects(known: Checked, pipes: PipeFile) -> None:
    for line in [*map(str, known.changes.lines), *describe_removed(known.waiting, pipes, known.changes.lines)]:
        print_note(line, "yellow")
    for one in known.grown:
        print_note(str(one))


def _print_not_analysed(path: Path, transforms: Sequence[str]) -> None:
    """transforms: the pipes that have one."""
    if transforms:
        what = "the transform was" if len(transforms) == 1 else "the transforms were"
        file = "" if path == Path("pipes.yaml") else f" -f {path}"
        print_note(f"{what} not analysed. Try: penstock try {transforms[0]} --sample FILE{file}")


def _print_warnings(path: Path) -> None:
    for problem in find_warnings(path):
        print_note(f"warning: {problem}", "yellow")


def _check_broker(broker: str | None, data: Path, pipes: PipeFile, path: Path) -> Checked | str:
    """The waiting events and the changes, or the reason why they are not known.

    Raises BadConfiguration when the broker has no topics of others, or not those that the file names.
    """
    try:
        url = find_broker(broker, data)
    except CommandFailed as error:
        return str(error)
    if pipes.brokers or existing_topics(pipes):
        try:
            open_fleet_broker(url, pipes)
        except BadBrokerUrl as error:
            raise BadConfiguration([Problem(str(path), "streams", str(error))]) from error
    return uvloop.run(check_broker(url, pipes, path, data))


def _url_of(broker: str | None, data: Path) -> str | None:
    """The broker's URL; None when no broker is named or known from the data folder."""
    try:
        return find_broker(broker, data)
    except CommandFailed:
        return None


def _by_name(waiting: WaitingEvents, pipes: PipeFile) -> dict[str, int]:
    """The number of events that still wait, by destination or pipe in `removed`, and by former name."""
    names = removed_lanes(pipes) | removed_pipes(pipes)
    return {
        name: sum(
            sum(found.values())
            for lane, found in waiting.unclaimed.items()
            if lane == name or lane.startswith(f"{name}/")
        )
        for name in names
    }


@APP.command(epilog=example("penstock schema > pipes.schema.json"))
def schema() -> None:
    """Print the JSON Schema of the pipe file. Editors use it for completion and checks."""
    typer.echo(pipe_schema(), nl=False)


@APP.command(
    epilog=example(
        "penstock apply\n"
        "penstock apply -f pipes.yaml --broker kafka://127.0.0.1:9092\n"
        "penstock apply -f pipes.yaml --broker 'kinesis://eu-west-1?prefix=acme.'"
    )
)
def apply(
    broker: Annotated[
        str | None,
        typer.Option(
            "--broker",
            envvar="PENSTOCK_BROKER",
            help="log:///path, kafka://host:port or kinesis://region, with ?prefix=acme. if fleets share it. Default: the "
            "broker of the fleet on --data.",
        ),
    ] = None,
    data: Data = Path("data"),
    pipes: PipeFilePath = Path("pipes.yaml"),
    allow_networks: Allowed = None,
    grow: Annotated[
        bool,
        typer.Option("--grow", help="Add partitions where the pipe file has more. Keys then map to other partitions."),
    ] = False,
    log_append_time: Annotated[
        bool,
        typer.Option(
            "--log-append-time",
            help="On Kafka: count the retention of streams of Penstock 0.1 from storing. Only when no service of 0.1 runs.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create the topics of a pipe file, and let renamed destinations continue at their positions. Safe to run again.

    Topics with more partitions stay as they are. If the file renames a destination, stop the fleet first.

    Status 2 when events wait for a destination that is neither in the file nor in its `removed`, or a removed pipe leaves dead
    letters.
    """
    found = check_pipe_file(pipes, allow_networks=find_networks(allow_networks, data), secrets=False)
    url = find_broker(broker, data)
    changes = uvloop.run(check_changes(url, found, pipes, None))
    done, waiting, grown = uvloop.run(prepare(url, found, pipes, grow=grow))
    altered: list[str] = []
    if log_append_time:
        altered = uvloop.run(count_from_storing(url, found))
        changes = [change for change in changes if change.kind != "retention"]
    if as_json:
        counts = {"created": done.created, "grown": done.grown, "kept": done.kept, "altered": altered}
        lines = [change.as_json() for change in changes]
        more = [one.as_json() for one in grown]
        typer.echo(json.dumps({**counts, "removed": _by_name(waiting, found), "changes": lines, "partitions": more}))
        return
    _print_warnings(pipes)
    for line in [*map(str, changes), *describe_removed(waiting, found, changes)]:
        print_note(line, "yellow")
    for one in grown:
        print_note(str(one))
    told = (("created", done.created), ("grown", done.grown), ("there already", done.kept), ("altered", altered))
    for what, topics in told:
        for topic in topics:
            OUT.print(f"{what:<14} {topic}")
