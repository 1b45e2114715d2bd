"""Who may try again what ended the process: one pipe at a time, so that it is known who ended it the next time."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spark.jobs.query import Stopping

SETTLE_S = 5.0
"""For each process that it ended, but for one, a pipe waits so long before it tries again: the others get to work, and those
that ended fewer go first."""
MOST_S = 60.0
_POLL_S = 0.1


class Turn:
    """Shared by all pipes of a process."""

    def __init__(self, settle_s: float = SETTLE_S) -> None:
        self._settle_s = settle_s
        self._free = threading.Lock()

    @contextmanager
    def alone(self, ended: int, is_stopping: Callable[[], bool]) -> Iterator[Callable[[], None]]:
        """Wait for the turn of a pipe that ended so many processes. One may have been ended by anybody: no wait then, and nobody
        waits for it. Yields how to give the turn back early. Raises Stopping."""
        held = False

        def give_back() -> None:
            nonlocal held
            if held:
                held = False
                self._free.release()

        if ended > 1:
            ready_at = time.monotonic() + min(MOST_S, (ended - 1) * self._settle_s)
            while time.monotonic() < ready_at or not self._free.acquire(timeout=_POLL_S):
                if is_stopping():
                    raise Stopping
                time.sleep(_POLL_S)
            held = True
        try:
            yield give_back
        finally:
            give_back()
