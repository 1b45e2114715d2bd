"""The reading half of a member: fair reads over its shards, and nothing returned of one that it may have lost."""

import asyncio
import time
from collections.abc import Collection, Mapping

from services.core.broker.contract import Lag
from services.core.broker.kinesis.member_side import MemberSide
from services.core.broker.kinesis.membership import Membership
from services.core.broker.record import Batch, TopicPartition

_LAG_SECONDS = 10.0
_PAUSE = 0.02


class KinesisConsumer:
    """`contract.Consumer`. A partition is a shard; it leaves the assignment, after on_revoke, when it has ended."""

    def __init__(self, side: MemberSide, membership: Membership) -> None:
        self._side, self._membership = side, membership
        self._turn = 0

    def assignment(self) -> frozenset[TopicPartition]:
        """As in the contract; a shard is shown as soon as it is known where it is read from."""
        return frozenset(source for source, held in self._membership.held.items() if held.is_placed)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        """As in the contract."""
        self._set_paused(partitions, True)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        """As in the contract."""
        self._set_paused(partitions, False)
        self._side.wake()

    async def poll(self, *, max_records: int, max_wait: float) -> list[Batch]:
        """As in the contract."""
        with self._membership.polls.poll():
            self._side.budget.wake()
            return await self._poll(max_records, asyncio.get_running_loop().time() + max_wait)

    async def _poll(self, max_records: int, deadline: float) -> list[Batch]:
        while True:
            self._side.news.clear()
            self._raise_failure()
            batches = self._take(max_records)
            if batches:
                return batches
            try:
                async with asyncio.timeout_at(deadline):
                    await self._side.news.wait()
            except TimeoutError:
                self._raise_failure()
                return self._take(max_records)

    async def commit(self, processed: Mapping[TopicPartition, int]) -> None:
        """As in the contract; one write to DynamoDB for each partition."""
        await self._membership.commit(processed)

    async def lag(self) -> dict[TopicPartition, Lag]:
        """As in the contract, after a fresh read of each shard. Kinesis counts nothing: `records` is exact for a shard
        that is read to its end, and of one that is further behind what this member holds of it, one at least."""
        asks = {source: held.backlog.asks for source, held in self._membership.held.items()}
        deadline = asyncio.get_running_loop().time() + _LAG_SECONDS
        while asyncio.get_running_loop().time() < deadline:
            held = self._membership.held
            if all(held[source].backlog.knows(number) for source, number in asks.items() if source in held):
                break
            await asyncio.sleep(_PAUSE)
        now = time.time_ns() // 1_000_000
        return {source: held.backlog.lag(now) for source, held in self._membership.held.items() if held.is_placed}

    def _set_paused(self, partitions: Collection[TopicPartition], paused: bool) -> None:
        for source in partitions:
            if (held := self._membership.held.get(source)) is not None:
                held.backlog.is_paused = paused

    def _raise_failure(self) -> None:
        failure = self._membership.take_failure() or self._side.take_failure()
        if failure is not None:
            raise failure
        for held in self._membership.held.values():
            if held.backlog.error is not None and held.is_readable:
                raise held.backlog.error

    def _take(self, max_records: int) -> list[Batch]:
        """What is there now, evenly from all shards that have something, starting with another one each time."""
        ready = [held for held in self._membership.held.values() if held.is_readable and held.backlog.has_records()]
        if not ready:
            return []
        self._turn += 1
        turn = self._turn % len(ready)
        batches: list[Batch] = []
        share = -(-max_records // len(ready))
        for held in ready[turn:] + ready[:turn]:
            count = min(share, max_records)
            if count > 0:
                taken = held.backlog.take(count)
                batches += taken
                max_records -= sum(len(batch.records) for batch in taken)
        return batches
