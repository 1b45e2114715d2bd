"""What a lane has to send, when the next of it may leave, and the timer for that moment: retries come first."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from services.core.broker.record import Record, TopicPartition
from services.expel.delivery import Chunk, Delivery
from services.expel.keyed_pending import KeyedPending
from services.expel.lane_bounds import LaneShape
from services.expel.pending import FifoPending, Pending
from services.expel.retries import Retries


class Agenda:
    """Events that wait for their request, and requests that wait for their next attempt. Times are those of `clock`, monotonic s.

    on_time: called when a moment has come that `look_again` was told of. `closing`: only retries leave any more. Not thread-safe.
    """

    def __init__(
        self, shape: LaneShape, on_time: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shape, self._on_time, self._clock = shape, on_time, clock
        self._pending: Pending = KeyedPending(shape.cut) if shape.keyed else FifoPending(shape.cut)
        self._retries = Retries()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self.closing = False

    @property
    def retries(self) -> int:
        """Requests that wait for their next attempt."""
        return len(self._retries)

    def add(self, chunk: Chunk) -> None:
        """These wait for their first request."""
        self._pending.add(chunk)

    def again(self, delivery: Delivery, wait: float = 0.0) -> None:
        """This one is tried again, so many seconds from now at the earliest."""
        self._retries.push(delivery, self._clock() + wait)

    def finish(self, records: Sequence[Record]) -> None:
        """These are settled, or another member's: later ones of their keys may go."""
        self._pending.finish(records)

    def when_due(self, now: float, *, is_sending: bool) -> float | None:
        """When the next delivery could leave (not after now: at once); None: not before something else happens."""
        retry = self._retries.due()
        is_busy = self._shape.serial and (is_sending or self._retries)
        if self.closing or is_busy or (retry is not None and retry <= now):
            return retry
        oldest = self._pending.oldest()
        if oldest is None:
            return retry
        full = now if self._pending.has_full() else oldest + self._shape.max_wait
        return full if retry is None else min(retry, full)

    def take(self, now: float) -> Delivery:
        """What may leave now, retries first; only when `when_due` says that there is something."""
        retry = self._retries.due()
        return self._retries.pop() if retry is not None and retry <= now else self._pending.cut()

    def take_all(self) -> Iterator[Delivery]:
        """All that is held, due or not, retries first; a key that is under way follows when it is not."""
        while self._retries:
            yield self._retries.pop()
        while self._pending.oldest() is not None:
            yield self._pending.cut()

    def drop(self, sources: Collection[TopicPartition]) -> tuple[tuple[int, float], list[Delivery]]:
        """Forget what these partitions have here: how many events that never were in a request, and their weight; the retries."""
        return self._pending.drop(sources), self._retries.drop(sources)

    def look_again(self, at: float) -> None:
        """Call `on_time` then, unless an earlier moment is set."""
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_later(max(0.0, at - self._clock()), self._ring)

    def stop(self) -> None:
        """No timer rings any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        self._timer = None
        self._on_time()
