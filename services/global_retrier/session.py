"""One membership in the retrier's group: poll, hold back, let each line go on at its time, commit right after each move."""

import asyncio
from typing import NoReturn

import backoff
import structlog

from services.core import metrics
from services.core.broker.contract import Broker, Consumer
from services.core.broker.errors import BrokerError, DataDamaged, NotOwner, OffsetOutOfRange
from services.core.broker.record import Batch, TopicPartition
from services.core.broker.watermark import LowWater
from services.core.group_watch import GroupWatch
from services.core.pipes import RETRIER_GROUP
from services.global_retrier.clock import Clock
from services.global_retrier.line import Line
from services.global_retrier.meter import Meter
from services.global_retrier.mover import Mover
from services.global_retrier.predecessor import Predecessor

log = structlog.get_logger()

_POLL_WAIT = 1.0
_POLL_RECORDS = 500
_ERROR_WAIT = 0.5
_REVOKE_WAIT = 5.0
"""Seconds that a revoked partition waits for records being written on."""
_MEASURE_INTERVAL = 2.0
_COMMIT_WAIT, _MAX_COMMIT_WAIT = 0.1, 5.0


class Session:
    """Made before joining, because revocation may be called from the first moment on.

    Each owned partition has a line and a task of its own: a head that waits for a day holds up nothing else. `lines` are
    those that are served now.
    """

    def __init__(
        self, broker: Broker, mover: Mover, meter: Meter, clock: Clock, low_water: LowWater | None = None
    ) -> None:
        self._broker, self._mover, self._meter, self._clock = broker, mover, meter, clock
        self._watch = GroupWatch(RETRIER_GROUP)
        self._low_water = low_water or LowWater()
        self._committing = asyncio.Lock()
        self.lines: dict[TopicPartition, Line] = {}
        self._tasks: dict[TopicPartition, asyncio.Task[None]] = {}
        self._stuck: set[TopicPartition] = set()
        self._group: asyncio.TaskGroup | None = None
        self._consumer: Consumer | None = None

    async def run(self, consumer: Consumer, stopping: asyncio.Event, drain: float) -> None:
        """Until `stopping`; then finish what is being written on, within `drain` seconds.

        Raises an ExceptionGroup of BrokerErrors when the membership cannot go on.
        """
        self._consumer = consumer
        async with asyncio.TaskGroup() as self._group:
            running = [
                self._group.create_task(self._poll(consumer)),
                self._group.create_task(self._keep_measuring(consumer)),
            ]
            await stopping.wait()
            for task in running:
                task.cancel()
            await self._close_lines(frozenset(self.lines), drain)

    async def revoke(self, partitions: frozenset[TopicPartition]) -> None:
        """`contract.OnRevoke`: finish what is being written on, commit, forget the rest."""
        try:
            await self._close_lines(partitions, _REVOKE_WAIT)
        finally:  # also when the backend cuts this off: what stays would block the partitions when they come back
            self._low_water.forget(partitions)
            self._stuck -= partitions
            self._watch.hide_lags(partitions)

    async def _poll(self, consumer: Consumer) -> NoReturn:
        is_failing = False
        while True:
            try:
                batches = await consumer.poll(max_records=_POLL_RECORDS, max_wait=_POLL_WAIT)
            except (OffsetOutOfRange, DataDamaged) as error:
                self._stop_reading(consumer, error)
                continue
            except BrokerError as error:
                if not error.retriable:
                    raise
                if not is_failing:
                    log.warning("poll_failed", group=RETRIER_GROUP, error=str(error))
                is_failing = True
                await asyncio.sleep(_ERROR_WAIT)
                continue
            is_failing = False
            for batch in batches:  # in the same turn of the loop: a partition cannot be revoked between poll and take
                self._take(consumer, batch)

    def _take(self, consumer: Consumer, batch: Batch) -> None:
        assert self._group is not None
        if batch.damage is not None:
            self._watch.note_damage(batch, batch.damage)
        source = batch.source
        line = self.lines.get(source)
        if line is None:
            line = self.lines[source] = Line(source)
            self._tasks[source] = self._group.create_task(self._serve(line, consumer), name=f"line {source.topic}")
        self._low_water.take(batch)
        line.take(batch, self._clock.now_ms())
        self._meter.took(batch)
        if line.is_full:
            consumer.pause([source])

    def _stop_reading(self, consumer: Consumer, error: OffsetOutOfRange | DataDamaged) -> None:
        """Records are missing: stop these partitions, go on with the others. Nothing is reset or skipped."""
        missing = self._watch.note_missing(error, self._stuck)
        if missing <= self._stuck:
            raise error  # nothing to pause, or pausing did not help: leave, and join again later
        self._stuck |= missing
        self._meter.up(False)
        consumer.pause(missing)

    async def _serve(self, line: Line, consumer: Consumer) -> None:
        """Move what may leave, batch by batch, until the line is closed."""
        predecessor = Predecessor(line.source, self._broker, self._clock)
        while self.lines.get(line.source) is line:
            await line.wait_until_ready(self._clock)
            line.busy = True
            items = line.cut(self._clock.now_ms())
            moved = await predecessor.find_moved(items)
            self._meter.already_moved(line.source.topic, len(moved))
            self._mover.note_moved([item for item in items if item.offset in moved])
            await self._mover.move(line.source, [item for item in items if item.offset not in moved])
            self._low_water.settle(line.source, [item.offset for item in items])
            await self.commit(consumer)
            line.busy = False
            if line.has_room and line.source not in self._stuck and self.lines.get(line.source) is line:
                consumer.resume([line.source])

    async def commit(self, consumer: Consumer) -> None:
        """Make durable what is settled, of all lines. Tried again for as long as it takes: what comes next waits for it."""
        failures = 0
        async with self._committing:
            while marks := self._low_water.committable():
                try:
                    await self._mover.ledger.report()  # all lines' at once, and nothing while events only wait
                    marks = self._low_water.still_owned(marks)
                    if marks:
                        await consumer.commit(marks)
                except NotOwner as error:
                    refused = {TopicPartition(*source) for source in error.partitions}
                    metrics.BROKER_COMMITS_REFUSED.labels(RETRIER_GROUP).inc(len(refused))
                    # Those owned again meanwhile are counted from anew, and their marks are not these.
                    self._low_water.forget(refused - consumer.assignment())
                    self._low_water.committed(marks, refused=refused)
                    return
                except BrokerError as error:
                    if not error.retriable:
                        raise
                    if not failures:
                        log.warning("commit_failed", group=RETRIER_GROUP, error=str(error))
                    failures += 1
                    wait = backoff.full_jitter(min(_MAX_COMMIT_WAIT, _COMMIT_WAIT * 2 ** min(failures, 10)))
                    await asyncio.sleep(wait)
                else:
                    self._low_water.committed(marks)

    async def _close_lines(self, partitions: frozenset[TopicPartition], within: float) -> None:
        """Start nothing more of these; wait up to `within` seconds for what is being written on and its commit."""
        tasks = []
        for source in partitions:
            line, task = self.lines.pop(source, None), self._tasks.pop(source, None)
            if line is not None and task is not None:
                tasks.append(task)
                if not line.busy:
                    task.cancel()
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=within)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)

    async def _keep_measuring(self, consumer: Consumer) -> NoReturn:
        while True:
            self._meter.holds(self.lines.values())
            try:
                lags = await consumer.lag()
                self._watch.show_lags(lags)
                await self._mover.ledger.behind(lags)
                await self._mover.ledger.report()
            except BrokerError as error:
                log.debug("lag_unknown", group=RETRIER_GROUP, error=str(error))
            await asyncio.sleep(_MEASURE_INTERVAL)
