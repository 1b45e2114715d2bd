"""`penstock log verify` and `repair`: check and repair the embedded log after disk damage."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from services.core.broker.errors import BrokerError
from services.core.broker.log.repair import repair as repair_folder
from services.core.broker.log.repair import verify as verify_folder
from services.core.broker.log.scan import FolderReport, TopicReport
from services.fleet.access import find_log
from services.fleet.console import OUT, confirm
from services.fleet.problem import CommandFailed
from services.fleet.verbs.app import APP, AsJson, Data, example

LOG = typer.Typer(help="Check and repair the embedded log.", no_args_is_help=True)
APP.add_typer(LOG, name="log")

Folder = Annotated[
    Path | None,
    typer.Argument(help="The log's folder. Default: `log` in the folder of --data.", exists=True, file_okay=False),
]
Topic = Annotated[str | None, typer.Option("--topic", help="Only this topic.")]


@LOG.command(epilog=example("penstock log verify\npenstock log verify /srv/penstock/log --json"))
def verify(folder: Folder = None, topic: Topic = None, data: Data = Path("data"), as_json: AsJson = False) -> None:
    """Read every record and compare it with its checksum. The fleet may run meanwhile. Status 1 when anything is lost."""
    try:
        report = verify_folder(find_log(folder, data), topic)
    except BrokerError as error:
        raise CommandFailed(str(error)) from error
    _print(report, as_json=as_json)
    if not report.is_sound:
        raise CommandFailed(
            "the log is damaged; the lost offsets are listed above", "penstock log repair, with the fleet stopped"
        )


@LOG.command(epilog=example("penstock log repair --yes"))
def repair(
    folder: Folder = None,
    topic: Topic = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Accept the loss: keep the readable records, and record the rest as gaps. Keeps the damaged files, too, in another place."""
    path = find_log(folder, data)
    if not yes:
        confirm("Unreadable records are given up for good. Is the fleet stopped? Repair the log?")
    try:
        report = repair_folder(path, topic)
    except BrokerError as error:
        raise CommandFailed(str(error)) from error
    _print(report, as_json=as_json)


def _print(report: FolderReport, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"sound": report.is_sound, **asdict(report)}))
        return
    for topic in [*report.topics, report.groups]:
        records = sum(part.records for part in topic.partitions)
        state = "sound" if topic.is_sound else f"{topic.lost_records} records lost"
        OUT.print(f"{topic.topic:<30} {records:>12,} records  {state}", style="" if topic.is_sound else "red")
        for line in _details(topic):
            OUT.print(f"    {line}")


def _details(topic: TopicReport) -> list[str]:
    lost = [
        f"partition {part.partition}: offsets {first} to {last} lost"
        for part in topic.partitions
        for first, last in part.lost
    ]
    return [*topic.problems, *lost]
