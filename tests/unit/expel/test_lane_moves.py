"""A lane leaves a stream that moves to another broker, also when it reads nothing."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import cast

import pytest

from services.core import consuming
from services.core.broker.contract import Consumer, OnRevoke, Start
from services.core.broker.errors import Unavailable
from services.core.broker.several.brokers import DEFAULT, Places
from services.core.broker.several.consumer import HomeConsumer
from tests.unit.expel.fake_broker import FakeBroker, FakeConsumer
from tests.unit.expel.fake_sender import make_record
from tests.unit.expel.receiver import wait_until
from tests.unit.expel.running_lane import P0, hold, run_lane


class _MovingBroker(FakeBroker):
    """The default broker of a fleet of several. `homes` says where its streams are."""

    def __init__(self) -> None:
        super().__init__({"s": 1, "late.dead": 1})
        self.homes: dict[str, str] = {}
        self.joins = 0

    @asynccontextmanager
    async def consumer(
        self, group: str, topics: Collection[str], *, start: Start, on_revoke: OnRevoke
    ) -> AsyncIterator[FakeConsumer]:
        self.joins += 1
        homes = {topic: self.homes.get(topic, DEFAULT) for topic in topics}
        async with super().consumer(group, topics, start=start, on_revoke=on_revoke) as consumer:
            member = HomeConsumer(cast(Consumer, consumer), homes, Places(self.homes))
            yield cast(FakeConsumer, member)


@pytest.mark.parametrize("ends", ["known", "unknown", "never answered"])
async def test_a_lane_without_room_leaves_a_stream_that_moves(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """Otherwise one receiver that is down holds up all destinations of the stream until somebody restarts expel."""
    monkeypatch.setattr(consuming, "_LAG_INTERVAL_S", 0.01)
    monkeypatch.setattr(consuming, "_LAG_LIMIT_S", 0.1)
    broker = _MovingBroker()
    records, never = [make_record(number) for number in range(3)], asyncio.Event()
    async with run_lane(records, hold(never), broker=broker, max_events=1) as running:
        await wait_until(lambda: running.sender.under_way == 1)
        (lane,) = running.dispatchers
        assert not lane.room()

        async def measure_ends() -> None:
            if ends == "never answered":
                await never.wait()
            raise Unavailable("another broker of the fleet is down")

        if ends != "known":
            monkeypatch.setattr(lane.ledger, "measure_ends", measure_ends)
        running.sender.answer = lambda _: None
        broker.homes["s"] = "second"
        await wait_until(lambda: running.committed(P0) == 2)
        assert running.sender.taken == ["e0", "e1", "e2"]
        assert broker.joins == 2
