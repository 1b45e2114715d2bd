"""`penstock destination pause`, `resume` and `list`: leave a receiver alone for a while; its events are parked, none is lost."""

import json
import time
from pathlib import Path
from typing import Annotated, Literal

import typer
import uvloop

from services.core.broker.producer import Producer
from services.core.pauses import OPERATOR, Pause, write_pause
from services.core.pipes import PipeFile, load_pipes
from services.fleet.access import find_broker, find_pipes, opened
from services.fleet.console import ERR, OUT
from services.fleet.dead.audit import whoami
from services.fleet.paused import Target, choose, count_parked, describe, read_pauses, target_table, targets
from services.fleet.verbs.app import example
from services.fleet.verbs.dead_options import AsJson, BrokerUrl, Data
from services.fleet.verbs.destination import DESTINATION

Name = Annotated[str, typer.Argument(help="The destination's name.")]
OfPipe = Annotated[str | None, typer.Option("--pipe", help="Only in this pipe; absent: in every pipe that has it.")]
Pipes = Annotated[
    Path | None, typer.Option("--pipes", "-f", envvar="PENSTOCK_PIPES", help="The pipe file; absent: the fleet's.")
]

MAX_REASON = 500


@DESTINATION.command(epilog=example('penstock destination pause billing --reason "they move to a new data centre"'))
def pause(
    name: Name,
    pipe: OfPipe = None,
    reason: Annotated[str, typer.Option("--reason", help="Why, for those who look at it later.")] = "",
    pipes: Pipes = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Send nothing to a destination until it is resumed. Its events are parked on disk, for as long as it takes.

    Every expel hears of it within about a second; requests under way are finished.
    """
    file, who = load_pipes(find_pipes(pipes, data)), whoami()
    new = Pause("paused", OPERATOR, who, time.time_ns() // 1_000_000, reason[:MAX_REASON])
    uvloop.run(_change(find_broker(broker, data), file, name, pipe, new, as_json=as_json))


@DESTINATION.command(epilog=example("penstock destination resume billing"))
def resume(
    name: Name,
    pipe: OfPipe = None,
    pipes: Pipes = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Send to a destination again that an operator paused, or that answered 410: first slowly, parked events, too."""
    file, who = load_pipes(find_pipes(pipes, data)), whoami()
    new = Pause("resumed", OPERATOR, who, time.time_ns() // 1_000_000)
    uvloop.run(_change(find_broker(broker, data), file, name, pipe, new, as_json=as_json))


async def _change(url: str, file: PipeFile, name: str, pipe: str | None, new: Pause, *, as_json: bool) -> None:
    """What is paused already, or not at all, stays as it is. Raises CommandFailed."""
    wanted: Literal["paused", "running"] = "paused" if new.state == "paused" else "running"
    async with opened(url) as broker, Producer(broker.driver) as producer:
        pauses = await read_pauses(broker.admin)
        for target in choose(targets(file, pauses), name, pipe):
            if (target.state == "paused") != (wanted == "paused"):
                await write_pause(producer, target.lane, new)
        await pauses.refresh()
        for target in choose(targets(file, pauses), name, pipe):
            parked = await count_parked(broker.admin, target.pipe, target.destination)
            if as_json:
                typer.echo(json.dumps({**target.as_json(), "parked": parked}))
            else:
                ERR.print(describe(target, parked))


@DESTINATION.command("list", epilog=example("penstock destination list\npenstock destination list --json | jq .state"))
def list_destinations(
    pipes: Pipes = None, broker: BrokerUrl = None, data: Data = Path("data"), as_json: AsJson = False
) -> None:
    """List the webhook destinations and which of them are paused; --json prints one object a line."""
    file = load_pipes(find_pipes(pipes, data))
    found = uvloop.run(_look(find_broker(broker, data), file))
    if as_json:
        for target, parked in found:
            typer.echo(json.dumps({**target.as_json(), "parked": parked}))
    else:
        OUT.print(target_table(found))


async def _look(url: str, file: PipeFile) -> list[tuple[Target, int]]:
    async with opened(url) as broker:
        known = targets(file, await read_pauses(broker.admin))
        return [(target, await count_parked(broker.admin, target.pipe, target.destination)) for target in known]
