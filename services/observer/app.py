"""The observer as a service: a reader of dead letters, an API, a management port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog

from services.core.lifecycle import Supervision
from services.core.management import serve_management
from services.core.opening import open_when_reachable
from services.core.pauses import Pauses
from services.core.pipes import RETRIER_DEAD, dead_letter_topic, load_pipes
from services.observer.api import OPENAPI, Api, serve_api
from services.observer.failures import FailureBook
from services.observer.letter_reader import LetterReader
from services.observer.settings import ObserverSettings

log = structlog.get_logger()


async def start(settings: ObserverSettings, supervision: Supervision) -> None:
    """Run until the stop; nothing is in flight, so nothing is drained. Raises BadConfiguration, OSError.

    Ready as soon as the API answers: it says itself whether it is catching up.
    """
    pipes = await asyncio.to_thread(load_pipes, settings.pipes)
    openapi = await asyncio.to_thread(OPENAPI.read_bytes)
    reason: str | None = "the broker is not reachable yet"
    stopping = supervision.stopping
    async with AsyncExitStack() as stack:
        management = await stack.enter_async_context(serve_management(settings.management, lambda: reason))
        log.info("started", management=management)
        broker = await open_when_reachable(stack, settings.broker, stopping)
        if broker is None:
            return
        book = FailureBook(pipes)
        reader = LetterReader(broker.admin, [*map(dead_letter_topic, pipes.pipes), RETRIER_DEAD], book.note)
        pauses = Pauses(broker.admin)
        reading = supervision.run(reader.run(stopping), "letter reader")
        following = supervision.run(pauses.follow(stopping), "pauses")
        api = Api(book, reader, lambda lane: _state(pauses, lane), openapi)
        address = await stack.enter_async_context(_listen(settings.listen, api))
        log.info("listening", address=address)
        reason = None
        await stopping.wait()
        reason = "stopping"
        await asyncio.wait([reading, following])


def _state(pauses: Pauses, lane: str) -> str | None:
    if pauses.unknown is not None:
        return None
    return "paused" if lane in pauses.paused() else "active"


@asynccontextmanager
async def _listen(address: str, api: Api) -> AsyncIterator[str]:
    try:
        async with serve_api(address, api) as bound:
            yield bound
    except OSError as error:
        raise OSError(f"{address}: {error.strerror}. Try: another --listen, or end what listens there") from error
