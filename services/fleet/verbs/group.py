"""`penstock group`: show the offsets of destinations, and move them back or forward."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop
from rich.table import Table
from rich.text import Text

from services.core.audit import RESET, SKIP
from services.core.broker.contract import Broker
from services.core.broker.producer import Producer
from services.core.control.pauses import Pause, list_paused
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import renames_of
from services.core.times import date_of, parse_time
from services.core.units import format_count
from services.fleet.access import find_broker, find_fleet, load_found_pipes, opened
from services.fleet.console import OUT, confirm, count_progress, make_table, print_note
from services.fleet.dead.audit import Auditor, whoami
from services.fleet.dead.view import plain
from services.fleet.positions.lanes import Lane, find_lanes, parse_offset
from services.fleet.positions.offsets import (
    LaneOffsets,
    Move,
    PartitionOffsets,
    Target,
    plan_moves,
    read_lanes,
    require_ledger,
    require_no_members,
    require_own_position,
    reset_offsets,
    retry_wait_s,
    skip_events,
)
from services.fleet.problem import CommandFailed
from services.fleet.status.paused import pause_json
from services.fleet.status.reading import read_status, transform_lag
from services.fleet.status.view import millis
from services.fleet.verbs.app import APP, AsJson, BrokerUrl, Data, Pipes, example
from services.fleet.verbs.destination import MAX_REASON
from services.fleet.verbs.transform_reset import restart_transform

GROUP = typer.Typer(
    help="The offsets of destinations: show them, deliver events again, or skip events.", no_args_is_help=True
)
APP.add_typer(GROUP, name="group")

_64_BITS = 1 << 63

Selected = Annotated[str | None, typer.Argument(metavar="[PIPE[/DESTINATION]]", help="Default: every destination.")]
OneLane = Annotated[str, typer.Argument(metavar="PIPE/DESTINATION", help="The destination; or penstock/retrier.")]
ToTime = Annotated[
    str | None,
    typer.Option(
        "--to",
        help="The first event of this time: 2h (ago), or RFC 3339. Event times count, on Kafka the times of storing.",
    ),
]
ToOffset = Annotated[
    list[str] | None,
    typer.Option(
        "--to-offset",
        metavar="[TOPIC:]PARTITION:OFFSET",
        help="The next offset of one partition; the others stay. Repeatable. With TOPIC if the destination reads several, or for "
        "waiting events.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


@GROUP.command(epilog=example("penstock group show\npenstock group show orders/crm --json"))
def show(
    name: Selected = None,
    pipes: Pipes = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Show the stored and the next offsets of each partition that a destination reads, its lag, and its members.

    PIPE.retry and PIPE.parked hold events that wait for a destination of the pipe. All of its destinations read them. Events
    that wait with the global retrier are in the topics of penstock/retrier.

    --json prints one object per line: destinations, then transforms.
    """
    file = load_found_pipes(pipes, data)
    lanes = find_lanes(file, name)
    found, paused = uvloop.run(_read(find_broker(broker, data), lanes, file))
    for one in found:
        if as_json:
            typer.echo(json.dumps(one.as_json()))
        else:
            OUT.print(_heading(one))
            OUT.print(offset_table(one))
    if name is None or "/" not in name:
        _show_transforms(file, {lane.pipe for lane in lanes}, data, paused, as_json=as_json)


async def _read(url: str, lanes: Sequence[Lane], file: PipeFile) -> tuple[list[LaneOffsets], Mapping[str, Pause]]:
    async with opened(url, file) as broker:
        paused = await list_paused(broker.reader, renames_of(file))
        return await read_lanes(broker, lanes, paused), paused


def _heading(one: LaneOffsets) -> Text:
    words = Text(one.lane.name, style="bold")
    count = len(one.members)
    names = f" ({plain(', '.join(one.members[:3]), 120)}{', …' if count > 3 else ''})" if count else ""
    words.append(f": {format_count(count, 'member')}{names}", style="not bold")
    if one.pause is not None:
        words.append(", paused", style="not bold yellow")
    words.append(f", {_behind([*one.partitions, *one.waiting])}", style="not bold")
    return words


def _behind(parts: Sequence[PartitionOffsets]) -> str:
    """The sum of the rows, and in which topics these events are."""
    late = [part for part in parts if part.lag.records]
    topics = list(dict.fromkeys(part.source.topic for part in late))
    names = f" in {', '.join(topics[:3])}{', …' if len(topics) > 3 else ''}" if topics else ""
    oldest = f", oldest {millis(max(part.lag.millis for part in late))}" if late else ""
    return f"{_events(sum(part.lag.records for part in late))} behind{names}{oldest}"


def offset_table(one: LaneOffsets) -> Table:
    """One row per partition; of the topics of waiting events only where there was one. Without start and end where offsets have
    56 digits: --json has them."""
    parts = [*one.partitions, *(part for part in one.waiting if part.stored.end)]
    is_short = all(part.stored.end < _64_BITS for part in parts)
    columns = ("topic", "partition", "start", "next", "end", "behind", "oldest")
    shown = columns if is_short else tuple(name for name in columns if name not in ("start", "end"))
    table = make_table(*shown, right=columns[1:])
    for part in parts:
        row = part.as_json()
        cells = {
            **{column: str(row[column]) for column in ("topic", "partition", "start", "end")},
            "next": "none" if part.next is None else str(part.next),
            "behind": str(part.lag.records),
            "oldest": millis(part.lag.millis) if part.lag.records else "",
        }
        table.add_row(*(cells[column] for column in shown))
    return table


def _show_transforms(
    file: PipeFile, chosen: set[str], data: Path, paused: Mapping[str, Pause], *, as_json: bool
) -> None:
    """The lag of transforms. Spark keeps their positions, and only a running transform knows its lag."""
    names = [name for name in sorted(chosen) if file.pipes[name].transform is not None]
    state = find_fleet(data) if names else None
    sample = None if state is None else uvloop.run(read_status(state, None)).sample
    for name in names:
        behind = None if sample is None else transform_lag(sample, name)
        if as_json:
            pause = None if name not in paused else pause_json(paused[name])
            typer.echo(json.dumps({"pipe": name, "transform": True, "paused": pause, "lag_records": behind}))
            continue
        words = "lag not known" if behind is None else f"{_events(behind)} behind"
        how = "paused, " if name in paused else ""
        OUT.print(Text.assemble((name, "bold"), f": transform, {how}{words}; its checkpoint has its position"))


@GROUP.command(
    epilog=example(
        "penstock group reset orders/crm --to 2h\n"
        "penstock group reset orders/crm --to-offset 0:4712 --to-offset 1:4698 --yes\n"
        "penstock group reset orders/crm --to-offset orders.retry:0:17\n"
        "penstock group reset large-orders --to-earliest\n"
        "penstock group reset large-orders --to 2h"
    )
)
def reset(
    name: Annotated[
        str,
        typer.Argument(
            metavar="PIPE/DESTINATION|PIPE", help="The destination; penstock/retrier; or the pipe, for its transform."
        ),
    ],
    to: ToTime = None,
    to_offset: ToOffset = None,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="The oldest stored event.")] = False,
    yes: Yes = False,
    pipes: Pipes = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Deliver events again: move a destination back, or let a transform begin again. Stop it first. Ids stay the same.

    A destination never moves forward over a stored event; partitions that are further back stay. Waiting retries and parked
    events (PIPE.retry, PIPE.parked; of penstock/retrier: penstock.retry-in, penstock.delay-*) are moved only where
    --to-offset names their topic. The audit names the events (penstock dead audit).

    PIPE lets the pipe's transform begin again. The command renames the transform's checkpoint. It also works when the checkpoint
    is lost or on another machine. --to needs a transform that treats each event by itself, and a broker other than Kinesis.
    """
    file, url = load_found_pipes(pipes, data), find_broker(broker, data)
    if (
        bool(to_earliest) != bool(to)
        and not to_offset
        and (pipe := file.pipes.get(name))
        and pipe.transform is not None
    ):
        since = None if to is None else _past_time(to)
        restart_transform(url, file, name, data, since, yes=yes, as_json=as_json)
        return
    lane = _one_lane(file, name)
    target = _target(lane, to, to_offset, "earliest" if to_earliest else None, "--to-earliest")
    moves = uvloop.run(_plan(url, file, lane, target, RESET))
    if _confirm(lane, moves, "will be delivered again to", yes=yes):
        uvloop.run(_reset(url, file, lane, moves))
    _print(lane, moves, "reset", "will be delivered again", as_json=as_json)


@GROUP.command(
    epilog=example(
        'penstock group skip orders/crm --to-end --reason "the test data of Monday"\n'
        'penstock group skip orders/crm --to-offset 0:4712 --reason "records are lost" --yes'
    )
)
def skip(
    name: OneLane,
    reason: Annotated[str, typer.Option("--reason", help="The reason, for the audit.")],
    to: ToTime = None,
    to_offset: ToOffset = None,
    to_end: Annotated[bool, typer.Option("--to-end", help="After the newest event.")] = False,
    yes: Yes = False,
    pipes: Pipes = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Do not deliver the next events: move a destination forward. It must be stopped.

    Every skipped event is counted as skipped in the loss table, and is in the audit with the reason (penstock dead audit).
    Waiting retries and parked events (PIPE.retry, PIPE.parked; of penstock/retrier: penstock.retry-in, penstock.delay-*) are
    skipped only where --to-offset names their topic, and become dead letters. After a failure, repeat the command.
    """
    file = load_found_pipes(pipes, data)
    lane = _one_lane(file, name)
    target = _target(lane, to, to_offset, "end" if to_end else None, "--to-end")
    if not reason.strip():
        raise CommandFailed("--reason is empty", '--reason "the reason for the audit"', status=2)
    url = find_broker(broker, data)
    moves = uvloop.run(_plan(url, file, lane, target, SKIP))
    done = moves
    if _confirm(lane, moves, "will not be delivered to", yes=yes):
        done = uvloop.run(_skip(url, file, lane, moves, reason.strip()[:MAX_REASON]))
    _print(lane, done, "skip", "are skipped", as_json=as_json)
    if not as_json and any(move.count and move.now.source.topic in lane.waiting for move in done):
        print_note("Waiting events that were skipped are dead letters now. Try: penstock dead list --reason skipped")


def _one_lane(file: PipeFile, name: str) -> Lane:
    if "/" not in name and (pipe := file.pipes.get(name)) is not None:
        lanes = " or ".join(f"{name}/{one.name}" for one in pipe.destinations)
        if pipe.transform is None:
            raise CommandFailed(f"{name} is a pipe; its destinations have offsets", lanes, status=2)
        raise CommandFailed(
            f"{name} is a pipe; its destinations have offsets, and its transform has a checkpoint",
            f"{lanes}; or, to transform stored events again: penstock group reset {name} with --to-earliest or --to 2h",
            status=2,
        )
    return find_lanes(file, name)[0]


def _target(lane: Lane, to: str | None, to_offset: list[str] | None, last: Any, last_flag: str) -> Target:
    """From exactly one of the options. Raises CommandFailed."""
    if sum(map(bool, (to, to_offset, last))) != 1:
        raise CommandFailed(
            f"exactly one of --to, --to-offset and {last_flag} is needed",
            f"--to 2h, --to-offset 0:4712 or {last_flag}",
            status=2,
        )
    if to is not None:
        return _time_of(to)
    if to_offset:
        named = [parse_offset(text, lane) for text in to_offset]
        if len(dict(named)) < len(named):
            raise CommandFailed("--to-offset names a partition twice", "one offset for each partition", status=2)
        return dict(named)
    target: Target = last
    return target


def _time_of(text: str) -> datetime:
    """Raises CommandFailed."""
    try:
        return date_of(parse_time(text, time.time()))
    except ValueError as error:
        raise CommandFailed(str(error), status=2) from error


def _past_time(text: str) -> datetime:
    """Raises CommandFailed."""
    if (found := _time_of(text)).timestamp() > time.time():
        raise CommandFailed(f"{text} is in the future", status=2)
    return found


async def _plan(url: str, file: PipeFile, lane: Lane, target: Target, action: str) -> list[Move]:
    async with opened(url, file) as broker:
        await require_no_members(broker, lane)
        await require_own_position(broker, file, lane)
        return await plan_moves(broker, lane, target, action)


def _confirm(lane: Lane, moves: Sequence[Move], what: str, *, yes: bool) -> bool:
    """Whether to go on; without moves there is nothing to do. A refusal ends the command."""
    if not moves:
        return False
    if gone := sum(move.gone for move in moves):
        print_note(
            f"{gone} events before these are gone from the broker; the loss table shows them as missing", "yellow"
        )
    if not yes:
        count = sum(move.count for move in moves)
        confirm(f"{_events(count)} {what} {lane.name}. Go on?")
    return True


async def _reset(url: str, file: PipeFile, lane: Lane, moves: Sequence[Move]) -> None:
    async with opened(url, file) as broker, Producer(broker.appender) as producer:
        who = whoami()
        await Auditor(producer, who, {}).require_topic()
        await _wait_for_retries(broker, lane, moves)
        await reset_offsets(broker, producer, lane, moves, who)


async def _wait_for_retries(broker: Broker, lane: Lane, moves: Sequence[Move]) -> None:
    while (seconds := await retry_wait_s(broker, lane, moves)) > 0:
        print_note(
            f"Some of these events were written to the retry topic a moment ago, and expel would pass over them. "
            f"Waiting {seconds:.0f} s. Ctrl-C ends the command; nothing was changed yet."
        )
        await asyncio.sleep(seconds)


async def _skip(url: str, file: PipeFile, lane: Lane, moves: Sequence[Move], because: str) -> list[Move]:
    """Returns the moves with the events that were reported."""
    async with opened(url, file) as broker, Producer(broker.appender) as producer:
        who = whoami()
        await Auditor(producer, who, {}).require_topic()
        await require_ledger(producer)
        with count_progress() as progress:
            bar = progress.add_task("reporting", total=sum(move.count for move in moves))
            return await skip_events(
                broker, producer, lane, moves, who, because, lambda events: progress.update(bar, completed=events)
            )


def _print(lane: Lane, moves: Sequence[Move], action: str, word: str, *, as_json: bool) -> None:
    events = sum(move.count for move in moves)
    if as_json:
        said = {"pipe": lane.pipe, "destination": lane.destination, "action": action, "events": events}
        typer.echo(json.dumps({**said, "partitions": [move.as_json() for move in moves]}))
        return
    for move in moves:
        topic, number = move.now.source
        at = "none" if move.now.next is None else move.now.next
        print_note(f"{topic}:{number}: the next offset was {at} and is {move.to}; {_events(move.count)} {word}")
    if moves:
        print_note(f"{lane.name}: {_events(events)} {word}. Start the fleet again.", "green")
    else:
        print_note(
            f"Nothing was changed: each partition of {lane.name} is at this position or past it. Try: penstock group show"
        )


def _events(count: int) -> str:
    return format_count(count, "event")
