"""What the observer says of a demo's events: the address of its page while the demo runs, its loss table at the end."""

import asyncio
import time
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from services.fleet.console import note
from services.fleet.loss_table import loss_table
from services.fleet.observer_client import Observer, ask
from services.fleet.problem import CommandFailed
from services.fleet.supervisor import Fleet

PATIENCE_S = 60.0
ASK_EVERY_S = 0.5

_OPEN = (
    "A minute is final two and a half minutes after its end, as late events may come meanwhile: "
    "the demo does not wait for that, a fleet that goes on (penstock up) does."
)

Loss = dict[str, Any]
"""The observer's answer, with `accepted` and `missing` over all its minutes; empty when it did not answer."""


def show_address(fleet: Fleet) -> None:
    """Where a person can look meanwhile."""
    note(f"how late and how complete it is, live: http://{fleet.plan.observer}/", "bold")


async def read_loss(fleet: Fleet, pipe: str, accepted: int) -> Loss:
    """The table, as soon as all these events are in it and none is missing; as it stands when that takes too long.

    Each service tells within about a second what it settled. The minutes are not final so soon.
    """
    deadline = time.monotonic() + PATIENCE_S
    found: Loss = {}
    while time.monotonic() < deadline:
        try:
            found = await ask(Observer(fleet.plan.observer), f"/v1/pipes/{pipe}/loss", {})
        except CommandFailed as error:
            note(f"{error.what}", "yellow")
            return found
        for count in ("accepted", "missing"):
            found[count] = sum(row[count] for row in found["minutes"])
        if found["accepted"] >= accepted and not found["missing"]:
            break
        await asyncio.sleep(ASK_EVERY_S)
    return found


def render_loss(loss: Loss) -> RenderableType:
    """Behind the demo's own result."""
    if not loss.get("minutes"):
        return Text("the observer knows no minute of it", style="yellow")
    words = f"the observer's loss table: {loss['missing']:,} of {loss['accepted']:,} events are missing"
    table = Text(), Text(words, style="bold red" if loss["missing"] else "bold green"), loss_table(loss)
    return Group(*table) if all(row["final"] for row in loss["minutes"]) else Group(*table, Text(_OPEN, style="dim"))
