"""Queries that read the same shards from several processes, within the limits of Kinesis: with the protocol of Spark and without
Spark, on a virtual clock.

The service answers five reads and five requests for an iterator of a shard a second, and 2 MB a second, and refuses the rest.
A query has the process that plans it and that of its driver, which measures the backlog; tasks run in worker processes.
"""

import asyncio
import json
import pickle
import queue
import random
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import prometheus_client
import pytest
from botocore.exceptions import ClientError

from services.core.broker.kinesis.aws import Clients, PutRecords, Timing
from services.core.broker.kinesis.blocking import BlockingKinesis
from services.core.broker.kinesis.broker import KinesisBroker
from services.core.broker.kinesis.pace import ReadPace
from services.core.broker.kinesis.streams import shard_number
from services.core.broker.record import Record
from spark.brokers.kinesis import KinesisBacklogMeter, KinesisSparkBroker
from spark.sources import ends
from spark.sources.kinesis import KinesisStreamReader, read_task
from tests.simulation.readers.kinesis_service import KinesisClient, Service
from tests.support.kinesis_limits import PROVISIONED, Bucket
from tests.support.virtual_loop import run_virtually

STREAM = "s"
SHARDS = 2
READ_BYTES = 2 << 20
READS = 5
PER_ENTRY = 10
TRIGGER_S = 0.1
MEASURE_EVERY_S = 5.0
PATIENCE_S = 3600.0
T = TypeVar("T")
Place = tuple[int, int]
"""A shard and an offset in it."""


class Call(NamedTuple):
    """A GetRecords."""

    process: str
    shard: int
    at: float
    refused: bool


class Limits:
    """Of a shard. Each second gives so much, and as much may be used at once."""

    def __init__(self) -> None:
        self.reads, self.iterators, self.bytes = (Bucket(limit, time.monotonic) for limit in (READS, READS, READ_BYTES))


class LimitedService(Service):
    """As there, with the limits. calls: all GetRecords. refusals: by kind of process and shard.

    is_used_up: others take all reads.
    """

    def __init__(self, rng: random.Random) -> None:
        super().__init__(cast(Any, asyncio.get_running_loop()), rng)
        self._sequence = 1 << 80  # as high as those of the service
        self.limits = defaultdict[int, Limits](Limits)
        self.calls: list[Call] = []
        self.refusals: Counter[tuple[str, int]] = Counter()
        self.is_used_up = False
        self.create(STREAM, SHARDS)

    def fill(self, shard: int, entries: int, size: int) -> None:
        """So many entries of about this size, with PER_ENTRY records each."""
        for _ in range(entries):
            self.put(STREAM, shard, [Record(b"k", bytes(size // PER_ENTRY), 0) for _ in range(PER_ENTRY)])

    def waits(self) -> list[list[float]]:
        """The times between calls, of each process and shard."""
        times = defaultdict[tuple[str, int], list[float]](list)
        for call in self.calls:
            times[call.process, call.shard].append(call.at)
        return [[later - sooner for sooner, later in pairwise(found)] for found in times.values()]

    def places(self) -> Counter[Place]:
        """All that is stored."""
        stream = self.streams[STREAM]
        return Counter(
            (shard, (int(entry["SequenceNumber"]) << 20) + index)
            for shard, entries in stream.entries.items()
            for entry in entries
            for index in range(PER_ENTRY)
        )


class LimitedClient(KinesisClient):
    """The SDK's client in one process."""

    def __init__(self, service: LimitedService, process: str) -> None:
        super().__init__(service)
        self._limited, self._process = service, process

    async def get_shard_iterator(self, *, StreamName: str, ShardId: str, **where: Any) -> Any:  # noqa: N803 - the SDK's
        iterators = self._limited.limits[shard := shard_number(ShardId)].iterators
        if not iterators.has(1):
            self._refuse(shard)
        iterators.owe(1)
        return await super().get_shard_iterator(StreamName=StreamName, ShardId=ShardId, **where)

    async def get_records(self, *, ShardIterator: str, Limit: int) -> Any:  # noqa: N803 - the SDK's
        service = self._limited
        name, _, number, at, _ = ShardIterator.split()
        shard, limits = int(number), service.limits[int(number)]
        refused = service.is_used_up or not (limits.reads.has(1) and limits.bytes.has(1))
        service.calls.append(Call(self._process, shard, time.monotonic(), refused))
        if refused:
            self._refuse(shard)
        limits.reads.owe(1)
        entries = service.streams[name].entries[shard]
        first = bisect_left(entries, int(at), key=lambda one: int(one["SequenceNumber"]))
        some = entries[first : first + Limit]
        limits.bytes.owe(sum(len(entry["Data"]) for entry in some))
        after = int(some[-1]["SequenceNumber"]) + 1 if some else int(at)
        behind = 1000 if first + len(some) < len(entries) else 0
        await asyncio.sleep(service.rng.uniform(0.002, 0.02))
        return {"Records": some, "MillisBehindLatest": behind, "NextShardIterator": f"{name} 0 {number} {after} 0"}

    def _refuse(self, shard: int) -> None:
        self._limited.refusals[self._process.split()[2], shard] += 1
        raise ClientError({"Error": {"Code": PROVISIONED, "Message": "Rate exceeded"}}, "a read")


_here = threading.local()
"""process: the one that this thread stands for. wait: runs a coroutine on the loop, for this thread."""


class Process(BlockingKinesis):
    """What a process of Spark has: a connection of its own, with paces of its own."""

    def __init__(self, service: LimitedService, name: str) -> None:
        clients = Clients(LimitedClient(service, name), None, cast(PutRecords, None), None)
        self.broker = KinesisBroker(clients, Timing())

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return cast(T, _here.wait(work))


async def in_process(process: Process, call: Callable[[], T]) -> T:
    """Run code that blocks in a thread. Time stands still while it computes, and goes on while it waits."""
    asked, answers = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()

    def wait(work: Coroutine[Any, Any, Any]) -> Any:
        asked.put(work)
        done, result = answers.get()
        if not done:
            raise result
        return result

    def run() -> None:
        _here.process, _here.wait = process, wait
        try:
            asked.put((True, call()))
        except BaseException as error:
            asked.put((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while not isinstance(work := asked.get(timeout=600), tuple):
        try:
            answers.put((True, await work))
        except BaseException as error:
            answers.put((False, error))
            if not isinstance(error, Exception):  # nobody waits for the thread any more
                raise
    thread.join()
    done, result = work
    if not done:
        raise result
    return cast(T, result)


class Died(Exception):
    """A task's process ends here."""


class Query:
    """Spark's part of a pipe. workers: idle ones of all executors; each runs one task at a time, of any query.

    read: what its tasks handed out. is_rough: attempts die, and some tasks have two at once.
    """

    def __init__(self, service: LimitedService, name: str, workers: list[Process], path: Path, room: int) -> None:
        self._rng, self._workers = service.rng, workers
        self._planner, self._driver = Process(service, f"{name} planner"), Process(service, f"{name} driver")
        self._options = {"broker": "kinesis://x", "topics": STREAM, "checkpoint": f"file://{path}/{name}", "tasks": "2"}
        self._options["max_events"] = str(room)
        self._broker = KinesisSparkBroker(self._options["broker"])
        self.read: Counter[Place] = Counter()
        self._done: dict[int, int] = {}
        self.is_rough = False

    async def run(self) -> None:
        """Until it is cancelled. Raises what ends a query."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._measure())
            reader = KinesisStreamReader(self._options)
            start = await in_process(self._planner, reader.initialOffset)
            while True:
                end = await in_process(self._planner, partial(reader.latestOffset, start, reader.getDefaultReadLimit()))
                if end == start:
                    await asyncio.sleep(TRIGGER_S)
                    continue
                end = json.loads(json.dumps(end))
                planned = await in_process(self._planner, partial(reader.partitions, start, end))
                for found in await asyncio.gather(*(self._compute(pickle.dumps(task)) for task in planned)):
                    self.read.update(found)
                    self._done |= {shard: offset + 1 for shard, offset in found}
                look = partial(self._broker.parse_offsets, json.dumps(end), self._options["checkpoint"])
                await in_process(self._driver, look)
                start = end

    async def _measure(self) -> None:
        meter = KinesisBacklogMeter(self._driver, [STREAM])
        while True:
            done = {(STREAM, shard): offset for shard, offset in self._done.items()}
            await in_process(self._driver, partial(meter.measure, done, done))
            await asyncio.sleep(MEASURE_EVERY_S)

    async def _compute(self, task: bytes) -> list[Place]:
        if self.is_rough and self._rng.random() < 0.1:
            with pytest.raises(Died):
                await self._attempt(task, dies=True)
        twice = self.is_rough and self._rng.random() < 0.1
        found = await asyncio.gather(*(self._attempt(task) for _ in range(1 + twice)))
        assert all(one == found[0] for one in found), "two attempts of a task read other records"
        return found[0]

    async def _attempt(self, task: bytes, *, dies: bool = False) -> list[Place]:
        while not self._workers:
            await asyncio.sleep(TRIGGER_S)
        worker = self._workers.pop(self._rng.randrange(len(self._workers)))

        def compute() -> list[Place]:
            batches = read_task(worker, pickle.loads(task))
            found = [(batch.partition, offset) for batch in batches for offset in batch.offsets]
            if dies:
                raise Died
            return found

        try:
            return await in_process(worker, compute)
        finally:
            self._workers.append(worker)


@pytest.fixture
def on_virtual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = lambda: time.monotonic()  # noqa: E731 - ReadPace keeps the function that it was defined with
    monkeypatch.setattr(ReadPace.__init__, "__defaults__", (clock,))
    monkeypatch.setattr("spark.sources.kinesis.connection", lambda _url: _here.process)
    monkeypatch.setattr("spark.brokers.kinesis.metrics", SimpleNamespace(BROKER_READ_THROTTLES=_TOLD))
    monkeypatch.setattr(ends, "sync", lambda _path: None)
    monkeypatch.setattr("os.fsync", lambda _file: None)


_TOLD = prometheus_client.Counter("told", "What drivers add to the metric.", ["topic", "shard"], registry=None)


def told_by_driver() -> dict[int, float]:
    """What it counts of the refusals of its tasks, by shard."""
    samples = next(iter(_TOLD.collect())).samples
    found = {sample.labels["shard"]: sample.value for sample in samples if sample.name == "told_total"}
    return {n: found.get(str(n), 0.0) for n in range(SHARDS)}


def throttles() -> dict[int, float]:
    """What the processes counted, by shard."""
    name = "penstock_broker_shard_read_throttles_total"
    return {
        n: prometheus_client.REGISTRY.get_sample_value(name, {"topic": STREAM, "shard": str(n)}) or 0.0
        for n in range(SHARDS)
    }


class Scene:
    """The service, and queries that read the stream."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        self._path = path
        self.service = LimitedService(rng)
        self.queries: list[Query] = []

    def add(self, *, executors: int, room: int) -> Query:
        """A query with executors of its own, each with two worker processes."""
        name = f"query {len(self.queries)}"
        workers = [Process(self.service, f"{name} worker {n}") for n in range(2 * executors)]
        self.queries.append(query := Query(self.service, name, workers, self._path, room))
        return query

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """All queries run meanwhile. At the end each has read every record once."""
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(query.run()) for query in self.queries]
            yield
            await self.until_read()
            for one in running:
                one.cancel()
        for query in self.queries:
            assert query.read == self.service.places()

    async def until_read(self) -> None:
        """Until no query has a backlog, and a little longer."""
        async with asyncio.timeout(PATIENCE_S):
            while any(query.read.total() < self.service.places().total() for query in self.queries):
                await asyncio.sleep(1.0)
        await asyncio.sleep(2.0)

    def fill(self, *, entries: int, size: int) -> None:
        """All shards."""
        for shard in range(SHARDS):
            self.service.fill(shard, entries, size)

    async def trickle(self, seconds: float) -> None:
        """New entries in all shards, several a second."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.fill(entries=1, size=200)
            await asyncio.sleep(self.service.rng.uniform(0.02, 0.5))


def run(main: Callable[[Scene], Coroutine[Any, Any, None]], path: Path) -> None:
    async def begin() -> None:
        await main(Scene(path, random.Random(1)))

    run_virtually(begin(), seed=1)


def test_one_query_stays_within_the_limits(on_virtual_clock: None, tmp_path: Path) -> None:
    """If this fails, the processes of one query use more of a shard than it gives, and refuse each other all the time."""

    async def main(scene: Scene) -> None:
        scene.add(executors=2, room=2_000)
        scene.fill(entries=200, size=50_000)
        async with scene.running():
            await scene.until_read()
            await scene.trickle(30.0)
        calls = scene.service.calls
        readers = {call.process for call in calls}
        assert len(readers) == 2 + 4, "all processes read"
        refused = scene.service.refusals.total()
        assert refused <= len(calls) / 20, f"{refused} of {len(calls)}"

    run(main, tmp_path)


def test_queries_share_a_shard(on_virtual_clock: None, tmp_path: Path) -> None:
    """If this fails, pipes over one stream end each other's tasks; or nobody knows that they are refused; or what was read is
    thrown away at each refusal, and they do not get on; or second attempts of a task read other records."""

    async def main(scene: Scene) -> None:
        for _ in range(3):
            scene.add(executors=2, room=500).is_rough = True
        scene.fill(entries=20, size=500_000)
        before, service = throttles(), scene.service
        async with scene.running():
            await scene.until_read()
            assert service.refusals, "three at once are never refused: nothing was tested"
            service.calls.clear()
            await scene.trickle(60.0)
            refused = sum(call.refused for call in service.calls)
            assert refused <= len(service.calls) / 5, f"{refused} of {len(service.calls)}"
        for shard, counted in throttles().items():
            assert counted - before[shard] == sum(n for (_, one), n in service.refusals.items() if one == shard)

    run(main, tmp_path)


def test_what_is_refused_is_asked_ever_more_seldom(on_virtual_clock: None, tmp_path: Path) -> None:
    """If this fails, executors storm a shard that others use up, or give a batch up, or lose what they had read."""

    async def main(scene: Scene) -> None:
        scene.add(executors=1, room=1_000)
        scene.fill(entries=300, size=50_000)
        async with scene.running():
            service, told = scene.service, told_by_driver()
            while not scene.queries[0].read:
                await asyncio.sleep(0.1)
            service.refusals.clear()
            service.calls.clear()
            service.is_used_up = True
            await asyncio.sleep(15.0)
            service.is_used_up = False
            waits = service.waits()
            assert max(len(found) for found in waits) >= 4
            for found in waits:
                assert min(found, default=1.0) > 1 / READS
                assert all(later > 1.3 * sooner or later > 1.0 for sooner, later in pairwise(found)), found
            assert scene.queries[0].read.total() < service.places().total(), "too late"
        for shard, before in told.items():
            assert 4 < told_by_driver()[shard] - before == service.refusals["worker", shard], "the driver does not tell"

    run(main, tmp_path)
