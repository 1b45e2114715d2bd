"""`penstock backup`: copies of the data folder, made while the fleet runs."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from services.core.broker.log.backup import TopicCopy
from services.core.units import format_count
from services.fleet.access import find_broker, find_pipes
from services.fleet.backup.create import Made, Show, Source, create_backup
from services.fleet.backup.manifest import Manifest, read_manifest
from services.fleet.backup.restore import check_backup, restore_backup
from services.fleet.console import ERR, OUT, make_table, print_note
from services.fleet.dead.audit import whoami
from services.fleet.folder import describe_loss
from services.fleet.problem import CommandFailed
from services.fleet.verbs.app import APP, AsJson, BrokerUrl, Data, Pipes, example

BACKUP = typer.Typer(
    help="Copies of the data folder: made while the fleet runs, checked, and restored.", no_args_is_help=True
)
APP.add_typer(BACKUP, name="backup")

OneBackup = Annotated[
    Path, typer.Argument(metavar="BACKUP", help="The folder of a backup.", exists=True, file_okay=False)
]


@BACKUP.command(epilog=example("penstock backup create /mnt/backups\npenstock backup create /mnt/backups --json"))
def create(
    into: Annotated[Path, typer.Argument(metavar="FOLDER", help="The backup is a new folder in this one.")],
    pipes: Pipes = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Copy the log, the checkpoints, the schemas and the configuration, as they are at one moment. The fleet may run meanwhile.

    Nothing that was acknowledged before the command began is missing in the copy. Secrets are not copied. With Kafka or Kinesis
    the topics are not copied either: the broker keeps them.
    """
    source = Source(data, find_broker(broker, data), find_pipes(pipes, data))
    with _progress("records") as (total, advance):
        made = create_backup(source, into, Show(total, advance))
    if as_json:
        typer.echo(
            json.dumps({"backup": str(made.folder), "held_ms": round(made.held_s * 1000), **summary(made.manifest)})
        )
        return
    _print_made(made)


def summary(manifest: Manifest) -> dict[str, Any]:
    """The counts, for --json."""
    log = manifest.log
    return {
        "cut": manifest.cut,
        "broker": manifest.broker,
        "bytes": manifest.bytes,
        "files": len(manifest.files),
        "topics": 0 if log is None else len(log.topics),
        "partitions": 0 if log is None else sum(len(topic.partitions) for topic in log.topics),
        "records": 0 if log is None else log.records,
        "unread": {} if log is None else log.unread(),
        "checkpoints": [one.pipe for one in manifest.checkpoints],
        "schema_entries": manifest.schemas,
        "left_out": manifest.left_out,
    }


def _print_made(made: Made) -> None:
    manifest = made.manifest
    print_note(f"{made.folder}", "bold green")
    print_note(f"  {_contents(manifest)}, as of {manifest.cut}; {manifest.bytes / (1 << 20):,.1f} MiB")
    if manifest.log is not None:
        print_note(f"  writers waited {made.held_s * 1000:.0f} ms")
    for line in manifest.left_out:
        print_note(f"  not in it: {line}", "yellow")


def _contents(manifest: Manifest) -> str:
    parts = []
    if manifest.log is not None:
        parts.append(
            f"{format_count(manifest.log.records, 'record')} of {format_count(len(manifest.log.topics), 'topic')}"
        )
    if manifest.checkpoints:
        parts.append(format_count(len(manifest.checkpoints), "checkpoint"))
    if manifest.schemas:
        parts.append("the schemas")
    if manifest.config is not None:
        parts.append("the configuration")
    return ", ".join(parts) or "nothing"


def topic_table(topics: Sequence[TopicCopy]) -> Table:
    table = make_table(
        "topic", "partitions", "records", "highest offset", right=("partitions", "records", "highest offset")
    )
    for topic in topics:
        highest = max((part.end for part in topic.partitions), default=0) - 1
        table.add_row(
            topic.topic, str(len(topic.partitions)), f"{topic.records:,}", "none" if highest < 0 else f"{highest:,}"
        )
    return table


@BACKUP.command(epilog=example("penstock backup verify /mnt/backups/20261123T034500.123Z"))
def verify(backup: OneBackup, as_json: AsJson = False) -> None:
    """Read a whole backup: compare each file with its hash, and each record with its checksum and the counts.

    Status 1 when anything differs. Nothing is written.
    """
    with _progress("bytes") as (total, advance):
        total(read_manifest(backup).bytes)
        checked = check_backup(backup, advance)
    manifest = checked.manifest
    if as_json:
        typer.echo(json.dumps({"sound": not checked.problems, "problems": checked.problems, **summary(manifest)}))
    else:
        if manifest.log is not None and manifest.log.topics:
            OUT.print(topic_table(manifest.log.topics))
        for problem in checked.problems:
            print_note(problem, "red")
    if checked.problems:
        raise CommandFailed(f"{backup} is damaged, see above", "another backup; the restore of this one is refused")
    if not as_json:
        print_note(f"{backup} is sound: {_contents(manifest)}, as of {manifest.cut}", "green")


@BACKUP.command(epilog=example("penstock backup restore /mnt/backups/20261123T034500.123Z --data /srv/penstock/data"))
def restore(backup: OneBackup, data: Data = Path("data"), as_json: AsJson = False) -> None:
    """Make a data folder from a backup. The folder must be empty or missing: nothing is replaced.

    Events that were accepted after the backup are lost, and those that were delivered after it are delivered again.
    """
    with _progress("bytes") as (total, advance):
        total(read_manifest(backup).bytes)
        manifest = restore_backup(backup, data, whoami(), advance)
    if as_json:
        typer.echo(json.dumps({"data": str(data), "backup": str(backup), **summary(manifest)}))
        return
    print_note(f"{data} has {_contents(manifest)}, as of {manifest.cut}", "bold green")
    if manifest.log is not None:
        for line in describe_loss(manifest.cut)[1:]:
            print_note(line, "yellow")
        for group, records in manifest.log.unread().items():
            if records:
                print_note(f"  {group}: {format_count(records, 'record')} to read")
    for line in manifest.left_out:
        print_note(f"  put in place: {line}", "yellow")
    pipes = f"-f {data / manifest.config} " if manifest.config is not None else ""
    print_note(f"Then: penstock up {pipes}--data {data}")


@contextmanager
def _progress(what: str) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Sets the total, and adds to what is done. Shown on a terminal only."""
    columns = (TextColumn(what), BarColumn(), TaskProgressColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=ERR, disable=not ERR.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda total: progress.update(task, total=total), lambda more: progress.update(task, advance=more)
