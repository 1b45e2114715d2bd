"""Resident memory: of each service with a backlog of a million events and a receiver that hangs, then answers again; of a
transform while it works off five million."""

import asyncio
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from bench.backlog import fill
from bench.figures import Figure
from bench.ledger_transform import PIPES as TRANSFORM_PIPES
from bench.ledger_transform import wait_written
from bench.processes import Child, fetch_metric, free_port
from bench.setup import Setup, make_topics, send_load, tell

BACKLOG = 1_000_000
HANG_S, DRAIN_S = 45.0, 150.0
GOAL_MB = 200.0
LONG_BACKLOG, PIECE = 5_000_000, 1_000_000
GOAL_GROWTH = 1.1
"""Of a transform's memory, from the second piece of the long backlog to the last one: in the first one the heap fills."""
_SAMPLE_S = 0.2
PIPES = """version: 1
streams:
  events:
    id: id
    key: user
    time: time
    columns: "id STRING, user STRING, time BIGINT, price DOUBLE, note STRING"
pipes:
  straight:
    sources: [events]
    destinations: [{{name: hook, webhook: {{url: "http://127.0.0.1:{port}/"}}}}]
  through:
    sources: [events]
    transform: {{sql: "SELECT event, id, user, time, note FROM events WHERE price > 0"}}
    destinations: [{{name: hook, webhook: {{url: "http://127.0.0.1:{port}/"}}}}]
"""


@contextmanager
def watch(services: dict[str, Child]) -> Iterator[Counter[str]]:
    """Highest resident bytes by service meanwhile: `name`, and `name*` with all that it started."""
    peaks: Counter[str] = Counter()
    done = threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLE_S):
            for name, child in services.items():
                try:
                    peaks[name] = max(peaks[name], child.rss())
                    peaks[f"{name}*"] = max(peaks[f"{name}*"], child.family_rss())
                except psutil.NoSuchProcess:
                    return

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def _memory(setup: Setup, broker: str) -> list[Figure]:
    kind = broker.partition(":")[0]
    folder = setup.folder / f"memory-{kind}"
    folder.mkdir()
    sink, listen = free_port(), free_port()
    pipes = folder / "pipes.yaml"
    pipes.write_text(PIPES.format(port=sink))
    make_topics(broker, pipes)
    asyncio.run(fill(broker, "events", BACKLOG))
    tell(f"memory, {kind}: {BACKLOG:,} events wait")
    ports = {name: free_port() for name in ("ingest", "expel", "retrier", "transform")}
    shared = {name: _shared(broker, pipes, port) for name, port in ports.items()}
    with ExitStack() as stack:
        receiver = stack.enter_context(Child(folder, "bench.floors", "receive", str(sink)))
        receiver.wait_port(sink)
        receiver.send(signal.SIGSTOP)
        services = {
            "ingest": Child(folder, "services.ingest", *shared["ingest"], "--listen", f"127.0.0.1:{listen}"),
            "expel": Child(folder, "services.expel", *shared["expel"], "--allow-networks", "127.0.0.0/8"),
            "retrier": Child(folder, "services.global_retrier", *shared["retrier"]),
            "transform": Child(folder, "spark", *shared["transform"], "--data", str(folder)),
        }
        for child in services.values():
            stack.enter_context(child)
        with watch(services) as peaks:
            _go_through(services, ports, receiver, f"http://127.0.0.1:{listen}/v1/streams/events/events")
    return [
        *(
            Figure(f"RSS of {name}, {kind}", peaks[name] / 1e6, "MB", GOAL_MB)
            for name in ("ingest", "expel", "retrier")
        ),
        Figure(f"RSS of transform's Python, {kind}", peaks["transform"] / 1e6, "MB", GOAL_MB),
        Figure(f"RSS of transform with its Java and workers, {kind}", peaks["transform*"] / 1e6, "MB", GOAL_MB),
    ]


def _shared(broker: str, pipes: Path, management: int) -> list[str]:
    return ["--broker", broker, "--pipes", str(pipes), "--management", f"127.0.0.1:{management}"]


def _go_through(services: dict[str, Child], ports: dict[str, int], receiver: Child, url: str) -> None:
    """The receiver hangs while ingest takes more and Spark works off the backlog; then it answers until nothing waits."""
    for name, child in services.items():
        child.wait_ready(ports[name], 120)
    end = time.monotonic() + HANG_S
    send_load(url, 100, BACKLOG // 1000)
    total = BACKLOG + BACKLOG // 10
    _wait_for(ports["transform"], "penstock_transform_events_written_total", total, end)
    time.sleep(max(0.0, end - time.monotonic()))
    told = fetch_metric(ports["transform"], "penstock_transform_events_written_total")
    receiver.send(signal.SIGCONT)
    _wait_for(ports["expel"], "penstock_expel_events_delivered_total", 2 * total, time.monotonic() + DRAIN_S)
    delivered = fetch_metric(ports["expel"], "penstock_expel_events_delivered_total")
    dead = fetch_metric(ports["expel"], "penstock_expel_events_dead_total")
    tell(f"memory: {told:,.0f} transformed while the receiver hung; then {delivered:,.0f} delivered, {dead:,.0f} dead")


def _wait_for(port: int, metric: str, count: int, end: float) -> None:
    """Until the metric says so, or until `end` (monotonic)."""
    while fetch_metric(port, metric) < count and time.monotonic() < end:
        time.sleep(0.5)


def log_memory(setup: Setup) -> list[Figure]:
    """With the backlog on the embedded log."""
    return _memory(setup, setup.log("memory"))


def kafka_memory(setup: Setup) -> list[Figure]:
    """With the backlog on Kafka."""
    return _memory(setup, setup.kafka)


def long_backlog(setup: Setup) -> list[Figure]:
    """On Kafka, a transform with default settings: its highest memory in each piece of the backlog."""
    folder = setup.folder / "long-backlog"
    folder.mkdir()
    (folder / "pipes.yaml").write_text(TRANSFORM_PIPES.replace("EVENTS", "events"))
    make_topics(setup.kafka, folder / "pipes.yaml")
    asyncio.run(fill(setup.kafka, "events", LONG_BACKLOG))
    port, peaks, begun = free_port(), list[float](), time.monotonic()
    child = Child(folder, "spark", *_shared(setup.kafka, folder / "pipes.yaml", port), "--data", str(folder))
    with child:
        child.wait_ready(port, 120)
        for written in range(PIECE, LONG_BACKLOG + 1, PIECE):
            with watch({"transform": child}) as peak:
                wait_written(port, written)
            peaks.append(peak["transform*"] / 1e6)
            tell(
                f"{written:,} events after {time.monotonic() - begun:.0f} s: {peaks[-1]:,.0f} MB, {child.family_cpu():.0f} CPU-s"
            )
    return [
        Figure(
            "RSS of a transform, fifth of five million events beside the second", peaks[-1], "MB", GOAL_GROWTH, peaks[1]
        )
    ]
