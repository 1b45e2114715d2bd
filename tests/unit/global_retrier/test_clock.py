"""The clock by which events wait."""

import asyncio
import time

import pytest

from services.global_retrier.delay_queue import SteadyClock


@pytest.mark.parametrize("jump_s", [3600, -3600])
async def test_the_wall_clock_may_jump(monkeypatch: pytest.MonkeyPatch, jump_s: int) -> None:
    """Broken: an hour that somebody adds to the system's clock releases an hour of events early, all at once; or holds them."""
    clock = SteadyClock()
    before = clock.now_ms()
    assert abs(before - time.time() * 1000) < 1000
    jumped, real = jump_s * 10**9, time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + jumped)
    monkeypatch.setattr(time, "time", lambda: (real() + jumped) / 10**9)
    assert 0 <= clock.now_ms() - before < 60_000


async def test_nobody_is_woken_early() -> None:
    """Broken: an event is looked at before its time, and hops once more for a few milliseconds."""
    clock = SteadyClock()
    until = clock.now_ms() + 50
    async with asyncio.timeout(600):
        await clock.sleep_until(until)
    assert clock.now_ms() >= until
    await clock.sleep_until(0)
