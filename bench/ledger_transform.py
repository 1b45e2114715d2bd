"""What the ledger costs the transform: a backlog through Spark's micro-batches, with it and without it in turn."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.figures import Figure
from bench.memory import make_record
from bench.processes import Child, fetch_metric, free_port
from bench.setup import CPU, Setup, make_topics, tell
from services.core.broker.connect import open_broker
from services.core.broker.producer import Producer

WARM, EVENTS = 1_000_000, 600_000
ROUNDS = 3
PATIENCE_S = 600.0
_CHUNK = 1000
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
    return _compare(setup, "log", setup.log)


def kafka_transform(setup: Setup) -> list[Figure]:
    """On Kafka: Spark's own connector reads, and aggregates gather the origins."""
    return _compare(setup, "Kafka", lambda _name: setup.kafka)


def _compare(setup: Setup, broker: str, url_of: Callable[[str], str]) -> list[Figure]:
    """CPU of Python and Java together, from a backlog: the first events, on which Java is still compiling, are not measured."""
    costs: dict[str, list[float]] = defaultdict(list)
    for number in range(min(setup.rounds, ROUNDS)):
        for state in ("true", "false") if number % 2 else ("false", "true"):
            name = f"transform-{state}-{number}"
            costs[state].append(_measure(setup.folder / f"{name}-{broker}", url_of(name), f"{state}{number}", state))
        told = ", ".join(f"{state} {cost[-1]:.1f}" for state, cost in costs.items())
        tell(f"ledger, transform on {broker}, round {number + 1}: {told}")
    ratio = median(one / other for one, other in zip(costs["true"], costs["false"], strict=True))
    floor = median(costs["false"])
    return [Figure(f"transform on {broker} with the ledger", ratio * floor, CPU, 1.05, floor)]


def _measure(folder: Path, url: str, stream: str, state: str) -> float:
    """stream: one that nobody used yet. state: of the setting `ledger`. CPU-s per million events."""
    folder.mkdir()
    (folder / "pipes.yaml").write_text(PIPES.replace("EVENTS", stream))
    port = free_port()
    make_topics(url, folder / "pipes.yaml")
    arguments = ("--broker", url, "--pipes", str(folder / "pipes.yaml"), "--data", str(folder), "--ledger", state)
    asyncio.run(fill(url, stream, range(WARM + EVENTS)))
    with Child(folder, "spark", *arguments, "--management", f"127.0.0.1:{port}") as child:
        child.wait_ready(port, 120.0)
        begun = wait_written(port, WARM)
        before = child.family_cpu()
        events = wait_written(port, WARM + EVENTS) - begun
        return (child.family_cpu() - before) / events * 1e6


async def fill(url: str, stream: str, numbers: range) -> None:
    """Store these events in the stream."""
    now = time.time_ns() // 1_000_000
    async with open_broker(url) as broker, Producer(broker.appender) as producer:
        for start in range(numbers.start, numbers.stop, _CHUNK):
            records = [make_record(number, now) for number in range(start, start + _CHUNK)]
            (await producer.send(stream, records)).raise_first()


def wait_written(port: int, written: int, patience_s: float = PATIENCE_S) -> int:
    """Until the transform with this management port has written so many, or a few more; how many it has."""
    deadline = time.monotonic() + patience_s
    while (now := fetch_metric(port, WRITTEN)) < written:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not everything was transformed in {patience_s:.0f} s")
        time.sleep(0.2)
    return int(now)
