"""The embedded log in the contract suite: a folder of its own per test, no server."""

import asyncio
import os
import signal
import sys
import uuid
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.membership import Timing
from services.core.broker.log.retention import enforce, remove_before
from services.core.broker.log.topic_store import TopicStore

TIMING = Timing(lease=4.0, drain=10.0)

_HOLD_LOCK = """
import sys, time
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.topic_store import TopicStore
store = TopicStore.open(DataFolder.prepare(sys.argv[1]), sys.argv[2])
store.connection.execute("BEGIN IMMEDIATE")
store.connection.execute("UPDATE partitions SET floor = floor + 1")
print("holds", flush=True)
time.sleep(60)
"""


def open_for_tests(address: str, patience: float | None = None) -> AbstractAsyncContextManager[Broker]:
    """The folder with short leases, so that tests need not wait for long ones."""
    timing = TIMING if patience is None else replace(TIMING, lease=patience, drain=patience)
    return LogBroker.open(address, timing=timing)


class LogHarness:
    """The log in `folder`."""

    member_timeout = TIMING.lease
    poll_interval = TIMING.lease

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "log"
        self.spec = f"log:{self._folder}"
        self.url = f"log://{self._folder}"

    def open(self, patience: float | None = None) -> AbstractAsyncContextManager[Broker]:
        """One more connection, as another process would have."""
        return open_for_tests(str(self._folder), patience)

    def fresh_name(self, hint: str) -> str:
        """Unique, though every test has a folder of its own."""
        return f"{hint}-{uuid.uuid4().hex[:8]}"

    async def create_topic(self, broker: Broker, partitions: int = 1) -> str:
        """A fresh empty topic."""
        name = self.fresh_name("topic")
        await broker.admin.create_topic(TopicSpec(name, partitions=partitions))
        return name

    async def crash(self, topic: str, partition: int = 0) -> None:
        """Kill a process that holds the topic's write lock with changes it has not committed."""
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _HOLD_LOCK, str(self._folder), topic, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert child.stdout is not None
            async with asyncio.timeout(300):
                assert await child.stdout.readline() == b"holds\n"
        finally:
            os.kill(child.pid, signal.SIGKILL)
            await child.wait()

    async def restart(self) -> None:
        """Nothing runs while nobody has the folder open."""

    compacts = True

    async def compact(self, topic: str) -> None:
        """What the keeper does, an hour later."""
        later = WallClock().now_ms() + 3_600_000
        await asyncio.to_thread(enforce, DataFolder(self._folder), topic, later)

    async def expire(self, topic: str, partition: int, before: int) -> None:
        """What retention does, at a given offset."""
        await asyncio.to_thread(_cut, DataFolder(self._folder), topic, partition, before)


def _cut(folder: DataFolder, topic: str, partition: int, before: int) -> None:
    store = TopicStore.open(folder, topic)
    try:
        remove_before(store, partition, before)
    finally:
        store.close()
