"""The loop of every service that reads topics through a consumer group: join, poll, commit, drain, join again."""

import asyncio
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn, Protocol

import structlog

from services.core import metrics
from services.core.backoff import Backoff
from services.core.broker.contract import Broker, Consumer, Lag, Start
from services.core.broker.errors import BrokerError, DataDamaged, HomeChanged, NotOwner, OffsetOutOfRange
from services.core.broker.offset_tracker import OffsetTracker
from services.core.broker.record import Batch, Damage, TopicPartition
from services.core.process.lifecycle import wait_for_stop
from services.core.process.progress import Step

log = structlog.get_logger()

REVOKE_WAIT_S = 5.0
"""How long a revoked partition waits for its records: long enough for a healthy receiver, shorter than a request's time-out."""
COMMIT_WAIT_S = 15.0
"""How long a revoked partition waits for its last report and commit. Longer than it takes to replace a broker that leads one of
the topics: what was delivered and is not committed is delivered again by the next owner."""
_POLL_WAIT_S = 1.0
_MAX_POLL_RECORDS = 1000
_POLL_ERROR_WAIT_S = 0.5
_LAG_INTERVAL_S = 2.0
_LAG_LIMIT_S = 30.0
"""Of each question for it: a disk or broker that never answers must not hide that a topic moves. A migration waits 120 s."""
_NO_TOPIC_WAIT_S = 30.0
_REJOIN_WAIT_S, _MAX_REJOIN_WAIT_S = 0.2, 5.0
_COMMIT_WAIT_S, _MAX_COMMIT_WAIT_S = 0.1, 5.0
_MOVE_LIMIT_S = 600.0
"""Of a join or a leave. Each request of it has a time-out, but on Kinesis it may make one for each shard."""


class Ledger(Protocol):
    """Reports the settled events of a group to the observer."""

    async def measure_ends(self) -> None:
        """Called just before the lag is measured. Raises BrokerError kinds."""

    async def set_lags(self, own: Mapping[TopicPartition, Lag]) -> None:
        """The lag of this member's partitions. Raises BrokerError kinds."""

    async def report(self) -> None:
        """Returns when every event settled before is reported durably. Raises BrokerError kinds."""


class Processor(Protocol):
    """Processes the records of one membership. Only the `async` methods wait."""

    @property
    def tracker(self) -> OffsetTracker:
        """The membership adds each batch before `accept`; the processor settles its records."""

    @property
    def ledger(self) -> Ledger: ...

    def open(self, membership: "Membership", tasks: asyncio.TaskGroup) -> Iterable[Coroutine[Any, Any, None]]:
        """The group is joined: from now on tasks belong to `tasks`. Returns work that runs until the processor is drained."""

    async def wait_for_room(self) -> int:
        """How many records may be polled, at least one. Waits until then."""

    def reads(self, topic: str) -> bool:
        """Whether batches of this topic are accepted. Other topics are not polled."""

    async def prepare(self, polled: Collection[TopicPartition], assigned: Collection[TopicPartition]) -> None:
        """Called before batches of `polled` are accepted. If a partition is revoked meanwhile, its batches are dropped."""

    def accept(self, batch: Batch) -> None:
        """These records are in flight from now on."""

    async def drain_partitions(self, partitions: frozenset[TopicPartition], limit: float) -> None:
        """Start no more work on these, finish the started work within `limit` seconds, and forget the other records."""

    def disown(self, partitions: Collection[TopicPartition]) -> None:
        """These belong to another member. Their unfinished work must not settle anything."""

    async def drain(self, limit: float) -> bool:
        """As `drain_partitions`, for all partitions, before the membership ends. Returns whether `limit` was enough."""

    def stop(self) -> None:
        """End all work now. Unsettled records stay unsettled."""

    def committed(self) -> None:
        """What was settled is reported and committed, as far as it was committable when the commit began."""

    def update_metrics(self) -> None:
        """Called at every commit interval, and after `Membership.commit_soon`."""

    def steps(self) -> Iterable[Step]:
        """What it does now and must end soon by itself, for the `ProgressWatch`. Nothing while it waits for anything else: for
        records, a time, a receiver that is down or throttled, a pause, or a commit."""


class Membership:
    """One membership in a consumer group. The words, once:

    - A record is **in flight** from `accept` until it is settled.
    - It is **settled** when it is final for the group: delivered, or durable in another topic.
    - The **committable** offset of a partition is the last one up to which every record is settled (`OffsetTracker`).
    - The **committed** offset is durable at the broker: the next owner continues behind it.

    Reported before committed: the ledger's report of the settled events is durable before their offsets are committed.

    When a partition is revoked: (1) no work on its other records is started, and the processor has REVOKE_WAIT_S seconds to
    finish the started work; (2) the settled records are reported and committed, repeated for COMMIT_WAIT_S seconds; (3) the
    tracker forgets the partition and the processor disowns it. The next owner polls the unsettled records again. So events may
    be delivered twice, and none is lost.

    An offset is only valid for the ownership in which it was polled: the same partition may come back as a topic that was
    deleted and created anew, with other events at the same offsets. So an offset is committed only if its partition was not
    revoked since (`still_owned`), not even while the report was written. Work on a revoked partition settles nothing.

    Missing or damaged records stop their partition, and are counted and logged. Other partitions continue. Nothing is reset
    or skipped. A membership is made before the join, because a revocation may come at once.
    """

    def __init__(
        self, group: str, processor: Processor, commit_interval: float, set_up: Callable[[bool], None]
    ) -> None:
        self._group, self._processor, self._set_up = group, processor, set_up
        self._commit_interval = commit_interval
        self._consumer: Consumer | None = None
        self._committing = asyncio.Lock()
        self._soon = asyncio.Event()
        self._over = asyncio.Event()
        self._is_failing_to_commit = self._leaving = False
        self._polls = self._commits = 0
        """How many were begun."""
        self._is_polling = self._is_committing = False
        self._stuck: set[TopicPartition] = set()
        """Partitions in which records are missing."""
        self._revoked: set[TopicPartition] = set()
        """Partitions that are being revoked, or were since the last poll returned."""
        self._being_revoked: set[TopicPartition] = set()
        self._shown: set[TopicPartition] = set()
        """Partitions whose lag is a metric."""

    def commit_soon(self) -> None:
        """Report and commit now instead of at the next interval, unless the last commit failed. Does not wait."""
        self._soon.set()

    def end(self) -> None:
        """Drain and leave the group. The GroupMember then joins again."""
        self._over.set()

    def pause(self, source: TopicPartition) -> None:
        """Poll no records of this partition."""
        if self._consumer is not None:
            self._consumer.pause([source])

    def resume(self, source: TopicPartition) -> None:
        """Undo `pause`."""
        if self._consumer is not None and source not in self._stuck:
            self._consumer.resume([source])

    def steps(self) -> Iterator[Step]:
        """For the `ProgressWatch`."""
        if self._is_polling:
            yield Step("a poll has not ended", self._polls)
        if self._is_committing:
            yield Step("a report or its commit has not ended", self._commits)
        yield from self._processor.steps()

    async def run(self, consumer: Consumer, stopping: asyncio.Event, drain: float) -> bool:
        """Until `stopping` or `end`. Then drain within `drain` seconds, and commit within REVOKE_WAIT_S more. Returns whether the
        drain time was enough. Raises an ExceptionGroup when the membership cannot continue.
        """
        self._consumer = consumer
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(work) for work in self._processor.open(self, group)]
            beside.append(group.create_task(self._keep_committing()))
            beside.append(group.create_task(self._keep_measuring(consumer)))
            polling = group.create_task(self._poll(consumer))
            ends = [group.create_task(event.wait()) for event in (stopping, self._over)]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for task in (polling, *ends):
                    task.cancel()
                self._is_polling = False
                is_drained = await self._processor.drain(drain)
            finally:  # also when a task failed: no timer may start work in a group that is over
                self._processor.stop()
                self._leaving = True  # a report that hangs must not keep the partitions from the next owner
            for work in beside:
                work.cancel()
            await self._try_commit(REVOKE_WAIT_S)
        self._processor.update_metrics()
        return is_drained

    async def revoke(self, partitions: frozenset[TopicPartition]) -> None:
        """`contract.OnRevoke`, as the class says."""
        self._revoked |= partitions
        self._being_revoked |= partitions
        try:
            await self._processor.drain_partitions(partitions, REVOKE_WAIT_S)
            if self._consumer is not None:
                await self._try_commit(REVOKE_WAIT_S if self._leaving else COMMIT_WAIT_S)
        finally:  # also when the backend cancels this: the rest would block the partitions when they come back
            self._disown(partitions)
            self._being_revoked -= partitions
            if self._stuck and self._stuck <= partitions and not self._leaving:
                self._set_up(True)
            self._stuck -= partitions
            self._hide_lags(partitions)

    def _disown(self, partitions: Collection[TopicPartition]) -> None:
        self._processor.tracker.remove(partitions)
        self._processor.disown(partitions)

    async def _poll(self, consumer: Consumer) -> NoReturn:
        processor, is_failing = self._processor, False
        while True:
            self._is_polling = False
            room = min(await processor.wait_for_room(), _MAX_POLL_RECORDS)
            self._polls += 1
            self._is_polling = True
            consumer.pause({source for source in consumer.assignment() if not processor.reads(source.topic)})
            try:
                batches = await consumer.poll(max_records=room, max_wait=_POLL_WAIT_S)
            except (OffsetOutOfRange, DataDamaged) as error:
                self._stop_reading(consumer, error)
                continue
            except BrokerError as error:
                if not error.retriable:
                    raise
                if not is_failing:
                    log.warning("poll_failed", group=self._group, error=str(error))
                is_failing, self._is_polling = True, False
                await asyncio.sleep(_POLL_ERROR_WAIT_S)
                continue
            is_failing = False
            self._revoked = set(self._being_revoked)  # a poll that began before may return records of these
            await processor.prepare({batch.source for batch in batches}, consumer.assignment())
            for batch in batches:  # in one turn of the event loop: nothing is revoked between this check and `accept`
                if batch.source in self._revoked or not processor.reads(batch.topic):
                    continue
                if batch.damage is not None:
                    _log_damage(self._group, batch, batch.damage)
                processor.tracker.add(batch)
                processor.accept(batch)

    def _stop_reading(self, consumer: Consumer, error: OffsetOutOfRange | DataDamaged) -> None:
        missing = _count_missing(error)
        for source in missing.keys() - self._stuck:
            metrics.BROKER_GAP_RECORDS.labels(self._group, source.topic).inc(missing[source])
            log.error(
                "records_missing",
                group=self._group,
                topic=source.topic,
                partition=source.partition,
                missing=missing[source],
                error=str(error),
                hint="this partition waits; the others continue. Try: stop the service, repair the log or move the group, start "
                "it ('When a partition stops' in docs/operating.md)",
            )
        if missing.keys() <= self._stuck:
            raise error  # nothing can be paused, or a pause did not help: leave, and join again later
        self._stuck |= missing.keys()
        self._set_up(False)
        consumer.pause(set(missing))

    async def commit(self) -> None:
        """Report, then commit the committable offsets. Repeated until it succeeds. Raises BrokerError kinds that are not
        retriable.
        """
        retry = Backoff(_COMMIT_WAIT_S, _MAX_COMMIT_WAIT_S)
        while True:
            try:
                await self._commit_once()
            except BrokerError as error:
                if not error.retriable:
                    raise
                if retry.fail():
                    log.warning("commit_failed", group=self._group, error=str(error))
                await retry.wait()
            else:
                return

    async def _keep_committing(self) -> NoReturn:
        while True:
            if self._is_failing_to_commit:
                await asyncio.sleep(self._commit_interval)
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._commit_interval):
                        await self._soon.wait()
            self._soon.clear()
            await self._try_commit()
            self._processor.update_metrics()

    async def _try_commit(self, limit: float | None = None) -> None:
        """One try, which is repeated at the next interval; with a `limit`: tries for so many seconds. To commit twice is
        harmless.
        """
        try:
            async with asyncio.timeout(limit):
                await (self._commit_once() if limit is None else self.commit())
        except (BrokerError, TimeoutError) as error:
            if not self._is_failing_to_commit:
                reason = f"no result within {limit:g} s" if limit is not None and not str(error) else str(error)
                log.warning(
                    "commit_failed", group=self._group, error=reason, hint="the commit is repeated at every interval"
                )
            self._is_failing_to_commit = True
        else:
            self._is_failing_to_commit = False

    async def _commit_once(self) -> None:
        """Raises BrokerError kinds but NotOwner, which is counted."""
        assert self._consumer is not None
        tracker = self._processor.tracker
        async with self._begin_commit():
            marks = tracker.committable()
            refused: set[TopicPartition] = set()
            await self._processor.ledger.report()
            marks = tracker.still_owned(marks)
            try:
                if marks:
                    await self._consumer.commit(marks)
            except NotOwner as error:
                refused = {TopicPartition(*source) for source in error.partitions}
                metrics.BROKER_COMMITS_REFUSED.labels(self._group).inc(len(refused))
                # Partitions that this member owns again are tracked anew; the refused offsets are of the earlier ownership.
                self._disown(refused - self._consumer.assignment())
            tracker.record_commit(marks, refused=refused)
            self._processor.committed()

    @asynccontextmanager
    async def _begin_commit(self) -> AsyncIterator[None]:
        """One at a time."""
        async with self._committing:
            self._commits += 1
            self._is_committing = True
            try:
                yield
            finally:
                self._is_committing = False

    async def _keep_measuring(self, consumer: Consumer) -> NoReturn:
        """A member without room does not poll. So this notices for it that a topic moves to another broker."""
        while True:
            try:
                await self._measure(consumer)
            except HomeChanged:
                raise
            except (BrokerError, TimeoutError) as error:
                log.debug("lag_unknown", group=self._group, error=str(error))
            await asyncio.sleep(_LAG_INTERVAL_S)

    async def _measure(self, consumer: Consumer) -> None:
        ledger, failed = self._processor.ledger, None
        try:
            async with asyncio.timeout(_LAG_LIMIT_S):
                await ledger.measure_ends()
        except (BrokerError, TimeoutError) as error:
            failed = error  # of another topic: it must not hide that this member's topics move
        async with asyncio.timeout(_LAG_LIMIT_S):
            lags = await consumer.lag()
        self._show_lags(lags)
        if failed is not None:
            raise failed
        async with asyncio.timeout(_LAG_LIMIT_S):
            await ledger.set_lags(lags)

    def _show_lags(self, lags: Mapping[TopicPartition, Lag]) -> None:
        for source, lag in lags.items():
            labels = (self._group, source.topic, str(source.partition))
            metrics.BROKER_LAG_RECORDS.labels(*labels).set(lag.records)
            metrics.BROKER_LAG_SECONDS.labels(*labels).set(lag.millis / 1000)
        self._shown |= lags.keys()

    def _hide_lags(self, partitions: Collection[TopicPartition]) -> None:
        """The next owner shows the lag of these."""
        for source in self._shown.intersection(partitions):
            labels = (self._group, source.topic, str(source.partition))
            metrics.BROKER_LAG_RECORDS.remove(*labels)
            metrics.BROKER_LAG_SECONDS.remove(*labels)
            self._shown.discard(source)


class GroupMember:
    """A member of a consumer group over all its memberships: it joins, and joins again when a membership ends.

    make_processor: called for each membership. find_topics: the topics to read; without any it does not join.
    set_up: called with whether the member is in its group and reads.
    """

    def __init__(
        self,
        broker: Broker,
        group: str,
        make_processor: Callable[[], Processor],
        find_topics: Callable[[], Awaitable[Sequence[str]]],
        *,
        start: Start = "earliest",
        commit_interval: float,
        set_up: Callable[[bool], None] = lambda _is_up: None,
    ) -> None:
        self._broker, self._group, self._start = broker, group, start
        self._make_processor, self._find_topics = make_processor, find_topics
        self._commit_interval, self._set_up = commit_interval, set_up
        self._retry = Backoff(_REJOIN_WAIT_S, _MAX_REJOIN_WAIT_S)
        self._membership: Membership | None = None
        self._joins = 0
        """How many were begun."""
        self._moving: str | None = None
        """The join or leave that goes on now, for the `ProgressWatch`."""
        self.waits_for: str | None = "has not joined its group yet"
        """Why it is not in its group, for a person; None while it is."""
        self.is_drained = True
        """Whether all records in flight were settled when the last membership ended."""

    async def run(self, stopping: asyncio.Event, drain: float) -> None:
        """Until `stopping`; then drain within about `drain` seconds. Raises nothing: broker failures are waited out.

        The waits grow while joins fail, and begin anew after each successful join.
        """
        while not stopping.is_set():
            try:
                await self._join(stopping, drain)
            except* Exception as errors:  # any error: uncommitted records are polled again
                self.waits_for = str(self._count_failure(errors))
                self._set_up(False)
            if not stopping.is_set():
                await self._retry.wait(stopping)
        self._set_up(False)

    def steps(self) -> Iterable[Step]:
        """For the `ProgressWatch`: none while it waits for its topics, or for its next join."""
        if self._moving is not None:
            return (Step(self._moving, self._joins, _MOVE_LIMIT_S),)
        return () if self._membership is None else self._membership.steps()

    async def _join(self, stopping: asyncio.Event, drain: float) -> None:
        topics = await self._find_topics()
        if not topics:
            await wait_for_stop(stopping, _NO_TOPIC_WAIT_S)
            return
        membership = Membership(self._group, self._make_processor(), self._commit_interval, self._set_up)
        joining = self._broker.consumer(self._group, topics, start=self._start, on_revoke=membership.revoke)
        self._joins += 1
        self._moving = "a join of its group has not ended"
        try:
            async with joining as consumer:
                self._moving = None
                log.info("group_joined", group=self._group, topics=topics)
                self._retry.reset()
                self.waits_for = None
                self._set_up(True)
                self._membership = membership
                try:
                    self.is_drained = await membership.run(consumer, stopping, drain)
                finally:
                    self._membership, self._moving = None, "a leave of its group has not ended"
        finally:
            self._moving = None

    def _count_failure(self, errors: BaseExceptionGroup[Exception]) -> BaseException:
        """Returns the first cause. Logs failures 1, 2, 4, 8 and so on of a series."""
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        reason = type(first).__name__
        metrics.BROKER_REJOINS.labels(self._group, reason).inc()
        self._retry.fail()
        if self._retry.failures & (self._retry.failures - 1) == 0:
            log.error(
                "membership_failed",
                group=self._group,
                error=str(first),
                kind=reason,
                failures=self._retry.failures,
                hint="the member joins its group again by itself. Nothing is lost. If topics are missing, try: penstock apply",
                exc_info=None if isinstance(first, BrokerError) else first,
            )
        return first


def _log_damage(group: str, batch: Batch, damage: Damage) -> None:
    metrics.BROKER_DAMAGED_RECORDS.labels(group, batch.topic).inc(damage.last - damage.first + 1)
    log.error(
        "records_damaged",
        group=group,
        topic=batch.topic,
        partition=batch.partition,
        first=damage.first,
        last=damage.last,
        error=damage.detail,
        hint="the stored bytes of these records go to the dead letters. The partition continues. Try: check the brokers' disks",
    )


def _count_missing(error: OffsetOutOfRange | DataDamaged) -> dict[TopicPartition, int]:
    if isinstance(error, OffsetOutOfRange):
        return {TopicPartition(error.topic, error.partition): error.missing}
    missing = Counter[TopicPartition]()
    for partition, first, last in error.ranges:
        missing[TopicPartition(error.topic, partition)] += last - first + 1
    return missing
