"""`penstock rate`."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from services.core.units import parse_duration, parse_size
from services.fleet.console import print_note
from services.fleet.problem import CommandFailed
from services.fleet.rating.rig import RIGS, LoadShape, run_rating
from services.fleet.rating.steps import HEAD, MIN_STEP_S, Rating, RatingStep, rate_of, step_line, summary
from services.fleet.settings_edit import check_key, set_key
from services.fleet.stop import stop_on_signals
from services.fleet.verbs.app import APP, AsJson, example


@APP.command(epilog=example("penstock rate expel\npenstock rate ingest --size 2KB --batch 500 --config penstock.yaml"))
def rate(
    service: Annotated[str, typer.Argument(help=f"The service: {' or '.join(RIGS)}.")],
    size: Annotated[str, typer.Option("--size", help="The payload size of an event.")] = "300B",
    batch: Annotated[int, typer.Option("--batch", min=1, max=10_000, help="Events per request.")] = 100,
    first: Annotated[float, typer.Option("--first", min=1, help="Events per second in the first step.")] = 500.0,
    step: Annotated[str, typer.Option("--step", help="The length of each step, at least 1s.")] = "5s",
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", envvar="PENSTOCK_CONFIG", help="The settings file in which to set the group's target_cpu."
        ),
    ] = None,
    group: Annotated[
        str | None, typer.Option("--group", help="The group's name in the settings file. Default: the service's name.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how much load one instance handles on this machine, and the CPU target that follows.

    The load rises in steps until the instance does not keep pace. The instance runs alone, on an embedded log in a temporary
    folder. Running fleets are not affected.
    """
    if service not in RIGS:
        raise CommandFailed(f"{service} cannot be rated", f"one of {', '.join(RIGS)}", status=2)
    try:
        shape, seconds = LoadShape(parse_size(size), batch), max(MIN_STEP_S, parse_duration(step))
    except ValueError as error:
        raise CommandFailed(str(error), status=2) from error
    keys = ("autoscaler", "groups", group or service, "target_cpu")
    if config is not None:
        check_key(config, keys)
    print_note(HEAD, "bold")
    steps = uvloop.run(_run(service, shape, first, seconds))
    rating = rate_of(steps)
    for line in summary(service, rating):
        print_note(line)
    if config is not None and rating.rate > 0:
        set_key(config, keys, rating.target_cpu)
        print_note(f"{'.'.join(keys)} is set in {config}")
    if as_json:
        typer.echo(_json(service, shape, rating, steps))
    if rating.rate == 0:
        raise typer.Exit(1)


async def _run(service: str, shape: LoadShape, first: float, seconds: float) -> list[RatingStep]:
    with stop_on_signals() as stop:
        return await run_rating(service, shape, first, seconds, stop, lambda step: print_note(step_line(step)))


def _json(service: str, shape: LoadShape, rating: Rating, steps: list[RatingStep]) -> str:
    rows = [{**dataclasses.asdict(step), "kept": step.kept} for step in steps]
    return json.dumps({"service": service, **dataclasses.asdict(shape), **dataclasses.asdict(rating), "steps": rows})
