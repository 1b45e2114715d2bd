"""A client of the observer's API, and the table of its answers."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.table import Table
from rich.text import Text

from services.core.bearer import read_tokens
from services.core.yaml_source import BadConfiguration
from services.fleet.access import require_fleet
from services.fleet.console import make_table
from services.fleet.folder import OBSERVER_TOKEN_FILE
from services.fleet.problem import CommandFailed

TIMEOUT = aiohttp.ClientTimeout(total=60.0)


@dataclass(frozen=True, slots=True)
class Observer:
    """The observer's address (host:port) and the token for it."""

    address: str
    token: str | None = field(default=None, repr=False)


def find_observer(address: str | None, data: Path, token_file: Path | None = None) -> Observer:
    """The observer as given, or that of the fleet on the data folder, with its token. Blocking. Raises CommandFailed."""
    if address is not None:
        return Observer(address, None if token_file is None else _read_token(token_file))
    state = require_fleet(data, "--observer host:port")
    own = data / OBSERVER_TOKEN_FILE
    found = token_file if token_file is not None else own if os.access(own, os.R_OK) else None
    return Observer(state.observer, None if found is None else _read_token(found))


def _read_token(path: Path) -> str:
    try:
        return read_tokens(path)[0]
    except BadConfiguration as error:
        raise CommandFailed(str(error), status=2) from error


async def get_json(observer: Observer, path: str, query: dict[str, str]) -> dict[str, Any]:
    """The JSON answer to GET. Raises CommandFailed with the observer's own message when it refuses."""
    return await ask(observer, "GET", path, query)


async def ask(
    observer: Observer, method: str, path: str, query: dict[str, str], body_to_send: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The JSON answer. Raises as `get_json`."""
    url, address = f"http://{observer.address}{path}", observer.address
    head = {} if observer.token is None else {"Authorization": f"Bearer {observer.token}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=TIMEOUT, headers=head) as session,
            session.request(method, url, params=query, json=body_to_send, allow_redirects=False) as answer,
        ):
            body: dict[str, Any] = orjson.loads(await answer.read())
    except (aiohttp.ClientError, TimeoutError, orjson.JSONDecodeError) as error:
        raise CommandFailed(f"the observer at {address} does not answer: {error}", "penstock status") from error
    if answer.status not in (200, 201):
        raise CommandFailed(". ".join(str(body[key]) for key in ("title", "detail") if body.get(key)))
    return body


def loss_table(body: dict[str, Any]) -> Table:
    """body: the answer to GET /v1/pipes/{pipe}/loss, with at least one minute."""
    rows = body["minutes"]
    steps = [step["node"] + (f" to {step['destination']}" if step["destination"] else "") for step in rows[-1]["steps"]]
    rare = [outcome for outcome in ("filtered", "skipped", "unknown") if any(_count(row, outcome) for row in rows)]
    columns = ("minute", "accepted", *steps, *rare, "waiting", "loss", "state")
    table = make_table(*columns, right=columns[1:-1], text=["state"], below=steps)
    for row in rows:
        style = _style(row["final_loss"], row, body["threshold"])
        state = "final" if row["final"] else row["why_open"]
        late = f", {row['late']} settled late" if row["late"] else ""
        if (planned := row.get("planned")) is not None:  # an older observer does not say
            late += f", planned: {planned['kind']} by {planned['by'] or 'somebody'}"
        missing = [_missing(step, row, body["threshold"]) for step in row["steps"]]
        counts = [str(_count(row, outcome)) for outcome in rare] + [str(row["waiting"])]
        cells = [row["minute"], str(row["accepted"]), *missing, *counts]
        loss = row["final_loss"] or row["loss"]  # the final loss first, then the loss that may still shrink
        table.add_row(*cells, Text(f"{loss:.2%}", style=style), Text(state + late))
    return table


def _count(row: dict[str, Any], outcome: str) -> int:
    """The events with this outcome, summed over the steps. filtered: only those of destinations, which are in other outputs.
    skipped: by an operator. unknown: only a newer version knows it."""
    steps = [step for step in row["steps"] if outcome != "filtered" or step["node"] == "expel"]
    return sum(step["outcomes"].get(outcome, 0) for step in steps)


def _missing(step: dict[str, Any], row: dict[str, Any], threshold: float) -> Text:
    """The missing count, coloured. A final destination is judged even if others are not final yet."""
    if not step["missing"]:
        return Text("0")
    lost = step["missing"] if step["final"] else 0
    return Text(str(step["missing"]), style=_style(lost / row["accepted"], step, threshold))


def _style(loss: float, judged: dict[str, Any], threshold: float) -> str:
    """loss: the final part of it."""
    return "red" if loss > threshold else "green" if judged["final"] else "dim"
