"""What the observer must say of a soak: nothing was dropped, so no minute may have been final with anything missing.

And the loss of chosen events among 100,000, at each node, which it must name.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

from services.core.ledger.report import Node
from services.fleet.observer_client import Observer, get_json
from tests.faults.lossy import Trial

EVENTS, LOST = 100_200, 500
NODES: tuple[Node, ...] = ("ingest", "transform", "expel", "retrier")
FINAL_S = 420.0
"""All minutes are final 150 s after their end, unless a step that was killed last is behind."""


async def lose_among_many(folder: Path, url: str | None, seed: int) -> list[str]:
    """The complaints about runs that lose LOST of EVENTS events, at each node in turn. url: None for logs of their own."""
    found: list[str] = []
    for node in NODES:
        own, begun = folder / node, time.monotonic()
        own.mkdir()
        broker = url or f"log://{own / 'log'}"
        verdict = await Trial(own, broker, f"lossy-{node}-{seed}", node, EVENTS, LOST, seed, crashes=True).run()
        print(
            f"{verdict.sent} events, {len(verdict.lost)} of them lost at {node}, {verdict.refused} refusals, "
            f"{verdict.received} received: missing are {verdict.missing}, {len({*verdict.named} & {*verdict.lost})} of the "
            f"lost are named, {time.monotonic() - begun:.0f} s",
            flush=True,
        )
        found += verdict.complaints()
    return found


async def judge_quiet(observer: str, pipe: str, acknowledged: int) -> list[str]:
    """The complaints about a pipe from which nothing was dropped, once all its minutes are final."""
    deadline = time.monotonic() + FINAL_S
    while True:
        rows: list[dict[str, Any]] = (await get_json(Observer(observer), f"/v1/pipes/{pipe}/loss", {"from": "23h"}))[
            "minutes"
        ]
        still_open = [row for row in rows if not row["final"]]
        if rows and not still_open:
            break
        if time.monotonic() > deadline:
            return [f"{pipe}: {row['minute']} is not final: {row['why_open']}" for row in still_open] or ["no minutes"]
        await asyncio.sleep(2)
    accepted = sum(row["accepted"] for row in rows)
    late = [row for row in rows if row["missing"] or row["late"]]
    print(f"{pipe}: {len(rows)} minutes final, {accepted} events accepted, {len(late)} false alarms", flush=True)
    found = [
        f"{pipe}: {row['minute']} was final with {row['missing'] + row['late']} of {row['accepted']} missing"
        for row in late
    ]
    if accepted < acknowledged:
        found.append(f"{pipe}: {accepted} events are accepted, but {acknowledged} were acknowledged")
    return found
