"""What a member owns, from assignment to revocation, and the drain in between."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping

import structlog
from aiokafka import ConsumerRebalanceListener

from services.core.broker.contract import OnRevoke
from services.core.broker.errors import BrokerError
from services.core.broker.record import Batch, TopicPartition

log = structlog.get_logger()


class Ownership(ConsumerRebalanceListener):  # type: ignore[misc]
    """Told by aiokafka about rebalances, which revoke everything first (the eager protocol; kept partitions come back).

    owned: what the member may commit. unplaced: those of them whose position is not decided yet. next_read and
    next_commit: offsets, of the placed ones. begun: where reading began in this ownership; what is committed below it
    belongs to an earlier one. stuck: partitions that cannot be read on, with what to raise. passed: what stands for damaged
    records that are the next to be read. fragile: offsets ahead at which a partition is damaged. paused: by the caller.
    epoch: counts assignments.
    """

    def __init__(self, on_revoke: OnRevoke, drain: float, lost: Callable[[], bool]) -> None:
        """`drain`: seconds that on_revoke may take. `lost`: whether the group has expelled this member already."""
        self._on_revoke, self._drain, self._lost = on_revoke, drain, lost
        self.on_assigned: Callable[[], Awaitable[None]] | None = None
        self._releasing = asyncio.Lock()
        self._closing = False
        self.epoch = 0
        self._forget()

    def _forget(self) -> None:
        self.owned: frozenset[TopicPartition] = frozenset()
        self.unplaced: frozenset[TopicPartition] = frozenset()
        self.next_read: dict[TopicPartition, int] = {}
        self.next_commit: dict[TopicPartition, int] = {}
        self.begun: dict[TopicPartition, int] = {}
        self.stuck: dict[TopicPartition, Callable[[], BrokerError]] = {}
        self.passed: dict[TopicPartition, Batch] = {}
        self.fragile: dict[TopicPartition, int] = {}
        self.paused: set[TopicPartition] = set()

    async def on_partitions_revoked(self, revoked: Collection[tuple[str, int]]) -> None:
        """aiokafka waits for this before it joins anew, with heartbeats going on. Nothing can be polled meanwhile."""
        try:
            await self.release()
        except Exception:  # nobody is there to raise to; the partitions are let go, and come again uncommitted
            log.exception("kafka_drain_failed", partitions=sorted(revoked))

    async def on_partitions_assigned(self, assigned: Collection[tuple[str, int]]) -> None:
        """The group is settled again. `on_assigned` is awaited; it must be quick, heartbeats wait for it."""
        if self._closing:
            return
        self._forget()
        self.epoch += 1
        self.owned = self.unplaced = frozenset(TopicPartition(*source) for source in assigned)
        if self.on_assigned is not None:
            await self.on_assigned()

    def placed(self, positions: Mapping[TopicPartition, int]) -> None:
        """Reading of these begins here."""
        self.begun.update(positions)
        self.next_read.update(positions)
        self.next_commit.update(positions)
        self.unplaced -= positions.keys()

    async def release(self) -> None:
        """Drain what is owned, then own nothing. When it was lost already, in the other order: commits are refused."""
        async with self._releasing:
            leaving = self.owned
            if not leaving:
                return
            if self._lost():
                self._forget()
            try:
                async with asyncio.timeout(self._drain):
                    await self._on_revoke(leaving)
            except TimeoutError:
                log.warning("kafka_drain_timed_out", seconds=self._drain, partitions=sorted(leaving))
            finally:
                self._forget()

    async def close(self) -> None:
        """Drain for good: nothing is taken any more."""
        self._closing = True
        await self.release()

    def is_fragile(self) -> bool:
        """Whether a partition that is read comes near to where it is damaged."""
        self.fragile = {
            source: first for source, first in self.fragile.items() if self.next_read.get(source, first + 1) <= first
        }
        return not self.paused.issuperset(self.fragile)

    def take_passed(self) -> list[Batch]:
        """What stands for damaged records, of those that are not paused; reading goes on behind them."""
        due = [source for source in self.passed if source not in self.paused]
        batches = [self.passed.pop(source) for source in due]
        self.next_read.update({batch.source: batch.offsets[-1] + 1 for batch in batches})
        return batches

    def raise_stuck(self) -> None:
        """Raise for a partition that cannot be read on, unless the caller paused it to go on with the others."""
        for source, error in self.stuck.items():
            if source not in self.paused:
                raise error()

    def split(self, processed: Mapping[TopicPartition, int]) -> tuple[dict[TopicPartition, int], set[TopicPartition]]:
        """(what may be committed, what is refused). Refused: not owned, or from an earlier ownership."""
        mine = {
            source: offset
            for source, offset in processed.items()
            if source in self.owned and offset + 1 >= self.begun.get(source, 0)
        }
        return mine, processed.keys() - mine.keys()
