"""The consumer of a member: it reads its partitions evenly, and returns nothing of a partition that it may have lost."""

import asyncio
from collections.abc import Collection, Mapping

from services.core.broker.contract import Lag, PartitionRange
from services.core.broker.errors import BrokerError, DataDamaged, NotOwner, OffsetOutOfRange
from services.core.broker.log.clock import WallClock, boot_ms
from services.core.broker.log.groups import CommitRequest
from services.core.broker.log.membership import LogMembership, OwnedPartition, SharedResources
from services.core.broker.log.topic_reader import ReadResult, TopicReader, lag_behind
from services.core.broker.record import Batch, TopicPartition

_IDLE_SECONDS = (0.002, 0.025)
_READ_ALL_MS = 500
"""Read the file this often even if no high-water mark moved: a writer may have died between commit and mark."""
_RETRY_MS = 500

_Want = tuple[OwnedPartition, int]
_Answer = tuple[OwnedPartition, int, "ReadResult | BrokerError | None"]


class LogConsumer:
    """`contract.Consumer` over the embedded log."""

    def __init__(self, shared: SharedResources, membership: LogMembership, clock: WallClock) -> None:
        self._shared, self._membership, self._clock = shared, membership, clock
        self._turn = 0
        self._read_all_at = 0
        self._errors: list[tuple[OwnedPartition, BrokerError]] = []

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._membership.held)

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        self._set_paused(partitions, True)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        self._set_paused(partitions, False)

    async def poll(self, *, max_records: int, max_wait: float) -> list[Batch]:
        """As in the contract. An error of one partition does not hold back the records of others."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + max_wait
        idle = _IDLE_SECONDS[0]
        while True:
            self._raise_failure()
            batches = await self._read(max_records)
            if batches:
                return batches
            self._raise_failure()
            left = deadline - loop.time()
            if left <= 0:
                return []
            await asyncio.sleep(min(idle, left))
            idle = min(idle * 1.5, _IDLE_SECONDS[1])

    async def commit(self, processed: Mapping[TopicPartition, int]) -> None:
        owned = self._membership.held
        offsets = {
            TopicPartition(*source): (owned[source].epoch, offset)
            for source, offset in processed.items()
            if source in owned and offset < owned[source].position
        }
        refused = {TopicPartition(*source) for source in processed} - offsets.keys()
        if offsets:
            refused |= await self._shared.offsets.commit(
                CommitRequest(self._membership.group, self._membership.member, offsets)
            )
        for source, (epoch, offset) in offsets.items():
            now = owned.get(source)
            if source not in refused and now is not None and now.epoch == epoch:
                now.processed_next = max(now.processed_next, offset + 1)
        if refused:
            raise NotOwner(frozenset((topic, partition) for topic, partition in refused))

    async def lag(self) -> dict[TopicPartition, Lag]:
        nexts = {source: owned.processed_next for source, owned in self._membership.held.items()}
        found: dict[TopicPartition, Lag] = {}
        for topic in sorted({source.topic for source in nexts}):
            wanted = {source.partition: offset for source, offset in nexts.items() if source.topic == topic}
            lags = await self._shared.readers.use(topic, lambda r, w=wanted: lag_behind(r, w, self._clock.now_ms()))  # type: ignore[misc]
            found.update({TopicPartition(topic, partition): lag for partition, lag in lags.items()})
        return found

    def _set_paused(self, partitions: Collection[TopicPartition], paused: bool) -> None:
        for source in partitions:
            owned = self._membership.held.get(source)
            if owned is not None:
                owned.paused = paused

    def _raise_failure(self) -> None:
        while self._errors:
            owned, error = self._errors.pop(0)
            if self._is_owned(owned):  # else it is of an earlier ownership, perhaps of a topic that is gone
                raise error
        failure = self._membership.next_error()
        if failure is not None:
            raise failure

    async def _read(self, max_records: int) -> list[Batch]:
        """The records there are now, evenly from all partitions, each time with another partition first."""
        wants = self._ready()
        if not wants:
            return []
        self._turn += 1
        turn = self._turn % len(wants)
        wants = wants[turn:] + wants[:turn]
        share = -(-max_records // len(wants))
        unread = [(owned, owned.position) for owned in wants if not owned.rest]
        answers: list[_Answer] = []
        for topic in dict.fromkeys(owned.source.topic for owned, _ in unread):
            part = [want for want in unread if want[0].source.topic == topic]
            answers += await self._read_topic(topic, part, share)
        if not self._membership.is_alive:  # frozen meanwhile: others may own these now
            return []
        for owned, offset, answer in answers:
            self._keep(owned, offset, answer)
        batches = []
        for owned in wants:
            count = min(share, max_records, len(owned.rest))
            if count and owned.is_readable and self._is_owned(owned):
                batches.append(_pop_batch(owned, count))
                max_records -= count
        return batches

    async def _read_topic(self, topic: str, wants: list[_Want], share: int) -> list[_Answer]:
        try:
            return await self._shared.readers.use(topic, lambda reader: _read_all(reader, wants, share))
        except BrokerError as error:  # one answer is enough: it concerns the whole topic
            for owned, _ in wants:
                owned.retry_at = boot_ms() + _RETRY_MS
            return [(*wants[0], error)]

    def _ready(self) -> list[OwnedPartition]:
        """Owned partitions with something to return, by their marks; at times all of them."""
        now = boot_ms()
        if now >= self._membership.until:
            return []
        reads_all, marks = now >= self._read_all_at, dict[str, list[int] | None]()
        if reads_all:
            self._read_all_at = now + _READ_ALL_MS
        ready = []
        for owned in self._membership.held.values():
            if not owned.is_readable or owned.retry_at > now:
                continue
            topic, partition = owned.source
            if not owned.rest and not reads_all:
                if topic not in marks:
                    marks[topic] = self._shared.readers.peek(topic)
                mark = marks[topic]
                if mark is not None and (partition >= len(mark) or mark[partition] <= owned.position):
                    continue
            ready.append(owned)
        return ready

    def _is_owned(self, owned: OwnedPartition) -> bool:
        return self._membership.held.get(owned.source) is owned

    def _keep(self, owned: OwnedPartition, offset: int, answer: ReadResult | BrokerError | None) -> None:
        """Keep the records that were read, unless the partition was lost meanwhile."""
        if not self._is_owned(owned) or owned.position != offset or owned.rest:
            return
        if isinstance(answer, BrokerError):
            self._errors.append((owned, answer))
            owned.retry_at = boot_ms() + _RETRY_MS
        elif answer is not None:
            owned.rest, owned.offsets, owned.behind_rest = answer.records, answer.offsets, answer.next
            owned.position = answer.offsets[0] if answer.records else answer.next


def _pop_batch(owned: OwnedPartition, count: int) -> Batch:
    records, owned.rest = owned.rest[:count], owned.rest[count:]
    offsets, owned.offsets = owned.offsets[:count], owned.offsets[count:]
    owned.position = owned.offsets[0] if owned.rest else owned.behind_rest
    return Batch(*owned.source, offsets, records)


def _read_all(reader: TopicReader, wants: list[_Want], share: int) -> list[_Answer]:
    """Read each partition. An error of one partition is its answer: the others go on."""
    answers: list[_Answer] = []
    for owned, offset in wants:
        topic, partition = owned.source
        try:
            if reader.store.meta.incarnation != owned.incarnation:  # deleted and made again: these are other records
                held = reader.ranges().get(partition, PartitionRange(0, 0))
                raise OffsetOutOfRange(topic, partition, offset, held.start, held.end)
            answers.append((owned, offset, reader.read(partition, offset, share)))
        except (OffsetOutOfRange, DataDamaged) as error:
            answers.append((owned, offset, error))
    return answers
