"""A transform on a standalone cluster: CPU of the driver and of the executors, and the bytes that executors send to the driver.

One executor of one core, then two, each on a worker of its own; then two with batches of 200,000 events, as a stream of 200,000
events/s has them that is transformed each second. Java compiles the driver's code for some hundred batches, so cases with
smaller batches begin to count after them.
Two cores cannot show that two workers are twice as fast: what they show is that the CPU of an event stays the same, and how large
the driver's part of it is. At 200,000 events/s the part is taken to be that of such batches from a backlog.

On two cores two executors run beside each other and one does not. They then compete for the memory: a Java loop over 8 MiB took
half as much CPU again in two threads. So run this bench on one core: `taskset -c 1 make bench ARGS="--only cluster"`.
"""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

from bench.backlog import fill
from bench.figures import Figure
from bench.ledger_transform import PIPES, wait_written
from bench.processes import Child, free_port
from bench.setup import CPU, Setup, make_topics, tell
from tests.support.spark_cluster import SparkCluster

ROUNDS = 2
USUAL, LARGE = 20_000, 200_000
"""Events of a batch. USUAL: the default of `max_events`."""
WARM, COUNTED = 5_000_000, 3_000_000
"""Events of each case that are not counted, and events that are."""
STREAM = "events"
"""All cases read the same stream."""
PATIENCE_S = 900.0
_FULL = {"JDK_JAVA_OPTIONS": ""}
_SENT = re.compile(r"(\d+) bytes result sent to driver")


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU-s per million events; bytes to the driver per event."""

    driver: float
    executors: float
    bytes_sent: float


def cluster_figures(setup: Setup) -> list[Figure]:
    """Rounds of the three cases in turn."""
    cases = {
        f"{executors} x {batch:,}": (executors, batch) for executors, batch in ((1, USUAL), (2, USUAL), (2, LARGE))
    }
    costs: dict[str, list[Cost]] = {name: [] for name in cases}
    (setup.folder / "pipes.yaml").write_text(PIPES.replace("EVENTS", STREAM))
    make_topics(setup.kafka, setup.folder / "pipes.yaml")
    asyncio.run(fill(setup.kafka, STREAM, WARM + COUNTED))
    tell("the stream is filled")
    for number in range(min(setup.rounds, ROUNDS)):
        for name, (executors, batch) in sorted(cases.items(), reverse=number % 2 == 1):
            folder = setup.folder / f"cluster-{number}-{executors}-{batch}"
            with _cluster(folder, executors) as cluster:
                costs[name].append(_measure(folder, setup.kafka, f"c{number}x{executors}x{batch}", cluster, batch))
            last = costs[name][-1]
            tell(
                f"{name}, round {number + 1}: driver {last.driver:.1f}, executors {last.executors:.1f}, "
                f"{last.bytes_sent:.1f} bytes an event"
            )
    one, two, large = (costs[name] for name in cases)

    def mid(found: list[Cost], part: str) -> float:
        return float(median(getattr(cost, part) for cost in found))

    all_one, all_two = (mid(found, "driver") + mid(found, "executors") for found in (one, two))
    share = 100 * mid(large, "driver") / (mid(large, "driver") + mid(large, "executors"))
    return [
        Figure("cluster: CPU with two executors, beside one", all_two, CPU, 1.15, all_one),
        Figure("cluster: driver's share, batches of 200,000 events", share, "%", 10.0),
        Figure(
            "cluster: bytes to the driver, beside the payload", mid(two, "bytes_sent"), "bytes per event", 0.1, 300.0
        ),
    ]


@contextmanager
def _cluster(folder: Path, workers: int) -> Iterator[SparkCluster]:
    folder.mkdir()
    # With Java's full compiler, unlike in tests.
    with SparkCluster(folder / "spark", workers=workers, memory_mb=1100, environment=_FULL) as cluster:
        yield cluster


def _measure(folder: Path, url: str, pipe: str, cluster: SparkCluster, batch: int) -> Cost:
    """pipe: a name that nobody used yet. It reads the stream from its beginning, so each batch is as large as it may be."""
    text = PIPES.replace("through-EVENTS", pipe).replace("EVENTS", STREAM)
    (folder / "pipes.yaml").write_text(text.replace("transform: {", f"transform: {{max_events: {batch}, "))
    port = free_port()
    make_topics(url, folder / "pipes.yaml")
    executors = len(list((folder / "spark").glob("worker-*.log")))
    arguments = ["--broker", url, "--pipes", str(folder / "pipes.yaml"), "--data", str(folder)]
    arguments += ["--master", cluster.url, "--driver-host", "127.0.0.1", "--executors", str(executors)]
    arguments += ["--executor-cores", "1", "--executor-memory", "1GiB"]
    with Child(folder, "spark", *arguments, "--management", f"127.0.0.1:{port}") as child:
        child.wait_ready(port, 240.0)
        begun = wait_written(port, WARM, PATIENCE_S)
        driver, in_executors, sent = child.family_cpu(), _cpu(cluster), _sent(folder)
        events = wait_written(port, WARM + COUNTED, PATIENCE_S) - begun
        return Cost(
            (child.family_cpu() - driver) / events * 1e6,
            (_cpu(cluster) - in_executors) / events * 1e6,
            (_sent(folder) - sent) / events,
        )


def _cpu(cluster: SparkCluster) -> float:
    """Seconds of all executors since their start, with their Python workers."""
    total = 0.0
    for executor in cluster.executors():
        for process in (executor, *executor.children(recursive=True)):
            used = psutil.Process(process.pid).cpu_times()
            total += used.user + used.system
    return total


def _sent(folder: Path) -> int:
    """Bytes of the results of all tasks so far, as the executors' logs say."""
    logs = (folder / "spark").glob("work-*/*/*/stderr*")
    return sum(int(number) for log in logs for number in _SENT.findall(log.read_text(errors="replace")))
