"""An observer whose readers hang is found; one that reads, waits, or cannot reach its broker is not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker, PartitionRange, Reader, Start
from services.core.broker.errors import Unavailable
from services.core.broker.producer import Producer
from services.core.broker.record import Batch
from services.core.control import pauses
from services.core.ledger.report import TELEMETRY
from services.core.pipe_file.topic_names import CONTROL
from services.core.process.progress import CHECK_EVERY_S, LIMIT_S, ProgressWatch
from services.core.provision import ensure_topics
from services.core.security.signing import SigningKeys
from services.observer import backlogs, dead_letters, follower, standby
from services.observer.app import _Parts
from services.observer.settings import ObserverSettings
from tests.unit.observer.letters import PIPES

LOOKS = round(LIMIT_S / CHECK_EVERY_S)
READERS = {"shop.dead": "reading dead letters", TELEMETRY: "reading reports", CONTROL: "reading pauses"}


class Troubled:
    """A Reader of which each request about the topic `hangs` has no answer, or that is `down`."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.hangs, self.down, self.waiting = "", False, 0

    async def _pass(self, topic: str) -> None:
        if self.down:
            raise Unavailable("down")
        self.waiting += topic == self.hangs
        while topic == self.hangs:
            await asyncio.sleep(0.005)

    async def describe(self, topic: str) -> dict[int, PartitionRange]:
        await self._pass(topic)
        return await self._reader.describe(topic)

    async def next_at_least(self, topic: str) -> dict[int, int]:
        await self._pass(topic)
        return await self._reader.next_at_least(topic)

    async def offsets_at(self, topic: str, start: Start) -> dict[int, int]:
        await self._pass(topic)
        return await self._reader.offsets_at(topic, start)

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        await self._pass(topic)
        return await self._reader.read(topic, partition, offset, max_records=max_records)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[_Parts, Troubled]]:
    """An observer's parts at work on a log."""
    async with open_broker(f"log://{folder}/log") as opened, Producer(opened.appender) as producer:
        await ensure_topics(opened.admin, PIPES)
        reader = Troubled(opened.reader)
        names: dict[str, Any] = {name: getattr(opened, name) for name in ("admin", "consumer", "features")}
        broker = cast(Broker, SimpleNamespace(**names, reader=reader))
        parts = _Parts(PIPES, broker, producer, ObserverSettings(), SigningKeys())
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for _, work in parts.work(stopping):
                group.create_task(work)
            try:
                yield parts, reader
            finally:
                reader.hangs, reader.down = "", False
                stopping.set()


async def look(parts: _Parts, stuck: str = "") -> str | None:
    """What the watch says after the time limit, in which every loop but the stuck one has turned again and again."""
    watch = ProgressWatch(parts.steps)
    for _ in range(LOOKS + 1):
        watch.check()
        before = {step.what: step.token for step in parts.steps()}
        async with asyncio.timeout(600):
            while any(step.token == before.get(step.what) for step in parts.steps() if step.what != stuck):
                await asyncio.sleep(0.002)
    return watch.why_not_alive()


async def test_readers_that_hang_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an observer that reads nothing looks alive, and no loss raises an alarm; or an outage restarts it for ever."""
    for module in (backlogs, pauses):
        monkeypatch.setattr(module, "FOLLOW_S", 0.01)
    for module in (dead_letters, follower):
        monkeypatch.setattr(module, "TURN_S", 0.01)
    monkeypatch.setattr(standby, "POLL_WAIT_S", 0.01)
    monkeypatch.setattr(follower, "RECOVER_EVERY_S", 0.01)
    async with running(tmp_path) as (parts, reader):
        async with asyncio.timeout(600):
            while len(list(parts.steps())) < 6:  # the recovery begins when all is read
                await asyncio.sleep(0.01)
        assert await look(parts) is None
        for topic, what in READERS.items():
            reader.hangs, reader.waiting = topic, 0
            async with asyncio.timeout(600):
                while not reader.waiting:
                    await asyncio.sleep(0.005)
            assert str(await look(parts, what)).startswith(what)
            reader.hangs = ""
            assert await look(parts) is None, f"{topic} is read again"
        reader.down = True
        assert await look(parts) is None, "the broker is away"
