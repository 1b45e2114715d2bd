"""`penstock cost`."""

import json
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from services.core.broker.errors import UnknownTopic
from services.core.pipes import PipeFile, event_topics, load_pipes
from services.fleet.access import find_broker, find_pipes, opened
from services.fleet.console import OUT, print_note
from services.fleet.cost import Prices, StreamSample, read_sample, render_cost, summarise_cost
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
    """Estimate the costs of the streams on Kinesis, as they are and in other layouts, and list the largest event types."""
    file = load_pipes(find_pipes(pipes, data))
    prices = Prices(shard_hour, million_units)
    samples, shards = uvloop.run(_read_samples(find_broker(broker, data), file, minutes))
    found = summarise_cost(samples, shards, prices)
    if as_json:
        typer.echo(json.dumps(found))
        return
    OUT.print(render_cost(found))
    print_note(
        f"Of the last {minutes:g} minutes. Prices: {prices.shard_hour} $ a shard-hour, {prices.million_units} $ a million PUT "
        "payload units (Kinesis price list, provisioned mode, us-east-1); longer retention and reads are not included."
    )
    if not shards:
        print_note(
            "The broker is not Kinesis: the number of events per entry is not known and assumed to be one.", "yellow"
        )


async def _read_samples(url: str, file: PipeFile, minutes: float) -> tuple[list[StreamSample], dict[str, int]]:
    samples: list[StreamSample] = []
    shards: dict[str, int] = {}
    async with opened(url) as broker:
        resharding = broker.resharding
        for topic in event_topics(file):
            try:
                samples.append(await read_sample(broker.reader, topic, minutes, aggregated=resharding is not None))
                if resharding is not None:
                    shards[topic] = len((await resharding.shards(topic)).numbers)
            except UnknownTopic:
                print_note(f"{topic} does not exist yet", "yellow")
    return samples, shards
