"""One process of a reading history: the real loop of services (`GroupMember`) over the real reading code of a backend.

Its processor is a stand-in for expel: it takes its time, pauses partitions, is in the middle of something when it is revoked, and
tells the oracle what it has processed.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from typing import Any

from services.core.broker.contract import Broker, Consumer, Lag, Start
from services.core.broker.errors import BrokerError
from services.core.broker.offset_tracker import OffsetTracker
from services.core.broker.record import Batch, TopicPartition
from services.core.consuming import GroupMember, Membership
from services.core.process.progress import Step
from tests.simulation.machine import Process

COMMIT_S = 0.7
DRAIN_S = 3.0


class _Ledger:
    """Sometimes slow: marks wait for it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def measure_ends(self) -> None:
        """Nothing."""

    async def set_lags(self, own: Mapping[TopicPartition, Lag]) -> None:
        """Nothing."""

    async def report(self) -> None:
        """Takes up to some seconds."""
        await asyncio.sleep(self._rng.choice((0.0, 0.0, 0.05, self._rng.uniform(0.0, 4.0))))


class Work:
    """`consuming.Processor`. told: gets the batch and index of each record once it is processed. took: gets each batch.

    is_calm: whether nobody pauses any more: a pause and its end would wake a partition that stands still. is_down: whether the
    receiver does not answer: nothing is processed meanwhile.
    """

    def __init__(
        self,
        rng: random.Random,
        told: Callable[[Batch, int], None],
        is_calm: Callable[[], bool],
        took: Callable[[Batch], None],
        is_down: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rng, self._told, self._is_calm, self._took, self._is_down = rng, told, is_calm, took, is_down
        self.tracker, self.ledger = OffsetTracker(), _Ledger(rng)
        self._queue: deque[Batch] = deque()
        self._paused: TopicPartition | None = None
        self._changed = asyncio.Event()
        self._membership: Membership | None = None

    @property
    def has_stopped(self) -> bool:
        """Whether a partition waits for a person: the log says `records_missing`."""
        return self._membership is not None and bool(self._membership._stuck)

    @property
    def consumer(self) -> Consumer | None:
        """While it is a member."""
        return None if self._membership is None else self._membership._consumer

    def open(self, membership: Membership, _tasks: asyncio.TaskGroup) -> Iterable[Coroutine[Any, Any, None]]:
        """As there."""
        self._membership = membership
        return [self._process(), self._pause_now_and_then(membership)]

    async def wait_for_room(self) -> int:
        """As there."""
        while len(self._queue) > 3:
            self._changed.clear()
            await self._changed.wait()
        return self._rng.choice((1, 5, 100))

    def reads(self, _topic: str) -> bool:
        """As there."""
        return True

    async def prepare(self, polled: Collection[TopicPartition], assigned: Collection[TopicPartition]) -> None:
        """Looks something up first."""
        await asyncio.sleep(self._rng.choice((0.0, 0.0, 0.2)))

    def accept(self, batch: Batch) -> None:
        """As there."""
        self._took(batch)
        self._queue.append(batch)
        self._changed.set()

    async def drain_partitions(self, partitions: frozenset[TopicPartition], limit: float) -> None:
        """What is under way ends, or not."""
        await asyncio.sleep(min(limit, self._rng.choice((0.0, 0.1, 1.0, self._rng.uniform(0.0, 6.0)))))

    def disown(self, partitions: Collection[TopicPartition]) -> None:
        """As there."""
        self._queue = deque(batch for batch in self._queue if batch.source not in partitions)
        if self._paused in partitions:
            self._paused = None  # a revocation ends a pause
        self._changed.set()

    async def drain(self, limit: float) -> bool:
        """As there."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                while self._queue:
                    self._changed.clear()
                    await self._changed.wait()
        return not self._queue

    def stop(self) -> None:
        """The worker ends with the membership."""

    def committed(self) -> None:
        """Nothing."""

    def update_metrics(self) -> None:
        """Nothing."""

    def steps(self) -> Iterable[Step]:
        """Nobody watches."""
        return ()

    async def _process(self) -> None:
        while True:
            while not self._queue:
                self._changed.clear()
                await self._changed.wait()
            if self._is_down():
                await asyncio.sleep(1.0)
                continue
            batch = self._queue[0]
            await asyncio.sleep(self._rng.choice((0.0, 0.01, 0.1, self._rng.uniform(0.0, 1.5))))
            for index, offset in enumerate(batch.offsets):
                if not self._queue or self._queue[0] is not batch:  # revoked: its next owner processes the rest
                    break
                self._told(batch, index)
                self.tracker.settle(batch.source, [offset])
                if self._rng.random() < 0.1:
                    await asyncio.sleep(self._rng.uniform(0.0, 0.5))
            else:
                if self._queue and self._queue[0] is batch:
                    self._queue.popleft()
            self._changed.set()

    async def _pause_now_and_then(self, membership: Membership) -> None:
        rng = self._rng
        while True:
            await asyncio.sleep(rng.uniform(1.0, 8.0))
            consumer = membership._consumer
            owned = sorted(consumer.assignment()) if consumer is not None else []
            if owned and not self._is_calm():
                self._paused = rng.choice(owned)
                membership.pause(self._paused)
                await asyncio.sleep(rng.uniform(0.1, 4.0))
                if self._paused is not None:
                    membership.resume(self._paused)
                self._paused = None


async def run_process(
    process: Process,
    open_broker: Callable[[], AbstractAsyncContextManager[Broker]],
    groups: Mapping[str, Start],
    topics: Collection[str],
    make_work: Callable[[str], Work],
) -> int:
    """The process of one service: a member of each group, until it is told to stop."""
    stopping = asyncio.Event()
    process.handle_signal(stopping.set, ())

    async def find_topics() -> list[str]:
        return sorted(topics)

    while not stopping.is_set():
        try:
            async with open_broker() as broker:
                members = [
                    GroupMember(
                        broker, name, partial(make_work, name), find_topics, start=start, commit_interval=COMMIT_S
                    )
                    for name, start in groups.items()
                ]
                async with asyncio.TaskGroup() as running:
                    for member in members:
                        running.create_task(member.run(stopping, DRAIN_S))
        except BrokerError:
            await asyncio.sleep(0.5)
    return 0
