"""The one service most tests here talk to."""

from collections.abc import AsyncIterator, Iterator

import pytest
import structlog.testing

from tests.unit.ingest.service import Service, running


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    """Ingest over a broker in memory, without keys."""
    async with running() as service:
        yield service


@pytest.fixture(autouse=True)
def _quiet_logs() -> Iterator[None]:
    """Logs are collected, not rendered: structlog's colourful default reads source files, which blocks the loop."""
    with structlog.testing.capture_logs():
        yield
