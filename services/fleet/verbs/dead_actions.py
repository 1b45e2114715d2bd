"""`penstock dead redrive` and `discard`: send dead letters again, or let them go."""

import json
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from services.core.audit import DISCARD
from services.core.broker.producer import Producer
from services.core.letter import Position
from services.core.pipes import PipeFile, load_pipes
from services.fleet.access import find_broker, find_pipes, opened
from services.fleet.console import ERR, note
from services.fleet.dead.aim import REMEDIES, Aim
from services.fleet.dead.audit import Auditor, whoami
from services.fleet.dead.filter import Filter
from services.fleet.dead.found import Found, Held
from services.fleet.dead.payload import with_payloads
from services.fleet.dead.redrive import Redrive, Redriven
from services.fleet.problem import CommandFailed
from services.fleet.stop import stop_on_signals
from services.fleet.verbs.app import example
from services.fleet.verbs.dead import DEAD
from services.fleet.verbs.dead_options import (
    AsJson,
    BrokerUrl,
    Data,
    DestinationName,
    PipeName,
    Positions,
    Reason,
    Since,
    Until,
    make_filter,
    read_positions,
    require_choice,
)


@DEAD.command(
    epilog=example(
        "penstock dead redrive --destination billing --since 2h\npenstock dead redrive orders.dead:0:17 --rate 10"
    )
)
def redrive(
    positions: Positions = None,
    pipe: PipeName = None,
    destination: DestinationName = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    rate: Annotated[float, typer.Option("--rate", min=0.1, help="Events a second at most.")] = 100,
    to_stream: Annotated[
        bool,
        typer.Option(
            "--to-stream",
            help="Send what a transform gave up to its stream again. All pipes of that stream see it again, not this one alone.",
        ),
    ] = False,
    pipes: Annotated[
        Path | None, typer.Option("--pipes", "-f", envvar="PENSTOCK_PIPES", help="The pipe file; absent: the fleet's.")
    ] = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Send dead letters again, each to its own destination alone, with a fresh schedule.

    Those that cannot go stay, with the reason. Status 0 when all went, 1 otherwise.
    """
    where, chosen = make_filter(pipe, destination, reason, since, until), read_positions(positions)
    require_choice(where, chosen)
    file, who = load_pipes(find_pipes(pipes, data)), whoami()
    run = _redrive(find_broker(broker, data), where, chosen, file, who, rate, to_stream=to_stream)
    done, failure = uvloop.run(run)
    if as_json:
        examples = {reason: str(position) for reason, position in done.examples.items()}
        typer.echo(json.dumps({"redriven": done.done, "refused": dict(done.refused), "examples": examples}))
    else:
        note(f"redriven {done.done}, refused {sum(done.refused.values())}", "yellow" if done.refused else "green")
        for refusal, count in done.refused.most_common():
            note(f"  {refusal} {count}, e.g. {done.examples[refusal]}: {REMEDIES[refusal]}", "yellow")
    if failure is not None:
        raise failure
    if done.refused:
        raise typer.Exit(1)


async def _redrive(
    url: str, where: Filter, positions: list[Position], file: PipeFile, who: str, rate: float, *, to_stream: bool
) -> tuple[Redriven, CommandFailed | None]:
    """What was done, and what went wrong, so that the summary comes first."""
    done = Redriven()
    try:
        with stop_on_signals(lambda _insists: None) as stop:
            async with opened(url) as broker, Producer(broker.driver) as producer:
                auditor = Auditor(producer, who, where.as_json())
                await auditor.require_topic()
                found = await Found.look(broker.admin, where, positions)
                with _progress() as progress:
                    bar = progress.add_task("redriving", total=await found.count())

                    def show(so_far: Redriven) -> None:
                        progress.update(bar, completed=so_far.done + sum(so_far.refused.values()))

                    aim = Aim(file, to_stream=to_stream, by_event_time=broker.features.retention_by_event_time)
                    work = Redrive(aim, producer, auditor, rate, asked_to_stop=stop.asked.is_set, show=show)
                    done = work.so_far
                    await work.run(with_payloads(broker.admin, found.pages()))
            if stop.asked.is_set():
                return done, CommandFailed(
                    "stopped; what is left was not redriven", "the same command again", status=130
                )
    except CommandFailed as error:
        return done, error
    return done, None


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=ERR, disable=not ERR.is_terminal)


@DEAD.command(
    epilog=example("penstock dead discard --pipe orders --reason bad_record --until 2026-11-01T00:00:00Z --yes")
)
def discard(
    positions: Positions = None,
    pipe: PipeName = None,
    destination: DestinationName = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Let go of dead letters: they are listed no more. They stay in their topic until its retention ends."""
    where, chosen = make_filter(pipe, destination, reason, since, until), read_positions(positions)
    require_choice(where, chosen)
    url = find_broker(broker, data)
    held, count = uvloop.run(_count(url, where, chosen))
    if count and not yes:
        typer.confirm(f"Nobody will be reminded of these {count} letters. Discard them?", abort=True, err=True)
    count = uvloop.run(_discard(url, where, chosen, held, whoami()))
    if as_json:
        typer.echo(json.dumps({"discarded": count}))
    else:
        note(f"discarded {count}", "green")


async def _count(url: str, where: Filter, positions: list[Position]) -> tuple[Held, int]:
    async with opened(url) as broker:
        found = await Found.look(broker.admin, where, positions)
        return found.held, await found.count()


async def _discard(url: str, where: Filter, positions: list[Position], held: Held, who: str) -> int:
    """Those that were counted, and none that was buried since."""
    done = 0
    async with opened(url) as broker, Producer(broker.driver) as producer:
        auditor = Auditor(producer, who, where.as_json())
        await auditor.require_topic()
        found = await Found.look(broker.admin, where, positions, held=held)
        async for page in found.pages():
            await auditor.write(DISCARD, page)
            done += len(page)
    return done
