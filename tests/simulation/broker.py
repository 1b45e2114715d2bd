"""A model of any of our brokers, at the level of the contract: what a process sees of the store, through a network that fails.

A request that has left arrives, whatever becomes of who sent it. Where backends differ, `Kind` says how.
"""

import asyncio
import contextvars
import random
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from services.core.broker.contract import (
    Appended,
    Features,
    Lag,
    OnRevoke,
    PartitionRange,
    Start,
    TopicSpec,
)
from services.core.broker.errors import NotOwner, OutcomeUnknown, RecordTooLarge, Unavailable, UnknownTopic
from services.core.broker.record import Batch, Record, TopicPartition, estimate_size
from services.core.broker.resharding import Resharding
from tests.simulation.groups import REBALANCE_S, SESSION_S, Coordinator
from tests.simulation.machine import Machine, Process
from tests.simulation.store import Store
from tests.simulation.weather import Weather, refusal
from tests.support.virtual_loop import EPOCH

Answer = TypeVar("Answer")
_WORLD = contextvars.Context()
MAX_RECORD_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Kind:
    """How a backend differs from others.

    gaps: in its offsets, how likely behind a record. by_event_time: what retention counts from. refuses_unpolled: commits
    beyond what was read.
    """

    name: str
    gaps: float = 0.0
    by_event_time: bool = False
    refuses_unpolled: bool = False

    @property
    def features(self) -> Features:
        """As in the contract."""
        return Features(
            contiguous_offsets=not self.gaps,
            compaction=False,
            retention_by_event_time=self.by_event_time,
            max_record_bytes=MAX_RECORD_BYTES,
        )


KINDS = (Kind("log", refuses_unpolled=True), Kind("kafka", by_event_time=True), Kind("kinesis", gaps=0.3))


class Cluster:
    """The broker itself: what survives all processes."""

    def __init__(self, machine: Machine, rng: random.Random, kind: Kind, weather: Weather) -> None:
        self.machine, self.rng, self.kind, self.weather = machine, rng, kind, weather
        self.store = Store(rng, lambda: int((EPOCH + machine.time()) * 1000), kind.gaps)
        self.coordinator = Coordinator(self.store, machine, rng, machine.trace)
        self.consumers: list[ModelConsumer] = []
        self.store.on_append.append(self._tell_news)

    def _tell_news(self, source: TopicPartition) -> None:
        for consumer in self.consumers:
            if source in consumer.owned:
                self.machine.call_later(self.weather.delay(), consumer.news.set, context=_WORLD)

    def attach(self, process: Process) -> None:
        """The process dies: its memberships run out later."""

        def forget() -> None:
            mine = [one for one in self.consumers if one.process is process]
            self.consumers = [one for one in self.consumers if one.process is not process]
            for one in mine:
                self.run_out(one)

        process.on_death.append(forget)

    def run_out(self, consumer: "ModelConsumer") -> None:
        """Whether or not it could say that it left: it is not heard of any more."""
        self.machine.call_later(
            SESSION_S, lambda: self.coordinator.leave(consumer.group, consumer.number), context=_WORLD
        )

    def note_frozen(self, process: Process) -> None:
        """Who stands still for too long is no member any more."""

        def expire() -> None:
            if process.frozen:
                for one in self.consumers:
                    if one.process is process:
                        self.coordinator.expire(one.group, one.number)

        self.machine.call_later(SESSION_S, expire, context=_WORLD)

    async def call(self, operation: Callable[[], Answer], topic: str | None, *, writes: bool = False) -> Answer:
        """A request that may be repeated without harm: it fails as Unavailable, done or not."""
        kind = self.weather.draw(topic, writes=writes)
        answer: asyncio.Future[Answer] = self.machine.create_future()
        self.machine.call_later(self.weather.delay(kind), self._arrive, answer, operation, kind, context=_WORLD)
        return await answer

    def _arrive(self, answer: "asyncio.Future[Answer]", operation: Callable[[], Answer], kind: str) -> None:
        error: Exception | None = None
        result: Any = None
        if kind in ("ok", "slow", "answer_lost", "late"):
            try:
                result = operation()
            except Exception as found:  # the caller's answer
                error = found
        if kind not in ("ok", "slow"):
            error = Unavailable("no answer from the broker")
        self.answer(answer, result, error, self.weather.delay(kind))

    def answer(self, answer: "asyncio.Future[Any]", result: Any, error: Exception | None, after: float) -> None:
        """Comes to the caller so many seconds later."""

        def arrive() -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)

        self.machine.call_later(after, arrive, context=_WORLD)

    def open(self, process: Process) -> AbstractAsyncContextManager["ModelBroker"]:
        """As `connect.open_broker`."""
        return self._open(process)

    @asynccontextmanager
    async def _open(self, process: Process) -> AsyncIterator["ModelBroker"]:
        await self.call(lambda: None, None)
        yield ModelBroker(self, process)


class ModelBroker:
    """One process's connection."""

    def __init__(self, cluster: Cluster, process: Process) -> None:
        self._cluster, self._process = cluster, process
        self.features = cluster.kind.features
        self.admin = ModelAdmin(cluster)
        self.driver = ModelDriver(cluster)
        self.resharding: Resharding | None = None

    def consumer(
        self, group: str, topics: Collection[str], *, start: Start, on_revoke: OnRevoke
    ) -> AbstractAsyncContextManager["ModelConsumer"]:
        """As in the contract."""
        return _join(self._cluster, self._process, group, tuple(topics), start, on_revoke)

    async def probe(self, topic: str, *, timeout: float) -> None:
        """As in the contract."""
        await self._cluster.call(lambda: self._cluster.store.topic(topic), topic, writes=True)


class ModelDriver:
    """As `contract.Driver`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def partition_count(self, topic: str) -> int:
        """As in the contract."""
        return len((await self._cluster.call(lambda: self._cluster.store.topic(topic), topic)).partitions)

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        """As in the contract."""
        if any(estimate_size((record,)) > MAX_RECORD_BYTES for record in records):
            raise RecordTooLarge(topic)
        cluster, answer = self._cluster, self._cluster.machine.create_future()
        kind = cluster.weather.draw(topic, writes=True)
        after = cluster.weather.delay(kind)
        cluster.machine.call_later(
            after, self._arrive, answer, topic, partition, tuple(records), kind, timeout, context=_WORLD
        )
        appended: Appended = await answer
        return appended

    def _arrive(
        self,
        answer: "asyncio.Future[Any]",
        topic: str,
        partition: int,
        records: tuple[Record, ...],
        kind: str,
        timeout: float,
    ) -> None:
        cluster, where = self._cluster, f"{topic}[{partition}]"
        if kind in ("refused", "throttled", "full", "denied"):
            cluster.answer(answer, None, refusal(kind, where), cluster.weather.delay())
            return
        if kind in ("never_arrived", "late"):
            wait = cluster.rng.choice((0.01, cluster.rng.uniform(0.05, timeout)))
            if kind == "late":
                after = wait + cluster.rng.uniform(0.0, 3.0)
                cluster.machine.call_later(after, self._store_late, topic, partition, records, context=_WORLD)
            cluster.answer(answer, None, OutcomeUnknown(f"{where}: no answer"), wait)
            return
        count = cluster.rng.randrange(len(records)) if kind == "partial" else len(records)
        try:
            first, last = cluster.store.append(topic, partition, records[:count]) if count else (-1, -1)
            if not count:
                cluster.store.partition(topic, partition)
        except UnknownTopic as error:
            cluster.answer(answer, None, error, cluster.weather.delay())
            return
        if kind == "answer_lost":
            wait = cluster.rng.choice((0.01, cluster.rng.uniform(0.05, timeout)))
            cluster.answer(answer, None, OutcomeUnknown(f"{where}: no answer"), wait)
            return
        error_kind = cluster.rng.choice(("refused", "throttled", "denied")) if count < len(records) else "ok"
        failed = tuple((index, refusal(error_kind, where)) for index in range(count, len(records)))
        if len(failed) == len(records):
            cluster.answer(answer, None, failed[0][1], cluster.weather.delay())
            return
        cluster.answer(answer, Appended(first, last, failed), None, cluster.weather.delay(kind))

    def _store_late(self, topic: str, partition: int, records: tuple[Record, ...]) -> None:
        with suppress(UnknownTopic):
            self._cluster.store.append(topic, partition, records)


class ModelAdmin:
    """As `contract.Admin`."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._store = cluster, cluster.store

    async def create_topic(self, spec: TopicSpec) -> None:
        """As in the contract."""
        await self._cluster.call(lambda: self._store.create(spec), spec.name)

    async def delete_topic(self, topic: str) -> None:
        """As in the contract."""
        await self._cluster.call(lambda: self._store.delete(topic), topic)

    async def topics(self) -> dict[str, int]:
        """As in the contract."""
        return await self._cluster.call(
            lambda: {name: len(topic.partitions) for name, topic in self._store.topics.items()}, None
        )

    async def add_partitions(self, topic: str, partitions: int) -> None:
        """As in the contract."""
        await self._cluster.call(lambda: self._store.add_partitions(topic, partitions), topic)

    async def describe(self, topic: str) -> dict[int, PartitionRange]:
        """As in the contract."""
        return await self._cluster.call(lambda: self._store.ranges(topic), topic)

    async def next_at_least(self, topic: str) -> dict[int, int]:
        """As in the contract."""
        return await self._cluster.call(
            lambda: {number: held.end for number, held in self._store.ranges(topic).items()}, topic
        )

    async def offsets_at(self, topic: str, start: Start) -> dict[int, int]:
        """As in the contract."""
        return await self._cluster.call(lambda: self._store.offsets_at(topic, start), topic)

    async def committed(self, group: str, topic: str) -> dict[int, int]:
        """As in the contract."""

        def find() -> dict[int, int]:
            known = self._store.groups.get(group)
            marks = {} if known is None else known.committed
            return {source.partition: mark for source, mark in marks.items() if source.topic == topic}

        return await self._cluster.call(find, topic)

    async def set_committed(self, group: str, topic: str, processed: Mapping[int, int]) -> None:
        """As in the contract."""
        busy = bool(self._cluster.coordinator.members(group))
        await self._cluster.call(lambda: self._store.rewind(group, topic, processed, has_members=busy), topic)

    async def copy_positions(self, group: str, to: str, topic: str) -> bool:
        """As in the contract."""
        busy = bool(self._cluster.coordinator.members(to))
        return await self._cluster.call(lambda: self._store.copy_positions(group, to, topic, has_members=busy), topic)

    async def check_durability(self, topics: Collection[str]) -> None:
        """As in the contract."""

    async def group_lag(self, group: str, topic: str) -> dict[int, Lag]:
        """As in the contract."""
        return await self._cluster.call(
            lambda: {
                number: self._store.lag(group, TopicPartition(topic, number))
                for number in range(len(self._store.topic(topic).partitions))
            },
            topic,
        )

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        """As in the contract."""
        return await self._cluster.call(lambda: self._store.read(topic, partition, offset, max_records), topic)


@dataclass(frozen=True, slots=True)
class _Owned:
    position: int
    epoch: int
    leaving: bool = False


class ModelConsumer:
    """As `contract.Consumer`, and a member as the coordinator sees it."""

    def __init__(
        self, cluster: Cluster, process: Process, group: str, topics: tuple[str, ...], start: Start, on_revoke: OnRevoke
    ) -> None:
        self._cluster, self.process, self.group = cluster, process, group
        self._topics, self._start, self._on_revoke = topics, start, on_revoke
        self.number = 0
        self.owned: dict[TopicPartition, _Owned] = {}
        self.news = asyncio.Event()
        self._paused: set[TopicPartition] = set()
        self._inbox: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._turn = 0

    # What the coordinator calls.

    @property
    def is_reachable(self) -> bool:
        """As in Member."""
        return self.process.alive and not self.process.frozen

    def hear_revoke(self, sources: frozenset[TopicPartition], *, lost: bool) -> None:
        """As in Member."""
        self._hear("lost" if lost else "revoke", sources)

    def hear_assign(self, source: TopicPartition, position: int, epoch: int) -> None:
        """As in Member."""
        self._hear("assign", (source, position, epoch))

    def _hear(self, word: str, what: Any) -> None:
        self._inbox.put_nowait((word, what))

    # What the process does.

    async def join(self) -> None:
        """Raises UnknownTopic, Unavailable."""

        def enter() -> None:
            for topic in self._topics:
                self._cluster.store.topic(topic)
            self._cluster.store.begin(self.group, self._topics, self._start)
            self._cluster.coordinator.leave(self.group, self.number)  # an earlier request, whose answer was lost
            self.number = self._cluster.coordinator.join(self.group, self, self._topics)

        await self._cluster.call(enter, None)

    async def manage(self) -> None:
        """Follow what the coordinator says, in order."""
        while True:
            word, what = await self._inbox.get()
            await asyncio.sleep(self._cluster.weather.delay())
            if word == "assign":
                source, position, epoch = what
                if self._cluster.coordinator.is_current(self.group, self.number, source, epoch):
                    self.owned[source] = _Owned(position, epoch)
                    self.news.set()
                continue
            await self._give_up(what, lost=word == "lost")

    async def _give_up(self, sources: frozenset[TopicPartition], *, lost: bool) -> None:
        mine = sources & self.owned.keys()
        self._paused -= mine
        for source in mine:
            if lost:
                del self.owned[source]
            else:
                self.owned[source] = replace(self.owned[source], leaving=True)
        if mine:
            with suppress(TimeoutError):
                async with asyncio.timeout(REBALANCE_S - 1):
                    await self._on_revoke(mine)
        for source in mine:
            self.owned.pop(source, None)
        if not lost:
            await self._tell(lambda: self._cluster.coordinator.release(self.group, self.number, mine))
        elif not self._cluster.coordinator.is_member(self.group, self.number):
            while True:
                try:
                    await self.join()
                except (Unavailable, UnknownTopic):
                    await asyncio.sleep(0.5)
                else:
                    return

    async def _tell(self, operation: Callable[[], None]) -> None:
        for _ in range(3):
            try:
                await self._cluster.call(operation, None)
            except Unavailable:
                await asyncio.sleep(0.2)
            else:
                return

    async def close(self) -> None:
        """Drain and leave."""
        mine = frozenset(self.owned)
        if mine:
            with suppress(TimeoutError):
                async with asyncio.timeout(REBALANCE_S - 1):
                    await self._on_revoke(mine)
        self.owned.clear()
        await self._tell(lambda: self._cluster.coordinator.leave(self.group, self.number))

    def describe(self) -> str:
        """For a person."""
        return f"{self.process.name} {self.group} member {self.number}: {self.owned} paused {sorted(self._paused)}"

    # As in the contract.

    async def poll(self, *, max_records: int, max_wait: float) -> list[Batch]:
        """As in the contract."""
        loop = asyncio.get_running_loop()
        until = loop.time() + max_wait
        while True:
            self.news.clear()
            ready = [source for source in self.owned if self._may_read(source) and self._has_news(source)]
            if ready:
                epochs = {source: self.owned[source].epoch for source in ready}
                self._turn += 1
                first = self._turn % len(ready)
                chosen = [*ready[first:], *ready[:first]]
                batches = await self._cluster.call(partial(self._fetch, chosen, max_records), None)
                if taken := self._take(batches, epochs):
                    return taken
                continue
            left = until - loop.time()
            if left <= 0:
                return []
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.news.wait()

    def _may_read(self, source: TopicPartition) -> bool:
        return not self.owned[source].leaving and source not in self._paused

    def _has_news(self, source: TopicPartition) -> bool:
        topic = self._cluster.store.topics.get(source.topic)
        if topic is None or source.partition >= len(topic.partitions):
            return False
        held, position = topic.partitions[source.partition], self.owned[source].position
        return not held.start <= position <= held.end or held.index(position) < len(held.offsets)

    def _fetch(self, sources: Sequence[TopicPartition], most: int) -> list[Batch]:
        found = []
        for source in sources:
            if most <= 0:
                break
            if source not in self.owned or not self._cluster.coordinator.owned_since(self.group, self.number, source):
                continue
            with suppress(UnknownTopic):
                batch = self._cluster.store.read(*source, self.owned[source].position, most)
                if batch is not None:
                    found.append(batch)
                    most -= len(batch.records)
        return found

    def _take(self, batches: Sequence[Batch], epochs: Mapping[TopicPartition, int]) -> list[Batch]:
        taken = []
        for batch in batches:
            owned = self.owned.get(batch.source)
            if owned is None or owned.epoch != epochs[batch.source] or not self._may_read(batch.source):
                continue
            self.owned[batch.source] = replace(owned, position=batch.offsets[-1] + 1)
            taken.append(batch)
        return taken

    async def commit(self, processed: Mapping[TopicPartition, int]) -> None:
        """As in the contract."""
        asked = dict(processed)
        owned = {source: self.owned[source] for source in asked if source in self.owned}

        def store() -> frozenset[tuple[str, int]]:
            refused = set()
            for source, mark in asked.items():
                if self._may_commit(source, mark, owned.get(source)):
                    self._cluster.store.commit(self.group, {source: mark})
                else:
                    refused.add((source.topic, source.partition))
            return frozenset(refused)

        refused = await self._cluster.call(store, None, writes=True)
        if refused:
            raise NotOwner(refused)

    def _may_commit(self, source: TopicPartition, mark: int, owned: "_Owned | None") -> bool:
        cluster = self._cluster
        if owned is None or source.topic not in cluster.store.topics:
            return False
        if cluster.kind.refuses_unpolled and mark >= owned.position:
            return False
        return cluster.coordinator.owns(self.group, self.number, source, mark, owned.epoch)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """As in the contract."""
        self._paused |= self.owned.keys() & set(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """As in the contract."""
        self._paused -= set(partitions)
        self.news.set()

    def assignment(self) -> frozenset[TopicPartition]:
        """As in the contract."""
        return frozenset(self.owned)

    async def lag(self) -> dict[TopicPartition, Lag]:
        """As in the contract."""
        mine = [source for source in self.owned if source.topic in self._cluster.store.topics]
        return await self._cluster.call(
            lambda: {
                source: self._cluster.store.lag(self.group, source)
                for source in mine
                if source.topic in self._cluster.store.topics
            },
            None,
        )


@asynccontextmanager
async def _join(
    cluster: Cluster, process: Process, group: str, topics: tuple[str, ...], start: Start, on_revoke: OnRevoke
) -> AsyncIterator[ModelConsumer]:
    consumer = ModelConsumer(cluster, process, group, topics, start, on_revoke)
    cluster.consumers.append(consumer)
    try:
        await consumer.join()
    except BaseException:
        cluster.consumers.remove(consumer)
        cluster.run_out(consumer)
        raise
    managing = asyncio.create_task(consumer.manage())
    try:
        yield consumer
    finally:
        managing.cancel()
        with suppress(asyncio.CancelledError):
            await managing
        try:
            await consumer.close()
        finally:
            if consumer in cluster.consumers:
                cluster.consumers.remove(consumer)
            cluster.run_out(consumer)
