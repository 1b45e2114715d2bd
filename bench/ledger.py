"""What the ledger costs: ingest and expel on the embedded log at a fixed rate, with it and without it in turn.

Each round has processes of its own, and the median counts: two of the same code differ by up to a tenth for as long as they run.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import aiohttp
import uvloop

from bench.delivery import DELIVERED, PIPE, make_secret, receiver
from bench.events import make_body
from bench.figures import Figure
from bench.processes import Child, fetch_metric, free_port
from bench.setup import CPU, Setup, make_topics, tell

CASES = ((10_000, 100), (1_000, 1))
"""Events a second, events a request and a delivery. At 10,000 requests a second two cores would measure their own queues."""
WARM_UP_S, ROUND_S = 3, 12
PATIENCE_S = 60.0
_ACCEPTED, _TOLD = "penstock_ingest_payload_bytes_total", "penstock_ledger_report_bytes_total"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Ingest and expel of one pipe, on a log of their own, and their management ports."""

    url: str
    ingest: Child
    expel: Child
    ports: tuple[int, int]

    def cpu(self) -> dict[str, float]:
        """CPU seconds since the start."""
        return {"ingest": self.ingest.cpu_seconds(), "expel": self.expel.cpu_seconds()}

    def total(self, name: str) -> float:
        """A metric over both."""
        return sum(fetch_metric(port, name) for port in self.ports)


def ledger_figures(setup: Setup) -> list[Figure]:
    """CPU with the ledger beside CPU without it, and the bytes that it writes beside those of the events."""
    with receiver(setup) as sink:
        return [figure for rate, size in CASES for figure in _compare(setup, sink, rate, size)]


def _compare(setup: Setup, sink: str, rate: int, size: int) -> list[Figure]:
    costs: dict[str, list[float]] = defaultdict(list)
    told = 0.0
    for number in range(setup.rounds):
        for state in ("true", "false") if number % 2 else ("false", "true"):
            with _fleet(setup, f"{state}-{size}-{number}", state, sink, size) as fleet:
                _measure(fleet, rate, size, WARM_UP_S)
                for service, cost in _measure(fleet, rate, size, ROUND_S).items():
                    costs[f"{service} {state}"].append(cost)
                if state == "true":
                    told = max(told, fleet.total(_TOLD) / fleet.total(_ACCEPTED) * 100)
        tell(f"ledger, round {number + 1}: " + ", ".join(f"{name} {cost[-1]:.2f}" for name, cost in costs.items()))
    usual = {name: median(cost) for name, cost in costs.items()}
    case = f"{rate:,} events/s, {size} a request"
    return [
        Figure(f"ingest with the ledger, {case}", usual["ingest true"], CPU, 1.05, usual["ingest false"]),
        Figure(f"expel with the ledger, {case}", usual["expel true"], CPU, 1.05, usual["expel false"]),
        Figure(f"telemetry beside the events, {case}", told, "% of their bytes", 1),
    ]


@contextmanager
def _fleet(setup: Setup, name: str, state: str, sink: str, size: int) -> Iterator[Fleet]:
    """state: of the setting `ledger`."""
    name = f"ledger-{name}"
    pipes = setup.folder / f"{name}.yaml"
    pipes.write_text(PIPE.format(stream="events", pipe="out", url=sink, secret=make_secret(setup.folder), size=size))
    log = setup.log(name)
    make_topics(log, pipes)
    port, ports = free_port(), (free_port(), free_port())
    options = ("--broker", log, "--pipes", str(pipes), "--ledger", state, "--management")
    own = (
        (f"127.0.0.1:{ports[0]}", "--listen", f"127.0.0.1:{port}"),
        (f"127.0.0.1:{ports[1]}", "--allow-networks", "127.0.0.0/8"),
    )
    with (
        Child(setup.folder, "services.ingest", *options, *own[0]) as ingest,
        Child(setup.folder, "services.expel", *options, *own[1]) as expel,
    ):
        ingest.wait_ready(ports[0])
        expel.wait_ready(ports[1])
        yield Fleet(f"http://127.0.0.1:{port}/v1/streams/events/events", ingest, expel, ports)


def _measure(fleet: Fleet, rate: int, size: int, seconds: int) -> dict[str, float]:
    """CPU-s/M by service, until the last of the events is delivered."""
    before, delivered = fleet.cpu(), fleet.total(DELIVERED)
    sent = uvloop.run(_send(fleet.url, rate, size, seconds))
    deadline = time.monotonic() + PATIENCE_S
    while fleet.total(DELIVERED) < delivered + sent:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not everything was delivered in {PATIENCE_S:.0f} s; see {fleet.expel.log}")
        time.sleep(0.5)
    return {service: (used - before[service]) / sent * 1e6 for service, used in fleet.cpu().items()}


async def _send(url: str, rate: int, size: int, seconds: int) -> int:
    """At the rate, whatever the answers take; how many events were sent. Raises when one is refused."""
    body, count = make_body(size), seconds * rate // size
    begin = time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64)) as session:

        async def post(number: int) -> None:
            await asyncio.sleep(begin + number * size / rate - time.monotonic())
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"refused: {answer.status} {await answer.text()}")

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(post(number))
    return count * size
