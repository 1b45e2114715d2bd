"""Ingest's figures: HTTP in to Kafka and to the log, in rounds that alternate with their floors.

Of CPU seconds the lowest of the rounds counts (noise only adds), of P99 the median.
"""

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import orjson

from bench.figures import Figure
from bench.processes import Child, free_port, run_json
from bench.setup import CPU, Setup, make_topics, send_load, tell

SYNCS = 100


@contextmanager
def ingest(setup: Setup, broker: str, stream: str, partitions: int = 4) -> Iterator[tuple[Child, str]]:
    """A running ingest process with one fresh stream, and the URL to post to."""
    pipes = setup.folder / f"{stream}.yaml"
    pipes.write_text(f"version: 1\nstreams:\n  {stream}: {{id: id, time: time, partitions: {partitions}}}\n")
    make_topics(broker, pipes)
    port, management = free_port(), free_port()
    options = ("--broker", broker, "--pipes", str(pipes), "--listen", f"127.0.0.1:{port}")
    with Child(setup.folder, "services.ingest", *options, "--management", f"127.0.0.1:{management}") as child:
        child.wait_ready(management)
        yield child, f"http://127.0.0.1:{port}/v1/streams/{stream}/events"


@contextmanager
def bare_handler(setup: Setup) -> Iterator[tuple[Child, str]]:
    """The floor of HTTP."""
    port = free_port()
    with Child(setup.folder, "bench.floors", "http", str(port)) as child:
        child.wait_port(port)
        yield child, f"http://127.0.0.1:{port}/"


def ingest_figures(setup: Setup) -> list[Figure]:
    """Ingest to Kafka and to the log, requests of 100 and of 1."""
    floor = setup.folder / "floor.yaml"
    floor.write_text("version: 1\nstreams:\n  floor: {}\n")
    make_topics(setup.kafka, floor)
    with ExitStack() as stack:
        subjects = {
            "http": stack.enter_context(bare_handler(setup)),
            "kafka": stack.enter_context(ingest(setup, setup.kafka, "in-kafka")),
            "log": stack.enter_context(ingest(setup, setup.log("ingest"), "in-log")),
        }
        cost100, _, bare, _ = _measure(setup, subjects, 100)
        cost1, p99, _, sync = _measure(setup, subjects, 1)
    return [
        Figure("ingest → Kafka, 100 a request", cost100["kafka"], CPU, 1.25, cost100["http"] + bare),
        Figure("ingest → Kafka, 1 a request", cost1["kafka"], CPU, 1.25, cost1["http"]),
        Figure("ingest → Kafka, 1 a request, P99", p99["kafka"], "ms", 20),
        Figure("ingest → log, 100 a request", cost100["log"], CPU, 1.3, cost100["kafka"]),
        Figure("ingest → log, 1 a request", cost1["log"], CPU, 1.3, cost1["kafka"]),
        Figure("ingest → log, 1 a request, P99", p99["log"], "ms", 20, sync),
    ]


def _measure(
    setup: Setup, subjects: dict[str, tuple[Child, str]], size: int
) -> tuple[dict[str, float], dict[str, float], float, float]:
    """(CPU-s/M by subject, P99 ms by subject, CPU-s/M of the bare producer, ms of one fdatasync)."""
    events = setup.count(size)
    costs, p99s, bare, syncs = defaultdict(list), defaultdict(list), [], []
    for _, url in subjects.values():
        send_load(url, size, max(200, events // size // 10))  # connections, caches and topics warm
    for number in range(setup.rounds):
        for name, (child, url) in subjects.items():
            before = child.cpu_seconds()
            report = send_load(url, size, events // size)
            costs[name].append((child.cpu_seconds() - before) / events * 1e6)
            p99s[name].append(report["p99_ms"])
        if size > 1:
            bare.append(_measure_produce_floor(setup, events // size, size))
        syncs += _time_syncs(setup.folder)
        told = ", ".join(f"{name} {cost[-1]:.2f}" for name, cost in costs.items())
        tell(f"ingest, {size} a request, round {number + 1}: {told}" + (f", producer {bare[-1]:.2f}" if bare else ""))
    lowest = {name: min(cost) for name, cost in costs.items()}
    middle = {name: statistics.median(values) for name, values in p99s.items()}
    return lowest, middle, min(bare, default=0.0), statistics.median(syncs)


def _measure_produce_floor(setup: Setup, requests: int, size: int) -> float:
    """CPU-s/M of bare create_batch/send_batch."""
    report = orjson.loads(run_json("bench.floors", "produce", setup.bootstrap, "floor", str(requests), str(size)))
    return float(report["cpu_seconds"] / report["events"] * 1e6)


def _time_syncs(folder: Path) -> list[float]:
    """Milliseconds of writing 4 KiB and one fdatasync, SYNCS times, on the disk that the log is on."""
    path = folder / "fdatasync"
    times = []
    with path.open("wb", buffering=0) as file:
        for _ in range(SYNCS):
            started = time.perf_counter()
            file.write(b"x" * 4096)
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - started) * 1000)
    path.unlink()
    return times
