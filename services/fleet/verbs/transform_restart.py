"""`penstock group reset PIPE`: says what a reset of the pipe's transform does, asks, and does it (`group/transform_reset.py`)."""

import json
from datetime import datetime
from pathlib import Path

import typer
import uvloop

from services.core.audit import RESET
from services.core.broker.producer import Producer
from services.core.control.transform_marks import TransformMark, read_transform_mark
from services.core.pipe_file.pipes import PipeFile
from services.core.units import format_count
from services.fleet.access import opened
from services.fleet.console import confirm, print_note
from services.fleet.dead.audit import Auditor, whoami
from services.fleet.folder import find_checkpoints
from services.fleet.group.transform_reset import (
    Former,
    Restart,
    check_former,
    find_former,
    keeps_state,
    lock_checkpoint,
    name_aside,
    no_checkpoint,
    plan_restart,
    record_restart,
    set_aside,
    time_text,
)
from services.fleet.problem import CommandFailed


def restart_transform(
    url: str, file: PipeFile, pipe: str, data: Path, since: datetime | None, *, yes: bool, as_json: bool
) -> None:
    """Let the transform begin again at the oldest event, or at the first one since a time. Raises CommandFailed."""
    try:
        root = find_checkpoints(data)
    except OSError as error:
        raise CommandFailed(f"the configuration of the last start in {data} cannot be read: {error}") from error
    checkpoint, place = (root / pipe, str(root / pipe)) if isinstance(root, Path) else (None, f"{root}/{pipe}")
    with lock_checkpoint(checkpoint) as is_here:
        restart, mark = uvloop.run(_plan(url, file, pipe, since))
        aside = name_aside(checkpoint) if is_here and checkpoint is not None else None
        former = find_former(checkpoint, aside, mark, gives_up=since is None)
        _check(pipe, place, mark, restart, former, is_here=is_here, looked=checkpoint is not None)
        if since is not None:
            print_note(_describe(restart, since, former), "yellow")
        events = format_count(count := sum(move.count for move in restart.moves), "event")
        if at_least := bool(former.name and restart.older):
            events = f"at least {events}"
        if not yes:
            print_note(
                "Results come again with the same ids. So a receiver that drops duplicates drops them, also where they differ. "
                "If a receiver must get the new results, give them other ids in the transform.",
                "yellow",
            )
            confirm(f"{pipe}: {events} will be transformed again, and the results delivered again. Go on?")
        uvloop.run(_record(url, pipe, restart, mark, former.name))
        try:
            if checkpoint is not None and aside is not None:
                set_aside(checkpoint, aside)
        except OSError as error:
            raise CommandFailed(f"{checkpoint} cannot be renamed: {error.strerror}") from error
    if as_json:
        said = {"pipe": pipe, "transform": True, "action": RESET, "since": since and time_text(since)}
        said |= {"events": count, "at_least": at_least, "older_events": restart.older, "former": former.name or None}
        said |= {"checkpoint": aside and str(aside), "partitions": [move.as_json() for move in restart.moves]}
        typer.echo(json.dumps(said))
        return
    if aside is not None:
        print_note(f"The checkpoint is {aside} now. Delete it when the new results are right.")
    then = "Start the fleet again." if is_here else "A transform that was refused begins at its next attempt."
    print_note(f"{pipe}: {events} will be transformed again. {then}", "green")


async def _plan(url: str, file: PipeFile, pipe: str, since: datetime | None) -> tuple[Restart, TransformMark | None]:
    async with opened(url, file, own=True) as broker:
        return await plan_restart(broker, file.pipes[pipe].sources, since), await read_transform_mark(
            broker.reader, pipe
        )


def _check(
    pipe: str, place: str, mark: TransformMark | None, restart: Restart, former: Former, *, is_here: bool, looked: bool
) -> None:
    """Raises CommandFailed when there is nothing to reset, or not to a time."""
    if restart.since is not None and mark is not None and mark.plan is not None:
        raise keeps_state(pipe)
    if restart.since is not None and former.path is not None:
        check_former(former.path, pipe)
    if not is_here and restart.since is None and (mark is None or not (mark.has_begun or mark.begins)):
        raise no_checkpoint(place, looked=looked)
    if not looked:
        print_note(
            f"{place} was not looked at. If a checkpoint is still there, the next start continues at its position. "
            "Stop the transform and move the checkpoint away first.",
            "yellow",
        )
    elif not is_here and mark is not None and mark.has_begun:
        print_note(
            f"There is no checkpoint in {place}, but {mark.text}. If that checkpoint is elsewhere, the transform continues "
            "with it. Stop the transform and move the checkpoint away first.",
            "yellow",
        )


def _describe(restart: Restart, since: datetime, former: Former) -> str:
    """Which events a reset to a time leaves out."""
    begin = f"The transform begins at the first event that is not older than {time_text(since)}"
    older = format_count(restart.older, "older event")
    if former.name:
        away = "" if former.path is not None else f" {former.name} is not here; --to-earliest does not need it."
        return (
            f"{begin}, or at the position of its former checkpoint, if that comes first. Keep the folder {former.name} until the "
            f"transform has begun.{away} Of {older}, it leaves out those that it has transformed. In a topic that was created "
            "again since then, it leaves out all older events, and its log counts them (events_left_out)."
        )
    return (
        f"{begin}. Its former checkpoint is not here, so it leaves out {older}, also events that it never transformed. The loss "
        "table shows these as missing."
    )


async def _record(url: str, pipe: str, restart: Restart, mark: TransformMark | None, former: str) -> None:
    async with opened(url) as broker, Producer(broker.appender) as producer:
        who = whoami()
        await Auditor(producer, who, {}).require_topic()
        await record_restart(producer, pipe, restart, mark, who, former)
