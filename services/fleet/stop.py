"""How a person stops a running verb: the first signal asks, the second insists."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.fleet.problem import CommandFailed


class Stop:
    """`asked`: stop in good order. `insisted`: stop now, whatever is in flight."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()

    def ask(self) -> None:
        """What each signal calls."""
        if self.asked.is_set():
            self.insisted.set()
        self.asked.set()

    def check(self) -> None:
        """Raise CommandFailed (status 130) when asked to stop: for work that has nothing to finish."""
        if self.asked.is_set():
            raise CommandFailed("stopped before everything was running", status=130)


@contextmanager
def stop_on_signals(tell: Callable[[bool], None]) -> Iterator[Stop]:
    """SIGINT, SIGTERM and SIGHUP ask, again they insist; `tell` is called each time with whether it insists.

    Under nohup SIGHUP stays ignored.
    """
    loop = asyncio.get_running_loop()
    stop = Stop()

    def ask() -> None:
        stop.ask()
        tell(stop.insisted.is_set())

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, ask)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
