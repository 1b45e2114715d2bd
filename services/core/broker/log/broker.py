"""`contract.Broker` over the embedded log. It opens the data folder, owns all threads and files, and closes them in order."""

import asyncio
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

from services.core.broker.contract import Features, OnRevoke, Start
from services.core.broker.log.admin import LogAdmin
from services.core.broker.log.appender import LogAppender
from services.core.broker.log.clock import WallClock
from services.core.broker.log.consumer import LogConsumer
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.groups import CommittedOffsets
from services.core.broker.log.leases import Leases
from services.core.broker.log.membership import LogMembership, SharedResources, Timing, WakeupFile
from services.core.broker.log.retention import run_retention
from services.core.broker.log.row_format import MAX_RECORD_BYTES
from services.core.broker.log.topic_reader import Readers
from services.core.process.disk import show_disk

FEATURES = Features(contiguous_offsets=True, dates_by_storing=False, max_record_bytes=MAX_RECORD_BYTES)
_CLOSE_SECONDS = 30.0


class LogBroker:
    """An open data folder. Made by `open`; several processes of one host may have the same folder open."""

    def __init__(self, folder: DataFolder, clock: WallClock, timing: Timing) -> None:
        self._folder, self._clock = folder, clock
        self._readers = Readers(folder)
        self._offsets = CommittedOffsets(folder)
        self.features = FEATURES
        self.appender = LogAppender(folder, clock, self._readers.partition_count)
        self.admin = self.reader = LogAdmin(folder, self._readers, self._offsets, clock)
        self.resharding = None
        self._lease_thread = ThreadPoolExecutor(1, thread_name_prefix="log-lease")
        self._timing = timing
        self._shared: SharedResources | None = None
        self._sharing = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, path: str, *, timing: Timing | None = None, clock: WallClock | None = None, retention_seconds: float = 60.0
    ) -> AsyncIterator["LogBroker"]:
        """Open or make the folder. Raises BadDataFolder. retention_seconds: between two passes of retention.

        Leaving waits for appends under way, at most 30 s, and closes every file.
        """
        folder = await asyncio.to_thread(DataFolder.prepare, path)
        show_disk(folder.root)
        broker = cls(folder, clock or WallClock(), timing or Timing())
        keeper = asyncio.create_task(run_retention(folder, broker._clock, retention_seconds), name="log-keeper")
        try:
            yield broker
        finally:
            keeper.cancel()
            await asyncio.wait((keeper,))
            await broker._close()

    @asynccontextmanager
    async def consumer(
        self, group: str, topics: Collection[str], *, start: Start, on_revoke: OnRevoke
    ) -> AsyncIterator[LogConsumer]:
        shared = await self._shared_resources()
        membership = LogMembership(shared, group, topics, start, on_revoke)
        try:
            await membership.join()
            yield LogConsumer(shared, membership, self._clock)
        finally:
            await membership.leave()

    def is_contiguous(self, topic: str) -> bool:
        return self.features.contiguous_offsets

    async def probe(self, topic: str, *, timeout: float) -> None:
        await self.appender.probe(topic, timeout)

    async def _shared_resources(self) -> SharedResources:
        async with self._sharing:  # members that join at once would each open files, and all but the last stay open
            if self._shared is None:
                await self._offsets.use(lambda file: None)  # makes groups.db
                leases = await self._on_lease_thread(Leases, self._folder, int(self._timing.lease * 1000))
                wakeup = await self._on_lease_thread(WakeupFile, self._folder.root / "groups.bell")
                self._shared = SharedResources(
                    leases, self._offsets, wakeup, self._readers, self._on_lease_thread, self._timing
                )
            return self._shared

    async def _on_lease_thread(self, work: Any, *arguments: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._lease_thread, work, *arguments)

    async def _close(self) -> None:
        try:
            await self.appender.close(_CLOSE_SECONDS)
            if self._shared is not None:
                await self._on_lease_thread(self._shared.leases.close)
                await self._on_lease_thread(self._shared.wakeup.close)
            await self._offsets.close(_CLOSE_SECONDS)
            await self._readers.close()
        finally:
            self._lease_thread.shutdown(wait=False)
