"""The options that the verbs on dead letters share."""

import time
from pathlib import Path
from typing import Annotated

import typer

from services.core.letter import Position
from services.core.times import parse_time
from services.fleet.dead.filter import Filter
from services.fleet.problem import CommandFailed

BrokerUrl = Annotated[
    str | None,
    typer.Option(
        "--broker",
        envvar="PENSTOCK_BROKER",
        help="log:///path, kafka://host:port or kinesis://region; absent: the fleet on --data, or the log in that folder.",
    ),
]
Data = Annotated[Path, typer.Option("--data", envvar="PENSTOCK_UP_DATA", help="The data folder of the fleet.")]
PipeName = Annotated[str | None, typer.Option("--pipe", help="Only letters of this pipe.")]
DestinationName = Annotated[str | None, typer.Option("--destination", help="Only letters for this destination.")]
Reason = Annotated[str | None, typer.Option("--reason", help="Only letters with this reason, e.g. http_404.")]
Since = Annotated[
    str | None, typer.Option("--since", help="Only what failed first at or after this: 2h (ago), or an RFC 3339 time.")
]
Until = Annotated[str | None, typer.Option("--until", help="Only what failed first before this.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout.")]
Positions = Annotated[
    list[str] | None,
    typer.Argument(
        help="Positions, as `penstock dead list` shows them; these are taken whatever became of them before."
    ),
]


def make_filter(
    pipe: str | None, destination: str | None, reason: str | None, since: str | None, until: str | None
) -> Filter:
    """From the options. Raises CommandFailed."""
    now = time.time()
    try:
        times = [None if text is None else parse_time(text, now) for text in (since, until)]
    except ValueError as error:
        raise CommandFailed(str(error), status=2) from error
    return Filter(pipe, destination, reason, *times)


def read_positions(texts: list[str] | None) -> list[Position]:
    """From the arguments. Raises CommandFailed."""
    try:
        return [Position.parse(text) for text in texts or []]
    except ValueError as error:
        raise CommandFailed(str(error), status=2) from error


def require_choice(where: Filter, positions: list[Position]) -> None:
    """Exactly one of filters and positions. Raises CommandFailed: nobody means everything by accident."""
    if bool(where) == bool(positions):
        raise CommandFailed(
            "either positions or filters are needed", "--pipe NAME, or positions from the list", status=2
        )
