"""Group commit: all requests that arrive during one transaction are the next transaction.

One call to a worker thread and one call back into the loop per transaction, however many wait for it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

from services.core.broker.errors import BrokerClosed, OutcomeUnknown, Unavailable

R = TypeVar("R")
W = TypeVar("W", bound="PendingRequest[Any]")


class PendingRequest(Generic[R]):
    """A request on its way. The worker thread fills in `outcome` or `error`; only the loop touches `future`."""

    __slots__ = ("error", "future", "outcome")

    def __init__(self) -> None:
        self.future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self.outcome: R | None = None
        self.error: BaseException | None = None


class Gatherer(Generic[W]):
    """Gives all waiting requests to `work` on a thread, one call at a time. All state belongs to the loop.

    work: fills in the requests' outcomes; an exception answers all that have none. It may return something to do
    after the answers went out and before the next transaction.
    """

    def __init__(
        self, name: str, thread: ThreadPoolExecutor, work: Callable[[list[W]], Callable[[], None] | None], limit: int
    ) -> None:
        self._name, self._thread, self._do, self._limit = name, thread, work, limit
        self._loop = asyncio.get_running_loop()
        self._waiting: list[W] = []
        self._busy = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def put(self, request: W, timeout: float) -> Any:
        """The request's outcome. Requests of one turn of the loop are one transaction.

        After `timeout` seconds: Unavailable when it still waits for its turn (it is removed), else OutcomeUnknown.
        """
        if len(self._waiting) >= self._limit:
            raise Unavailable(f"{self._name}: {self._limit} requests are waiting already; nothing was stored")
        self._waiting.append(request)
        if not self._busy:
            self._busy = True
            self._idle.clear()
            self._loop.call_soon(self._launch)
        try:
            async with asyncio.timeout(timeout):
                return await request.future
        except TimeoutError:
            if request in self._waiting:
                self._waiting.remove(request)
                raise Unavailable(f"{self._name}: the log was busy for {timeout:g} s; nothing was stored") from None
            raise OutcomeUnknown(f"{self._name}: no answer from the disk within {timeout:g} s") from None

    async def run(self, work: Callable[[], R]) -> R:
        """Run something else on the same thread. The caller knows that no transaction is under way."""
        return await self._loop.run_in_executor(self._thread, work)

    async def close(self, timeout: float) -> bool:
        """Wait for all answers; whether all came within `timeout` seconds. Otherwise refuses the requests that wait."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                request.error = BrokerClosed(f"{self._name}: closed before it was stored")
            self._settle(waiting)
            return False
        return True

    def _launch(self) -> None:
        requests, self._waiting = self._waiting, []
        if not requests:
            self._busy = False
            self._idle.set()
            return
        self._thread.submit(self._work, requests)

    def _work(self, requests: list[W]) -> None:
        after = None
        try:
            after = self._do(requests)
        except BaseException as error:
            for request in requests:
                request.error = request.error or error
        if after is None:
            self._call_soon(self._settle_and_launch, requests)
            return
        self._call_soon(self._settle, requests)
        try:
            after()
        finally:
            self._call_soon(self._launch)

    def _call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _settle_and_launch(self, requests: list[W]) -> None:
        self._launch()
        self._settle(requests)

    @staticmethod
    def _settle(requests: list[W]) -> None:
        for request in requests:
            if request.future.done():
                continue
            if request.error is None:
                request.future.set_result(request.outcome)
            else:
                request.future.set_exception(request.error)
