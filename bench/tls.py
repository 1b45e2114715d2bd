"""TLS and SCRAM-SHA-256 to Kafka beside plaintext at the same broker: CPU of ingest and expel per event, in turn."""

import statistics
from contextlib import ExitStack
from dataclasses import replace

from bench.delivery import measure_expel, receiver
from bench.figures import Figure
from bench.main_path import ingest
from bench.setup import CPU, SERVER_JAVA, Setup, send_load, tell
from tests.support.secured_kafka import SecuredKafka

SIZE = 100
_STREAM = {"plaintext": "plain-in", "TLS": "tls-in"}


def tls_figures(setup: Setup) -> list[Figure]:
    """Batches of 100. Goal: at most 1.3 times as much with TLS."""
    folder = setup.folder / "secured"
    folder.mkdir()
    with SecuredKafka(folder, SERVER_JAVA) as kafka:
        security = kafka.write(folder / "client", mechanism="SCRAM-SHA-256")
        ways = {
            "plaintext": replace(setup, bootstrap=kafka.cluster.bootstrap),
            # What is behind the host in a broker's URL.
            "TLS": replace(setup, bootstrap=f"{kafka.address('scram')}?security={security}"),
        }
        return [
            _figure("ingest → Kafka with TLS, 100 a request", _measure_ingest(ways)),
            _figure("Kafka with TLS → expel → HTTP, batches of 100", _measure_expel(ways)),
        ]


def _measure_ingest(ways: dict[str, Setup]) -> dict[str, list[float]]:
    """CPU-s/M by way, of each round."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    with ExitStack() as stack:
        running = {name: stack.enter_context(ingest(setup, setup.kafka, _STREAM[name])) for name, setup in ways.items()}
        events, rounds = ways["TLS"].events, ways["TLS"].rounds
        for _, url in running.values():
            send_load(url, SIZE, max(200, events // SIZE // 10))  # connections, caches and topics warm
        for number in range(rounds):
            for name in _turns(ways, number):
                child, url = running[name]
                before = child.cpu_seconds()
                send_load(url, SIZE, events // SIZE)
                found[name].append((child.cpu_seconds() - before) / events * 1e6)
            _tell_round("ingest", number, found)
    return found


def _measure_expel(ways: dict[str, Setup]) -> dict[str, list[float]]:
    """As `_measure_ingest`, of the events that it has stored on the plaintext listener."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    with receiver(ways["TLS"]) as sink:
        for number in range(ways["TLS"].rounds):
            for name in _turns(ways, number):
                setup, pipe = ways[name], f"{_STREAM[name]}-{number}"
                cost = measure_expel(setup, _STREAM["plaintext"], pipe, SIZE, setup.events, sink)
                found[name].append(cost)
            _tell_round("expel", number, found)
    return found


def _turns(ways: dict[str, Setup], number: int) -> list[str]:
    """Who is measured first in this round: each in turn."""
    return list(ways)[:: 1 if number % 2 else -1]


def _tell_round(service: str, number: int, found: dict[str, list[float]]) -> None:
    costs = ", ".join(f"{name} {values[-1]:.2f}" for name, values in found.items())
    tell(f"{service}, round {number + 1}: {costs}, ratio {found['TLS'][-1] / found['plaintext'][-1]:.2f}")


def _figure(name: str, found: dict[str, list[float]]) -> Figure:
    ratios = [tls / plain for tls, plain in zip(found["TLS"], found["plaintext"], strict=True)]
    tell(f"{name}: ratio {min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}")
    return Figure(name, min(found["TLS"]), CPU, 1.3, min(found["plaintext"]))
