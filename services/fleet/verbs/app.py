"""The application, and the options that several commands share."""

import inspect
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from typer.models import CommandInfo, TyperInfo

from services.core.pipe_file.pipes import load_pipes
from services.core.pipe_file.topic_names import lanes_of, removed_lanes, renames_of
from services.core.times import parse_time
from services.core.undelivered.dead_letter import Position
from services.core.version import VERSION
from services.core.yaml_source import BadConfiguration
from services.fleet.dead.found import Filter
from services.fleet.problem import CommandFailed

APP = typer.Typer(
    name="penstock",
    help="Deliver events from HTTP clients to signed webhooks without loss. Start with [bold]penstock demo[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {VERSION}")
        raise typer.Exit


@APP.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options in front of a command."""


def example(text: str) -> str:
    """The last paragraph of a command's help: an example."""
    lines = "\n\n".join(f"  [cyan]{line}[/cyan]" for line in text.strip().splitlines())
    return f"[bold]Example[/bold]\n\n{lines}"


PANELS = {
    "Run a pipe": ("demo", "init", "check", "try", "up", "send", "listen", "status"),
    "Find events": ("event", "loss", "dead"),
    "Operate": (
        "doctor",
        "pause",
        "resume",
        "planned",
        "destination",
        "group",
        "migrate",
        "scaling",
        "apply",
        "keys",
        "schemas",
        "log",
        "backup",
    ),
    "Plan": ("rate", "cost", "schema"),
}
"""The commands in the order of `penstock --help`, by heading."""


def arrange_help() -> None:
    """Put the commands of APP in order, and join the wrapped lines of every command's help: the terminal wraps them."""
    places = {name: (panel, at) for panel, names in PANELS.items() for at, name in enumerate(names)}
    order = list(places)
    infos: list[CommandInfo | TyperInfo] = [*APP.registered_commands, *APP.registered_groups]
    for info in infos:
        info.rich_help_panel = places[_name_of(info)][0]
    APP.registered_commands.sort(key=lambda info: order.index(_name_of(info)))
    APP.registered_groups.sort(key=lambda info: order.index(_name_of(info)))
    _join_lines(APP)


def _name_of(info: CommandInfo | TyperInfo) -> str:
    return info.name or str(getattr(info.callback, "__name__", ""))


def _join_lines(app: typer.Typer) -> None:
    for info in app.registered_commands:
        info.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(info.callback) or "")
    for group in app.registered_groups:
        if group.typer_instance is not None:
            _join_lines(group.typer_instance)


BrokerUrl = Annotated[
    str | None,
    typer.Option(
        "--broker",
        envvar="PENSTOCK_BROKER",
        help="log:///path, kafka://host:port or kinesis://region, with ?prefix=acme. if fleets share it. Default: the broker of "
        "the fleet on --data, else the log in that folder.",
    ),
]
Pipes = Annotated[
    Path | None,
    typer.Option("--pipes", "-f", envvar="PENSTOCK_PIPES", help="The pipe file. Default: that of the fleet on --data."),
]
Data = Annotated[Path, typer.Option("--data", envvar="PENSTOCK_UP_DATA", help="The data folder of the fleet.")]
PipeName = Annotated[str | None, typer.Option("--pipe", help="Only dead letters of this pipe.")]
DestinationName = Annotated[str | None, typer.Option("--destination", help="Only dead letters for this destination.")]
Reason = Annotated[str | None, typer.Option("--reason", help="Only dead letters with this reason, e.g. http_404.")]
Since = Annotated[
    str | None,
    typer.Option("--since", help="Only events that became dead letters at or after this time: 2h (ago), or RFC 3339."),
]
Until = Annotated[str | None, typer.Option("--until", help="Only events that became dead letters before this time.")]
ObserverAddress = Annotated[
    str | None,
    typer.Option("--observer", help="host:port of the observer. Default: that of the fleet on --data."),
]
ObserverToken = Annotated[
    Path | None,
    typer.Option(
        "--observer-token-file",
        envvar="PENSTOCK_OBSERVER_TOKEN_FILE",
        help="A file with a token of the observer, required beyond loopback. Default: that of the fleet on --data.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Positions = Annotated[
    list[str] | None,
    typer.Argument(help="Positions from `penstock dead list`, also of dead letters that were redriven or discarded."),
]


def make_filter(
    pipe: str | None,
    destination: str | None,
    reason: str | None,
    since: str | None,
    until: str | None,
    *,
    pipes: Path,
) -> Filter:
    """The filter of the options. pipes: the pipe file with the names; a file that cannot be read has none. Blocking.

    Raises CommandFailed.
    """
    now = time.time()
    try:
        times = [None if text is None else parse_time(text, now) for text in (since, until)]
    except ValueError as error:
        raise CommandFailed(str(error), status=2) from error
    renames: Mapping[str, str] = {}
    lanes: frozenset[str] | None = None
    with suppress(BadConfiguration):
        file = load_pipes(pipes)
        renames, lanes = renames_of(file), lanes_of(file) | removed_lanes(file).keys()
    return Filter(pipe, destination, reason, times[0], times[1], renames, lanes)


def read_positions(texts: list[str] | None) -> list[Position]:
    """The positions of the arguments. Raises CommandFailed."""
    try:
        return [Position.parse(text) for text in texts or []]
    except ValueError as error:
        raise CommandFailed(str(error), status=2) from error


def require_choice(where: Filter, positions: list[Position]) -> None:
    """Require exactly one of filters and positions, so that nobody selects everything by accident. Raises CommandFailed."""
    if bool(where) == bool(positions):
        raise CommandFailed(
            "either positions or filters are needed", "--pipe NAME, or positions from the list", status=2
        )
