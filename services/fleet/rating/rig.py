"""One instance alone, on a log of its own, under an open load: what is offered does not wait for what is done."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.core.address import parse_address
from services.core.pipes import load_pipes
from services.core.scrape import Sample, scrape
from services.fleet.plan import FleetPlan
from services.fleet.ports import free_port
from services.fleet.problem import CommandFailed
from services.fleet.process import ServiceSpec
from services.fleet.rating.steps import Step
from services.fleet.stop import Stop
from services.fleet.supervisor import run_fleet
from services.fleet.topics import provision

TICK_S = 0.05
SETTLE_S = 30.0
"""What a backlog gets to be worked off before the next step."""
PIPES = """\
version: 1
streams:
  rated: {{partitions: 4, id: id}}
pipes:
  rated:
    sources: [rated]
    destinations:
      - name: receiver
        webhook: {{url: "http://127.0.0.1:{port}/", batch: {{max_events: {batch}}}}}
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the load: payload bytes of an event, events a request."""

    size: int
    batch: int


@dataclass(frozen=True, slots=True)
class Rig:
    """offer: give so many events now, without waiting for them. made: how many reached the instance's input so far.

    totals: events done and core-seconds used, so far. behind: events that reached it, or are on their way, and are not done.
    """

    offer: Callable[[int], None]
    made: Callable[[], int]
    totals: Callable[[], Awaitable[tuple[float, float]]]
    behind: Callable[[], Awaitable[int]]


async def run_step(rig: Rig, rate: float, seconds: float, stop: Stop) -> Step:
    """Offer `rate` for so long, then let what is left be done. Raises CommandFailed when asked to stop."""
    began, own = time.monotonic(), time.process_time()
    await asyncio.to_thread(psutil.cpu_percent)  # the next call tells of the time since this one
    done_before, cpu_before = await rig.totals()
    offered, made_before = 0, rig.made()
    while (elapsed := time.monotonic() - began) < seconds:
        stop.check()
        due = int(min(elapsed + TICK_S, seconds) * rate)
        rig.offer(due - offered)
        offered = due
        await asyncio.sleep(TICK_S)
    rig.offer(int(seconds * rate) - offered)
    made = (rig.made() - made_before) / seconds
    lag = await rig.behind() / rate  # before what is done: what ends in between counts twice rather than never
    done, cpu = await rig.totals()
    took = time.monotonic() - began
    machine = await asyncio.to_thread(psutil.cpu_percent) / 100
    own = (time.process_time() - own) / took
    await _settle(rig, stop)
    return Step(rate, seconds, made, (done - done_before) / seconds, lag, (cpu - cpu_before) / took, own, machine)


async def _settle(rig: Rig, stop: Stop) -> None:
    deadline = time.monotonic() + SETTLE_S
    while await rig.behind() and time.monotonic() < deadline:
        stop.check()
        await asyncio.sleep(TICK_S)


@asynccontextmanager
async def one_instance(
    service: str, module: str, folder: Path, port: int, shape: Shape, arguments: tuple[str, ...], stop: Stop
) -> AsyncIterator[tuple[str, str]]:
    """One process of the service on a fresh log in `folder`. Yields (broker URL, management address).

    port: of the receiver in the pipe file. Raises CommandFailed.
    """
    pipes, broker = folder / "pipes.yaml", f"log://{folder / 'log'}"
    await asyncio.to_thread(_write, folder, pipes, PIPES.format(port=port, batch=shape.batch))
    await provision(broker, await asyncio.to_thread(load_pipes, pipes))
    shared = ("--broker", broker, "--pipes", str(pipes), "--ledger", "true", "--log-level", "warning")
    spec = ServiceSpec(f"{service}-1", service, module, (*shared, *arguments))
    nowhere = f"127.0.0.1:{free_port()}"
    plan = FleetPlan(folder, broker, pipes, nowhere, nowhere, (spec,), ready_within=60.0, drain=5.0)
    async with run_fleet(plan, "127.0.0.1:0", _ignore, lambda _text: None, stop) as fleet:
        yield broker, fleet.processes[0].management


async def read_instance(management: str) -> Sample:
    """Its metrics. Raises CommandFailed when it does not answer."""
    sample = await scrape([management])
    if sample.unready.get(management) == "does not answer":
        raise CommandFailed(f"the instance at {parse_address(management)[1]} does not answer", "fewer events a second")
    return sample


def _write(folder: Path, path: Path, text: str) -> None:
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _ignore(_level: str, _text: str) -> None:
    """Its warnings stay in its log."""
