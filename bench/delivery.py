"""Expel's figures: a backlog on Kafka, drained over HTTP by the bare loop and by expel in turn, each seen from outside."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from bench.figures import Figure
from bench.main_path import ingest
from bench.processes import Child, fetch_metric, free_port, run_json
from bench.setup import CPU, Setup, make_topics, send_load, tell

PIPE = """version: 1
streams:
  {stream}: {source}
pipes:
  {pipe}:
    sources: [{stream}]
    destinations:
      - name: sink
        webhook:
          url: {url}
          secret: {{file: {secret}}}
          body: json
          concurrency: 64
          batch: {{max_events: {size}, max_bytes: 1MB, max_wait: 20ms}}
"""
DELIVERED = "penstock_expel_events_delivered_total"
DEADLINE_S = 300.0
OWN = "{id: id, time: time}"
"""A stream of ours, as the pipe file has it."""
LEFT = 0.3
"""The share of the events that must still wait when measuring starts: expel delivers as soon as it can."""


def delivery_figures(setup: Setup) -> list[Figure]:
    """Batches of 100 and single events, signatures and statuses included."""
    with receiver(setup) as sink:
        return [
            _figure(setup, sink, 100, 2 * setup.events, "batches of 100", 1.5),
            _figure(setup, sink, 1, setup.events // 4, "single events", 1.1),
        ]


@contextmanager
def receiver(setup: Setup) -> Iterator[str]:
    """A running receiver's URL."""
    port = free_port()
    with Child(setup.folder, "bench.floors", "receive", str(port)) as child:
        child.wait_port(port)
        yield f"http://127.0.0.1:{port}/"


def _figure(setup: Setup, sink: str, size: int, events: int, name: str, goal: float) -> Figure:
    stream = f"out-{size}"
    with ingest(setup, setup.kafka, stream) as (_, url):
        send_load(url, 100, events // 100)
    floors, values = [], []
    for number in range(setup.rounds):
        floors.append(_measure_floor(setup, stream, size, events, sink))
        values.append(measure_expel(setup, stream, f"{stream}-{number}", size, events, sink))
        tell(f"expel, {name}, round {number + 1}: {values[-1]:.2f}, bare loop {floors[-1]:.2f}")
    return Figure(f"Kafka → expel → HTTP, {name}", min(values), CPU, goal, min(floors))


def _measure_floor(setup: Setup, topic: str, size: int, events: int, sink: str) -> float:
    """CPU-s/M of bare getmany and POST."""
    report = orjson.loads(run_json("bench.floors", "deliver", setup.bootstrap, topic, sink, str(events), str(size)))
    return float(report["cpu_seconds"] / report["events"] * 1e6)


def measure_expel(setup: Setup, stream: str, pipe: str, size: int, events: int, sink: str, source: str = OWN) -> float:
    """CPU-s/M of a process that serves this pipe alone, from when it is ready: imports and joining are not counted.

    source: the stream, as the pipe file has it.
    """
    pipes, secret = setup.folder / f"{pipe}.yaml", make_secret(setup.folder)
    pipes.write_text(PIPE.format(stream=stream, source=source, pipe=pipe, url=sink, secret=secret, size=size))
    make_topics(setup.kafka, pipes)
    management = free_port()
    options = ("--broker", setup.kafka, "--pipes", str(pipes), "--allow-networks", "127.0.0.0/8")
    with Child(setup.folder, "services.expel", *options, "--management", f"127.0.0.1:{management}") as child:
        child.wait_ready(management)
        used, delivered = child.cpu_seconds(), fetch_metric(management, DELIVERED)
        deadline = time.monotonic() + DEADLINE_S
        while (now := fetch_metric(management, DELIVERED)) < events:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{now:.0f} of {events} events delivered in {DEADLINE_S:.0f} s; see {child.log}")
            time.sleep(0.2)
        used = child.cpu_seconds() - used
        if now - delivered < LEFT * events:
            raise RuntimeError(
                f"{delivered:.0f} of {events} events were delivered before the start. Try: more --events"
            )
        return used / (now - delivered) * 1e6


def make_secret(folder: Path) -> Path:
    """A file with a signing secret."""
    path = folder / "webhook.secret"
    if not path.exists():
        path.touch(0o600)
        path.write_text("whsec_QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo=\n")
    return path
