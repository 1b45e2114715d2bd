"""Opening the broker when a service starts: waited for as long as it takes, unless no waiting helps."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack

import backoff
import structlog

from services.core.broker.connect import BadBrokerUrl, open_broker
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError, DataDamaged
from services.core.lifecycle import wait_for_stop
from services.core.provision import require_safe_topics
from services.core.yaml_source import BadConfiguration, Problem

log = structlog.get_logger()

_BASE_WAIT, _MAX_WAIT = 0.2, 5.0


async def open_when_reachable(
    stack: AsyncExitStack,
    url: str,
    stopping: asyncio.Event,
    *,
    topics: Collection[str] = (),
    tell: Callable[[str], None] = lambda _reason: None,
) -> Broker | None:
    """The broker, closed by `stack`, as soon as it can be reached; None when the stop comes first.

    topics: may not lose acknowledged events (`require_safe_topics`). tell: hears why it waits, for readiness.
    Raises BadConfiguration, and DataDamaged: neither is helped by waiting.
    """
    failures = 0
    while not stopping.is_set():
        try:
            async with AsyncExitStack() as attempt:
                broker = await attempt.enter_async_context(open_broker(url))
                await require_safe_topics(broker.admin, topics)
                stack.push_async_exit(attempt.pop_all())
                return broker
        except BadBrokerUrl as error:
            raise BadConfiguration([Problem("--broker", "", str(error))]) from error
        except DataDamaged:
            raise
        except BrokerError as error:
            if not error.retriable:
                raise BadConfiguration([Problem("--broker", "", str(error))]) from error
            tell(f"the broker cannot be opened: {error}")
            if not failures:
                log.warning("broker_unavailable", error=str(error), hint="it is tried again")
            failures += 1
            await wait_for_stop(stopping, backoff.full_jitter(min(_MAX_WAIT, _BASE_WAIT * 2 ** min(failures, 10))))
    return None
