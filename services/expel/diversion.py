"""How fast a lane with an open breaker puts its events away: in turns, a little faster than they usually come.

What waits longer lies in its stream, which costs nothing. Handing a backlog over as fast as the machine can would take it from
the other destinations: the retrier, the broker and the other lanes would work for the dead one. A turn gathers what came since
the last, so that few large writes are made of it.
"""

import time
from collections.abc import Callable

TURN_S = 0.5
LEAST_RATE = 500.0
"""Events a second, when less is usual or nothing is known of it."""
_MOST = 1.25
_DOUBLE_S = 30.0
"""So long with more than may go, and the rate is doubled: what comes for days must not expire in its stream."""


class Diversion:
    """One destination's, in one process. `clock` is monotonic seconds. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate = LEAST_RATE
        self._next_turn = self._enough_at = 0.0

    def begin(self, usual: float | None) -> None:
        """The breaker opened. usual: events a second before that, when it is known."""
        self._rate = max(LEAST_RATE, _MOST * (usual or 0.0))
        self._enough_at = self._clock()

    def wait(self) -> float:
        """Seconds until the next turn."""
        return max(0.0, self._next_turn - self._clock())

    def limit(self) -> int:
        """How many events a turn may take, its last request aside."""
        return int(self._rate * TURN_S)

    def end_turn(self, taken: int, *, is_more: bool) -> None:
        """A turn put so many events away. is_more: there is more: here, or in the stream because the lane was full."""
        now = self._clock()
        self._next_turn = now + (min(TURN_S, taken / self._rate) if is_more else TURN_S)
        if not is_more:
            self._enough_at = now
        elif now - self._enough_at >= _DOUBLE_S:
            self._rate *= 2
            self._enough_at = now
