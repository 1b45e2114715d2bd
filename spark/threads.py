"""Blocking work beside an event loop, on threads that never hold up the end of the process."""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_blocking(work: Callable[[], T], name: str) -> T:
    """Run `work` on a daemon thread of its own and wait for it. Cancelling stops the waiting, not the thread."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # None only when T is None

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            return  # the loop has ended: nobody waits any more

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
