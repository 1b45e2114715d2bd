"""One membership of a lane in its group: poll, take, commit what is settled, drain what is revoked, say what is missing."""

import asyncio
from typing import NoReturn

import structlog

from services.core import metrics
from services.core.broker.contract import Consumer
from services.core.broker.errors import BrokerError, DataDamaged, NotOwner, OffsetOutOfRange
from services.core.broker.record import TopicPartition
from services.core.group_watch import GroupWatch
from services.expel.dispatch import Dispatcher
from services.expel.inheritance import Inheritance
from services.expel.meter import LaneMeter
from services.expel.standing import Mode, Standing

log = structlog.get_logger()

_POLL_WAIT = 1.0
_POLL_RECORDS = 1000
_REVOKE_WAIT = 5.0
"""Seconds that a revoked partition waits for requests under way: a healthy receiver's answer, not a hanging one's time-out."""
_LAG_INTERVAL = 2.0
_ERROR_WAIT = 0.5


class Session:
    """Made before joining, because revocation may be called from the first moment on."""

    def __init__(
        self,
        group: str,
        dispatcher: Dispatcher,
        meter: LaneMeter,
        commit_interval: float,
        inheritance: Inheritance,
        standing: Standing | None = None,
    ) -> None:
        self._group, self._dispatcher, self._meter = group, dispatcher, meter
        self._commit_interval, self._inheritance = commit_interval, inheritance
        self._standing = standing
        self.mode = Mode.RUNNING
        self._is_over = asyncio.Event()
        self._is_failing_to_commit = False
        self._consumer: Consumer | None = None
        self._watch = GroupWatch(group)
        self._stuck: set[TopicPartition] = set()
        self._revoked: set[TopicPartition] = set()
        """Since the last look at what a predecessor left: polled batches of these are no longer ours."""

    async def run(self, consumer: Consumer, stopping: asyncio.Event, drain: float) -> bool:
        """Deliver or park until `stopping`, or until another mode needs another membership; then drain and commit.

        Returns whether all that was under way is settled within `drain` seconds.
        Raises an ExceptionGroup of BrokerErrors when the membership cannot go on.
        """
        self._consumer = consumer
        async with asyncio.TaskGroup() as group:
            self._dispatcher.open(group)
            self._begin()
            polling = group.create_task(self._poll(consumer))
            ticking: list[asyncio.Task[None]] = [
                group.create_task(self._keep_committing(consumer)),
                group.create_task(self._keep_measuring(consumer)),
            ]
            if self._standing is not None:
                ticking.append(group.create_task(self._follow_operator(self._standing)))
                ticking.append(group.create_task(self._follow_receiver(self._standing)))
                if self.mode is Mode.REPLAYING:
                    ticking.append(group.create_task(self._standing.watch_replay()))
            ends = [group.create_task(event.wait()) for event in (stopping, self._is_over)]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                for task in (polling, *ends):
                    task.cancel()
                is_drained = await self._dispatcher.drain(drain)
            finally:  # also when a task failed: no timer may start work in a group that is over
                self._dispatcher.stop()
            for ticker in ticking:
                ticker.cancel()
            await self._commit(consumer)
        self._meter.flush()
        return is_drained

    def _begin(self) -> None:
        if self._standing is None:
            return
        self.mode = self._standing.mode
        self._meter.paused(self.mode is Mode.PAUSED)
        if self.mode is Mode.PAUSED:
            self._park(self._standing)
            return
        if self.mode is Mode.REPLAYING:
            self._dispatcher.replay()
        if self._standing.was_parked:
            self._standing.was_parked = False
            self._dispatcher.ease_in()
            log.info("destination_resumed", group=self._group, mode=self.mode.value)

    def _park(self, standing: Standing) -> None:
        self.mode, standing.was_parked = Mode.PAUSED, True
        self._meter.up(False)
        self._meter.paused(True)
        log.warning("destination_paused", group=self._group, reason=standing.reason, hint="its events are parked")
        self._dispatcher.park(standing.reason)

    async def _follow_operator(self, standing: Standing) -> None:
        """Only a running lane is paused as it is: with partitions it would give to others who may not know of it yet."""
        while (mode := standing.mode) is self.mode or (self.mode, mode) == (Mode.RUNNING, Mode.PAUSED):
            if mode is not self.mode:
                self._park(standing)
            await standing.wait_for_change()
        if mode is Mode.PAUSED:  # what a replay tries again would go to a destination that must be left alone
            self._dispatcher.hold()
        self._is_over.set()

    async def _follow_receiver(self, standing: Standing) -> None:
        """Pause it durably before anything is parked: else a crash would let later events of a key go before those."""
        await self._dispatcher.gone.wait()
        if standing.mode is not Mode.PAUSED:
            await standing.pause_gone()
        if standing.mode is not Mode.PAUSED:
            self._is_over.set()  # resumed in the same moment: it is asked once more

    async def _poll(self, consumer: Consumer) -> NoReturn:
        is_failing = False
        while True:
            await self._dispatcher.wait_for_room()
            consumer.pause({source for source in consumer.assignment() if not self._dispatcher.reads(source.topic)})
            try:
                batches = await consumer.poll(
                    max_records=min(self._dispatcher.room(), _POLL_RECORDS), max_wait=_POLL_WAIT
                )
            except (OffsetOutOfRange, DataDamaged) as error:
                self._stop_reading(consumer, error)
                continue
            except BrokerError as error:
                if not error.retriable:
                    raise
                if not is_failing:
                    log.warning("poll_failed", group=self._group, error=str(error))
                is_failing = True
                await asyncio.sleep(_ERROR_WAIT)
                continue
            is_failing = False
            if not self._inheritance.is_known(sources := {batch.source for batch in batches}):
                self._revoked.clear()
                await self._inheritance.look(sources | consumer.assignment())
                self._inheritance.forget(self._revoked)
                batches = [batch for batch in batches if batch.source not in self._revoked]
            for batch in batches:  # in the same turn of the loop: a partition cannot be revoked between poll and take
                if batch.damage is not None:
                    self._watch.note_damage(batch, batch.damage)
                self._dispatcher.take(batch, self._inheritance.find(batch))

    def _stop_reading(self, consumer: Consumer, error: OffsetOutOfRange | DataDamaged) -> None:
        """Records are missing: count them, stop these partitions, go on with the others. Nothing is reset or skipped."""
        missing = self._watch.note_missing(error, self._stuck)
        if missing <= self._stuck:
            raise error  # nothing to pause, or pausing did not help: leave, and join again later
        self._stuck |= missing
        self._meter.up(False)
        consumer.pause(missing)

    async def _keep_committing(self, consumer: Consumer) -> NoReturn:
        while True:
            await asyncio.sleep(self._commit_interval)
            await self._commit(consumer)
            self._dispatcher.show()
            self._meter.flush()

    async def _commit(self, consumer: Consumer) -> None:
        """Tell what is settled, then make durable what is settled without a gap.

        What fails is tried again at the next turn; twice is harmless. A partition that left while the report was written
        is not committed, although it may be back: its topic may have been made anew.
        """
        low_water = self._dispatcher.low_water
        marks = low_water.committable()
        refused: set[TopicPartition] = set()
        try:
            await self._meter.ledger.report()  # first: what is committed and was never told would count as missing
            marks = low_water.still_owned(marks)
            if marks:
                await consumer.commit(marks)
        except NotOwner as error:
            refused = {TopicPartition(*source) for source in error.partitions}
            metrics.BROKER_COMMITS_REFUSED.labels(self._group).inc(len(refused))
            # Those owned again meanwhile are counted from anew, and their marks are not these.
            self._dispatcher.disown(refused - consumer.assignment())
        except BrokerError as error:
            if not self._is_failing_to_commit:
                log.warning("commit_failed", group=self._group, error=str(error), hint="it is tried again every turn")
            self._is_failing_to_commit = True
            return
        self._is_failing_to_commit = False
        low_water.committed(marks, refused=refused)

    async def revoke(self, partitions: frozenset[TopicPartition]) -> None:
        """`contract.OnRevoke`: finish what is being sent of these, commit, forget."""
        self._revoked |= partitions
        try:
            await self._dispatcher.give_up(partitions, _REVOKE_WAIT)
            if self._consumer is not None:
                await self._commit(self._consumer)
        finally:  # also when the backend cuts this off: what stays would block the partitions when they come back
            self._dispatcher.disown(partitions)
            self._inheritance.forget(partitions)
            self._stuck -= partitions
            self._watch.hide_lags(partitions)
            self._dispatcher.go_on()

    async def _keep_measuring(self, consumer: Consumer) -> NoReturn:
        while True:
            try:
                await self._meter.ledger.look()
                lags = await consumer.lag()
                self._watch.show_lags(lags)
                await self._meter.ledger.behind(lags)
            except BrokerError as error:
                log.debug("lag_unknown", group=self._group, error=str(error))
            await asyncio.sleep(_LAG_INTERVAL)
