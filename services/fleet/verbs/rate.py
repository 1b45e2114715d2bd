"""`penstock rate`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from services.core.units import parse_duration, parse_size
from services.fleet.console import note
from services.fleet.problem import CommandFailed
from services.fleet.rating.rig import Shape
from services.fleet.rating.run import RIGS, Course, run_rating
from services.fleet.rating.steps import MIN_STEP_S, Rating, Step, rate_of
from services.fleet.rating.view import HEAD, step_line, summary
from services.fleet.settings_edit import check_key, set_key
from services.fleet.stop import stop_on_signals
from services.fleet.verbs.app import APP, example
from services.fleet.verbs.dead_options import AsJson


@APP.command(epilog=example("penstock rate expel\npenstock rate ingest --size 2KB --batch 500 --config penstock.yaml"))
def rate(
    service: Annotated[str, typer.Argument(help=f"Which: {' or '.join(RIGS)}.")],
    size: Annotated[str, typer.Option("--size", help="Payload of an event.")] = "300B",
    batch: Annotated[int, typer.Option("--batch", min=1, max=10_000, help="Events a request.")] = 100,
    first: Annotated[float, typer.Option("--first", min=1, help="Events a second of the first step.")] = 500.0,
    step: Annotated[str, typer.Option("--step", help="How long each step takes, at least 1s.")] = "5s",
    config: Annotated[
        Path | None,
        typer.Option("--config", envvar="PENSTOCK_CONFIG", help="Settings file that gets the group's target_cpu."),
    ] = None,
    group: Annotated[str | None, typer.Option("--group", help="The group's name there; absent: the service's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Find out what one instance takes on this machine: load in steps until it does not keep pace, and the CPU to aim at.

    The instance runs alone, on an embedded log in a temporary folder; no running fleet is touched.
    """
    if service not in RIGS:
        raise CommandFailed(f"{service} cannot be rated", f"one of {', '.join(RIGS)}", status=2)
    try:
        shape, course = Shape(parse_size(size), batch), Course(first, max(MIN_STEP_S, parse_duration(step)))
    except ValueError as error:
        raise CommandFailed(str(error), status=2) from error
    keys = ("autoscaler", "groups", group or service, "target_cpu")
    if config is not None:
        check_key(config, keys)
    note(HEAD, "bold")
    steps = uvloop.run(_run(service, shape, course))
    rating = rate_of(steps)
    for line in summary(service, rating):
        note(line)
    if config is not None and rating.rate > 0:
        set_key(config, keys, rating.target_cpu)
        note(f"{'.'.join(keys)} is set in {config}")
    if as_json:
        typer.echo(_json(service, shape, rating, steps))
    if rating.rate == 0:
        raise typer.Exit(1)


async def _run(service: str, shape: Shape, course: Course) -> list[Step]:
    with stop_on_signals(lambda _insists: None) as stop:
        return await run_rating(service, shape, course, stop, lambda step: note(step_line(step)))


def _json(service: str, shape: Shape, rating: Rating, steps: list[Step]) -> str:
    told = [{**dataclasses.asdict(step), "kept": step.kept} for step in steps]
    return json.dumps({"service": service, **dataclasses.asdict(shape), **dataclasses.asdict(rating), "steps": told})
