"""Asking the observer of a running fleet."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from services.core.bearer import read_tokens
from services.core.yaml_source import BadConfiguration
from services.fleet.folder import OBSERVER_TOKEN_FILE, read_state
from services.fleet.problem import CommandFailed

TIMEOUT = aiohttp.ClientTimeout(total=60.0)


@dataclass(frozen=True, slots=True)
class Observer:
    """Where it listens (host:port), and what it is asked with."""

    address: str
    token: str | None = field(default=None, repr=False)


def find_observer(address: str | None, data: Path, token_file: Path | None = None) -> Observer:
    """As given, or that of the fleet on the data folder, with its token. Blocking. Raises CommandFailed."""
    if address is not None:
        return Observer(address, None if token_file is None else _read_token(token_file))
    state = read_state(data)
    if state is None:
        raise CommandFailed(f"no fleet runs on the data folder {data}", "--observer host:port, or --data")
    own = data / OBSERVER_TOKEN_FILE
    found = token_file if token_file is not None else own if os.access(own, os.R_OK) else None
    return Observer(state.observer, None if found is None else _read_token(found))


def _read_token(path: Path) -> str:
    try:
        return read_tokens(path)[0]
    except BadConfiguration as error:
        raise CommandFailed(str(error), status=2) from error


async def ask(observer: Observer, path: str, query: dict[str, str]) -> dict[str, Any]:
    """The JSON answer. Raises CommandFailed with the observer's own words when it says no."""
    url, address = f"http://{observer.address}{path}", observer.address
    head = {} if observer.token is None else {"Authorization": f"Bearer {observer.token}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT, headers=head) as session,
            session.get(url, params=query, allow_redirects=False) as answer,
        ):
            body: dict[str, Any] = orjson.loads(await answer.read())
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
        raise CommandFailed(f"the observer at {address} does not answer: {error}", "penstock status") from error
    if answer.status != 200:
        raise CommandFailed(f"{body.get('title')}", str(body.get("detail")))
    return body
