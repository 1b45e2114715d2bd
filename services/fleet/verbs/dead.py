"""`penstock dead`: what could not be delivered; look, send again, or let go."""

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from services.core.letter import DeadLetter, Position
from services.fleet.access import find_broker, opened
from services.fleet.console import OUT, note
from services.fleet.dead.audit import read_audit
from services.fleet.dead.filter import Filter
from services.fleet.dead.found import Found
from services.fleet.dead.payload import restore
from services.fleet.dead.view import audit_line, letter_json, letter_page, letter_table
from services.fleet.verbs.app import APP, example
from services.fleet.verbs.dead_options import (
    AsJson,
    BrokerUrl,
    Data,
    DestinationName,
    PipeName,
    Reason,
    Since,
    Until,
    make_filter,
    read_positions,
)

DEAD = typer.Typer(
    help="Dead letters: events that could not be delivered. Look, send again, let go.", no_args_is_help=True
)
APP.add_typer(DEAD, name="dead")


@DEAD.command(
    "list", epilog=example("penstock dead list\npenstock dead list --pipe orders --reason http_404 --since 2h")
)
def list_letters(
    pipe: PipeName = None,
    destination: DestinationName = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also what was redriven or discarded, with its fate.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Show at most so many; 0: all.")] = 100,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """List dead letters, oldest first in each pipe. --json prints one object a line."""
    where = make_filter(pipe, destination, reason, since, until)
    uvloop.run(_list(find_broker(broker, data), where, limit, settled=everything, as_json=as_json))


async def _list(url: str, where: Filter, limit: int, *, settled: bool, as_json: bool) -> None:
    shown: list[DeadLetter] = []
    count = 0
    async with opened(url) as broker:
        async for page in (await Found.look(broker.admin, where, settled=settled)).pages():
            chosen = page if not limit else page[: max(0, limit - count)]
            count += len(page)
            if as_json:
                for letter in chosen:
                    typer.echo(json.dumps(letter.as_json()))
            else:
                shown += chosen
    if as_json:
        return
    if shown:
        OUT.print(letter_table(shown, settled=settled))
    more = count - len(shown)
    note(f"{count} dead letters" + (f", {more} of them not shown. Try: --limit 0" if more else ""))


@DEAD.command(epilog=example("penstock dead show orders.dead:0:17"))
def show(
    position: Annotated[str, typer.Argument(help="As `penstock dead list` shows it.")],
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Print one dead letter with its headers and payload."""
    positions = read_positions([position])
    uvloop.run(_show(find_broker(broker, data), positions, as_json=as_json))


async def _show(url: str, positions: list[Position], *, as_json: bool) -> None:
    async with opened(url) as broker:
        async for (letter,) in (await Found.look(broker.admin, Filter(), positions)).pages():
            whole = await restore(broker.admin, letter)
            from_source = whole.record is not letter.record
            if as_json:
                typer.echo(json.dumps(letter_json(whole, from_source=from_source)))
            else:
                OUT.print(letter_page(whole, from_source=from_source))


@DEAD.command(epilog=example("penstock dead audit\npenstock dead audit --json | jq .who"))
def audit(broker: BrokerUrl = None, data: Data = Path("data"), as_json: AsJson = False) -> None:
    """Print who redrove and discarded what, oldest first; --json prints one object a line."""
    uvloop.run(_audit(find_broker(broker, data), as_json=as_json))


async def _audit(url: str, *, as_json: bool) -> None:
    async with opened(url) as broker:
        async for entry in read_audit(broker.admin):
            if as_json:
                typer.echo(msgspec.json.encode(entry).decode())
            else:
                OUT.print(audit_line(entry))
