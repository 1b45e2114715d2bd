"""`penstock up`."""

import os
from typing import Annotated

import typer
import uvloop

from services.core.process.settings import flag_help, resolve_settings
from services.fleet.up.run import run_up
from services.fleet.up.settings import UpSettings, refuse_overruled
from services.fleet.verbs.app import APP, example

Value = str | None


def _option(field: str, *names: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(*names, help=flag_help(UpSettings, field), show_default=False)
    return option


@APP.command(
    epilog=example(
        "penstock up -f pipes.yaml --allow-networks 127.0.0.0/8\n"
        "penstock up --broker kafka --data /srv/penstock --listen 127.0.0.1:9090"
    )
)
def up(
    pipes: Annotated[Value, _option("pipes", "--pipes", "-f")] = None,
    broker: Annotated[Value, _option("broker", "--broker")] = None,
    data: Annotated[Value, _option("data", "--data")] = None,
    listen: Annotated[Value, _option("listen", "--listen")] = None,
    observer: Annotated[Value, _option("observer", "--observer")] = None,
    registry: Annotated[Value, _option("registry", "--registry")] = None,
    tables: Annotated[Value, _option("tables", "--tables")] = None,
    allow_networks: Annotated[Value, _option("allow_networks", "--allow-networks")] = None,
    ingest: Annotated[Value, _option("ingest", "--ingest")] = None,
    expel: Annotated[Value, _option("expel", "--expel")] = None,
    autoscale: Annotated[Value, _option("autoscale", "--autoscale")] = None,
    ready_within: Annotated[Value, _option("ready_within", "--ready-within")] = None,
    drain: Annotated[Value, _option("drain", "--drain")] = None,
    management: Annotated[Value, _option("management", "--management")] = None,
    ledger: Annotated[Value, _option("ledger", "--ledger")] = None,
    schemas: Annotated[Value, _option("schemas", "--schemas")] = None,
    log_level: Annotated[Value, _option("log_level", "--log-level")] = None,
    config: Annotated[Value, typer.Option("--config", help="Settings file (YAML). [PENSTOCK_CONFIG]")] = None,
) -> None:
    """Run the fleet on this machine. Each service is a process, restarted when it dies, drained on Ctrl-C."""
    flags = {name: value for name, value in locals().items() if value is not None}
    settings = resolve_settings(UpSettings, flags, os.environ)
    config = config or os.environ.get("PENSTOCK_CONFIG")
    refuse_overruled(config, os.environ)
    raise typer.Exit(uvloop.run(run_up(settings, config)))
