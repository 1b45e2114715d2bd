"""A client of the observer's API, and the table of its answers."""

import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.table import Table
from rich.text import Text

from services.core.security.bearer import read_tokens
from services.core.yaml_source import BadConfiguration
from services.fleet.access import require_fleet
from services.fleet.console import make_table
from services.fleet.folder import OBSERVER_TOKEN_FILE
from services.fleet.problem import CommandFailed, why_no_answer

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
        raise CommandFailed(
            f"the observer at {address} does not answer: {why_no_answer(error)}", "penstock status"
        ) from error
    if answer.status not in (200, 201):
        raise CommandFailed(". ".join(str(body[key]) for key in ("title", "detail") if body.get(key)))
    return body


def loss_table(body: dict[str, Any]) -> Table:
    """One row per minute. body: the answer to GET /v1/pipes/{pipe}/loss, with at least one minute."""
    rows = body["minutes"]
    found = dict.fromkeys(
        (step["node"], step["destination"]) for row in rows for step in row["steps"] if step["missing"]
    )
    where = [_label(node, destination) for node, destination in found]
    headings = [f"missing at {one}" for one in where] or ["missing"]
    columns = ("minute", "accepted", *headings, "waiting", "loss", "state")
    table = make_table(*columns, right=columns[1:-1], text=["state"], below=headings)
    for row in rows:
        style = _style(row["final_loss"], row, body["threshold"])
        state = "final" if row["final"] else row["why_open"]
        late = f", {row['late']} settled late" if row["late"] else ""
        if (planned := row.get("planned")) is not None:  # an older observer does not say
            late += f", planned: {planned['kind']} by {planned['by'] or 'somebody'}"
        steps = {(step["node"], step["destination"]): step for step in row["steps"]}
        missing = [_missing(steps.get(one), row, body["threshold"]) for one in found] or [Text("0")]
        loss = "open" if row["loss"] and not row["final_loss"] and not row["final"] else f"{row['final_loss']:.2%}"
        cells = (row["minute"], str(row["accepted"]), *missing, str(row["waiting"]))
        table.add_row(*cells, Text(loss, style=style), Text(state + late))
    return table


def _label(node: str, destination: str | None) -> str:
    return node + (f" to {destination}" if destination else "")


def outcome_table(body: dict[str, Any]) -> Table:
    """One row per step: what became of the events of all these minutes so far. Each is in one column behind `events`.

    A destination that gets only results over several events has no counts: the ledger has none.
    """
    totals: dict[tuple[str, str | None], Counter[str]] = {}
    for step in (step for row in body["minutes"] for step in row["steps"] if step["node"] in ("transform", "expel")):
        total = totals.setdefault((step["node"], step["destination"]), Counter())
        total.update({**step["outcomes"], "events": step["expected"], _open_or_missing(step): step["missing"]})
    for step in (step for row in body["minutes"] for step in row["steps"] if step["node"] == "retrier"):
        # An event that the retrier lost is among those that expel handed over to it.
        totals["expel", step["destination"]].update(
            {"retrying": -step["missing"], _open_or_missing(step): step["missing"]}
        )
    shown = {
        "passed on": ("passed",), "delivered": ("delivered",), "waiting": ("retrying", "parked"), "dead": ("dead",),
        "filtered": ("filtered",), "skipped": ("skipped",), "unknown": ("unknown",), "open": ("open",), "missing": ("missing",),
    }  # fmt: skip
    always = ("delivered", "waiting", "dead", "missing")
    used = [
        name for name, parts in shown.items() if name in always or any(t[one] for t in totals.values() for one in parts)
    ]
    table = make_table("outcome so far", "events", *used, right=("events", *used))
    uncounted = describe_results(body) is not None
    for (node, destination), total in totals.items():
        if uncounted and node == "expel" and not total["events"]:
            table.add_row(_label(node, destination), "not counted", *("" for _ in used))
            continue
        other = {"delivered", "waiting"} if node == "transform" else {"passed on"}
        counts = ["" if name in other else str(sum(total[one] for one in shown[name])) for name in used]
        table.add_row(_label(node, destination), str(total["events"]), *counts)
    return table


def describe_results(body: dict[str, Any]) -> str | None:
    """A sentence for a pipe whose transform has passed on no event itself, as one over several events does."""
    steps = [step["outcomes"] for row in body["minutes"] for step in row["steps"] if step["node"] == "transform"]
    if any(one.get("passed") for one in steps) or not any(one.get("filtered") for one in steps):
        return None
    return (
        "filtered at the transform: it dropped the event, or made it part of a result over several events. "
        "Such results are new events: this table counts neither them nor their deliveries. "
        "Try: penstock status, which has the number of delivered results"
    )


def _open_or_missing(step: dict[str, Any]) -> str:
    return "missing" if step["final"] else "open"


def _missing(step: dict[str, Any] | None, row: dict[str, Any], threshold: float) -> Text:
    """The missing count, coloured. A final destination is judged even if others are not final yet."""
    if step is None or not step["missing"]:
        return Text("0")
    if not step["final"]:
        return Text(f"{step['missing']} open", style="dim")
    return Text(str(step["missing"]), style=_style(step["missing"] / row["accepted"], step, threshold))


def _style(loss: float, judged: dict[str, Any], threshold: float) -> str:
    """loss: the final part of it."""
    return "red" if loss > threshold else "green" if judged["final"] else "dim"
