"""The global retrier as a service: one retrier and a management port."""

import asyncio
from contextlib import AsyncExitStack

import backoff
import structlog

from services.core.broker.connect import BadBrokerUrl, open_broker
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError, DataDamaged
from services.core.broker.producer import Producer
from services.core.ledger.report import TELEMETRY
from services.core.lifecycle import Supervision
from services.core.management import serve_management
from services.core.pipes import RETRIER_DEAD
from services.core.provision import require_safe_topics
from services.core.yaml_source import BadConfiguration, Problem
from services.global_retrier.clock import SteadyClock
from services.global_retrier.ledger import Ledger
from services.global_retrier.retrier import Retrier, wait_for_stop
from services.global_retrier.route import DELAY_BY_TOPIC
from services.global_retrier.settings import RetrierSettings

log = structlog.get_logger()

_DRAIN_SHARE = 0.6
"""Of the drain time, for writing on and committing; the rest is for leaving the group and closing."""


class Readiness:
    """What the management port says."""

    def __init__(self) -> None:
        self.retrier: Retrier | None = None
        self.reason: str | None = "starting"

    def why_not(self) -> str | None:
        """None when the retrier runs."""
        return self.reason or (self.retrier.waits_for if self.retrier is not None else "starting")


async def start(settings: RetrierSettings, supervision: Supervision) -> None:
    """Run until the stop, then drain. Raises BadConfiguration; everything else is waited out or ends the process."""
    readiness, stopping = Readiness(), supervision.stopping
    async with AsyncExitStack() as stack:
        management = await stack.enter_async_context(serve_management(settings.management, readiness.why_not))
        log.info("started", management=management)
        broker = await _open(stack, settings.broker, readiness, stopping)
        if broker is None:
            return
        producer = await stack.enter_async_context(Producer(broker.driver))
        ledger = Ledger(producer if settings.ledger else None)
        readiness.retrier = Retrier(broker, producer, SteadyClock(), ledger)
        readiness.reason = None
        running = supervision.run(readiness.retrier.run(stopping, settings.drain * _DRAIN_SHARE), "retrier")
        await stopping.wait()
        readiness.reason = "stopping"
        await asyncio.wait([running])
        await ledger.close()


async def _open(stack: AsyncExitStack, url: str, readiness: Readiness, stopping: asyncio.Event) -> Broker | None:
    """The broker, as soon as it can be reached; None when the stop comes first. Raises BadConfiguration."""
    failures = 0
    while not stopping.is_set():
        try:
            async with AsyncExitStack() as attempt:
                broker = await attempt.enter_async_context(open_broker(url))
                await require_safe_topics(broker.admin, [*DELAY_BY_TOPIC, RETRIER_DEAD, TELEMETRY])
                stack.push_async_exit(attempt.pop_all())
                return broker
        except BadBrokerUrl as error:
            raise BadConfiguration([Problem("--broker", "", str(error))]) from error
        except DataDamaged:
            raise
        except BrokerError as error:
            if not error.retriable:
                raise BadConfiguration([Problem("--broker", "", str(error))]) from error
            readiness.reason = f"the broker cannot be opened: {error}"
            if not failures:
                log.warning("broker_unavailable", error=str(error), hint="it is tried again")
            failures += 1
            await wait_for_stop(stopping, backoff.full_jitter(min(5.0, 0.2 * 2 ** min(failures, 10))))
    return None
