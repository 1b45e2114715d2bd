"""An event loop whose clock is virtual: a history of hours runs in milliseconds, the same way each time.

The loop never waits. When no task can go on, its clock jumps to the moment at which the next timer fires. `run_virtually`
makes this the clock of the whole process meanwhile: `time.monotonic`, `time.time`, `time.clock_gettime` and their `_ns` forms
are virtual, and `random` has the given seed. So code that measures its deadlines with `time.monotonic()` and waits with
`asyncio.sleep` needs no change to run here.

What it cannot do: sockets, pipes, subprocesses and signals are not there (their calls raise NotImplementedError). Work for
another thread (`asyncio.to_thread`, `run_in_executor`) runs at once, in this thread, and takes no time; code that waits there
for another such call would wait for ever. `datetime.now()` is not virtual. The order of a set of strings differs from process
to process unless PYTHONHASHSEED is set: a history must not depend on it.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

EPOCH = 1_700_000_000.0
"""Virtual `time.time()` at virtual `time.monotonic()` 0, in seconds."""
_BEGIN = 1_000.0
_RESOLUTION = 1e-9
_NS = 1_000_000_000
_T = TypeVar("_T")


class Deadlock(Exception):
    """Every task waits for something that no task, timer or callback will bring about."""


class VirtualLoop(asyncio.BaseEventLoop):
    """A loop that runs tasks and timers only. `time()` is virtual, in seconds; nothing else than this loop moves it."""

    def __init__(self) -> None:
        super().__init__()
        self._now = _BEGIN
        self._clock_resolution = _RESOLUTION
        self._selector = self  # what BaseEventLoop asks to wait: `select` below

    def time(self) -> float:
        """Virtual seconds; `time.monotonic()` inside of `run_virtually`."""
        return self._now

    def select(self, timeout: float | None) -> list[Any]:
        """Called by BaseEventLoop when no callback is ready: nothing happens for `timeout` seconds, so they are over."""
        if timeout is None:
            waiting = sorted(repr(task.get_coro()) for task in asyncio.all_tasks(self))
            raise Deadlock(f"nothing can go on; waiting: {waiting}")
        self._now += timeout
        return []

    def run_in_executor(  # type: ignore[override]  # typeshed has *args of a TypeVarTuple here
        self, _executor: Any, call: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        """Runs it here and now. The future that it returns is done."""
        future = self.create_future()
        try:
            future.set_result(call(*args))
        except Exception as error:  # as an executor does: it is the caller's, who awaits the future
            future.set_exception(error)
        return future

    def _process_events(self, event_list: list[Any]) -> None:
        """BaseEventLoop hands over what `select` returned: never anything."""

    def _write_to_self(self) -> None:
        """BaseEventLoop wakes `select` with it: that never sleeps."""


@contextmanager
def virtual_clock(loop: VirtualLoop) -> Iterator[None]:
    """Meanwhile the clocks of `time` are those of this loop. For tests that run it piece by piece (`run_until_complete`)."""
    clocks: dict[str, Any] = {
        "monotonic": loop.time,
        "monotonic_ns": lambda: int(loop.time() * _NS),
        "time": lambda: EPOCH + loop.time(),
        "time_ns": lambda: int((EPOCH + loop.time()) * _NS),
        "clock_gettime": lambda _clock: loop.time(),
        "clock_gettime_ns": lambda _clock: int(loop.time() * _NS),
    }
    with mock.patch.multiple(time, **clocks):
        yield


def run_virtually(main: Coroutine[Any, Any, _T], *, seed: int) -> _T:
    """Run `main` to its end on a loop of its own, as `asyncio.run` does, with virtual clocks and `random` seeded.

    Tasks that are left are cancelled. Raises what `main` raises, and Deadlock. The state of `random` is put back.
    """
    loop, before = VirtualLoop(), random.getstate()
    random.seed(seed)
    try:
        with virtual_clock(loop), asyncio.Runner(loop_factory=lambda: loop) as runner:
            return runner.run(main)
    finally:
        random.setstate(before)
