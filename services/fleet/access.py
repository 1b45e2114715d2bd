"""How every command finds the fleet on the data folder: its state, broker, pipe file, ingest and keys; and opens the broker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil

from services.core.broker.connect import BadBrokerUrl
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.core.fleet_broker import open_fleet_broker, open_own_broker
from services.core.http.address import parse_address
from services.core.pipe_file.pipes import PipeFile, load_pipes
from services.fleet.folder import FleetState, read_state
from services.fleet.problem import CommandFailed


def find_fleet(data: Path) -> FleetState | None:
    """The state of the fleet that runs on the data folder; None when none does. Blocking."""
    state = read_state(data)
    return state if state is not None and psutil.pid_exists(state.pid) else None


def require_fleet(data: Path, otherwise: str = "") -> FleetState:
    """As `find_fleet`. Raises CommandFailed when none runs. otherwise: the flag that names the part that the command needs."""
    state = find_fleet(data)
    if state is None:
        remedy = (
            "penstock up, --data with its folder, or " + otherwise
            if otherwise
            else "penstock up, or --data with its folder"
        )
        raise CommandFailed(f"no fleet runs on the data folder {data}", remedy)
    return state


def find_broker(broker: str | None, data: Path) -> str:
    """The URL as given, else the broker of the last fleet on the data folder, else the log in that folder. Blocking.

    The fleet need not run: its streams are there without it.
    """
    if broker is not None:
        return broker
    state = read_state(data)
    if state is not None:
        return state.broker
    return f"log://{find_log(None, data, '--broker').absolute()}"


def find_log(folder: Path | None, data: Path, otherwise: str = "the log's folder as argument") -> Path:
    """The folder as given, else the embedded log of the last fleet on the data folder. Blocking.

    otherwise: as in `require_fleet`.
    """
    state = read_state(data)
    kind, _, path = state.broker.partition("://") if state is not None else ("", "", "")
    found = folder or (Path(path) if kind == "log" else data / "log")
    if not found.is_dir():
        remedy = f"penstock up, --data with its folder, or {otherwise}"
        raise CommandFailed(f"no fleet runs on the data folder {data}, and it holds no log", remedy, status=2)
    return found


def find_pipes(pipes: Path | None, data: Path) -> Path:
    """The path as given, else the file of the last fleet on the data folder, else `pipes.yaml` here. Blocking."""
    state = read_state(data) if pipes is None else None
    return pipes or (Path(state.pipes) if state is not None else Path("pipes.yaml"))


def load_found_pipes(pipes: Path | None, data: Path) -> PipeFile:
    """The pipe file of `find_pipes`. Blocking. Raises BadConfiguration, and CommandFailed when nothing names one."""
    path = find_pipes(pipes, data)
    if pipes is None and read_state(data) is None and not path.exists():
        remedy = "--data with the folder of the fleet, or --pipes with its pipe file"
        raise CommandFailed(f"no fleet runs on the data folder {data}, and there is no {path} here", remedy, status=2)
    return load_pipes(path)


def find_keys(keys: Path | None, data: Path) -> Path:
    """The path as given, else the file that the running fleet's ingest reads, else `keys.yaml` here. Blocking."""
    state = find_fleet(data) if keys is None else None
    return keys or Path(state.keys if state is not None and state.keys is not None else "keys.yaml")


def find_networks(networks: str | None, data: Path) -> str:
    """The private networks as given, else those that webhooks of the running fleet may reach; "": none. Blocking."""
    state = find_fleet(data) if networks is None else None
    return networks or (state.allow_networks if state is not None else "")


def ingest_url(listen: str) -> str:
    """The URL by which this machine reaches a server that listens on this address. Every address means loopback."""
    host, port = parse_address(listen)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@asynccontextmanager
async def opened(url: str, pipes: PipeFile | None = None, *, own: bool = False) -> AsyncIterator[Broker]:
    """Open the broker. Turns broker errors, also those raised inside of the context, into CommandFailed.

    pipes: of a command that reads streams or their groups: it names the topics of others. own: as `open_own_broker`.
    """
    try:
        async with open_own_broker(url, pipes) if own and pipes else open_fleet_broker(url, pipes) as broker:
            yield broker
    except BadBrokerUrl as error:
        raise CommandFailed(str(error), status=2) from error
    except BrokerError as error:
        raise CommandFailed(f"{url}: {error}") from error
