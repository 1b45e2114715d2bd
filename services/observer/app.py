"""The observer as a service: a reader of dead letters, an API, a management port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import backoff
import structlog

from services.core.broker.connect import BadBrokerUrl, open_broker
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError, DataDamaged
from services.core.lifecycle import Supervision
from services.core.management import serve_management
from services.core.pauses import Pauses
from services.core.pipes import RETRIER_DEAD, dead_letter_topic, load_pipes
from services.core.yaml_source import BadConfiguration, Problem
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
        broker = await _open(stack, settings.broker, stopping)
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


async def _open(stack: AsyncExitStack, url: str, stopping: asyncio.Event) -> Broker | None:
    """The broker, as soon as it can be reached; None when the stop comes first. Raises BadConfiguration."""
    failures = 0
    while not stopping.is_set():
        try:
            return await stack.enter_async_context(open_broker(url))
        except BadBrokerUrl as error:
            raise BadConfiguration([Problem("--broker", "", str(error))]) from error
        except DataDamaged:
            raise
        except BrokerError as error:
            if not error.retriable:
                raise BadConfiguration([Problem("--broker", "", str(error))]) from error
            if not failures:
                log.warning("broker_unavailable", error=str(error), hint="it is tried again")
            failures += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.full_jitter(min(5.0, 0.2 * 2 ** min(failures, 10)))):
                    await stopping.wait()
    return None
