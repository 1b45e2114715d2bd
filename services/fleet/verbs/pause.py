"""`penstock pause` and `resume`: stop the transform of a pipe, and start it again."""

import json
import time
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.text import Text

from services.core.broker.producer import Producer
from services.core.control.pauses import OPERATOR, Pause, Pauses, write_pause
from services.core.pipe_file.pipes import load_pipes, own_streams
from services.core.units import format_duration
from services.fleet.access import find_broker, find_pipes, opened
from services.fleet.console import ERR
from services.fleet.dead.audit import whoami
from services.fleet.dead.view import plain
from services.fleet.problem import CommandFailed, unknown_name
from services.fleet.status.paused import describe_file, pause_json, read_pauses
from services.fleet.verbs.app import APP, AsJson, BrokerUrl, Data, Pipes, example
from services.fleet.verbs.destination import MAX_REASON, ReasonText

Pipe = Annotated[str, typer.Argument(help="The pipe's name.")]


@APP.command(epilog=example('penstock pause large-orders --reason "the VAT rate is wrong"'))
def pause(
    pipe: Pipe,
    reason: ReasonText = "",
    pipes: Pipes = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Stop the transform of a pipe until it is resumed. Its events wait in its streams, as long as these keep them.

    The transform finishes its current batch and keeps its position. Events that have passed it are still delivered. To stop
    deliveries, pause a destination.
    """
    new = Pause("paused", OPERATOR, whoami(), time.time_ns() // 1_000_000, reason[:MAX_REASON])
    _change_pipe(pipe, new, pipes, broker, data, as_json=as_json)


@APP.command(epilog=example("penstock resume large-orders"))
def resume(
    pipe: Pipe, pipes: Pipes = None, broker: BrokerUrl = None, data: Data = Path("data"), as_json: AsJson = False
) -> None:
    """Start the transform of a pipe again that an operator paused. It continues at its position."""
    new = Pause("resumed", OPERATOR, whoami(), time.time_ns() // 1_000_000)
    _change_pipe(pipe, new, pipes, broker, data, as_json=as_json)


def _change_pipe(pipe: str, new: Pause, pipes: Path | None, broker: str | None, data: Path, *, as_json: bool) -> None:
    """Pause or resume, and print the state. Raises CommandFailed, BadConfiguration."""
    kept = _find_retention(pipe, find_pipes(pipes, data))
    found, changed = uvloop.run(_write(find_broker(broker, data), pipe, new))
    state = "running" if found is None else "paused"
    if as_json:
        typer.echo(json.dumps({"pipe": pipe, "state": state, **({} if found is None else pause_json(found))}))
        return
    words = Text.assemble(
        f"the transform of {pipe} is {'' if changed else 'already '}", (state, "green" if found is None else "red")
    )
    if found is not None:
        words.append(plain(" since {since} by {by} because: {because}".format_map(pause_json(found)), 400))
        limit = "until their owner removes them" if kept is None else f"for at most {format_duration(kept)}"
        words.append(f". Its events wait in its streams {limit}")
    ERR.print(words)


def _find_retention(pipe: str, path: Path) -> float | None:
    """The shortest retention of the pipe's own streams, s; None when all are topics of others.

    Raises CommandFailed unless the file has this pipe, with a transform.
    """
    file = load_pipes(path)
    if pipe not in file.pipes:
        transformed = [name for name, one in file.pipes.items() if one.transform is not None]
        raise unknown_name(
            f"{describe_file(path)} has no pipe {pipe}", pipe, transformed, none="none in the file has a transform"
        )
    if file.pipes[pipe].transform is None:
        name = file.pipes[pipe].destinations[0].name
        raise CommandFailed(
            f"the pipe {pipe} has no transform that could be paused",
            f"penstock destination pause {name} --pipe {pipe}, which stops its deliveries",
            status=2,
        )
    own = own_streams(file)
    return min((own[stream].retention for stream in file.pipes[pipe].sources if stream in own), default=None)


async def _write(url: str, pipe: str, new: Pause) -> tuple[Pause | None, bool]:
    """Write the change, unless the transform is in that state already. Returns the pause in force, and whether it wrote."""
    async with opened(url) as broker, Producer(broker.appender) as producer:
        pauses: Pauses = await read_pauses(broker.reader)
        changed = (pipe in pauses.paused()) != (new.state == "paused")
        if changed:
            await write_pause(producer, pipe, new)
            await pauses.refresh()
        return pauses.paused().get(pipe), changed
