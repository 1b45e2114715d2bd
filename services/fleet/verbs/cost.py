"""`penstock cost`."""

import json
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from services.core.pipe_file.pipes import PipeFile
from services.fleet.access import find_broker, load_found_pipes, opened
from services.fleet.console import OUT, print_note
from services.fleet.cost import FleetSample, Prices, read_fleet, render_cost, summarise_cost
from services.fleet.verbs.app import APP, AsJson, BrokerUrl, Data, Pipes, example

_DEFAULT = Prices()


@APP.command(epilog=example("penstock cost\npenstock cost --minutes 60 --json | jq .layouts"))
def cost(
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    pipes: Pipes = None,
    minutes: Annotated[float, typer.Option("--minutes", min=1, max=1440, help="The period to sample.")] = 10.0,
    shard_hour: Annotated[
        float,
        typer.Option("--shard-hour", min=0, help="Dollars per shard-hour; the default is the price of us-east-1."),
    ] = _DEFAULT.shard_hour,
    million_units: Annotated[
        float,
        typer.Option(
            "--million-units",
            min=0,
            help="Dollars per million PUT payload units; the default is the price of us-east-1.",
        ),
    ] = _DEFAULT.million_units,
    as_json: AsJson = False,
) -> None:
    """Estimate the costs of the streams on Kinesis, as they are and in other layouts, and list the largest event types.

    It counts every stream of the pipe file, also those that Penstock keeps for itself, as `infra/aws/streams.py` does.
    """
    file = load_found_pipes(pipes, data)
    prices = Prices(shard_hour, million_units)
    fleet = uvloop.run(_read(find_broker(broker, data), file, minutes))
    found = summarise_cost(fleet, prices)
    if as_json:
        typer.echo(json.dumps(found))
        return
    OUT.print(render_cost(found))
    print_note(
        f"Of the last {minutes:g} minutes. Prices: {prices.shard_hour} $ a shard-hour, {prices.million_units} $ a million PUT "
        "payload units (Kinesis price list, provisioned mode, us-east-1). Not included: longer retention, reads, DynamoDB, and "
        "PUT units of the streams that Penstock keeps for itself."
    )
    if fleet.shards is None:
        print_note(
            "The broker is not Kinesis: the shards are those with which the streams would be created there. The number of events "
            "per entry is not known and assumed to be one.",
            "yellow",
        )
    elif missing := [name for name in fleet.topics if name not in fleet.shards]:
        print_note(
            f"These streams do not exist yet; counted with the shards with which they are created: {', '.join(missing)}",
            "yellow",
        )


async def _read(url: str, file: PipeFile, minutes: float) -> FleetSample:
    async with opened(url, file) as broker:
        return await read_fleet(broker, file, minutes)
