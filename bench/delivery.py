"""Expel's figures: a backlog on Kafka, drained over HTTP by the bare loop and by expel, each from outside."""

import time

from bench.figures import Figure
from bench.main_path import CPU, Setup, ingest, make_topic, measure_deliver_floor, send_load
from bench.processes import Child, fetch_metric, free_port

PIPE = """version: 1
streams:
  {stream}: {{partitions: 4, id: id, time: time}}
pipes:
  {stream}:
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


def delivery_figures(setup: Setup) -> list[Figure]:
    """Batches of 100 and single events, signatures and statuses included."""
    return [_figure(setup, 100, setup.events, 1.5), _figure(setup, 1, setup.events // 10, 1.1)]


def _figure(setup: Setup, size: int, events: int, goal: float) -> Figure:
    stream = f"out-{size}"
    with ingest(setup, setup.kafka, stream) as (_, url):
        send_load(url, 100, events // 100)
    make_topic(setup.kafka, f"{stream}.dead")
    sink_port = free_port()
    sink = f"http://127.0.0.1:{sink_port}/"
    with Child(setup.folder, "bench.floors", "receive", str(sink_port)) as receiver:
        receiver.wait_port(sink_port)
        floor = measure_deliver_floor(setup, stream, size, events, sink)
        value = _measure_expel(setup, stream, size, events, sink)
    name = "batches of 100" if size > 1 else "single events"
    return Figure(f"Kafka → expel → HTTP, {name}", value, CPU, goal, floor)


def _measure_expel(setup: Setup, stream: str, size: int, events: int, sink: str) -> float:
    secret, pipes = setup.folder / f"{stream}.secret", setup.folder / f"{stream}-out.yaml"
    secret.write_text("whsec_" + "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo=" + "\n")
    secret.chmod(0o600)
    pipes.write_text(PIPE.format(stream=stream, url=sink, secret=secret, size=size))
    management = free_port()
    options = ("--broker", setup.kafka, "--pipes", str(pipes), "--allow-networks", "127.0.0.0/8")
    with Child(setup.folder, "services.expel", *options, "--management", f"127.0.0.1:{management}") as child:
        child.wait_ready(management)
        deadline = time.monotonic() + 300
        idle = child.cpu_seconds()  # start-up: imports and joining the group; the rest is the work
        while fetch_metric(management, "penstock_expel_events_delivered_total") < events:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not delivered in time; see {child.log}")
            time.sleep(0.2)
        return (child.cpu_seconds() - idle) / events * 1e6
