"""Asking the observer of a running fleet."""

from pathlib import Path
from typing import Any

import aiohttp
import orjson

from services.fleet.folder import read_state
from services.fleet.problem import CommandFailed

TIMEOUT = aiohttp.ClientTimeout(total=60.0)


def find_observer(address: str | None, data: Path) -> str:
    """host:port as given, or that of the fleet on the data folder. Blocking. Raises CommandFailed."""
    if address is not None:
        return address
    state = read_state(data)
    if state is None:
        raise CommandFailed(f"no fleet runs on the data folder {data}", "--observer host:port, or --data")
    return state.observer


async def ask(address: str, path: str, query: dict[str, str]) -> dict[str, Any]:
    """The JSON answer. Raises CommandFailed with the observer's own words when it says no."""
    url = f"http://{address}{path}"
    try:
        async with aiohttp.ClientSession(timeout=TIMEOUT) as session, session.get(url, params=query) as answer:
            body: dict[str, Any] = orjson.loads(await answer.read())
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
        raise CommandFailed(f"the observer at {address} does not answer: {error}", "penstock status") from error
    if answer.status != 200:
        raise CommandFailed(f"{body.get('title')}", str(body.get("detail")))
    return body
