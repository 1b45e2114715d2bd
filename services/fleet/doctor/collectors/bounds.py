"""Limits of the collectors: a part of the fleet that does not answer must not keep the doctor from the others."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from services.core.security.masking import mask_text
from services.fleet.doctor.facts import Facts

T = TypeVar("T")


async def bounded(facts: Facts, name: str, limit: float, work: Coroutine[Any, Any, None]) -> None:
    """Run a collector for at most `limit` seconds. Its failure is recorded under its name, and not raised."""
    try:
        async with asyncio.timeout(limit):
            await work
    except TimeoutError:
        facts.unknown[name] = f"no answer within {limit:g} s"
    except Exception as error:  # whatever is broken there: the others run
        facts.unknown[name] = describe(error)


def describe(error: BaseException) -> str:
    """One line for a person, without secrets."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    first = (text or type(error).__name__).strip().splitlines()[0]
    path = f"{error.filename}: " if isinstance(error, OSError) and error.filename else ""
    return mask_text(f"{path}{first}")


async def in_thread(work: Callable[[], T]) -> T:
    """The result of blocking work, on a thread that does not hold up the end of the process: a disk may hang for ever.

    Cancelling ends the waiting, not the thread.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(set_it: Callable[[], None]) -> None:
        if not done.done():
            set_it()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised again where it is awaited
            failure = error
            report: Callable[[], None] = lambda: done.set_exception(failure)  # noqa: E731
        else:
            report = lambda: done.set_result(result)  # noqa: E731
        try:
            loop.call_soon_threadsafe(finish, report)
        except RuntimeError:
            return  # the loop has ended

    threading.Thread(target=run, name="collector", daemon=True).start()
    return await done
