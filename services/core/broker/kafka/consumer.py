"""One member of a group, on AIOKafkaConsumer with auto-commit and automatic reset off."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, NoReturn

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as KafkaPartition
from aiokafka import errors as kafka

from services.core.broker.contract import Lag, OnRevoke, Start
from services.core.broker.errors import BrokerClosed, BrokerError, NotAllowed, NotOwner
from services.core.broker.existing import NO_EXISTING, ExistingTopics
from services.core.broker.kafka.aiokafka_internals import (
    FetchBudget,
    connect,
    disconnect,
    epochs_between,
    generation_of,
    read_by_id,
    send_commit,
    send_heartbeat,
)
from services.core.broker.kafka.assignment import Assignment
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.error_codes import bounded, classify, find_cause
from services.core.broker.kafka.eviction import evict_dead
from services.core.broker.kafka.leaders import LagMeter, partitions_of
from services.core.broker.kafka.log_check import Epochs, LogCheck
from services.core.broker.kafka.offsets import CommitMetadata
from services.core.broker.kafka.positions import GroupStarts, find_positions
from services.core.broker.kafka.reader import ErrorFactory, find_damage, find_gaps
from services.core.broker.kafka.record_batch import make_batch
from services.core.broker.record import Batch, TopicPartition
from services.core.clock import boot_seconds

log = structlog.get_logger()


class FreezeDetector:
    """Notices that this process was frozen (stopped, suspended, swapped out, a blocked loop) so long that it may have lost its
    partitions.

    After the freeze, thousands of fetched records could be returned before the next heartbeat is answered, although another
    member may have processed them. limit: seconds without a run of the loop. clock: one that goes on during a suspend.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = boot_seconds) -> None:
        self._limit, self._clock = limit, clock
        self._alive_at = clock()
        self._happened = self._is_reported = False

    async def watch(self) -> NoReturn:
        """Record that the loop runs, several times within the limit, until cancelled."""
        while True:
            await asyncio.sleep(self._limit / 5)
            self._check()

    def has_frozen(self) -> bool:
        """Whether it was frozen since the membership was last certain."""
        self._check()
        return self._happened

    def reset(self) -> None:
        """The membership is certain again."""
        self._happened = self._is_reported = False

    def is_first_report(self) -> bool:
        """Whether this is the first call since the freeze."""
        is_reported, self._is_reported = self._is_reported, True
        return not is_reported

    def _check(self) -> None:
        now = self._clock()
        self._happened |= now - self._alive_at > self._limit
        self._alive_at = now


_Fetched = Mapping[KafkaPartition, list[Any]]

_GRACE = 0.05
"""Seconds beyond getmany's own time-out, which does not count while a rebalance runs."""


class SharedResources(NamedTuple):
    """Shared by all members of a process. prefix: of the fleet's names on the cluster. existing: topics of others."""

    cluster: Cluster
    begun: GroupStarts
    budget: FetchBudget
    prefix: str = ""
    existing: ExistingTopics = NO_EXISTING


@asynccontextmanager
async def join(
    shared: SharedResources,
    group: str,
    topics: Collection[str],
    start: Start,
    on_revoke: OnRevoke,
) -> AsyncIterator["KafkaConsumer"]:
    """A member for the time of the context; see `KafkaBroker.consumer`."""
    cluster, timing = shared.cluster, shared.cluster.timing
    await partitions_of(cluster, topics)
    await evict_dead(cluster, group)
    client = await connect(cluster, group, shared.budget)
    assigned = Assignment(on_revoke, timing.drain, lambda: generation_of(client))
    freeze_detector = FreezeDetector(timing.session / 2)
    consumer = KafkaConsumer(shared, client, assigned, group, start, freeze_detector)
    assigned.on_assigned = consumer.position_early
    read_by_id(client, assigned.topic_of)
    client.subscribe(list(topics), listener=assigned)
    watching = asyncio.create_task(freeze_detector.watch(), name=f"freeze_detector {group}")
    try:
        yield consumer
    finally:
        watching.cancel()
        try:
            await assigned.close()
        finally:
            await disconnect(client)


class KafkaConsumer:
    """The contract's `Consumer`."""

    def __init__(
        self,
        shared: SharedResources,
        client: AIOKafkaConsumer,
        assigned: Assignment,
        group: str,
        start: Start,
        freeze_detector: FreezeDetector,
    ) -> None:
        self._cluster, self._begun, self._prefix = shared.cluster, shared.begun, shared.prefix
        self._translate = shared.existing.translate
        self._client, self._own = client, assigned
        self._group, self._start, self._freeze_detector = group, start, freeze_detector
        self._positioning, self._committing = asyncio.Lock(), asyncio.Lock()
        self._log = LogCheck(shared.cluster, assigned, group)
        self._lag = LagMeter(shared.cluster)
        self._dealt: dict[str, int] = {}
        self._checked_at = asyncio.get_running_loop().time()

    async def poll(self, *, max_records: int, max_wait: float) -> list[Batch]:
        """As in the contract. Finding new partitions' positions, or the cause of a failed read, may take longer than `max_wait`.

        Cancelling is safe: aiokafka removes nothing from its buffer before its last await.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + max_wait
        while True:
            self._own.raise_failed()
            if self._own.unpositioned:
                await self._position()
            epoch = self._own.epoch
            batches = self._skip_damage()
            if not batches:
                fetched = await self._fetch(max_records, max(0.0, deadline - clock()))
                epochs = self._epochs_of(fetched)
                if await self._may_return(fetched, epochs, epoch):
                    batches = self._make_batches(fetched, epochs)
            if batches:
                return batches
            if clock() >= deadline:
                self._own.raise_failed()
                return []

    async def _confirm_membership(self, epoch: int) -> bool:
        """Ask the group after a freeze. While the answer is not certain, the fetched records are not returned."""
        certain = False
        try:
            async with bounded(f"heartbeat of group {self._group}", self._cluster.timing.request):
                certain = await send_heartbeat(self._client) and epoch == self._own.epoch
        except BrokerError as error:
            log.info("kafka_membership_unknown", group=self._group, error=str(error))
        finally:  # also when it is cancelled: no record may be skipped
            if not certain:
                self._seek_back()
        if certain:
            self._freeze_detector.reset()
        else:
            if self._freeze_detector.is_first_report():
                log.warning(
                    "kafka_stood_still",
                    group=self._group,
                    hint="this process was frozen. It asks its group before it reads on",
                )
            await asyncio.sleep(_GRACE)
        return certain

    def _epochs_of(self, fetched: _Fetched) -> Epochs:
        """The epochs that wrote these records. To be asked before the next await: aiokafka fetches on meanwhile, and what it gets
        from a log that was cut off may take the place of what is known of these offsets."""
        return {
            source: epochs_between(self._client, source, rows[0].offset, rows[-1].offset)
            for source, rows in fetched.items()
        }

    async def _may_return(self, fetched: _Fetched, epochs: Epochs, epoch: int) -> bool:
        """Whether the fetched records may be returned: this member owns them, in the same log. Else they are read again."""
        if fetched and self._freeze_detector.has_frozen() and not await self._confirm_membership(epoch):
            return False
        suspects, newer = self._log.find_suspects(epochs)
        now = asyncio.get_running_loop().time()
        if not suspects and now - self._checked_at < self._cluster.timing.metadata:
            return True
        certain = False
        try:
            changed = await self._log.find_changed(suspects, newer)
            self._checked_at = now
            if changed and epoch == self._own.epoch:
                await self._own.reassign(changed)
            certain = not changed and epoch == self._own.epoch
        except BrokerError as error:
            log.info("kafka_log_unknown", group=self._group, error=str(error))
            await asyncio.sleep(_GRACE)
            certain = not suspects and epoch == self._own.epoch
        finally:  # also when it is cancelled: no record may be skipped
            if not certain:
                self._seek_back()
        return certain

    def _seek_back(self) -> None:
        """Read again from behind the last returned record."""
        assigned = self._client.assignment()
        for source in self._own.owned - self._own.unpositioned:
            if KafkaPartition(*source) in assigned:
                self._client.seek(KafkaPartition(*source), self._own.next_read[source])

    def _skip_damage(self) -> list[Batch]:
        """The batches in place of damaged records that are next; aiokafka goes on behind them."""
        batches = self._own.pop_replacements()
        for batch in batches:
            self._client.seek(KafkaPartition(*batch.source), batch.offsets[-1] + 1)
        return batches

    async def _fetch(self, max_records: int, wait: float) -> _Fetched:
        """The records that aiokafka has, or fetches within `wait` seconds. Marks unreadable partitions as failed."""
        try:
            if self._own.is_damage_near():
                max_records = 1
            async with asyncio.timeout(wait + _GRACE):
                fetched: _Fetched = await self._client.getmany(
                    timeout_ms=math.ceil(wait * 1000), max_records=max_records
                )
                return fetched
        except (TimeoutError, kafka.NoOffsetForPartitionError):
            return {}  # a rebalance runs, or a partition was just assigned and has no position yet
        except kafka.OffsetOutOfRangeError as error:
            await self._find_gap({TopicPartition(*source): offset for source, offset in error.args[0].items()})
        except kafka.ConsumerStoppedError as error:
            raise BrokerClosed("the consumer was closed") from error
        except (kafka.CorruptRecordException, kafka.RecordTooLargeError) as error:
            await self._examine(error)
        except kafka.KafkaError as error:
            cause = find_cause(error)
            rights = [f"Read on group {self._group}", *(f"Read on topic {name}" for name in cause.args[:1])]
            found = classify(cause, f"poll of group {self._group}", *rights)
            if isinstance(found, NotAllowed):  # aiokafka's tasks have ended: it must join again
                raise BrokerError(str(found)) from error
            raise found from error
        except Exception as error:
            if not await self._examine(error):
                raise
        return {}

    async def _find_gap(self, wanted: Mapping[TopicPartition, int]) -> None:
        """These offsets are not stored: the topic is another one now, the log was cut off, or retention removed them.

        While a new partition's position is being found, aiokafka reads from the commit, which may be for an earlier topic, or
        beyond a cut: that is no gap. Behind the mark of a transaction it is beyond the next to read, and reads again from there.
        """
        own, epoch = self._own, self._own.epoch
        if any(own.next_read.get(source) != at for source, at in wanted.items()):
            wanted = {source: at for source, at in wanted.items() if own.next_read.get(source) == at}
            self._seek_back()
        ids = {source.topic: own.metadata[source].topic for source in wanted}
        read = {source: last for source in wanted if (last := own.last_read(source)) is not None}
        changed = await self._log.find_changed(read)
        if changed:  # the others are read again, and fail again
            if epoch == own.epoch:
                await own.reassign(changed)
            return
        gaps = await find_gaps(self._cluster, wanted, ids)
        if epoch == own.epoch:
            self._fail({source: gap for source, gap in gaps.items() if own.next_read.get(source) == wanted[source]})

    async def _examine(self, error: Exception) -> bool:
        """Find the damage. The records before it are returned first, one by one, so that none is skipped.

        aiokafka has moved past records that it never returned, so it is set back first. Gives whether there is damage.
        """
        own = self._own
        positions = {source: own.next_read[source] for source in own.owned - own.unpositioned - own.failed.keys()}
        for source, offset in positions.items():
            self._client.seek(KafkaPartition(*source), offset)
        ids = {source.topic: own.metadata[source].topic for source in positions}
        found = await find_damage(self._cluster, positions, ids)
        for source, damaged in found.items():
            if own.next_read.get(source) != positions[source]:
                continue  # revoked meanwhile; its owner will find the damage
            if not damaged.is_next:
                own.damaged_ahead[source] = damaged.first
            elif damaged.replacement is not None:
                own.replacements[source] = damaged.replacement
            else:
                self._fail({source: damaged.fault})
        if not found:
            log.warning("kafka_read_failed_once", group=self._group, error=repr(error))
        return bool(found)

    def _fail(self, faults: Mapping[TopicPartition, ErrorFactory]) -> None:
        for source, fault in faults.items():
            if source in self._own.owned:
                self._own.failed[source] = fault
                self._client.pause(KafkaPartition(*source))

    def _make_batches(self, fetched: _Fetched, epochs: Epochs) -> list[Batch]:
        own = self._own
        batches = []
        for (topic, partition), rows in fetched.items():
            source = TopicPartition(topic, partition)
            if source not in own.owned or source in own.unpositioned:
                continue  # fetched before its position was found; finding it seeks back
            own.record_read(source, rows[-1].offset, epochs[KafkaPartition(*source)])
            translate = self._translate.get(topic)
            batch = make_batch(source, rows, timed=translate is None)
            batches.append(batch if translate is None else translate(batch, own.metadata[source].topic))
        return batches

    async def position_early(self) -> None:
        """Find positions at once, so that "latest" is the time of the assignment; when that fails or is slow, poll does it."""
        known = {source.topic: self._client.partitions_for_topic(source.topic) for source in self._own.owned}
        self._dealt = {topic: len(numbers) for topic, numbers in known.items() if numbers}
        try:
            async with asyncio.timeout(self._cluster.timing.session / 2):
                await self._position()
        except (BrokerError, TimeoutError) as error:
            log.info("kafka_placement_postponed", group=self._group, error=str(error))

    async def _position(self) -> None:
        """Find the positions of newly assigned partitions, commit them, and seek there."""
        async with self._positioning:
            own = self._own
            sources, epoch = own.unpositioned, own.epoch
            if not sources:
                return
            found = await find_positions(
                self._cluster,
                self._begun,
                self._group,
                sources,
                self._start,
                self._prefix,
                dealt=self._dealt,
                others=self._translate.keys(),
            )
            if epoch != own.epoch:
                return
            fixed = {source: (found.position[source], found.metadata[source]) for source in found.fresh}
            async with self._committing:  # after the commits of the earlier assignment
                if await self._commit(fixed):
                    return
            await self._begun.record(self._group, found.begun)
            if epoch != own.epoch or not own.unpositioned.issuperset(sources):
                return
            own.begin_at(found)
            for source, position in found.position.items():
                self._client.seek(KafkaPartition(*source), position)
                if source in found.lost:
                    self._client.pause(KafkaPartition(*source))
                elif source not in own.paused:  # it may have been when it was owned before: see `Assignment.reassign`
                    self._client.resume(KafkaPartition(*source))

    async def commit(self, processed: Mapping[TopicPartition, int]) -> None:
        """As in the contract. Unavailable when the group's coordinator cannot be reached; committing again is harmless.

        Commits of one member are sent one after the other, under the generation in which its partitions were assigned.
        """
        epoch = self._own.epoch
        async with self._committing:
            if epoch != self._own.epoch:
                raise NotOwner(frozenset(processed))  # the caller's offsets belong to another assignment
            positions, refused = self._own.select_commits(processed)
            refused |= await self._commit(
                {source: (at, self._own.metadata_at(source, at)) for source, at in positions.items()}
            )
            for source in (positions.keys() - refused) & self._own.next_commit.keys():
                self._own.next_commit[source] = positions[source]
        if refused:
            raise NotOwner(frozenset(refused))

    async def _commit(self, rows: Mapping[TopicPartition, tuple[int, CommitMetadata]]) -> frozenset[TopicPartition]:
        """The partitions that are refused because the group has a new generation."""
        async with bounded(f"commit of group {self._group}", self._cluster.timing.request):
            return await send_commit(self._client, self._group, self._own.generation, rows)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """As in the contract. Lasts until the partition is revoked."""
        for source in self._own.owned.intersection(partitions):
            self._own.paused.add(source)
            self._client.pause(KafkaPartition(*source))

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        for source in self._own.owned.intersection(partitions):
            self._own.paused.discard(source)
            if source not in self._own.failed:
                self._client.resume(KafkaPartition(*source))

    def assignment(self) -> frozenset[TopicPartition]:
        """As in the contract, without partitions whose position is not known yet."""
        return self._own.owned - self._own.unpositioned

    async def lag(self) -> dict[TopicPartition, Lag]:
        """As in the contract; about two requests per leading node, and a small read per lagging partition that moved."""
        if self._own.unpositioned:
            await self._position()
        own = self._own
        return await self._lag.measure(
            dict(own.next_commit), {source.topic: own.metadata[source].topic for source in own.next_commit}
        )
