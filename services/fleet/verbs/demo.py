"""`penstock demo`."""

import json
import os
from typing import Annotated

import typer
import uvloop

from services.fleet.console import ERR, OUT
from services.fleet.demo.chaos import render_chaos, run_chaos
from services.fleet.demo.run import render_result, run_demo
from services.fleet.demo.stage import remove_settings
from services.fleet.problem import CommandFailed
from services.fleet.verbs.app import APP, example


@APP.command(
    epilog=example("penstock demo\npenstock demo --chaos --broker kafka\npenstock demo --json | tail -1 | jq .lost")
)
def demo(
    broker: Annotated[
        str,
        typer.Option(
            "--broker",
            help="log: the embedded log. kafka: Apache Kafka, started for the demo. kinesis: an emulator, in memory.",
        ),
    ] = "log",
    chaos: Annotated[
        bool, typer.Option("--chaos", help="Two destinations, without Spark: one goes down for a while and comes back.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object as the last line on stdout.")] = False,
) -> None:
    """Run the whole fleet for about a minute on 10,000 real events, and count the outcome of each.

    HTTP, ingest, broker, PySpark, expel and signed webhooks all run on this machine, in a temporary folder. Events are
    sent at 1,000 a second. With --chaos: 2,600 events to two destinations, one of which goes down for a while. Status 0 only
    if nothing was lost.
    """
    if broker not in ("log", "kafka", "kinesis"):
        raise CommandFailed(
            f"the demo does not support --broker {broker!r}", "--broker log, kafka or kinesis", status=2
        )
    remove_settings(os.environ)
    os.environ["PENSTOCK_TRANSFORM_JAVA_COMPILER"] = "quick"  # the full one would pay after 300,000 events
    result = uvloop.run((run_chaos if chaos else run_demo)(broker))
    (ERR if as_json else OUT).print((render_chaos if chaos else render_result)(result))
    if as_json:
        typer.echo(json.dumps(result))
    if not result["ok"]:
        raise typer.Exit(1)
