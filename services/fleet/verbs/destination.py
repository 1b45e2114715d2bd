"""`penstock destination`: one destination as its owner sees it."""

import json
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from services.core.causes import Causes
from services.fleet.access import find_broker, opened
from services.fleet.console import OUT, note
from services.fleet.dead.filter import Filter
from services.fleet.dead.found import Found
from services.fleet.dead.view import cause_table
from services.fleet.verbs.app import APP, example
from services.fleet.verbs.dead_options import AsJson, BrokerUrl, Data, PipeName, Since, Until, make_filter

DESTINATION = typer.Typer(help="One destination as its owner sees it.", no_args_is_help=True)
APP.add_typer(DESTINATION, name="destination")

SHOWN, LIMIT = 20, 1000


@DESTINATION.command(
    epilog=example("penstock destination show billing\npenstock destination show billing --since 7d --json")
)
def show(
    name: Annotated[str, typer.Argument(help="The destination's name.")],
    pipe: PipeName = None,
    since: Since = None,
    until: Until = None,
    everything: Annotated[bool, typer.Option("--all", help="Also what was redriven or discarded.")] = False,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Show why events could not be delivered: dead letters by cause, the most frequent first."""
    where = make_filter(pipe, name, None, since, until)
    causes = uvloop.run(_group(find_broker(broker, data), where, settled=everything))
    found = causes.most_common()
    if as_json:
        result = {"destination": name, "pipe": pipe, "causes": [cause.as_json() for cause in found]}
        typer.echo(json.dumps(result))
        return
    if found:
        OUT.print(cause_table(found[:SHOWN]))
    rest = f", {len(found) - SHOWN} of them not shown. Try: --json" if len(found) > SHOWN else ""
    note(f"{sum(cause.count for cause in found)} dead letters for {name}, {len(found)} causes{rest}")


async def _group(url: str, where: Filter, *, settled: bool) -> Causes:
    causes = Causes(LIMIT)
    async with opened(url) as broker:
        async for page in (await Found.look(broker.admin, where, settled=settled)).pages():
            for letter in page:
                causes.add(letter)
    return causes
