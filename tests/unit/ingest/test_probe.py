"""Readiness follows the broker: unready until it took a probe, and again whenever it does not."""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import cast

import pytest

from services.core.broker.contract import Broker
from services.core.broker.errors import Unavailable, UnknownTopic
from services.core.broker.producer import Producer
from services.core.pipe_file.stream import Stream
from services.ingest import probe as probe_module
from services.ingest.intake import Intake
from services.ingest.probe import Probe
from tests.support.memory_appender import MemoryAppender


@dataclass
class Answers:
    """The probing half of a broker; `error` is what it answers."""

    error: Exception | None = None
    asked: list[str] = field(default_factory=list)

    @property
    def admin(self) -> "Answers":
        """As in the contract, as far as it is asked here."""
        return self

    async def check_durability(self, topics: Collection[str]) -> None:
        """All are safe."""

    async def kept_by_event_time(self, topics: Collection[str]) -> frozenset[str]:
        """As in the contract: one of the streams."""
        return frozenset(topics) & {"two"}

    async def probe(self, topic: str, *, timeout: float) -> None:
        """As in the contract."""
        self.asked.append(topic)
        if self.error is not None:
            raise self.error


async def test_readiness_follows_the_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traffic must not come before the broker can take it, and must go elsewhere while it cannot."""
    monkeypatch.setattr(probe_module, "READY_EVERY_S", 0.01)
    monkeypatch.setattr(probe_module, "UNREADY_EVERY_S", 0.01)
    appender, answers, stopping = MemoryAppender(), Answers(), asyncio.Event()
    async with Producer(appender) as producer:
        intakes = [Intake(name, Stream(), producer.rotate_keyless) for name in ("one", "two")]
        probe = Probe(cast("Broker", answers), producer, intakes)

        async def until(part: str | None) -> None:
            async with asyncio.timeout(600):
                while probe.reason is not None if part is None else part not in (probe.reason or ""):
                    await asyncio.sleep(0.005)

        assert probe.reason is not None
        appender.create("one", 3)
        async with asyncio.TaskGroup() as group:
            group.create_task(probe.run(stopping))
            await until("two does not exist")
            assert [intake.partitions for intake in intakes] == [3, 0]
            appender.create("two", 5)
            await until(None)
            assert [intake.partitions for intake in intakes] == [3, 5]
            answers.error = Unavailable("no leader")
            await until("no leader")
            assert [intake.partitions for intake in intakes] == [3, 5]
            answers.error = None
            await until(None)
            answers.error = UnknownTopic("gone")
            await until("does not exist")
            stopping.set()
        assert probe.reason == "stopping"
    assert set(answers.asked) == {"one", "two"}


async def test_a_stop_does_not_wait_for_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an ingest that is stopped while a slow broker answers its first check outlasts its drain time, and is killed."""
    answers, stopping, asked = Answers(), asyncio.Event(), asyncio.Event()

    async def hang(_: Collection[str]) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(answers, "check_durability", hang)
    monkeypatch.setattr(probe_module, "FIRST_S", 3600.0)
    async with Producer(MemoryAppender()) as producer, asyncio.timeout(600):
        probe = Probe(cast("Broker", answers), producer, [Intake("one", Stream(), producer.rotate_keyless)])
        running = asyncio.create_task(probe.run(stopping))
        await asked.wait()
        stopping.set()
        await running
    assert probe.reason == "stopping"
