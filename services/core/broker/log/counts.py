"""Partition counts, looked up again behind the scenes; callers that wait go on in the order in which they came."""

import asyncio
from collections.abc import Callable

from services.core.broker.log.clock import boot_ms

_FRESH_MS = 1000

LookUp = Callable[[str], "asyncio.Future[int]"]


class PartitionCounts:
    """How many partitions each topic has, at most a second old plus the time of one look-up.

    A send asks for the count before it is queued, so a caller must not overtake one that came before it and waits.
    """

    def __init__(self, look_up: LookUp) -> None:
        self._look_up = look_up
        self._known: dict[str, _Count] = {}

    async def get(self, topic: str) -> int:
        """The count. Raises what the look-up raised: UnknownTopic, DataDamaged, Unavailable."""
        known, now = self._known.get(topic), boot_ms()
        if known is None or (known.count is not None and now > known.look_again + _FRESH_MS):  # nobody asked for long
            known = self._known[topic] = _Count()
            self._start(topic, known)
        if known.count is None:
            return await known.wait()
        if now > known.look_again:
            known.look_again = now + _FRESH_MS
            self._start(topic, known)
        return known.count

    def forget(self, topic: str) -> None:
        """Look it up at the next call."""
        self._known.pop(topic, None)

    def _start(self, topic: str, known: "_Count") -> None:
        def settle(done: "asyncio.Future[int]") -> None:
            error = asyncio.CancelledError() if done.cancelled() else done.exception()
            if error is not None and self._known.get(topic) is known:
                del self._known[topic]
            known.settle(error or done.result())

        self._look_up(topic).add_done_callback(settle)


class _Count:
    """One topic's count, None while those who wait have not gone on."""

    def __init__(self) -> None:
        self.count: int | None = None
        self.look_again = boot_ms() + _FRESH_MS
        self._waiters: list[asyncio.Future[int]] = []

    async def wait(self) -> int:
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return await waiter

    def settle(self, outcome: int | BaseException) -> None:
        """Wake those who wait; whoever comes before they ran waits behind them."""
        if self.count is not None:
            self.count = outcome if isinstance(outcome, int) else self.count
            return
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if isinstance(outcome, int):
                waiter.set_result(outcome)
            else:
                waiter.set_exception(outcome)
        if waiters:
            asyncio.get_running_loop().call_soon(self.settle, outcome)
        elif isinstance(outcome, int):
            self.count = outcome
