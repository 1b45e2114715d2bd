"""`penstock destination`: one destination as its owner sees it."""

import json
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from services.core.broker.contract import Admin
from services.core.broker.errors import UnknownTopic
from services.core.causes import Causes
from services.core.pauses import Pauses
from services.fleet.access import find_broker, opened
from services.fleet.console import OUT, note
from services.fleet.dead.filter import Filter
from services.fleet.dead.found import Found
from services.fleet.dead.view import cause_table
from services.fleet.paused import Target, count_parked, describe
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
    """Show whether it is paused, and why events could not be delivered: dead letters by cause, the most frequent first."""
    where = make_filter(pipe, name, None, since, until)
    causes, paused = uvloop.run(_look(find_broker(broker, data), where, name, pipe, settled=everything))
    found = causes.most_common()
    if as_json:
        told = [{**target.as_json(), "parked": parked} for target, parked in paused]
        result = {"destination": name, "pipe": pipe, "paused": told, "causes": [cause.as_json() for cause in found]}
        typer.echo(json.dumps(result))
        return
    for target, parked in paused:
        OUT.print(describe(target, parked))
    if found:
        OUT.print(cause_table(found[:SHOWN]))
    rest = f", {len(found) - SHOWN} of them not shown. Try: --json" if len(found) > SHOWN else ""
    note(f"{sum(cause.count for cause in found)} dead letters for {name}, {len(found)} causes{rest}")


async def _look(
    url: str, where: Filter, name: str, pipe: str | None, *, settled: bool
) -> tuple[Causes, list[tuple[Target, int]]]:
    causes = Causes(LIMIT)
    async with opened(url) as broker:
        async for page in (await Found.look(broker.admin, where, settled=settled)).pages():
            for letter in page:
                causes.add(letter)
        return causes, await _find_paused(broker.admin, name, pipe)


async def _find_paused(admin: Admin, name: str, pipe: str | None) -> list[tuple[Target, int]]:
    """Those of this name that are paused, with the number of their parked events."""
    pauses = Pauses(admin)
    try:
        await pauses.refresh()
    except UnknownTopic:
        return []
    lanes = [(*lane.partition("/"), pause) for lane, pause in pauses.paused().items()]
    found = [Target(of_pipe, destination, "paused", pause) for of_pipe, _, destination, pause in lanes]
    chosen = [target for target in found if target.destination == name and pipe in (None, target.pipe)]
    return [(target, await count_parked(admin, target.pipe, target.destination)) for target in chosen]
