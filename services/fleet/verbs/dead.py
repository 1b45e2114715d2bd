"""`penstock dead`: list, show, redrive and discard dead letters."""

import json
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop

from services.core.audit import DISCARD
from services.core.broker.producer import Producer
from services.core.pipe_file.pipes import PipeFile, load_pipes, own_streams
from services.core.pipe_file.topic_names import lane_name
from services.core.undelivered.dead_letter import DeadLetter, Position
from services.core.units import format_count
from services.fleet.access import find_broker, find_pipes, opened
from services.fleet.console import OUT, confirm, count_progress, print_note
from services.fleet.dead.audit import Auditor, read_audit, whoami
from services.fleet.dead.found import DeadLetterSearch, Filter, StoredRanges, restore, with_payloads
from services.fleet.dead.redrive import LATE, LATE_WARNING, REMEDIES, Redrive, Redriven, RedriveTargets
from services.fleet.dead.view import audit_line, letter_json, letter_page, letter_table
from services.fleet.problem import CommandFailed, unknown_name
from services.fleet.stop import stop_on_signals
from services.fleet.verbs.app import (
    APP,
    AsJson,
    BrokerUrl,
    Data,
    DestinationName,
    PipeName,
    Pipes,
    Positions,
    Reason,
    Since,
    Until,
    example,
    make_filter,
    read_positions,
    require_choice,
)

DEAD = typer.Typer(
    help="List, show, redrive or discard dead letters: events that could not be delivered.", no_args_is_help=True
)
APP.add_typer(DEAD, name="dead")


@DEAD.command(
    "list", epilog=example("penstock dead list\npenstock dead list --pipe orders --reason http_404 --since 2h")
)
def list_letters(
    unexpected: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    pipe: PipeName = None,
    destination: DestinationName = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also redriven and discarded dead letters, with their fate.")
    ] = False,
    limit: Annotated[int, typer.Option("--limit", min=0, help="The most dead letters to show; 0: all.")] = 100,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """List dead letters, oldest first in each pipe. --json prints one object per line."""
    if unexpected:
        raise CommandFailed("dead list has options only, no arguments", f"--pipe {unexpected[0]}", status=2)
    where = make_filter(pipe, destination, reason, since, until, pipes=find_pipes(None, data))
    uvloop.run(list_found(find_broker(broker, data), where, limit, settled=everything, as_json=as_json))


async def list_found(url: str, where: Filter, limit: int, *, settled: bool, as_json: bool) -> None:
    """Print at most `limit` dead letters (0: all), and on stderr how many there are more."""
    shown: list[DeadLetter] = []
    found = listed = 0
    async with opened(url) as broker:
        async for page in (await DeadLetterSearch.open(broker, where, settled=settled)).pages():
            chosen = page if not limit else page[: max(0, limit - found)]
            found += len(page)
            listed += len(chosen)
            if as_json:
                for letter in chosen:
                    typer.echo(json.dumps(letter.as_json()))
            else:
                shown += chosen
    if shown:
        OUT.print(letter_table(shown, settled=settled))
    if listed < found:
        print_note(
            f"{format_count(found, 'dead letter')}, {found - listed:,} of them not shown. Try: --limit 0", "yellow"
        )
    elif not as_json:
        to_stream = "" if any(letter.destination for letter in shown) else " --to-stream"
        remedy = "correct the event, its `columns` or the transform, and " if to_stream else ""
        redrive = f"{remedy}penstock dead redrive POSITION{to_stream}"
        todo = f". Try: penstock dead show POSITION; then {redrive}, or dead discard POSITION" if found else ""
        print_note(f"{format_count(found, 'dead letter')}{todo}")


@DEAD.command(epilog=example("penstock dead show orders.dead:0:17"))
def show(
    position: Annotated[str, typer.Argument(help="A position from `penstock dead list`.")],
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Print one dead letter with its headers and payload."""
    positions = read_positions([position])
    uvloop.run(_show(find_broker(broker, data), positions, as_json=as_json))


async def _show(url: str, positions: list[Position], *, as_json: bool) -> None:
    async with opened(url) as broker:
        async for (letter,) in (await DeadLetterSearch.open(broker, Filter(), positions)).pages():
            whole = await restore(broker.reader, letter)
            from_source = whole.record is not letter.record
            if as_json:
                typer.echo(json.dumps(letter_json(whole, from_source=from_source)))
            else:
                OUT.print(letter_page(whole, from_source=from_source))


@DEAD.command(epilog=example("penstock dead audit\npenstock dead audit --json | jq .who"))
def audit(broker: BrokerUrl = None, data: Data = Path("data"), as_json: AsJson = False) -> None:
    """Print redrives, discards, drops, resets, skips, added partitions, planned actions and freezes of groups, with their
    operators, oldest first. --json: one object per line."""
    uvloop.run(_audit(find_broker(broker, data), as_json=as_json))


async def _audit(url: str, *, as_json: bool) -> None:
    async with opened(url) as broker:
        async for entry in read_audit(broker.reader):
            if as_json:
                typer.echo(msgspec.json.encode(entry).decode())
            else:
                OUT.print(audit_line(entry))


@DEAD.command(
    epilog=example(
        "penstock dead redrive --destination billing --since 2h\npenstock dead redrive orders.dead:0:17 --rate 10\n"
        "penstock dead redrive --pipe removed-pipe --to orders/billing"
    )
)
def redrive(
    positions: Positions = None,
    pipe: PipeName = None,
    destination: DestinationName = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    rate: Annotated[float, typer.Option("--rate", min=0.1, help="The most events per second.")] = 100,
    to_stream: Annotated[
        bool,
        typer.Option(
            "--to-stream",
            help="Send dead letters of a transform to their stream again. All pipes of that stream process them again.",
        ),
    ] = False,
    to: Annotated[
        str | None,
        typer.Option("--to", help="Send them to this PIPE/DESTINATION instead, e.g. those of a removed pipe."),
    ] = None,
    pipes: Pipes = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Send dead letters again, each only to its own destination, with a fresh retry schedule.

    Those that cannot be sent stay dead letters; the reason is printed. Status 0 when all were redriven, 1 otherwise.

    A `late` event may already be part of a result. With --to-stream the command warns before it sends the first event; in --json,
    `may_be_in_results` is the number of redriven `late` events.
    """
    path = find_pipes(pipes, data)
    where = make_filter(pipe, destination, reason, since, until, pipes=path)
    chosen = read_positions(positions)
    require_choice(where, chosen)
    file, who = load_pipes(path), whoami()
    _check_target(file, to, path)
    run = _redrive(find_broker(broker, data), where, chosen, file, who, rate, to=to, to_stream=to_stream)
    done, failure = uvloop.run(run)
    if as_json:
        examples = {reason: str(position) for reason, position in done.examples.items()}
        outcome = {"redriven": done.done, "may_be_in_results": done.late, "refused": dict(done.refused)}
        typer.echo(json.dumps({**outcome, "examples": examples}))
    else:
        print_note(f"redriven {done.done}, refused {sum(done.refused.values())}", "yellow" if done.refused else "green")
        for refusal, count in done.refused.most_common():
            print_note(f"  {refusal} {count}, e.g. {done.examples[refusal]}: {REMEDIES[refusal]}", "yellow")
    if failure is not None:
        raise failure
    if done.refused:
        raise typer.Exit(1)


def _check_target(file: PipeFile, to: str | None, path: Path) -> None:
    """Raises CommandFailed unless the lane `to` is a webhook of the file."""
    known = sorted(
        lane_name(name, one.name)
        for name, pipe in file.pipes.items()
        for one in pipe.destinations
        if one.webhook is not None
    )
    if to is not None and to not in known:
        raise unknown_name(f"--to {to}: {path} has no such webhook", to, known, none="it has none")


async def _redrive(
    url: str,
    where: Filter,
    positions: list[Position],
    file: PipeFile,
    who: str,
    rate: float,
    *,
    to: str | None,
    to_stream: bool,
) -> tuple[Redriven, CommandFailed | None]:
    """Returns the outcome and the error, so that the summary is printed before the error."""
    done = Redriven()
    try:
        with stop_on_signals() as stop:
            async with opened(url) as broker, Producer(broker.appender) as producer:
                auditor = Auditor(producer, who, where.as_json() | ({} if to is None else {"to": to}))
                await auditor.require_topic()
                found = await DeadLetterSearch.open(broker, where, positions)
                counts = await found.count_reasons()
                if to_stream and counts[LATE]:
                    print_note(LATE_WARNING.format(count=counts[LATE]), "yellow")
                with count_progress() as progress:
                    bar = progress.add_task("redriving", total=counts.total())

                    def show(so_far: Redriven) -> None:
                        progress.update(bar, completed=so_far.done + sum(so_far.refused.values()))

                    by_event_time = await broker.admin.kept_by_event_time(own_streams(file)) if to_stream else ()
                    targets = RedriveTargets(file, to_stream=to_stream, by_event_time=by_event_time, to=to)
                    work = Redrive(targets, producer, auditor, rate, asked_to_stop=stop.asked.is_set, show=show)
                    done = work.so_far
                    await work.run(with_payloads(broker.reader, found.pages()))
            if stop.asked.is_set():
                return done, CommandFailed(
                    "stopped; the remaining dead letters were not redriven", "the same command again", status=130
                )
    except CommandFailed as error:
        return done, error
    return done, None


@DEAD.command(
    epilog=example("penstock dead discard --pipe orders --reason bad_record --until 2026-11-01T00:00:00Z --yes")
)
def discard(
    positions: Annotated[list[str] | None, typer.Argument(help="Positions from `penstock dead list`.")] = None,
    pipe: PipeName = None,
    destination: DestinationName = None,
    reason: Reason = None,
    since: Since = None,
    until: Until = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Mark dead letters as done. They are no longer listed. They stay in their topic until its retention ends."""
    where = make_filter(pipe, destination, reason, since, until, pipes=find_pipes(None, data))
    chosen = read_positions(positions)
    require_choice(where, chosen)
    url = find_broker(broker, data)
    stored, count = uvloop.run(_count(url, where, chosen))
    if count and not yes:
        confirm(f"{format_count(count, 'dead letter')} will no longer be listed. Discard?")
    count = uvloop.run(_discard(url, where, chosen, stored, whoami()))
    if as_json:
        typer.echo(json.dumps({"discarded": count}))
    else:
        print_note(f"discarded {count}", "green")


async def _count(url: str, where: Filter, positions: list[Position]) -> tuple[StoredRanges, int]:
    async with opened(url) as broker:
        found = await DeadLetterSearch.open(broker, where, positions)
        return found.stored, await found.count()


async def _discard(url: str, where: Filter, positions: list[Position], stored: StoredRanges, who: str) -> int:
    """Discard the counted dead letters, not those written since."""
    done = 0
    async with opened(url) as broker, Producer(broker.appender) as producer:
        auditor = Auditor(producer, who, where.as_json())
        await auditor.require_topic()
        found = await DeadLetterSearch.open(broker, where, positions, stored=stored)
        async for page in found.pages():
            await auditor.write(DISCARD, page)
            done += len(page)
    return done
