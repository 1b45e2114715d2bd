"""Stops a running command on signals: the first requests a stop in good order, the second a stop at once."""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from services.fleet.problem import CommandFailed

Result = TypeVar("Result")


class Stop:
    """`asked`: stop in good order. `insisted`: stop at once, also with events in flight."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()

    def request(self) -> None:
        """Called for each signal."""
        if self.asked.is_set():
            self.insisted.set()
        self.asked.set()

    def check(self) -> None:
        """Raise CommandFailed (status 130) when a stop is requested: for work that has nothing to finish."""
        if self.asked.is_set():
            raise CommandFailed("stopped before everything was running", status=130)

    async def interrupt(self, work: Coroutine[Any, Any, Result], message: str) -> Result:
        """The result of `work`. If a stop is requested first, cancels it and raises CommandFailed with status 130."""
        working, asked = asyncio.ensure_future(work), asyncio.ensure_future(self.asked.wait())
        try:
            await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            if not working.done():
                working.cancel()
                await asyncio.wait({working})
        if self.asked.is_set() and (working.cancelled() or working.exception() is not None):
            raise CommandFailed(message, status=130)
        return working.result()


@contextmanager
def stop_on_signals(on_signal: Callable[[bool], None] = lambda _insists: None) -> Iterator[Stop]:
    """Handle SIGINT, SIGTERM and SIGHUP. `on_signal` is called for each, with whether it requests a stop at once.

    Under nohup SIGHUP stays ignored.
    """
    loop = asyncio.get_running_loop()
    stop = Stop()

    def handle() -> None:
        stop.request()
        on_signal(stop.insisted.is_set())

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, handle)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
