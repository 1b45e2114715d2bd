"""A member of a group that reads topics of several brokers: one membership on each of them."""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from services.core.broker.contract import Consumer, Lag, OnRevoke
from services.core.broker.errors import BrokerError, DataDamaged, HomeChanged, NotOwner, OffsetOutOfRange, Unavailable
from services.core.broker.record import Batch, TopicPartition
from services.core.broker.several.brokers import Places, shift_batch

_LIMIT_S = 120.0
"""How long a poll may last after its `max_wait`: some requests find positions, or the cause of a failed read. Nobody else
watches it."""


class Revocations:
    """Passes the revocations of several memberships on, one at a time, as those of one."""

    def __init__(self, on_revoke: OnRevoke) -> None:
        self._on_revoke = on_revoke
        self._one_at_a_time = asyncio.Lock()
        self.forget: Callable[[frozenset[TopicPartition]], None] = lambda _partitions: None
        """Called when the partitions are gone."""

    async def __call__(self, partitions: frozenset[TopicPartition]) -> None:
        try:
            async with self._one_at_a_time:
                await self._on_revoke(partitions)
        finally:
            self.forget(partitions)


class SeveralConsumer:
    """`Consumer` over one consumer for each broker. members: they, and the topics of each."""

    def __init__(self, members: Sequence[tuple[Consumer, Collection[str]]], revocations: Revocations) -> None:
        self._members = deque(consumer for consumer, _ in members)
        self._by_topic = {topic: consumer for consumer, topics in members for topic in topics}
        self._polls: dict[Consumer, asyncio.Task[None]] = {}
        """Under way: at most one of each broker."""
        self._read: list[Batch] = []
        """Polled, not returned yet: another broker was quicker, or its partition was paused meanwhile."""
        self._failed: set[Consumer] = set()
        """Their polls have failed since `poll` last waited for the brokers."""
        self._errors: deque[Exception] = deque()
        """Of polls, not raised yet."""
        self._paused: set[TopicPartition] = set()
        revocations.forget = self._forget

    async def poll(self, *, max_records: int, max_wait: float) -> list[Batch]:
        """As in the contract: the first broker with records ends the wait. The polls of the others go on, and their records come
        with a later call. If they were cancelled, a poll that must first ask its broker something would never end beside a busy
        broker. A broker that fails does not hold up the others: its error is raised in turn with their records."""
        if self._errors:
            raise self._errors.popleft()
        if found := self._take(max_records):
            return found
        self._members.rotate(1)
        self._failed.clear()
        clock = asyncio.get_running_loop().time
        until, left = clock() + max_wait, max_wait
        while self._begin_polls(max_records, left):
            await asyncio.wait(self._polls.values(), timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if found := self._take(max_records):
                return found
            if (left := until - clock()) <= 0:
                break
        if self._errors:
            raise self._errors.popleft()
        return []

    def _begin_polls(self, max_records: int, max_wait: float) -> bool:
        """Poll the brokers that are not being polled, and whose last poll did not fail. Gives whether any is polled now."""
        share = max(1, max_records // len(self._members))
        for one in list(self._members)[:max_records]:
            if one not in self._polls and one not in self._failed:
                self._polls[one] = asyncio.create_task(self._poll_one(one, share, max_wait))
        return bool(self._polls)

    async def _poll_one(self, consumer: Consumer, max_records: int, max_wait: float) -> None:
        """Keep its records or its error at once: a revocation that comes next must find them."""
        try:
            async with asyncio.timeout(max_wait + _LIMIT_S) as limit:
                found = await consumer.poll(max_records=max_records, max_wait=max_wait)
                self._read += found
        except Exception as error:
            self._failed.add(consumer)
            self._errors.append(self._never_ended(consumer) if limit.expired() else error)
        finally:
            del self._polls[consumer]

    def _never_ended(self, consumer: Consumer) -> Unavailable:
        topics = ", ".join(topic for topic, one in self._by_topic.items() if one is consumer)
        return Unavailable(
            f"a poll of {topics} has not ended {_LIMIT_S:g} s after its time was over. The poll begins again"
        )

    async def close(self) -> None:
        """End the polls under way, before their brokers are left."""
        polls = list(self._polls.values())
        for task in polls:
            task.cancel()
        if polls:
            await asyncio.wait(polls)

    def _take(self, max_records: int) -> list[Batch]:
        """What was read and may be returned now."""
        found: list[Batch] = []
        kept: list[Batch] = []
        room = max_records
        for batch in self._read:
            if batch.source in self._paused or not room:
                kept.append(batch)
                continue
            count = min(room, len(batch.records))
            if count < len(batch.records):
                kept.append(_slice(batch, count, len(batch.records)))
                batch = _slice(batch, 0, count)
            room -= count
            found.append(batch)
        self._read = kept
        return found

    def _forget(self, partitions: frozenset[TopicPartition]) -> None:
        self._read = [batch for batch in self._read if batch.source not in partitions]
        self._paused -= partitions
        self._errors = deque(error for error in self._errors if not _sources_of(error) & partitions)

    async def commit(self, processed: Mapping[TopicPartition, int]) -> None:
        """As in the contract. When a broker is not available, what is on the others is committed."""
        refused: frozenset[tuple[str, int]] = frozenset()
        failed: BrokerError | None = None
        for consumer, sources in self._split(processed).items():
            try:
                await consumer.commit({source: processed[source] for source in sources})
            except NotOwner as error:
                refused |= error.partitions
            except BrokerError as error:
                failed = error
        if failed is not None:
            raise failed
        if refused:
            raise NotOwner(refused)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        for consumer, sources in self._split(partitions).items():
            consumer.pause(sources)
            self._paused |= consumer.assignment().intersection(sources)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        self._paused.difference_update(partitions)
        for consumer, sources in self._split(partitions).items():
            consumer.resume(sources)

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset().union(*(consumer.assignment() for consumer in self._members))

    async def lag(self) -> dict[TopicPartition, Lag]:
        found: dict[TopicPartition, Lag] = {}
        for consumer in tuple(self._members):
            found |= await consumer.lag()
        return found

    def _split(self, sources: Collection[TopicPartition]) -> dict[Consumer, list[TopicPartition]]:
        found: dict[Consumer, list[TopicPartition]] = {}
        for source in sources:
            if (consumer := self._by_topic.get(source.topic)) is not None:
                found.setdefault(consumer, []).append(source)
        return found


class HomeConsumer:
    """`Consumer` of topics that may move: it reads only while they are where it joined. Its offsets are those of `Places.base`.

    homes: the broker of each topic, as it was known before the join, which takes time.
    """

    def __init__(self, consumer: Consumer, homes: Mapping[str, str], places: Places) -> None:
        self._consumer, self._homes, self._places = consumer, homes, places

    async def poll(self, *, max_records: int, max_wait: float) -> list[Batch]:
        """As in the contract. Raises Unavailable while it is not known where a topic is, and HomeChanged when it has moved."""
        for topic, home in self._homes.items():
            if self._places.of(topic) == home:
                await self._places.known(topic, max_wait)
            self._require(topic, home)
        batches = await self._consumer.poll(max_records=max_records, max_wait=max_wait)
        return [shift_batch(batch, self._base(batch.source)) for batch in batches]

    async def commit(self, processed: Mapping[TopicPartition, int]) -> None:
        await self._consumer.commit({source: offset - self._base(source) for source, offset in processed.items()})

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        self._consumer.pause(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        self._consumer.resume(partitions)

    def assignment(self) -> frozenset[TopicPartition]:
        return self._consumer.assignment()

    async def lag(self) -> dict[TopicPartition, Lag]:
        """As in the contract. Raises HomeChanged as `poll` does, and waits for nothing before it."""
        for topic, home in self._homes.items():
            self._require(topic, home)
        return await self._consumer.lag()

    def _require(self, topic: str, home: str) -> None:
        if self._places.of(topic) != home or self._places.is_leaving(topic):
            raise HomeChanged(
                f"{topic} moves from broker {home}. Its readers leave, and join again where the stream is then"
            )

    def _base(self, source: TopicPartition) -> int:
        return self._places.base(self._homes[source.topic], source.topic, source.partition)


def _sources_of(error: Exception) -> frozenset[TopicPartition]:
    """The partitions that an error is about. It counts for the ownership that met it."""
    if isinstance(error, OffsetOutOfRange):
        return frozenset({TopicPartition(error.topic, error.partition)})
    if isinstance(error, DataDamaged):
        return frozenset(TopicPartition(error.topic, partition) for partition, _, _ in error.ranges)
    return frozenset()


def _slice(batch: Batch, start: int, end: int) -> Batch:
    return Batch(batch.topic, batch.partition, batch.offsets[start:end], batch.records[start:end])
