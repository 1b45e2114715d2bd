"""`penstock doctor`."""

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from services.core.process.targets import check_targets
from services.fleet.console import ERR, OUT
from services.fleet.doctor.checks import CHECKS
from services.fleet.doctor.collection import Where, collect_facts
from services.fleet.doctor.diagnosis import diagnose
from services.fleet.doctor.view import render_diagnosis
from services.fleet.problem import CommandFailed
from services.fleet.verbs.app import APP, AsJson, BrokerUrl, Data, ObserverAddress, ObserverToken, Pipes, example


@APP.command(
    epilog=example(
        "penstock doctor\npenstock doctor --json | jq -r '.causes[0].what'\n"
        "penstock doctor --targets targets.json --broker kafka://host:9092 -f pipes.yaml --observer host:8081"
    )
)
def doctor(
    data: Data = Path("data"),
    targets: Annotated[
        str | None,
        typer.Option(
            "--targets",
            help="Processes elsewhere: Prometheus' list of targets (file_sd), or dns://name:port of their management ports. "
            "Default: the fleet on --data.",
        ),
    ] = None,
    broker: BrokerUrl = None,
    pipes: Pipes = None,
    observer: ObserverAddress = None,
    token_file: ObserverToken = None,
    as_json: AsJson = False,
) -> None:
    """Find the faults of a fleet: the most probable cause first, its evidence, and the first thing to do.

    Runs the checks of all runbooks (docs/runbooks), also when the fleet does not run, and changes nothing. Takes about ten
    seconds, because it reads all figures twice, and at most a minute. Consequences of a cause are listed beneath it.

    Exit status: 0 nothing is wrong, 1 something is wrong, 2 nothing wrong was found, but some checks could not be made.
    """
    if targets is not None:
        try:
            check_targets(targets)
        except ValueError as error:
            raise CommandFailed(f"--targets: {error}", status=2) from error
    with _progress() as show:
        facts = uvloop.run(collect_facts(Where(data, targets, broker, pipes, observer, token_file), show))
    found = diagnose(facts, CHECKS)
    if as_json:
        typer.echo(json.dumps(found.as_json()))
    else:
        OUT.print(render_diagnosis(found))
    raise typer.Exit(found.status)


@contextmanager
def _progress() -> Iterator[Callable[[Collection[str]], None]]:
    """On a terminal, one line with what is being looked at."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=ERR, transient=True, disable=not ERR.is_terminal) as progress:
        task = progress.add_task("looking at the fleet")

        def show(waiting: Collection[str]) -> None:
            progress.update(task, description=f"looking at {' and '.join(list(waiting)[:3]) or 'the fleet'}")

        yield show
