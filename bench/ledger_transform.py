"""What the ledger costs the transform: a backlog through Spark's micro-batches, with it and without it in turn."""

import asyncio
import time
from collections import defaultdict
from pathlib import Path
from statistics import median

from bench.backlog import fill
from bench.figures import Figure
from bench.processes import Child, fetch_metric, free_port
from bench.setup import CPU, Setup, make_topics, tell

WARM, EVENTS = 1_000_000, 3_000_000
STREAM = "events"
"""All cases read the same stream."""
PATIENCE_S = 600.0
WRITTEN = "penstock_transform_events_written_total"
PIPES = """version: 1
streams:
  EVENTS: {id: id, key: user, time: time, columns: "id STRING, user STRING, time BIGINT, price DOUBLE, note STRING"}
pipes:
  through-EVENTS:
    sources: [EVENTS]
    transform: {mode: micro-batch, sql: "SELECT event, id, user, time, note FROM EVENTS WHERE price > 0"}
    destinations: [{name: hook, webhook: {url: "http://127.0.0.1:9/"}}]
"""


def log_transform(setup: Setup) -> list[Figure]:
    """On the log: its reader packs the origins of a batch."""
    return _compare(setup, "log", setup.log("transform"))


def kafka_transform(setup: Setup) -> list[Figure]:
    """On Kafka: Spark's own connector reads, and aggregates gather the origins."""
    return _compare(setup, "Kafka", setup.kafka)


def _compare(setup: Setup, broker: str, url: str) -> list[Figure]:
    """CPU of Python and Java together, from a backlog: the first events, on which Java is still compiling, are not measured."""
    costs: dict[str, list[float]] = defaultdict(list)
    (setup.folder / "pipes.yaml").write_text(PIPES.replace("EVENTS", STREAM))
    make_topics(url, setup.folder / "pipes.yaml")
    asyncio.run(fill(url, STREAM, WARM + EVENTS))
    for number in range(setup.rounds):
        for state in ("true", "false") if number % 2 else ("false", "true"):
            pipe = f"ledger-{state}-{number}"
            costs[state].append(_measure(setup.folder / f"{pipe}-{broker}", url, pipe, state))
        told = ", ".join(f"{state} {cost[-1]:.1f}" for state, cost in costs.items())
        tell(f"ledger, transform on {broker}, round {number + 1}: {told}")
    mine, floor = median(costs["true"]), median(costs["false"])
    return [Figure(f"transform on {broker} with the ledger", mine, CPU, 1.05, floor)]


def _measure(folder: Path, url: str, pipe: str, state: str) -> float:
    """pipe: a name that nobody used yet. It reads the stream from its beginning. state: of the setting `ledger`.

    CPU-s per million events.
    """
    folder.mkdir()
    (folder / "pipes.yaml").write_text(PIPES.replace("through-EVENTS", pipe).replace("EVENTS", STREAM))
    port = free_port()
    make_topics(url, folder / "pipes.yaml")
    arguments = ("--broker", url, "--pipes", str(folder / "pipes.yaml"), "--data", str(folder), "--ledger", state)
    with Child(folder, "spark", *arguments, "--management", f"127.0.0.1:{port}") as child:
        child.wait_ready(port, 120.0)
        begun = wait_written(port, WARM)
        before = child.family_cpu()
        events = wait_written(port, WARM + EVENTS) - begun
        return (child.family_cpu() - before) / events * 1e6


def wait_written(port: int, written: int, patience_s: float = PATIENCE_S) -> int:
    """Until the transform with this management port has written so many, or a few more; how many it has."""
    deadline = time.monotonic() + patience_s
    while (now := fetch_metric(port, WRITTEN)) < written:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not everything was transformed in {patience_s:.0f} s")
        time.sleep(0.2)
    return int(now)
