"""Ingest to Kinesis beside ingest to Kafka, requests signed: CPU per event, and how many entries the events become."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.request import urlopen

import orjson

from bench.figures import Figure
from bench.main_path import ingest
from bench.processes import Child, free_port
from bench.setup import CPU, Setup, send_load, tell
from services.core.aws_emulator import kinesis_url, use_credentials

PARTITIONS = {100: 32, 1: 4}
"""By events a request: as many as the load needs, a shard taking 1 MB a second. Kafka has the same number."""

_COUNTS = ("PutRecords", "entries")


def kinesis_figures(setup: Setup) -> list[Figure]:
    """Two figures per shape of the load."""
    use_credentials()
    with ExitStack() as stack:
        stub = stack.enter_context(_stub(setup))
        url = kinesis_url(stub, stub)
        return [figure for size in PARTITIONS for figure in _measure(setup, stub, url, size)]


@contextmanager
def _stub(setup: Setup) -> Iterator[str]:
    port = free_port()
    with Child(setup.folder, "bench.kinesis_stub", str(port)) as child:
        child.wait_port(port)
        yield f"http://127.0.0.1:{port}"


def _measure(setup: Setup, stub: str, url: str, size: int) -> list[Figure]:
    events, partitions = setup.count(size), PARTITIONS[size]
    costs, counts = defaultdict(list), defaultdict(list)
    with ExitStack() as stack:
        subjects = {
            name: stack.enter_context(ingest(setup, broker, f"{name}-{size}", partitions))
            for name, broker in (("kinesis", url), ("kafka", setup.kafka))
        }
        for _, target in subjects.values():
            send_load(target, size, max(200, events // size // 10))
        for number in range(setup.rounds):
            for name, (child, target) in subjects.items():
                before, counted = child.cpu_seconds(), _counts(stub)
                send_load(target, size, events // size)
                costs[name].append((child.cpu_seconds() - before) / events * 1e6)
                if name == "kinesis":
                    for kind, count in _counts(stub).items():
                        counts[kind].append((count - counted[kind]) / events)
            told = ", ".join(f"{name} {cost[-1]:.2f}" for name, cost in costs.items())
            shares = ", ".join(f"{share[-1]:.4f} {kind} an event" for kind, share in counts.items())
            tell(f"kinesis, {size} a request, round {number + 1}: {told}; {shares}")
    name = f"ingest → Kinesis, {size} a request"
    return [
        Figure(name, min(costs["kinesis"]), CPU, 1.5, min(costs["kafka"])),
        Figure(f"{name}: entries an event", max(counts["entries"]), "entries", 0.1),
    ]


def _counts(stub: str) -> dict[str, int]:
    with urlopen(stub, timeout=10) as answer:
        found = orjson.loads(answer.read())
    return {kind: found.get(kind, 0) for kind in _COUNTS}
