"""The `Appender` of the log: appends are gathered into transactions, on a thread for each topic.

So topics do not wait for each other's syncs. Threads that serve all topics in turn find cold caches: they used 70 us more CPU per
append as soon as a second topic was written at times.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.core.broker.contract import Appended
from services.core.broker.errors import BrokerClosed, UnknownTopic
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.group_commit import Gatherer, PendingRequest
from services.core.broker.log.row_format import Failed, Packed, pack
from services.core.broker.log.topic_writer import TopicWriter
from services.core.broker.record import Record

MAX_WAITING = 10_000
"""Appends waiting for one topic's transaction; one more is refused as Unavailable."""


class Append(PendingRequest[Appended]):
    """One append under way. Without records it only checks that the log could store some."""

    __slots__ = ("partition", "records")

    def __init__(self, partition: int, records: Sequence[Record]) -> None:
        super().__init__()
        self.partition, self.records = partition, records


class TopicQueue:
    """The appends of one topic, and its file. `_work` runs on the thread, one call at a time."""

    def __init__(self, folder: DataFolder, topic: str, clock: WallClock) -> None:
        self._open: Callable[[], TopicWriter] = lambda: TopicWriter(folder, topic, clock, rewrite=True)
        self._writer: TopicWriter | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="log-write")
        self.gatherer = Gatherer[Append](topic, self._thread, self._work, MAX_WAITING)

    async def close(self, timeout: float) -> None:
        """Wait for appends under way, at most `timeout` seconds; refuse those that wait; close the file."""
        try:
            if await self.gatherer.close(timeout) and self._writer is not None:
                await self.gatherer.run(self._writer.close)
                self._writer = None
        finally:
            self._thread.shutdown(wait=False)

    def _work(self, appends: list[Append]) -> Callable[[], None] | None:
        self._store(appends)
        writer = self._writer
        return writer.checkpoint if writer is not None and writer.is_checkpoint_due else None

    def _store(self, appends: list[Append]) -> None:
        blocks: dict[int, list[Packed]] = {}
        stored: list[tuple[Append, int, Failed]] = []
        for append in appends:
            if not append.records:
                continue
            try:
                packed, failed = pack(append.records)
            except Exception as error:
                append.error = error
                continue
            if packed is None:
                append.error = failed[0][1]
                continue
            part = blocks.setdefault(append.partition, [])
            stored.append((append, len(part), failed))
            part.append(packed)
        if not blocks and all(append.records for append in appends):
            return
        firsts = self._append(blocks)
        for append, index, failed in stored:
            first = firsts[append.partition][index]
            append.outcome = Appended(first, first + len(append.records) - len(failed) - 1, failed)

    def _append(self, blocks: dict[int, list[Packed]]) -> dict[int, list[int]]:
        was_open = self._writer is not None
        try:
            return self._try(blocks)
        except UnknownTopic:
            if not was_open:
                raise
        return self._try(blocks)  # deleted since it was opened, and perhaps made again

    def _try(self, blocks: dict[int, list[Packed]]) -> dict[int, list[int]]:
        if self._writer is None:
            self._writer = self._open()
        try:
            firsts = self._writer.append(blocks)
            assert firsts is not None
            return firsts
        finally:
            if self._writer.broken:
                self._writer.close()
                self._writer = None


class LogAppender:
    """`contract.Appender` over the embedded log."""

    def __init__(self, folder: DataFolder, clock: WallClock, count: Callable[[str], Awaitable[int]]) -> None:
        self._folder, self._clock, self._count = folder, clock, count
        self._queues: dict[str, TopicQueue] = {}
        self._closed = False

    async def partition_count(self, topic: str) -> int:
        return await self._count(topic)

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        """As in the contract. A time-out before its turn is Unavailable: nothing was stored."""
        if not records:
            raise ValueError("an append needs records")
        if not 0 <= partition < await self._count(topic):
            raise UnknownTopic(f"topic {topic!r} has no partition {partition}")
        stored: Appended = await self._queue(topic).gatherer.put(Append(partition, records), timeout)
        return stored

    async def probe(self, topic: str, timeout: float) -> None:
        """Raises the error that an append would raise now."""
        await self._count(topic)
        await self._queue(topic).gatherer.put(Append(0, ()), timeout)

    async def close(self, timeout: float) -> None:
        """Finish appends under way, within `timeout` seconds, and close every topic."""
        self._closed = True
        await asyncio.gather(*(queue.close(timeout) for queue in self._queues.values()))

    def _queue(self, topic: str) -> TopicQueue:
        if self._closed:
            raise BrokerClosed("the log is closed")
        queue = self._queues.get(topic)
        if queue is None:
            queue = self._queues[topic] = TopicQueue(self._folder, topic, self._clock)
        return queue
