"""The loop with a virtual clock, on which whole histories are tested."""

import asyncio
import random
import time

import pytest

from tests.support.virtual_loop import EPOCH, Deadlock, run_virtually


def test_hours_pass_at_once_on_every_clock() -> None:
    """If it fails, code under simulation sees clocks that disagree, or a test sleeps for real."""

    async def wait() -> tuple[float, float, float, int]:
        loop = asyncio.get_running_loop()
        before = loop.time(), time.monotonic(), time.time(), time.monotonic_ns()
        await asyncio.sleep(36_000)
        return (
            loop.time() - before[0],
            time.monotonic() - before[1],
            time.time() - before[2],
            time.monotonic_ns() - before[3],
        )

    real = time.time()
    assert run_virtually(wait(), seed=1) == pytest.approx((36_000, 36_000, 36_000, 36_000 * 10**9))
    assert abs(time.time() - real) < 3_000, "the real clock is back"
    assert real > EPOCH


def test_timers_fire_in_their_order_and_bounds_hold() -> None:
    """If it fails, time-outs under simulation come before or after what they bound."""

    async def run() -> list[str]:
        seen: list[str] = []

        async def note(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append(name)

        async with asyncio.TaskGroup() as group:
            for name, seconds in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
                group.create_task(note(name, seconds))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await note("never", 5.1)
        seen.append(await asyncio.to_thread(lambda: "thread"))
        return seen

    assert run_virtually(run(), seed=1) == ["a", "b", "c", "thread"]


def test_one_seed_is_one_history() -> None:
    """If it fails, a seed that found a fault does not find it again."""

    async def run() -> list[float]:
        return [random.random() for _ in range(5)]

    state = random.getstate()
    assert run_virtually(run(), seed=7) == run_virtually(run(), seed=7)
    assert run_virtually(run(), seed=7) != run_virtually(run(), seed=8)
    assert random.getstate() == state


def test_waiting_for_nothing_is_an_error() -> None:
    """If it fails, a history in which everybody waits for somebody else hangs the test run."""

    async def wait() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="wait"):
        run_virtually(wait(), seed=1)


def test_what_a_thread_raises_reaches_the_caller() -> None:
    """If it fails, an error of blocking work is lost under simulation."""

    async def run() -> None:
        await asyncio.to_thread(int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        run_virtually(run(), seed=1)
