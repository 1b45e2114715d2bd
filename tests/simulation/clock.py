"""The functions of `time`, and what is drawn from the system, as a history has them: they follow its loop and its seed.

`install` comes before anything else is imported: modules take `time.monotonic` as a default argument, and keep it.
"""

import os
import random
import secrets
import time
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.virtual_loop import EPOCH, VirtualLoop

_loop: VirtualLoop | None = None
_bytes = random.Random(0)
find_skew: Callable[[], float] = lambda: 0.0  # noqa: E731 - replaced by the machine
"""How many seconds the wall clock is ahead, of whoever asks."""
_real: dict[str, Callable[[], float]] = {
    name: getattr(time, name) for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter")
}
_real_clock = time.clock_gettime
_real_clock_ns = time.clock_gettime_ns


def install() -> None:
    """Replace them, in this whole process: they are the real ones while no loop is followed."""
    for name in _real:
        setattr(time, name, _follow(name))
    time.clock_gettime = lambda clock: _real_clock(clock) if _loop is None else _loop.time()
    time.clock_gettime_ns = lambda clock: _real_clock_ns(clock) if _loop is None else int(_loop.time() * 1e9)
    os.urandom = _bytes.randbytes
    secrets.token_bytes = lambda nbytes=None: _bytes.randbytes(32 if nbytes is None else nbytes)


def _follow(name: str) -> Callable[[], float | int]:
    real = _real[name]
    if name == "time":
        return lambda: real() if _loop is None else EPOCH + find_skew() + _loop.time()
    if name == "time_ns":
        return lambda: real() if _loop is None else int((EPOCH + find_skew() + _loop.time()) * 1e9)
    if name.endswith("_ns"):
        return lambda: real() if _loop is None else int(_loop.time() * 1e9)
    return lambda: real() if _loop is None else _loop.time()


def seed_everything(seed: int) -> None:
    """What services draw from `random`, `secrets` and the system."""
    random.seed(seed)
    _bytes.seed(seed)


def real_seconds() -> float:
    """The machine's own clock, whatever is followed."""
    return _real["monotonic"]()


@contextmanager
def follow(loop: VirtualLoop) -> Iterator[None]:
    """All clocks tell this loop's time."""
    global _loop
    before, _loop = _loop, loop
    events.set_event_loop(loop)
    try:
        yield
    finally:
        _loop = before
        events.set_event_loop(None)
