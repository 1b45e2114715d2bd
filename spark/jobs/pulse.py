"""How long a pipe's queries have been at work on what they do now. Plain Python: it is read while Java answers nobody."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PART = 0.1
"""Of the time that a batch may take: what one part of a batch that is done in parts may take, and one trial."""
SLOW = 0.2
"""Of the time that it may take: after so much of it, the pipe is not ready."""


class Pulse:
    """Of one pipe. Thread-safe. limit: seconds that one batch may take."""

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._begun: dict[str, tuple[str, float, float]] = {}

    def begin(self, query: str, what: str, share: float = 1.0) -> None:
        """This query begins something, and is done with what it did before. share: of the limit, for this."""
        self._begun[query] = (what, self._clock(), share * self._limit)

    def end(self, query: str) -> None:
        """It waits for something to do."""
        self._begun.pop(query, None)

    @contextmanager
    def at_work(self, query: str, what: str, share: float = 1.0) -> Iterator[None]:
        """Something to be done meanwhile."""
        self.begin(query, what, share)
        try:
            yield
        finally:
            self.end(query)

    def slow(self) -> str | None:
        """What has been under way for too long to call the pipe ready."""
        return self._older(lambda _limit: SLOW * self._limit)

    def stuck(self) -> str | None:
        """What has been under way beyond its limit."""
        return self._older(lambda limit: limit)

    def _older(self, than: Callable[[float], float]) -> str | None:
        now = self._clock()
        for what, begun, limit in tuple(self._begun.values()):
            if now - begun > than(limit):
                return f"{what} has made no progress for {now - begun:.0f} s"
        return None
