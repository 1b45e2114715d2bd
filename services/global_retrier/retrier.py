"""The global retrier: joins its group and joins again when the membership breaks. Broker failures are waited out."""

import asyncio

import structlog

from services.core.broker.contract import Broker
from services.core.broker.producer import Producer
from services.core.pipes import RETRIER_GROUP, PipeFile
from services.core.rejoin import Rejoin
from services.global_retrier.clock import Clock
from services.global_retrier.ledger import Ledger
from services.global_retrier.meter import Meter
from services.global_retrier.mover import Mover
from services.global_retrier.route import DELAY_BY_TOPIC
from services.global_retrier.session import Session

log = structlog.get_logger()

_HINT = "it joins again by itself; nothing is lost. Try: penstock up creates its topics"


class Retrier:
    """Reads retry-in and all delay topics in one group; several of them share the topics."""

    def __init__(
        self, broker: Broker, producer: Producer, clock: Clock, ledger: Ledger, pipes: PipeFile | None = None
    ) -> None:
        """pipes: by which it tells of events that nobody will deliver; they go on like any other."""
        self._broker, self._clock = broker, clock
        self._meter = Meter(pipes)
        self._mover = Mover(producer, broker.admin, self._meter, clock, ledger)
        self.waits_for: str | None = "has not joined its group yet"
        """Why it does not run, for a person; None while it runs."""
        self._rejoin = Rejoin(RETRIER_GROUP, "retrier_waits", _HINT)

    async def run(self, stopping: asyncio.Event, drain: float) -> None:
        """Until `stopping`; then finishes what is being written on, within about `drain` seconds. Raises nothing."""
        while not stopping.is_set():
            try:
                await self._work(stopping, drain)
            except* Exception as errors:  # a fault of ours, too: what is uncommitted is read again
                self.waits_for = str(self._rejoin.failed(errors))
                self._meter.up(False)
            if not stopping.is_set():
                await self._rejoin.wait(stopping)
        self._meter.up(False)

    async def _work(self, stopping: asyncio.Event, drain: float) -> None:
        session = Session(self._broker, self._mover, self._meter, self._clock)
        topics = list(DELAY_BY_TOPIC)
        async with self._broker.consumer(RETRIER_GROUP, topics, start="earliest", on_revoke=session.revoke) as consumer:
            log.info("retrier_joined", group=RETRIER_GROUP)
            self._rejoin.joined()
            self.waits_for = None
            self._meter.up(True)
            await session.run(consumer, stopping, drain)
