"""A transform on a Spark cluster under kills: make soak ARGS="--cluster 50 --rate 200"

A standalone master, two workers, two drivers (one stands by) and a Kafka with three brokers. The checkpoint is in S3, so only its
claims say which driver works. Workers, executors and drivers are killed, executors are frozen for a while, and twice the driver
at work is frozen until long after the other one has taken over. Each strike is followed until a fresh event got through. Exit
status 1 when an event was lost, altered, dead or wrong in the ledger, or nobody took over.
"""

import asyncio
import os
import random
import re
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psutil

from services.core.aws_emulator import CREDENTIALS
from services.core.broker.connect import open_broker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.event import read_id
from services.core.jvm.kafka import KafkaCluster
from tests.spark.broker_pipeline import BrokerPipeline, TopicReading
from tests.spark.log_pipeline import event, numbers
from tests.spark.service_process import ServiceProcess
from tests.spark.stored_checkpoint import StoredCheckpoint
from tests.support.object_store import ObjectStoreServer
from tests.support.spark_cluster import SparkCluster

PARTITIONS = 4
COLUMNS = "n INT, twice INT"
SQL = "SELECT event, n, 2 * n AS twice FROM {s}"
KINDS = {"kill worker": 3.0, "kill executor": 3.0, "kill driver": 2.0, "kill standby": 0.5, "freeze executor": 0.5}
"""How often each kind strikes, as a share."""
GAP = (0.2, 1.5)
DRIVER_FREEZES_S = (120.0, 90.0)
"""Longer on a machine where the other driver has not yet worked. After two minutes the thawed one may end at once, as Java gave
no answer for so long. After less it goes on."""
EXECUTOR_FREEZE_S = 90.0
"""Longer than Spark waits for a sign of life."""
SETTLE_S = 420.0


@dataclass
class Drivers:
    """Two services with one checkpoint, and nothing else in common. Each is started again when it has ended, as a supervisor
    does."""

    pipeline: BrokerPipeline
    checkpoint: StoredCheckpoint
    arguments: list[str]
    services: list[ServiceProcess] = field(default_factory=list)
    restarts: int = 0

    def start(self) -> None:
        for name in ("a", "b"):
            folder = self.pipeline.folder / name
            folder.mkdir()
            shutil.copy(self.pipeline.folder / "pipes.yaml", folder)
            self.services.append(ServiceProcess(folder, self.pipeline.url, *self.arguments, quick_claims=False))
            self.services[-1].start()

    def keep_running(self) -> None:
        for service in self.services:
            if not service.is_running:
                service.kill()
                service.start()
                self.restarts += 1

    def at_work(self) -> ServiceProcess:
        """The one that holds the checkpoint; the first one while none does."""
        holder = self.checkpoint.holder()
        return next((one for one in self.services if one.pid == holder), self.services[0])

    def standby(self) -> ServiceProcess:
        at_work = self.at_work()
        return next(one for one in self.services if one is not at_work)

    def are_in_place(self) -> bool:
        """Whether one works and the other one stands by."""
        at_work, standby = self.at_work(), self.standby()
        return at_work.is_running and at_work.pid == self.checkpoint.holder() and "pipe_on_standby" in standby.said()

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
        self.altered = self.again = 0
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
                    self.again += name in self.counts
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
    thawed: list[str] = field(default_factory=list)
    """How each driver that had been frozen ended its work."""

    def run(self, kills: int) -> None:
        """Strikes until so many processes were killed; the freezes of drivers divide them evenly."""
        self.wait_until_fresh("start")
        freezes = list(DRIVER_FREEZES_S)
        while (killed := sum(count for name, count in self.faults.items() if name.startswith("kill"))) < kills:
            if freezes and killed >= kills * (1 - len(freezes) / (len(DRIVER_FREEZES_S) + 1)):
                self._freeze_driver(freezes.pop(0))
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

    def _freeze_driver(self, seconds: float) -> None:
        """The other one works before the thaw, and the frozen one gives up its work after it."""
        checkpoint = self.drivers.checkpoint
        self._wait(self.drivers.are_in_place, SETTLE_S, "a driver on standby")
        frozen, claim, again = self.drivers.at_work(), checkpoint.claim(), self.arrivals.again
        self._wait(checkpoint.has_batch_at_work, SETTLE_S, "a batch")  # which the other one has to do again
        frozen.signal(signal.SIGSTOP)
        begun = time.monotonic()
        taken = self._wait(lambda: checkpoint.claim() > claim, SETTLE_S, "a takeover from the frozen driver")
        stored, came = self.feed.sent, len(self.arrivals.counts)
        # More ids than there were events: one was stored after the takeover.
        fresh = taken + self._wait(lambda: len(self.arrivals.counts) > stored, SETTLE_S, "an event after the takeover")
        self.recoveries += [("freeze driver, until the takeover", taken), ("freeze driver, until a new event", fresh)]
        self._wait(lambda: time.monotonic() > begun + seconds, seconds, "the thaw")
        came, before = len(self.arrivals.counts) - came, len(frozen.said())
        frozen.signal(signal.SIGCONT)
        self.faults[f"freeze driver {time.monotonic() - begun:.0f} s"] += 1
        ended = self._wait(
            lambda: bool(self._end_of_work(frozen, before)), SETTLE_S, "the thawed driver's end of work", restart=False
        )
        how = f"{self._end_of_work(frozen, before)}, {ended:.1f} s after the thaw"
        self.wait_until_fresh("thaw of the driver")
        self.thawed.append(f"{how}; {came} events came out before it; {self.arrivals.again - again} events came again")
        print(self.thawed[-1], flush=True)

    @staticmethod
    def _end_of_work(thawed: ServiceProcess, since: int) -> str:
        """How it ended its work; "" before."""
        ended, text = not thawed.is_running, thawed.said()[since:]
        found = ["its query ended by the takeover"] if "query_ended_by_takeover" in text else []
        if ended:
            kinds = ", ".join(re.findall(r'"kind":"(\w+)"', text))
            found.append(f"its process ended with {kinds or 'no error'}")
        return " and ".join(found)

    def _wait(self, condition: Callable[[], bool], limit: float, what: str, *, restart: bool = True) -> float:
        """The seconds that it took. restart: drivers that end."""
        begun = time.monotonic()
        while not condition():
            assert time.monotonic() - begun < limit, f"in vain waited {limit:.0f} s for {what}"
            if restart:
                self.drivers.keep_running()
            time.sleep(0.5)
        return time.monotonic() - begun

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
        again = self.arrivals.again
        print(f"\n{sent} events, {len(counts)} came out, {again} of them again by id ({again / max(1, sent):.2%})")
        print(f"faults: {dict(self.faults)}; starts of drivers after an end: {self.drivers.restarts}")
        for text in self.thawed:
            print(f"a thawed driver: {text}")
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
    os.environ.update(CREDENTIALS)
    kept = tempfile.mkdtemp(prefix="penstock-soak-cluster-")
    folder = Path(kept)
    with ExitStack() as stack:
        brokers = KafkaCluster(folder / "kafka")
        stack.callback(brokers.stop, grace_s=0)
        brokers.start()
        store = stack.enter_context(ObjectStoreServer(folder))
        # With room for the executors of both drivers: one that is frozen keeps its own.
        cluster = stack.enter_context(SparkCluster(folder / "spark", cores=2, memory_mb=1000))
        url = f"kafka://{brokers.bootstrap}"
        pipeline = stack.enter_context(BrokerPipeline(no_session, url, folder, partitions=PARTITIONS))
        pipeline.chosen(columns=COLUMNS, sql=SQL, max_events=20_000, mode="micro-batch")
        arguments = ["--master", cluster.url, "--driver-host", "127.0.0.1", "--executors", "2", "--executor-cores", "1"]
        arguments += ["--executor-memory", "480MiB", "--memory", "512MiB", *store.options("fleet")]
        drivers = Drivers(pipeline, StoredCheckpoint(store, "fleet", pipeline.pipe), arguments)
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
