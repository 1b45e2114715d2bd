"""What the ledger costs: ingest and expel on the embedded log at a fixed rate, with it and without it at the same time.

At the same time, because one process costs up to a third more in one minute than in another on a machine that others use. Each
round has processes of its own, and the median counts: two of the same code differ by up to a tenth for as long as they run.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp
import uvloop

from bench.delivery import DELIVERED, PIPE, make_secret, receiver
from bench.events import make_body
from bench.figures import Figure
from bench.ledger_transform import log_transform
from bench.processes import Child, fetch_metric, free_port
from bench.setup import CPU, Setup, make_topics, tell

CASES = ((10_000, 100), (1_000, 1))
"""Events a second, events a request and a delivery. At 10,000 requests a second two cores would measure their own queues."""
WARM_UP_S, ROUND_S = 3, 12
OBSERVED_S = 120
PATIENCE_S = 60.0
STATES = ("true", "false")
"""Of the setting `ledger`."""
_ACCEPTED, _TOLD = "penstock_ingest_payload_bytes_total", "penstock_ledger_report_bytes_total"


@dataclass(frozen=True, slots=True)
class Fleet:
    """Ingest and expel of one pipe, on a log of their own, and their management ports."""

    url: str
    url_of_log: str
    pipes: Path
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
    """CPU with the ledger beside CPU without it, and the bytes that it writes beside the events'; the observer's memory."""
    with receiver(setup) as sink:
        found = [figure for rate, size in CASES for figure in _compare(setup, sink, rate, size)]
        return [*found, _observe(setup, sink), *log_transform(setup)]


def _observe(setup: Setup, sink: str) -> Figure:
    """The observer's memory after a long load beside that after a short one."""
    rate, size = CASES[0]
    with _fleet(setup, "observed", "true", sink, size) as fleet:
        port = free_port()
        options = ("--broker", fleet.url_of_log, "--pipes", str(fleet.pipes), "--listen", f"127.0.0.1:{free_port()}")
        with Child(setup.folder, "services.observer", *options, "--management", f"127.0.0.1:{port}") as observer:
            observer.wait_ready(port)
            _measure([fleet], rate, size, OBSERVED_S // 4)
            early = observer.rss()
            _measure([fleet], rate, size, OBSERVED_S)
            late = observer.rss()
    tell(f"ledger, observer: {early / 1e6:.1f} MB, after {OBSERVED_S * rate:,} events more {late / 1e6:.1f} MB")
    return Figure(f"RSS of the observer, {OBSERVED_S * rate:,} events later", late / 1e6, "MB", 1.1, early / 1e6)


def _compare(setup: Setup, sink: str, rate: int, size: int) -> list[Figure]:
    costs: dict[str, list[float]] = defaultdict(list)
    told = 0.0
    for number in range(setup.rounds):
        with (
            _fleet(setup, f"true-{size}-{number}", "true", sink, size) as told_of,
            _fleet(setup, f"false-{size}-{number}", "false", sink, size) as silent,
        ):
            pair = {"true": told_of, "false": silent}
            states = STATES[:: 1 if number % 2 else -1]  # who is sent first is at an advantage
            _measure([pair[state] for state in states], rate, size, WARM_UP_S)
            found = _measure([pair[state] for state in states], rate, size, ROUND_S)
            for state, one in zip(states, found, strict=True):
                for service, cost in one.items():
                    costs[f"{service} {state}"].append(cost)
            told = max(told, told_of.total(_TOLD) / told_of.total(_ACCEPTED) * 100)
        tell(f"ledger, round {number + 1}: " + ", ".join(f"{name} {cost[-1]:.2f}" for name, cost in costs.items()))
    case = f"{rate:,} events/s, {size} a request"
    return [
        *(
            _figure(service, case, costs[f"{service} true"], costs[f"{service} false"])
            for service in ("ingest", "expel")
        ),
        Figure(f"telemetry beside the events, {case}", told, "% of their bytes", 1),
    ]


def _figure(service: str, case: str, told: list[float], silent: list[float]) -> Figure:
    """By the median of the rounds' ratios: what a round costs differs more than what the ledger does."""
    floor = median(silent)
    ratio = median(one / other for one, other in zip(told, silent, strict=True))
    return Figure(f"{service} with the ledger, {case}", ratio * floor, CPU, 1.05, floor)


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
        yield Fleet(f"http://127.0.0.1:{port}/v1/streams/events/events", log, pipes, ingest, expel, ports)


def _measure(fleets: Sequence[Fleet], rate: int, size: int, seconds: int) -> list[dict[str, float]]:
    """CPU-s/M of each by service, all at once, until the last of the events is delivered."""
    before = [(fleet.cpu(), fleet.total(DELIVERED)) for fleet in fleets]
    sent = uvloop.run(_send([fleet.url for fleet in fleets], rate, size, seconds))
    deadline = time.monotonic() + PATIENCE_S
    for fleet, (_, delivered) in zip(fleets, before, strict=True):
        while fleet.total(DELIVERED) < delivered + sent:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not everything was delivered in {PATIENCE_S:.0f} s; see {fleet.expel.log}")
            time.sleep(0.5)
    after = [fleet.cpu() for fleet in fleets]
    return [
        {service: (used - cpu[service]) / sent * 1e6 for service, used in now.items()}
        for now, (cpu, _) in zip(after, before, strict=True)
    ]


async def _send(urls: Sequence[str], rate: int, size: int, seconds: int) -> int:
    """To each at the rate, whatever the answers take; how many events each was sent. Raises when one is refused."""
    body, count = make_body(size), seconds * rate // size
    begin = time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64 * len(urls))) as session:

        async def post(url: str, number: int) -> None:
            await asyncio.sleep(begin + number * size / rate - time.monotonic())
            async with session.post(url, data=body, headers={"Content-Type": "application/json"}) as answer:
                if answer.status != 200:
                    raise RuntimeError(f"refused: {answer.status} {await answer.text()}")

        async with asyncio.TaskGroup() as group:
            for number in range(count):
                for url in urls:
                    group.create_task(post(url, number))
    return count * size
