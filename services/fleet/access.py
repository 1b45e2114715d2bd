"""Finds the broker and the pipe file that a command uses, and opens the broker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.core.broker.connect import BadBrokerUrl, open_broker
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.fleet.folder import read_state
from services.fleet.problem import CommandFailed


def find_broker(broker: str | None, data: Path) -> str:
    """The URL as given, else the broker of the fleet that runs on the data folder, else the log in that folder. Blocking."""
    if broker is not None:
        return broker
    state = read_state(data)
    if state is not None:
        return state.broker
    if (data / "log").is_dir():
        return f"log://{(data / 'log').absolute()}"
    raise CommandFailed(
        f"no fleet runs on {data}, and it holds no log", "--data with its folder, or --broker", status=2
    )


def find_pipes(pipes: Path | None, data: Path) -> Path:
    """The path as given, else the file of the fleet that runs on the data folder, else `pipes.yaml` here. Blocking."""
    state = read_state(data) if pipes is None else None
    return pipes or (Path(state.pipes) if state is not None else Path("pipes.yaml"))


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Broker]:
    """Open the broker. Turns broker errors, also those raised inside of the context, into CommandFailed."""
    try:
        async with open_broker(url) as broker:
            yield broker
    except BadBrokerUrl as error:
        raise CommandFailed(str(error), status=2) from error
    except BrokerError as error:
        raise CommandFailed(f"{url}: {error}") from error
