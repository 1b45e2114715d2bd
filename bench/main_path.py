"""The main path's figures: HTTP in to Kafka and to the log, Kafka out to HTTP, each beside its floor in the same run."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from bench.figures import Figure
from bench.processes import Child, free_port, run_json
from services.core.broker.connect import open_broker
from services.core.broker.contract import TopicSpec

CPU = "CPU-s per million events"
PARTITIONS = 4


@dataclass(frozen=True, slots=True)
class Setup:
    """Where and how much: `events` per figure in requests of 100; a tenth of it in requests of 1."""

    folder: Path
    bootstrap: str
    events: int

    @property
    def kafka(self) -> str:
        """The broker URL."""
        return f"kafka://{self.bootstrap}"

    @property
    def log(self) -> str:
        """The embedded log's URL."""
        return f"log://{self.folder / 'log'}"

    def requests(self, size: int) -> int:
        """How many requests of `size` events make a figure."""
        return self.events // size if size > 1 else self.events // 10


def make_topic(url: str, name: str) -> None:
    """A fresh topic."""

    async def create() -> None:
        async with open_broker(url) as broker:
            await broker.admin.create_topic(TopicSpec(name, PARTITIONS))

    asyncio.run(create())


def send_load(url: str, size: int, requests: int) -> dict[str, Any]:
    """Run the load generator; every answer must be a 200."""
    report: dict[str, Any] = orjson.loads(
        run_json("bench.load", url, "--events", str(size), "--requests", str(requests))
    )
    if report["statuses"] != {"200": requests}:
        raise RuntimeError(f"not every request was accepted: {report['statuses']}")
    return report


def measure_http_floor(setup: Setup, size: int) -> float:
    """CPU-s/M of the bare handler."""
    port = free_port()
    with Child(setup.folder, "bench.floors", "http", str(port)) as child:
        child.wait_port(port)
        return _loaded(child, f"http://127.0.0.1:{port}/", size, setup.requests(size))[0]


def _loaded(child: Child, url: str, size: int, requests: int) -> tuple[float, dict[str, Any]]:
    send_load(url, size, max(200, requests // 20))  # connections, caches and topics warm
    before = child.cpu_seconds()
    report = send_load(url, size, requests)
    return (child.cpu_seconds() - before) / (size * requests) * 1e6, report


def measure_produce_floor(setup: Setup, size: int) -> float:
    """CPU-s/M of bare create_batch/send_batch."""
    topic = f"floor-{size}"
    make_topic(setup.kafka, topic)
    command = ("produce", setup.bootstrap, topic, str(setup.requests(size)), str(size))
    report = orjson.loads(run_json("bench.floors", *command))
    return float(report["cpu_seconds"] / report["events"] * 1e6)


@contextmanager
def ingest(setup: Setup, broker: str, stream: str) -> Iterator[tuple[Child, str]]:
    """A running ingest process with one fresh stream, and the URL to post to."""
    make_topic(broker, stream)
    pipes = setup.folder / f"{stream}.yaml"
    pipes.write_text(f"version: 1\nstreams:\n  {stream}: {{partitions: {PARTITIONS}, id: id, time: time}}\n")
    port, management = free_port(), free_port()
    options = ("--broker", broker, "--pipes", str(pipes), "--listen", f"127.0.0.1:{port}")
    with Child(setup.folder, "services.ingest", *options, "--management", f"127.0.0.1:{management}") as child:
        child.wait_ready(management)
        yield child, f"http://127.0.0.1:{port}/v1/streams/{stream}/events"


def measure_ingest(setup: Setup, broker: str, name: str, size: int) -> tuple[float, float]:
    """(CPU-s/M, P99 ms) of ingest with 64 connections."""
    with ingest(setup, broker, f"in-{name}-{size}") as (child, url):
        cost, report = _loaded(child, url, size, setup.requests(size))
        return cost, report["p99_ms"]


def measure_deliver_floor(setup: Setup, topic: str, size: int, events: int, sink: str) -> float:
    """CPU-s/M of bare getmany + POST."""
    report = orjson.loads(run_json("bench.floors", "deliver", setup.bootstrap, topic, sink, str(events), str(size)))
    return float(report["cpu_seconds"] / report["events"] * 1e6)


def ingest_figures(setup: Setup) -> list[Figure]:
    """Ingest to Kafka and to the log."""
    http100, http1 = measure_http_floor(setup, 100), measure_http_floor(setup, 1)
    bare100 = measure_produce_floor(setup, 100)
    kafka100, _ = measure_ingest(setup, setup.kafka, "kafka", 100)
    kafka1, p99 = measure_ingest(setup, setup.kafka, "kafka", 1)
    log100, _ = measure_ingest(setup, setup.log, "log", 100)
    log1, log_p99 = measure_ingest(setup, setup.log, "log", 1)
    return [
        Figure("ingest → Kafka, 100 a request", kafka100, CPU, 1.25, http100 + bare100),
        Figure("ingest → Kafka, 1 a request", kafka1, CPU, 1.25, http1),
        Figure("ingest → Kafka, 1 a request, P99", p99, "ms", 20),
        Figure("ingest → log, 100 a request", log100, CPU, 1.3, kafka100),
        Figure("ingest → log, 1 a request", log1, CPU, 1.3, kafka1),
        Figure("ingest → log, 1 a request, P99", log_p99, "ms", 20, measure_fdatasync(setup.folder)),
    ]


def measure_fdatasync(folder: Path) -> float:
    """Median milliseconds of writing 4 KiB and one fdatasync."""
    path = folder / "fdatasync"
    times = []
    with path.open("wb") as file:
        for _ in range(200):
            file.write(b"x" * 4096)
            file.flush()
            started = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - started) * 1000)
    path.unlink()
    return sorted(times)[len(times) // 2]
