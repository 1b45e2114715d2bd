"""A transform on a Spark cluster under kills: make soak ARGS="--cluster 50 --rate 200"

A standalone master, two workers, two drivers (one stands by) and a Kafka with three brokers. Workers, executors and drivers are
killed, executors are frozen for a while, and in the middle the driver at work is frozen for two minutes and thawed. Each strike
is followed until a fresh event got through. Exit status 1 when an event was lost, altered, dead or wrong in the ledger.
"""

import asyncio
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psutil

from services.core.broker.connect import open_broker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.event import read_id
from services.core.jvm.kafka import KafkaCluster
from tests.spark.broker_pipeline import BrokerPipeline, TopicReading
from tests.spark.log_pipeline import event, numbers
from tests.spark.service_process import ServiceProcess
from tests.support.spark_cluster import SparkCluster

PARTITIONS = 4
COLUMNS = "n INT, twice INT"
SQL = "SELECT event, n, 2 * n AS twice FROM {s}"
KINDS = {"kill worker": 3.0, "kill executor": 3.0, "kill driver": 2.0, "kill standby": 0.5, "freeze executor": 0.5}
"""How often each kind strikes, as a share."""
GAP = (0.2, 1.5)
LONG_FREEZE_S = 120.0
EXECUTOR_FREEZE_S = 90.0
"""Longer than Spark waits for a sign of life."""
SETTLE_S = 420.0


@dataclass
class Drivers:
    """Two services with one checkpoint. Each is started again when it has ended, as a supervisor does."""

    folder: Path
    pipeline: BrokerPipeline
    arguments: list[str]
    services: list[ServiceProcess] = field(default_factory=list)
    restarts: int = 0

    def start(self) -> None:
        for _ in range(2):
            self.services.append(ServiceProcess(self.folder, self.pipeline.url, *self.arguments))
            self.services[-1].start()

    def keep_running(self) -> None:
        for service in self.services:
            if not service.is_running:
                service.kill()
                service.start()
                self.restarts += 1

    def at_work(self) -> ServiceProcess:
        """The one that holds the checkpoint's lock; the first one while none does."""
        lock = self.folder / "checkpoints" / self.pipeline.pipe / "penstock.lock"
        holder = lock.read_text().strip() if lock.exists() else ""
        return next((one for one in self.services if str(one.pid) == holder), self.services[0])

    def standby(self) -> ServiceProcess:
        at_work = self.at_work()
        return next(one for one in self.services if one is not at_work)

    def stop(self) -> None:
        for service in self.services:
            service.kill()


class Feed:
    """Sends events in a thread at a rate; each is stored before the next ones are sent. `sent`: how many are stored."""

    def __init__(self, pipeline: BrokerPipeline, rate: float) -> None:
        self._pipeline, self._rate = pipeline, rate
        self.sent = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def _run(self) -> None:
        step = max(PARTITIONS, round(self._rate / 2))
        async with open_broker(self._pipeline.url) as broker, Producer(broker.appender) as producer:
            while not self._stopping.is_set():
                made = [sample(number) for number in range(self.sent, self.sent + step)]
                (await producer.send(self._pipeline.stream, made)).raise_first()
                self.sent += step
                await asyncio.sleep(0.5)


class Arrivals:
    """What has come out, read in a thread."""

    def __init__(self, pipeline: BrokerPipeline) -> None:
        self._pipeline = pipeline
        self.counts: Counter[str | None] = Counter()
        self.altered = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    async def _run(self) -> None:
        async with open_broker(self._pipeline.url) as broker:
            reading, done = TopicReading(broker, f"{self._pipeline.pipe}.out"), 0
            while not self._stopping.is_set():
                await reading.go_on()
                for record in reading.found[done:]:
                    name = read_id(record)
                    self.counts[name] += 1
                    number = int((name or "id--1")[3:])
                    self.altered += orjson.loads(record.value or b"null") != {"n": number, "twice": 2 * number}
                done = len(reading.found)
                await asyncio.sleep(0.2)


def sample(number: int) -> Record:
    return event(number, orjson.dumps({"n": number, "twice": 0}))


@dataclass
class ClusterSoak:
    """One run."""

    chance: random.Random
    cluster: SparkCluster
    drivers: Drivers
    feed: Feed
    arrivals: Arrivals
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: list[tuple[str, float]] = field(default_factory=list)

    def run(self, kills: int) -> None:
        """Strikes until so many processes were killed; in the middle the long freeze."""
        self.wait_until_fresh("start")
        frozen = False
        while (killed := sum(count for name, count in self.faults.items() if name.startswith("kill"))) < kills:
            if not frozen and killed >= kills // 2:
                frozen = True
                self._freeze_driver()
            time.sleep(self.chance.uniform(*GAP))
            (kind,) = self.chance.choices(list(KINDS), list(KINDS.values()))
            if self._strike(kind):
                self.faults[kind] += 1
                self.wait_until_fresh(kind)

    def _strike(self, kind: str) -> bool:
        if kind == "kill worker":
            number = self.chance.randrange(2)
            self.cluster.kill_worker(number)
            time.sleep(self.chance.uniform(0, 3))
            self.cluster.start_worker(number)
            return True
        if kind == "kill driver":
            self.drivers.at_work().kill()
            return True
        if kind == "kill standby":
            self.drivers.standby().kill()
            return True
        executors = self.cluster.executors()
        if not executors:
            return False
        victim = self.chance.choice(executors)
        with suppress(psutil.NoSuchProcess):
            if kind == "kill executor":
                victim.kill()
                return True
            victim.suspend()
            threading.Timer(EXECUTOR_FREEZE_S, _thaw, [victim]).start()
        return True

    def _freeze_driver(self) -> None:
        victim = self.drivers.at_work().pid
        assert victim is not None
        os.killpg(victim, signal.SIGSTOP)
        end = time.monotonic() + LONG_FREEZE_S
        while time.monotonic() < end:
            time.sleep(1)
            self.drivers.keep_running()
        os.killpg(victim, signal.SIGCONT)
        self.faults[f"freeze driver {LONG_FREEZE_S:.0f} s"] += 1
        self.wait_until_fresh("freeze driver")

    def wait_until_fresh(self, after: str) -> None:
        """Until an event that was stored after now has come out, and everything before it."""
        begun, before = time.monotonic(), self.feed.sent
        while self.feed.alive and self.feed.sent == before:
            time.sleep(0.05)
        wanted = self.feed.sent
        assert wanted, "nothing is sent"
        while len(self.arrivals.counts) < wanted:
            self.drivers.keep_running()
            assert time.monotonic() - begun < SETTLE_S, (
                f"{after}: {wanted - len(self.arrivals.counts)} events are missing"
            )
            time.sleep(0.2)
        self.recoveries.append((after, time.monotonic() - begun))
        print(f"{after}: {self.recoveries[-1][1]:.1f} s; {wanted} events, {dict(self.faults)}", flush=True)

    def judge(self, pipeline: BrokerPipeline) -> int:
        """Print the figures; the exit status."""
        sent, counts = self.feed.sent, self.arrivals.counts
        wanted = {f"id-{number}" for number in range(sent)}
        dead = asyncio.run(pipeline.read_now("dead"))
        passed = numbers(pipeline.reports(), "passed")
        complaints = [f"{len(wanted - counts.keys())} lost"] if wanted - counts.keys() else []
        complaints += [f"{len(counts.keys() - wanted)} foreign"] if counts.keys() - wanted else []
        complaints += [f"{self.arrivals.altered} altered"] if self.arrivals.altered else []
        complaints += [f"{len(dead)} dead"] if dead else []
        if passed != set(range(sent)):
            complaints.append(
                f"the ledger lacks {len(set(range(sent)) - passed)} and has {len(passed - set(range(sent)))} more"
            )
        again = counts.total() - len(counts)
        print(f"\n{sent} events, {len(counts)} came out, {again} of them again by id ({again / max(1, sent):.2%})")
        print(f"faults: {dict(self.faults)}; starts of drivers after an end: {self.drivers.restarts}")
        for kind in sorted({kind for kind, _ in self.recoveries}):
            taken = sorted(seconds for other, seconds in self.recoveries if other == kind)
            print(
                f"recovery after {kind}: median {taken[len(taken) // 2]:.1f} s, worst {taken[-1]:.1f} s, {len(taken)} times"
            )
        for text in complaints:
            print("FAILED:", text)
        return 1 if complaints else 0


def _thaw(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):  # it was replaced
        process.resume()


def run(kills: int, rate: float, seed: int) -> int:
    """The exit status."""
    print("seed", seed, flush=True)
    no_session: Any = None
    kept = tempfile.mkdtemp(prefix="penstock-soak-cluster-")
    folder = Path(kept)
    with ExitStack() as stack:
        brokers = KafkaCluster(folder / "kafka")
        stack.callback(brokers.stop, grace_s=0)
        brokers.start()
        cluster = stack.enter_context(SparkCluster(folder / "spark", memory_mb=500))
        url = f"kafka://{brokers.bootstrap}"
        pipeline = stack.enter_context(BrokerPipeline(no_session, url, folder, partitions=PARTITIONS))
        pipeline.chosen(columns=COLUMNS, sql=SQL, max_events=20_000, mode="micro-batch")
        arguments = ["--master", cluster.url, "--driver-host", "127.0.0.1", "--executors", "2", "--executor-cores", "1"]
        arguments += ["--executor-memory", "450MiB", "--memory", "512MiB"]
        drivers = Drivers(folder, pipeline, arguments)
        stack.callback(drivers.stop)
        drivers.start()
        feed, arrivals = Feed(pipeline, rate), Arrivals(pipeline)
        feed.start()
        arrivals.start()
        soak = ClusterSoak(random.Random(seed), cluster, drivers, feed, arrivals)
        with suppress(KeyboardInterrupt):  # Ctrl-C ends the strikes, and what was done is judged
            soak.run(kills)
        feed.stop()
        soak.wait_until_fresh("the end")  # of the feed, too
        for service in drivers.services:
            service.terminate()
        arrivals.stop()
        status = soak.judge(pipeline)
    print(f"what the services said is in {folder}")
    return status
