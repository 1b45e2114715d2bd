"""A member of a group of the modelled broker: as `contract.Consumer`, and as the coordinator sees it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from services.core.broker.contract import Lag, OnRevoke, Start
from services.core.broker.errors import DataDamaged, NotOwner, OffsetOutOfRange, Unavailable, UnknownTopic
from services.core.broker.record import Batch, TopicPartition
from tests.simulation.cluster import Cluster
from tests.simulation.groups import REBALANCE_S
from tests.simulation.machine import Process


@dataclass(frozen=True, slots=True)
class _Owned:
    position: int
    epoch: int
    life: int
    """Of the topic."""
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
            self._cluster.coordinator.check()
            for topic in self._topics:
                self._cluster.store.topic(topic)
            self._cluster.store.begin(self.group, self._topics, self._start)
            while not self._inbox.empty():  # of a membership that is over
                self._inbox.get_nowait()
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
                    self.owned[source] = _Owned(position, epoch, self._cluster.store.topic(source.topic).life)
                    self.news.set()
                continue
            await self._give_up(what, lost=word == "lost")

    async def _give_up(self, sources: frozenset[TopicPartition], *, lost: bool) -> None:
        is_member = self._cluster.coordinator.is_member(self.group, self.number)
        if not is_member:
            sources, lost = frozenset(self.owned), True
        mine = sources & self.owned.keys()
        epochs = {source: self.owned[source].epoch for source in mine}
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
        self._paused -= mine  # also what was paused while it was drained
        if not lost:
            await self._tell(lambda: self._cluster.coordinator.release(self.group, self.number, epochs))
        if not is_member:
            await self._join_again()

    async def _join_again(self) -> None:
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
                try:
                    batches = await self._cluster.call(partial(self._fetch, chosen, max_records), None)
                except (OffsetOutOfRange, DataDamaged) as error:
                    if self._is_of_now(error, epochs):
                        raise
                    continue
                if taken := self._take(batches, epochs):
                    return taken
                continue
            left = until - loop.time()
            if left <= 0:
                return []
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self.news.wait()

    def _is_of_now(self, error: OffsetOutOfRange | DataDamaged, epochs: Mapping[TopicPartition, int]) -> bool:
        """Whether the partition that cannot be read is owned as it was when it was asked for."""
        partition = error.partition if isinstance(error, OffsetOutOfRange) else error.ranges[0][0]
        source = TopicPartition(error.topic, partition)
        owned = self.owned.get(source)
        return owned is not None and owned.epoch == epochs[source]

    def _may_read(self, source: TopicPartition) -> bool:
        return not self.owned[source].leaving and source not in self._paused

    def _has_news(self, source: TopicPartition) -> bool:
        topic = self._cluster.store.topics.get(source.topic)
        if topic is None or source.partition >= len(topic.partitions):
            return False
        held, position = topic.partitions[source.partition], self.owned[source].position
        if position == held.end:  # most often
            return False
        return not held.start <= position <= held.end or held.index(position) < len(held.offsets)

    def _fetch(self, sources: Sequence[TopicPartition], most: int) -> list[Batch]:
        """Raises OffsetOutOfRange for a topic that was made anew: offsets of the old one are other records now."""
        store, found = self._cluster.store, []
        for source in sources:
            if most <= 0:
                break
            owned, topic = self.owned.get(source), store.topics.get(source.topic)
            if owned is None or topic is None:
                continue
            if topic.life != owned.life:
                held = topic.partitions[source.partition]
                raise OffsetOutOfRange(*source, owned.position, held.start, held.end, contiguous=not store.gaps)
            if self._cluster.coordinator.is_current(self.group, self.number, source, owned.epoch):
                batch = store.read(*source, owned.position, most)
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
            self._cluster.coordinator.check()
            refused = set()
            for source, mark in asked.items():
                if self._cluster.kinesis is not None and self._cluster.weather.draw(source.topic, writes=True) != "ok":
                    raise Unavailable("one of the writes to the table of leases failed")  # those before it are done
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
async def join_group(
    cluster: Cluster, process: Process, group: str, topics: tuple[str, ...], start: Start, on_revoke: OnRevoke
) -> AsyncIterator[ModelConsumer]:
    """A membership, until it is left."""
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
