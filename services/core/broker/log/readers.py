"""Open readers, one per topic, used from the event loop through a few threads."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from services.core.broker.errors import DataDamaged, Unavailable, UnknownTopic
from services.core.broker.log.counts import PartitionCounts
from services.core.broker.log.layout import DataFolder
from services.core.broker.log.reader import TopicReader
from services.core.broker.log.topics import register_group

T = TypeVar("T")

THREADS = 2


class _Slot:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reader: TopicReader | None = None


class Readers:
    """Topics open for reading in this process. A reader that failed is closed; the next use opens the topic anew."""

    def __init__(self, folder: DataFolder) -> None:
        self._folder = folder
        self._slots: dict[str, _Slot] = {}
        self._counts = PartitionCounts(self._look_up)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="log-read")

    async def use(self, topic: str, work: Callable[[TopicReader], T]) -> T:
        """Run `work` with the topic's reader on a thread. Cancelling does not wait for it."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._use, topic, work)

    async def run(self, work: Callable[[], T]) -> T:
        """Run something else that blocks on these threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def register_group(self, topic: str, group: str) -> None:
        """`topics.register_group`."""
        await self.run(lambda: register_group(self._folder, topic, group))

    async def partition_count(self, topic: str) -> int:
        """How many partitions the topic has, about a second old at most. Raises UnknownTopic."""
        return await self._counts.get(topic)

    def forget(self, topic: str) -> None:
        """Look again at the topic's description at the next use."""
        self._counts.forget(topic)

    def _look_up(self, topic: str) -> "asyncio.Future[int]":
        return asyncio.get_running_loop().run_in_executor(self._threads, self._use, topic, TopicReader.refresh)

    def peek(self, topic: str) -> list[int] | None:
        """The topic's high-water marks without any waiting; None when only a real read can tell."""
        slot = self._slots.get(topic)
        reader = None if slot is None else slot.reader
        return None if reader is None else reader.store.marks.peek(reader.store.meta.partitions)

    async def close(self) -> None:
        """Close every reader, after what they do now."""
        await asyncio.get_running_loop().run_in_executor(self._threads, self._close)
        self._threads.shutdown(wait=False)

    def _use(self, topic: str, work: Callable[[TopicReader], T]) -> T:
        slot = self._slots.setdefault(topic, _Slot())
        with slot.lock:
            was_open = slot.reader is not None
            try:
                return self._try(slot, topic, work)
            except UnknownTopic:
                if not was_open:
                    raise
            return self._try(slot, topic, work)  # deleted since it was opened, and perhaps made again

    def _try(self, slot: _Slot, topic: str, work: Callable[[TopicReader], T]) -> T:
        if slot.reader is None:
            slot.reader = TopicReader(self._folder, topic)
        try:
            return work(slot.reader)
        except (DataDamaged, Unavailable, UnknownTopic):
            reader, slot.reader = slot.reader, None
            reader.close()
            raise

    def _close(self) -> None:
        for slot in self._slots.values():
            with slot.lock:
                if slot.reader is not None:
                    slot.reader.close()
                    slot.reader = None
