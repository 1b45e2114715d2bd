"""`penstock init`, `check`, `schema` and `apply`: the pipe file before the fleet runs."""

import json
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from services.core.pipes import PipeFile
from services.core.waiting import Waiting
from services.core.yaml_source import BadConfiguration
from services.fleet.access import find_broker
from services.fleet.console import OUT, note
from services.fleet.pipe_check import check_pipe_file
from services.fleet.pipe_schema import pipe_schema
from services.fleet.problem import CommandFailed
from services.fleet.starter import STARTER
from services.fleet.topics import describe_removed, look, name_unclaimed, prepare
from services.fleet.verbs.app import APP, example
from services.fleet.verbs.dead_options import BrokerUrl, Data

PipeFilePath = Annotated[Path, typer.Option("--pipes", "-f", envvar="PENSTOCK_PIPES", help="The pipe file.")]
Allowed = Annotated[
    str,
    typer.Option(
        "--allow-networks", envvar="PENSTOCK_UP_ALLOW_NETWORKS", help="Networks inside that webhooks may be in."
    ),
]


@APP.command(epilog=example("penstock init\npenstock check -f pipes.yaml"))
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("pipes.yaml"),
) -> None:
    """Write a commented pipe file to start from. An existing file is left alone."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(STARTER)
    except FileExistsError as error:
        raise CommandFailed(f"{path} exists already and was left alone", f"penstock init other-{path.name}") from error
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}", "another folder") from error
    note(f"Wrote {path}. Try: penstock check -f {path}")


@APP.command(
    epilog=example(
        "penstock check -f pipes.yaml --allow-networks 127.0.0.0/8\npenstock check --broker kafka://127.0.0.1:9092"
    )
)
def check(
    pipes: PipeFilePath = Path("pipes.yaml"),
    allow_networks: Allowed = "",
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Check a pipe file: every mistake with file, line and key. Status 2 when there is one.

    Where there is a broker, it is asked what waits for destinations that the file no longer has. Without one the file alone is
    checked, and that is said.
    """
    try:
        found = check_pipe_file(pipes, allow_networks=allow_networks)
        waiting = _look(broker, data, found)
        if isinstance(waiting, Waiting) and (problems := name_unclaimed(waiting, found, pipes)):
            raise BadConfiguration(problems)
    except BadConfiguration as error:
        if not as_json:
            raise
        typer.echo(json.dumps({"problems": [problem.as_json() for problem in error.problems]}))
        raise typer.Exit(2) from None
    summary = {
        "streams": len(found.streams),
        "pipes": len(found.pipes),
        "destinations": sum(len(pipe.destinations) for pipe in found.pipes.values()),
    }
    if as_json:
        looked = {"unknown": waiting} if isinstance(waiting, str) else {"removed": _by_lane(waiting, found)}
        typer.echo(json.dumps({**summary, "problems": [], "waiting": looked}))
        return
    OUT.print(f"{pipes} is good: " + ", ".join(f"{count} {what}" for what, count in summary.items()), style="green")
    if isinstance(waiting, str):
        note(f"what waits for destinations that it may no longer have is not known: {waiting}", "yellow")
    else:
        for line in describe_removed(waiting, found):
            note(line, "yellow")


def _look(broker: str | None, data: Path, pipes: PipeFile) -> Waiting | str:
    """What waits, or why it is not known."""
    try:
        url = find_broker(broker, data)
    except CommandFailed as error:
        return str(error)
    return uvloop.run(look(url, pipes))


def _by_lane(waiting: Waiting, pipes: PipeFile) -> dict[str, int]:
    """How many events still wait for each destination that the file has removed."""
    return {lane: sum(waiting.unclaimed.get(lane, {}).values()) for lane in pipes.removed}


@APP.command(epilog=example("penstock schema > pipes.schema.json"))
def schema() -> None:
    """Print the JSON Schema of the pipe file, by which editors complete and check it."""
    typer.echo(pipe_schema(), nl=False)


@APP.command(epilog=example("penstock apply -f pipes.yaml --broker kafka://127.0.0.1:9092"))
def apply(
    broker: Annotated[
        str,
        typer.Option("--broker", envvar="PENSTOCK_BROKER", help="log:///path, kafka://host:port or kinesis://region."),
    ],
    pipes: PipeFilePath = Path("pipes.yaml"),
    allow_networks: Allowed = "",
    grow: Annotated[
        bool, typer.Option("--grow", help="Add partitions where the pipe file wants more. Keys will map elsewhere.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Create the topics that a pipe file implies, and nothing else. Safe to run again.

    Status 2 when events wait for a destination that the file no longer has, and it does not say what becomes of them.
    """
    found = check_pipe_file(pipes, allow_networks=allow_networks, secrets=False)
    done, waiting, went_on = uvloop.run(prepare(broker, found, pipes, grow=grow))
    if as_json:
        result = {"created": done.created, "grown": done.grown, "kept": done.kept, "removed": _by_lane(waiting, found)}
        typer.echo(json.dumps(result))
        return
    for line in describe_removed(waiting, found, went_on):
        note(line, "yellow")
    for what, topics in (("created", done.created), ("grown", done.grown), ("there already", done.kept)):
        for topic in topics:
            OUT.print(f"{what:<14} {topic}")
