"""`penstock status`."""

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.live import Live

from services.core.pipe_file.pipes import load_pipes
from services.core.process.lifecycle import wait_for_stop
from services.fleet.access import require_fleet
from services.fleet.console import OUT
from services.fleet.status.reading import read_status, summarise
from services.fleet.status.view import render_status
from services.fleet.stop import stop_on_signals
from services.fleet.verbs.app import APP, Data, example

REFRESH_EVERY_S = 1.0


@APP.command(epilog=example("penstock status\npenstock status --watch\npenstock status --json | jq .destinations"))
def status(
    data: Data = Path("data"),
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout; with --watch one line per second.")
    ] = False,
) -> None:
    """Show a running fleet: rates, lag and loss per node, CPU and memory per process.

    Two clocks: the event age at a transform counts from the event's own time (its `time`). The E2E lag of a destination counts
    from the event's arrival at ingest. So old events that are sent now have a large age and a small E2E lag. In --json,
    `lag_out_ms`, `event_lag_ms` and `lag_ms` count from the event's own time, `e2e_lag_ms` from its arrival.
    """
    uvloop.run(_run(data, watch=watch, as_json=as_json))


async def _run(data: Path, *, watch: bool, as_json: bool) -> None:
    state = await asyncio.to_thread(require_fleet, data)
    pipes = await asyncio.to_thread(load_pipes, Path(state.pipes))
    previous = (await read_status(state, None)).sample
    with stop_on_signals() as stop, contextlib.ExitStack() as stack:
        live = stack.enter_context(Live(console=OUT, auto_refresh=False)) if watch and not as_json else None
        while True:
            await wait_for_stop(stop.asked, REFRESH_EVERY_S)
            if stop.asked.is_set():
                return
            current = await read_status(await asyncio.to_thread(require_fleet, data), previous)
            previous = current.sample
            found = await summarise(current, pipes)
            if as_json:
                typer.echo(json.dumps(found))
            elif live is not None:
                live.update(render_status(found), refresh=True)
            else:
                OUT.print(render_status(found))
            if not watch:
                return
