"""The global retrier: joins its group and joins again when the membership breaks. Broker failures are waited out."""

import asyncio

import backoff
import structlog

from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.core.broker.producer import Producer
from services.core.lifecycle import wait_for_stop
from services.core.pipes import RETRIER_GROUP
from services.global_retrier.clock import Clock
from services.global_retrier.ledger import Ledger
from services.global_retrier.meter import Meter
from services.global_retrier.mover import Mover
from services.global_retrier.route import DELAY_BY_TOPIC
from services.global_retrier.session import Session

log = structlog.get_logger()

_BASE_WAIT, _MAX_WAIT = 0.2, 5.0


class Retrier:
    """Reads retry-in and all delay topics in one group; several of them share the topics."""

    def __init__(self, broker: Broker, producer: Producer, clock: Clock, ledger: Ledger) -> None:
        self._broker, self._clock = broker, clock
        self._meter = Meter()
        self._mover = Mover(producer, broker.admin, self._meter, clock, ledger)
        self.waits_for: str | None = "has not joined its group yet"
        """Why it does not run, for a person; None while it runs."""
        self._joined = False

    async def run(self, stopping: asyncio.Event, drain: float) -> None:
        """Until `stopping`; then finishes what is being written on, within about `drain` seconds. Raises nothing."""
        failures = 0
        while not stopping.is_set():
            try:
                await self._work(stopping, drain)
            except* Exception as errors:  # a fault of ours, too: what is uncommitted is read again
                failures = 0 if self._joined else failures
                self._report(errors, failures)
                failures += 1
            if not stopping.is_set():
                wait = backoff.full_jitter(min(_MAX_WAIT, _BASE_WAIT * 2 ** min(failures, 10)))
                await wait_for_stop(stopping, wait)
        self._meter.up(False)

    async def _work(self, stopping: asyncio.Event, drain: float) -> None:
        self._joined = False
        session = Session(self._broker, self._mover, self._meter, self._clock)
        topics = list(DELAY_BY_TOPIC)
        async with self._broker.consumer(RETRIER_GROUP, topics, start="earliest", on_revoke=session.revoke) as consumer:
            log.info("retrier_joined", group=RETRIER_GROUP)
            self._joined, self.waits_for = True, None
            self._meter.up(True)
            await session.run(consumer, stopping, drain)

    def _report(self, errors: BaseExceptionGroup[Exception], failures: int) -> None:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        self.waits_for = str(first)
        self._meter.up(False)
        if not failures:
            cause = None if isinstance(first, BrokerError) else first
            log.error(
                "retrier_waits",
                error=str(first),
                kind=type(first).__name__,
                hint="it joins again by itself; nothing is lost. Try: penstock up creates its topics",
                exc_info=cause,
            )
