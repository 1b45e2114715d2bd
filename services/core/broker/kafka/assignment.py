"""A member's partitions, from their assignment to the drain before they are revoked."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import lru_cache
from uuid import UUID

import structlog
from aiokafka import ConsumerRebalanceListener

from services.core.broker.contract import OnRevoke
from services.core.broker.errors import BrokerError
from services.core.broker.kafka.aiokafka_internals import Generation
from services.core.broker.kafka.log_truncation import EpochHistory
from services.core.broker.kafka.offsets import CommitMetadata
from services.core.broker.kafka.positions import StartPositions
from services.core.broker.record import Batch, TopicPartition

log = structlog.get_logger()
_parse_id = lru_cache(UUID)
"""It is asked for the id of each partition whenever something is fetched."""


class Assignment(ConsumerRebalanceListener):  # type: ignore[misc]
    """aiokafka reports rebalances to it. A rebalance revokes everything first (the eager protocol); kept partitions come back.

    - owned: partitions that the member may commit. unpositioned: owned partitions whose position is not decided yet.
    - next_read, next_commit: offsets of the others. begun: the first position in this assignment; a commit below it belongs to
      an earlier assignment. requested: the highest commit that was requested, whether or not it succeeded.
    - metadata: stored with each commit. epochs: the leader epochs that wrote the records that were read.
      validated: the next offset and leader's epoch for which it is known that nothing was cut off below that offset.
    - failed: partitions that cannot be read further, with the error to raise. replacements: batches to return next, in place of
      damaged records. damaged_ahead: the offset of damage that was found but is not reached yet. paused: by the caller.
    - epoch: counts assignments. generation: of this assignment.
    """

    def __init__(self, on_revoke: OnRevoke, drain: float, generation: Callable[[], Generation]) -> None:
        """`drain`: seconds that on_revoke may take. `generation`: returns the member's generation now."""
        self._on_revoke, self._drain, self._generation = on_revoke, drain, generation
        self.generation = generation()
        self.on_assigned: Callable[[], Awaitable[None]] | None = None
        self._releasing = asyncio.Lock()
        self._closing = False
        self.epoch = 0
        self._forget()

    def _forget(self) -> None:
        self.owned: frozenset[TopicPartition] = frozenset()
        self.unpositioned: frozenset[TopicPartition] = frozenset()
        self.next_read: dict[TopicPartition, int] = {}
        self.next_commit: dict[TopicPartition, int] = {}
        self.begun: dict[TopicPartition, int] = {}
        self.requested: dict[TopicPartition, int] = {}
        self.metadata: dict[TopicPartition, CommitMetadata] = {}
        self.epochs: dict[TopicPartition, EpochHistory] = {}
        self.validated: dict[TopicPartition, tuple[int, int]] = {}
        self.failed: dict[TopicPartition, Callable[[], BrokerError]] = {}
        self.replacements: dict[TopicPartition, Batch] = {}
        self.damaged_ahead: dict[TopicPartition, int] = {}
        self.paused: set[TopicPartition] = set()

    async def on_partitions_revoked(self, revoked: Collection[tuple[str, int]]) -> None:
        """aiokafka waits for this before it joins again; heartbeats go on. Nothing can be polled meanwhile."""
        try:
            await self.release()
        except Exception:  # there is no caller to raise to; the next owner reads the uncommitted records again
            log.exception("kafka_drain_failed", partitions=sorted(revoked))

    async def on_partitions_assigned(self, assigned: Collection[tuple[str, int]]) -> None:
        """The rebalance has ended. Awaits `on_assigned`, which must be quick: heartbeats wait for it."""
        if self._closing:
            return
        self._forget()
        self.epoch += 1
        self.generation = self._generation()
        self.owned = self.unpositioned = frozenset(TopicPartition(*source) for source in assigned)
        if self.on_assigned is not None:
            await self.on_assigned()

    def begin_at(self, positions: StartPositions) -> None:
        """Begin to read at these positions. Lost partitions are neither read nor committed."""
        for source, position in positions.position.items():
            metadata = positions.metadata[source]
            self.begun[source] = self.next_read[source] = self.next_commit[source] = position
            self.metadata[source] = metadata
            self.epochs[source] = EpochHistory([] if metadata.epoch is None else [(position - 1, metadata.epoch)])
            self.validated.pop(source, None)
        self.failed.update(positions.lost)
        self.unpositioned -= positions.position.keys()

    def topic_of(self, source: tuple[str, int]) -> UUID | None:
        """The id of the topic in which this partition is read; None while its position is not known."""
        own = TopicPartition(*source)
        return _parse_id(self.metadata[own].topic) if own in self.owned and own not in self.unpositioned else None

    def last_read(self, source: TopicPartition) -> tuple[int, int] | None:
        """(next offset to read, epoch of the record before it); None when it is not known."""
        epochs, at = self.epochs.get(source), self.next_read.get(source)
        epoch = None if epochs is None or at is None else epochs.find(at - 1)
        return None if epoch is None or at is None else (at, epoch)

    def find_led_anew(self, newest: Mapping[TopicPartition, int]) -> dict[TopicPartition, tuple[int, int]]:
        """`last_read` of partitions whose leader's epoch, in `newest`, is newer than what is read, and not validated for it."""
        read = {source: last for source in newest if (last := self.last_read(source)) is not None}
        return {
            source: (at, epoch)
            for source, (at, epoch) in read.items()
            if newest[source] > epoch and self.validated.get(source) != (at, newest[source])
        }

    def record_read(self, source: TopicPartition, last: int, epochs: Collection[tuple[int, int]]) -> None:
        """Records up to offset `last` were returned. epochs: theirs, as (first offset, epoch)."""
        self.next_read[source] = last + 1
        for first, epoch in epochs:
            self.epochs[source].record(first, epoch)

    def metadata_at(self, source: TopicPartition, position: int) -> CommitMetadata:
        """The metadata of a commit of this next offset to read."""
        return self.metadata[source]._replace(epoch=self.epochs[source].find(position - 1))

    async def reassign(self, sources: Collection[TopicPartition]) -> None:
        """Treat these as lost and assigned again: other records are stored now than those that were read."""
        async with self._releasing:
            epoch, mine = self.epoch, self.owned.intersection(sources)
            if not mine:
                return
            self.owned -= mine
            self.unpositioned -= mine
            for known in (
                self.next_read,
                self.next_commit,
                self.begun,
                self.requested,
                self.failed,
                self.replacements,
                self.damaged_ahead,
            ):
                for source in mine:
                    known.pop(source, None)
            self.paused -= mine
            try:
                await self._drain_off(mine)
            finally:  # also when the poll is cancelled: otherwise nobody reads these until the next rebalance
                if self.epoch == epoch and not self._closing:
                    self.owned |= mine
                    self.unpositioned |= mine

    async def release(self) -> None:
        """Drain the owned partitions, then forget them. Lost ones are forgotten first: their commits are refused."""
        async with self._releasing:
            leaving = self.owned
            if not leaving:
                return
            if self._generation() != self.generation:
                self._forget()
            try:
                await self._drain_off(leaving)
            finally:
                self._forget()

    async def _drain_off(self, leaving: frozenset[TopicPartition]) -> None:
        try:
            async with asyncio.timeout(self._drain):
                await self._on_revoke(leaving)
        except TimeoutError:
            log.warning("kafka_drain_timed_out", seconds=self._drain, partitions=sorted(leaving))

    async def close(self) -> None:
        """Drain; later assignments are ignored."""
        self._closing = True
        await self.release()

    def is_damage_near(self) -> bool:
        """Whether known damage is ahead in a partition that is being read."""
        self.damaged_ahead = {
            source: first
            for source, first in self.damaged_ahead.items()
            if self.next_read.get(source, first + 1) <= first
        }
        return not self.paused.issuperset(self.damaged_ahead)

    def pop_replacements(self) -> list[Batch]:
        """The replacements in partitions that are not paused. Reading goes on behind them."""
        due = [source for source in self.replacements if source not in self.paused]
        batches = [self.replacements.pop(source) for source in due]
        self.next_read.update({batch.source: batch.offsets[-1] + 1 for batch in batches})
        return batches

    def raise_failed(self) -> None:
        """Raise the error of a partition that cannot be read further and is not paused."""
        for source, error in self.failed.items():
            if source not in self.paused:
                raise error()

    def select_commits(
        self, processed: Mapping[TopicPartition, int]
    ) -> tuple[dict[TopicPartition, int], set[TopicPartition]]:
        """(next offsets to commit, refused partitions). Refused: not owned, from an earlier assignment, or not read in this one.

        Never below an offset that was requested before: that one is processed, too.
        """
        mine = {
            source: max(offset + 1, self.requested.get(source, 0))
            for source, offset in processed.items()
            if source in self.owned and self._begun_at(source) <= offset + 1 <= self.next_read.get(source, -1)
        }
        self.requested.update(mine)
        return mine, processed.keys() - mine.keys()

    def _begun_at(self, source: TopicPartition) -> float:
        is_lost = source in self.failed and self.next_read.get(source) == self.begun.get(source)
        return math.inf if is_lost else self.begun.get(source, math.inf)
