"""The global retrier as a member of its group: it polls ahead, moves each record at its time, and commits after each move."""

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Iterator, Sequence
from typing import Any

from services.core import metrics
from services.core.broker.contract import Broker
from services.core.broker.offset_tracker import OffsetTracker
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, TopicPartition
from services.core.consuming import GroupMember, Membership
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import RETRIER_GROUP
from services.core.process.progress import Step
from services.global_retrier.dedup import MoveTakeover
from services.global_retrier.delay_queue import DELAY_BY_TOPIC, Clock, DelayQueue
from services.global_retrier.metrics import RetrierLedger, RetrierMetrics
from services.global_retrier.mover import Mover

_POLL_RECORDS = 500
_COMMIT_INTERVAL_S = 2.0
"""For reports; each move is committed at once."""


def make_retrier(
    broker: Broker, producer: Producer, clock: Clock, ledger: RetrierLedger, pipes: PipeFile | None = None
) -> GroupMember:
    """Reads retry-in and all delay topics in one group; several retriers share the topics. pipes: as in RetrierMetrics."""
    retrier_metrics = RetrierMetrics(pipes)
    mover = Mover(producer, broker.admin, retrier_metrics, clock, ledger)

    async def find_topics() -> Sequence[str]:
        return list(DELAY_BY_TOPIC)

    return GroupMember(
        broker,
        RETRIER_GROUP,
        lambda: RetrierProcessor(broker, mover, retrier_metrics, clock),
        find_topics,
        commit_interval=_COMMIT_INTERVAL_S,
        set_up=metrics.RETRIER_UP.set,
    )


class RetrierProcessor:
    """`consuming.Processor`: each owned partition has its own queue and task, so an event that waits for a day delays no other
    partition.
    """

    def __init__(self, broker: Broker, mover: Mover, retrier_metrics: RetrierMetrics, clock: Clock) -> None:
        self._broker, self._mover, self._metrics, self._clock = broker, mover, retrier_metrics, clock
        self.tracker, self.ledger = OffsetTracker(), mover.ledger
        self.queues: dict[TopicPartition, DelayQueue] = {}
        self._tasks: dict[TopicPartition, asyncio.Task[None]] = {}
        self._membership: Membership | None = None
        self._group: asyncio.TaskGroup | None = None

    def open(self, membership: Membership, tasks: asyncio.TaskGroup) -> Iterable[Coroutine[Any, Any, None]]:
        self._membership, self._group = membership, tasks
        return ()

    async def wait_for_room(self) -> int:
        """Full partitions are paused."""
        return _POLL_RECORDS

    def reads(self, _topic: str) -> bool:
        return True

    async def prepare(self, polled: Collection[TopicPartition], assigned: Collection[TopicPartition]) -> None:
        """Each queue finds the records that were moved before."""

    def accept(self, batch: Batch) -> None:
        assert self._membership is not None
        assert self._group is not None
        source = batch.source
        queue = self.queues.get(source)
        if queue is None:
            queue = self.queues[source] = DelayQueue(source)
            self._tasks[source] = self._group.create_task(self._serve(queue, self._membership), name=str(source))
        queue.add(batch, self._clock.now_ms())
        metrics.RETRIER_TAKEN.labels(batch.topic).inc(len(batch.records))
        if queue.is_full:
            self._membership.pause(source)

    async def _serve(self, queue: DelayQueue, membership: Membership) -> None:
        """Move the records that are ready, batch by batch, until the queue is closed."""
        takeover = MoveTakeover(queue.source, self._broker, self._clock)
        while self.queues.get(queue.source) is queue:
            await queue.wait_until_ready(self._clock)
            queue.busy = True
            items = queue.pop_ready(self._clock.now_ms())
            moved = await takeover.find_moved(items)
            metrics.RETRIER_ALREADY_MOVED.labels(queue.source.topic).inc(len(moved))
            self._mover.record_moved([item for item in items if item.offset in moved])
            await self._mover.move(queue.source, [item for item in items if item.offset not in moved])
            self.tracker.settle(queue.source, [item.offset for item in items])
            queue.committing = True
            await membership.commit()
            queue.busy = queue.committing = False
            queue.moves += 1
            if queue.has_room and self.queues.get(queue.source) is queue:
                membership.resume(queue.source)

    async def drain_partitions(self, partitions: frozenset[TopicPartition], limit: float) -> None:
        await self._close_queues(partitions, limit)

    def disown(self, partitions: Collection[TopicPartition]) -> None:
        """Their queues are closed. A move that has not ended settles nothing that the tracker still has."""

    async def drain(self, limit: float) -> bool:
        return await self._close_queues(frozenset(self.queues), limit)

    async def _close_queues(self, partitions: frozenset[TopicPartition], limit: float) -> bool:
        """Start no more moves of these; wait at most `limit` seconds for the current ones and their commit. Whether all ended."""
        tasks = []
        for source in partitions:
            queue, task = self.queues.pop(source, None), self._tasks.pop(source, None)
            if queue is not None and task is not None:
                tasks.append(task)
                if not queue.busy:
                    task.cancel()
        if not tasks:
            return True
        try:
            _, late = await asyncio.wait(tasks, timeout=limit)
        finally:  # also when the backend cancels this: an old move must not settle records of a topic that was created anew
            for task in tasks:
                task.cancel()
        if late:
            await asyncio.wait(late)
        return not late

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def committed(self) -> None:
        """Each move commits itself."""

    def steps(self) -> Iterator[Step]:
        """A move is repeated while the broker is away: each try is a step. A commit is a step of the membership."""
        now = self._clock.now_ms()
        for source, queue in self.queues.items():
            token = queue.moves, self._mover.tries[source]
            if queue.busy and not queue.committing:
                yield Step(f"{source.topic}[{source.partition}]: a move has not ended", token)
            elif not queue.busy and queue.is_ready(now):
                yield Step(f"{source.topic}[{source.partition}]: events are due and are not moved", token)

    def update_metrics(self) -> None:
        self._metrics.set_next_due(self.queues.values())
