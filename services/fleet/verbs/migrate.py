"""`penstock migrate`: move a stream to another broker while the fleet runs."""

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from services.core.broker.connect import BadBrokerUrl
from services.core.broker.errors import BrokerError
from services.core.broker.several.broker import SeveralBrokers
from services.core.control.homes import Homes
from services.core.fleet_broker import open_with_homes
from services.core.pipe_file.pipes import PipeFile
from services.core.units import format_count
from services.fleet.access import find_broker, find_pipes
from services.fleet.console import ERR, print_note
from services.fleet.dead.audit import whoami
from services.fleet.migrate.movable import LoadPipes, load_movable
from services.fleet.migrate.steps import Migration, Result, Show
from services.fleet.problem import CommandFailed
from services.fleet.verbs.app import APP, AsJson, BrokerUrl, Data, Pipes, example

StreamArgument = Annotated[str, typer.Argument(help="The stream's name.")]


@APP.command(
    epilog=example(
        "penstock migrate orders --to second\npenstock migrate orders --status\npenstock migrate orders --undo\n"
        "penstock migrate orders --finish"
    )
)
def migrate(
    stream: StreamArgument,
    to: Annotated[
        str | None, typer.Option(help="The broker, by its name in the pipe file. `default` is the fleet's own broker.")
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Show where the stream lives. Changes nothing.")] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="End a migration before its hand-over, and delete the copy.")
    ] = False,
    finish: Annotated[
        bool, typer.Option("--finish", help="Delete the former topic of a stream that has moved.")
    ] = False,
    pipes: Pipes = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Move a stream, with its events and the positions of its readers, to another broker of the pipe file.

    The fleet runs meanwhile. If the command is killed, run it again: it continues. All services must run with a pipe file that
    names the brokers.
    """
    if (to is not None) + status + undo + finish != 1:
        raise CommandFailed(
            "the command needs exactly one of --to BROKER, --status, --undo and --finish",
            f"penstock migrate {stream} --status",
            status=2,
        )
    url = find_broker(broker, data)
    load = partial(load_movable, find_pipes(pipes, data), stream, url)
    file = load(to)
    with _progress() as show:

        async def act(migration: Migration) -> Result:
            if to is not None:
                return await migration.run(to)
            if undo:
                return await migration.undo()
            return await migration.finish() if finish else migration.result()

        result = uvloop.run(_with_migration(url, file, load, stream, show, act))
    if as_json:
        typer.echo(json.dumps(result.as_json(stream)))
        return
    for line in describe(result, stream, in_file=file.streams[stream].home):
        print_note(line)


async def _with_migration(
    url: str,
    pipes: PipeFile,
    load: LoadPipes,
    stream: str,
    show: Show,
    act: Callable[[Migration], Awaitable[Result]],
) -> Result:
    try:
        async with open_with_homes(url, pipes) as fleet:
            assert isinstance(fleet, SeveralBrokers)
            homes = fleet.brokers.places
            assert isinstance(homes, Homes)
            return await act(Migration(fleet, homes, load, stream, whoami(), show))
    except BadBrokerUrl as error:
        raise CommandFailed(str(error), status=2) from error
    except BrokerError as error:
        raise CommandFailed(f"{stream}: {error}", "the same command again, which continues") from error


def describe(result: Result, stream: str, *, in_file: str) -> list[str]:
    """The state, for a person. in_file: the home by the pipe file."""
    home = result.home
    if home.state is not None:
        return [
            f"{stream} is being moved from {home.readers} to {home.to}: {home.state}. Its events are stored on {home.writers}",
            f"Try: penstock migrate {stream} --to {home.to}, which continues{', or --undo' if home.state != 'written' else ''}",
        ]
    lines = [f"{stream} lives on {home.readers}"]
    if result.events:
        lines.append(
            f"{format_count(result.events, 'event')} compared, {result.missing} of {format_count(result.origins, 'origin')} "
            "missing; "
            f"writers were held for {result.held_s:.1f} s; {format_count(result.groups, 'group')} moved"
        )
    if result.late:
        lines.append(
            f"{format_count(result.late, 'event')} reached the former topic late, and were stored in {stream}, maybe twice"
        )
    if home.former:
        lines.append(
            f"its former topic on {home.former} is still there. Try: penstock migrate {stream} --finish, which deletes it, or "
            f"--to {home.former}, which moves the stream back"
        )
    if home.readers != in_file:
        lines.append(
            f"the pipe file says {in_file}, which no longer counts. Try: {stream}: {{on: {home.readers}}} in its streams"
        )
    return lines


@contextmanager
def _progress() -> Iterator[Show]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=ERR, disable=not ERR.is_terminal, transient=True) as progress:
        task = progress.add_task("begins", total=None)

        def show(step: str, done: int, of: int) -> None:
            progress.update(task, description=step, completed=done, total=max(done, of))

        yield show
