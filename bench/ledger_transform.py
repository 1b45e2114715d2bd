"""What the ledger costs the transform: a backlog on the log through Spark's micro-batches, with it and without it in turn."""

import asyncio
import time
from collections import defaultdict
from statistics import median

from bench.figures import Figure
from bench.memory import make_record
from bench.processes import Child, fetch_metric, free_port
from bench.setup import CPU, Setup, make_topics, tell
from services.core.broker.connect import open_broker
from services.core.broker.producer import Producer

WARM, EVENTS = 150_000, 300_000
ROUNDS = 3
PATIENCE_S = 240.0
_CHUNK = 1000
_WRITTEN = "penstock_transform_events_written_total"
PIPES = """version: 1
streams:
  events: {id: id, key: user, time: time, columns: "id STRING, user STRING, time BIGINT, price DOUBLE, note STRING"}
pipes:
  through:
    sources: [events]
    transform: {sql: "SELECT event, id, user, time, note FROM events WHERE price > 0"}
    destinations: [{name: hook, webhook: {url: "http://127.0.0.1:9/"}}]
"""


def transform_figures(setup: Setup) -> list[Figure]:
    """CPU of Python and Java together: the first events, on which Java is still compiling, are not measured."""
    costs: dict[str, list[float]] = defaultdict(list)
    for number in range(min(setup.rounds, ROUNDS)):
        for state in ("true", "false") if number % 2 else ("false", "true"):
            costs[state].append(_measure(setup, f"transform-{state}-{number}", state))
        tell(f"ledger, transform, round {number + 1}: " + ", ".join(f"{s} {cost[-1]:.1f}" for s, cost in costs.items()))
    return [Figure("transform with the ledger", median(costs["true"]), CPU, 1.05, median(costs["false"]))]


def _measure(setup: Setup, name: str, state: str) -> float:
    """state: of the setting `ledger`. CPU-s per million events."""
    folder = setup.folder / name
    folder.mkdir()
    (folder / "pipes.yaml").write_text(PIPES)
    log, port = setup.log(f"{name}-log"), free_port()
    make_topics(log, folder / "pipes.yaml")
    arguments = ("--broker", log, "--pipes", str(folder / "pipes.yaml"), "--data", str(folder), "--ledger", state)
    with Child(folder, "spark", *arguments, "--management", f"127.0.0.1:{port}") as child:
        child.wait_ready(port, 120.0)
        asyncio.run(_fill(log, range(WARM)))
        _wait(port, WARM)
        before = child.family_cpu()
        asyncio.run(_fill(log, range(WARM, WARM + EVENTS)))
        _wait(port, WARM + EVENTS)
        return (child.family_cpu() - before) / EVENTS * 1e6


async def _fill(url: str, numbers: range) -> None:
    now = time.time_ns() // 1_000_000
    async with open_broker(url) as broker, Producer(broker.driver) as producer:
        for start in range(numbers.start, numbers.stop, _CHUNK):
            records = [make_record(number, now) for number in range(start, start + _CHUNK)]
            (await producer.send("events", records)).raise_first()


def _wait(port: int, written: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while fetch_metric(port, _WRITTEN) < written:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not everything was transformed in {PATIENCE_S:.0f} s")
        time.sleep(0.2)
