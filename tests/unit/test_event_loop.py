"""The suite's own guards work: tests run on the loop of production, and code that blocks it fails."""

import asyncio

import pytest
import uvloop
from blockbuster import BlockingError

from services.core.jvm.jars import read_lock


async def test_tests_run_on_uvloop() -> None:
    """If this fails, the suite tests another event loop than the services run on."""
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)


async def test_project_code_that_blocks_the_loop_fails() -> None:
    """If this fails, a file read on the event loop, which delays every request, goes unseen."""
    with pytest.raises(BlockingError):
        read_lock()
    assert await asyncio.to_thread(read_lock)
