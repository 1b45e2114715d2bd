"""Group commit: together what comes together, an answer for everybody, an honest one after a time-out."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from services.core.broker.errors import BrokerClosed, OutcomeUnknown, Unavailable
from services.core.broker.log.group_commit import Gatherer, PendingRequest


class Number(PendingRequest[int]):
    """A request."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


Work = Callable[[list[Number]], Callable[[], None] | None]


def square(requests: list[Number]) -> None:
    """Answer each."""
    for request in requests:
        request.outcome = request.number**2


@asynccontextmanager
async def gatherer(work: Work, limit: int = 100) -> AsyncIterator[Gatherer[Number]]:
    """A gatherer over two threads, closed at the end."""
    threads = ThreadPoolExecutor(2)
    gathered = Gatherer[Number]("orders", threads, work, limit)
    try:
        yield gathered
    finally:
        await gathered.close(10)
        threads.shutdown()


async def test_one_turn_of_the_loop_is_one_call_and_order_stays() -> None:
    """If it fails, each request pays for a sync of its own."""
    calls: list[list[int]] = []

    def work(requests: list[Number]) -> None:
        calls.append([request.number for request in requests])
        square(requests)

    async with gatherer(work) as gathered:
        answers = await asyncio.gather(*[gathered.put(Number(n), 600) for n in range(20)])
    assert answers == [n * n for n in range(20)]
    assert calls == [list(range(20))]


async def test_what_comes_meanwhile_is_the_next_call_and_never_two_at_once() -> None:
    """If it fails, two transactions on one file run at once."""
    started, go = threading.Event(), threading.Event()
    calls: list[int] = []
    running = 0

    def work(requests: list[Number]) -> None:
        nonlocal running
        running += 1
        assert running == 1
        calls.append(len(requests))
        started.set()
        assert go.wait(600)
        square(requests)
        running -= 1

    async with gatherer(work) as gathered:
        first = asyncio.create_task(gathered.put(Number(1), 600))
        await asyncio.to_thread(started.wait, 10)
        others = [asyncio.create_task(gathered.put(Number(n), 600)) for n in range(2, 7)]
        await asyncio.sleep(0)
        go.set()
        assert await asyncio.gather(first, *others) == [1, 4, 9, 16, 25, 36]
    assert calls == [1, 5]


async def test_failing_work_answers_everybody() -> None:
    """If it fails, a sender waits for ever after an unexpected error."""

    def work(requests: list[Number]) -> None:
        requests[0].outcome = 1
        raise RuntimeError("unexpected")

    async with gatherer(work) as gathered:
        answers = await asyncio.gather(*[gathered.put(Number(n), 600) for n in range(3)], return_exceptions=True)
    assert [str(answer) for answer in answers] == ["unexpected"] * 3


async def test_a_time_out_says_whether_it_can_have_happened() -> None:
    """If it fails, a client is told "nothing stored" about something that was."""
    go = threading.Event()

    def work(requests: list[Number]) -> None:
        assert go.wait(600)
        square(requests)

    async with gatherer(work) as gathered:
        under_way = asyncio.create_task(gathered.put(Number(1), 0.05))
        await asyncio.sleep(0.01)
        waiting = asyncio.create_task(gathered.put(Number(2), 0.05))
        with pytest.raises(OutcomeUnknown):
            await under_way
        with pytest.raises(Unavailable):
            await waiting
        go.set()
        assert await gathered.put(Number(3), 600) == 9


async def test_a_cancelled_caller_harms_nobody() -> None:
    """If it fails, one client that goes away takes the batch of others with it."""
    async with gatherer(square) as gathered:
        tasks = [asyncio.create_task(gathered.put(Number(n), 600)) for n in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert answers[0] == 0
    assert answers[2] == 4
    assert isinstance(answers[1], asyncio.CancelledError)


async def test_the_queue_is_bounded() -> None:
    """If it fails, memory grows without bound while the disk hangs."""
    async with gatherer(square, limit=2) as gathered:
        tasks = [asyncio.create_task(gathered.put(Number(n), 600)) for n in range(3)]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert answers[:2] == [0, 1]
    assert isinstance(answers[2], Unavailable)


async def test_answers_come_before_what_is_done_afterwards() -> None:
    """If it fails, every checkpoint delays the acknowledgements of its transaction."""
    go = threading.Event()
    rests = 0

    def work(requests: list[Number]) -> Callable[[], None]:
        square(requests)
        return rest

    def rest() -> None:
        nonlocal rests
        rests += 1
        assert go.wait(600)

    async with gatherer(work) as gathered:
        assert await gathered.put(Number(3), 600) == 9
        go.set()
        assert await gathered.put(Number(4), 600) == 16
    assert rests == 2


async def test_closing_refuses_what_cannot_be_done_in_time() -> None:
    """If it fails, a disk that hangs keeps the process from ending."""
    go = threading.Event()

    def work(requests: list[Number]) -> None:
        assert go.wait(600)
        square(requests)

    async with gatherer(work) as gathered:
        first = asyncio.create_task(gathered.put(Number(1), 600))
        await asyncio.sleep(0.01)
        second = asyncio.create_task(gathered.put(Number(2), 600))
        await asyncio.sleep(0.01)
        assert not await gathered.close(0.05)
        with pytest.raises(BrokerClosed):
            await second
        go.set()
        assert await first == 1
