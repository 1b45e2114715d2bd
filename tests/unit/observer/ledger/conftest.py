"""A log with the topics of the ledger, and turns without waits between them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.log import LogBroker
from services.core.ledger.report import SNAPSHOTS, TELEMETRY
from services.observer import follower


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waits between two turns."""
    monkeypatch.setattr(follower, "TURN_S", 0.01)
    monkeypatch.setattr(follower, "RECOVER_EVERY_S", 0.01)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with LogBroker.open(str(tmp_path / "log")) as opened:
        for topic in ("flights", "late.out", TELEMETRY, SNAPSHOTS):
            await opened.admin.create_topic(TopicSpec(topic, 1))
        yield opened
