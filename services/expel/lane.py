"""A destination's lane: joins its own group, delivers, and starts over when the membership breaks. Shares nothing with others."""

import asyncio
from collections.abc import Callable

import backoff
import structlog

from services.core.broker.contract import Broker, Start
from services.core.broker.errors import BrokerError
from services.core.lifecycle import wait_for_stop
from services.core.pipes import delivery_group
from services.expel.dispatch import Dispatcher
from services.expel.inheritance import Inheritance
from services.expel.meter import LaneMeter
from services.expel.session import Session
from services.expel.standing import Standing

log = structlog.get_logger()

_BASE_WAIT, _MAX_WAIT = 0.2, 5.0


class Lane:
    """`topics` is what the destination reads; `make_dispatcher` gives a fresh one for each membership.

    Without a `standing` it cannot be paused.
    """

    def __init__(
        self,
        broker: Broker,
        pipe: str,
        destination: str,
        topics: list[str],
        start: Start,
        meter: LaneMeter,
        make_dispatcher: Callable[[], Dispatcher],
        commit_interval: float,
        standing: Standing | None = None,
    ) -> None:
        self._broker, self._topics, self._start = broker, topics, start
        self.name, self._pipe, self._destination = f"{pipe}/{destination}", pipe, destination
        self._group = delivery_group(pipe, destination)
        self._standing = standing
        self._meter, self._make_dispatcher, self._commit_interval = meter, make_dispatcher, commit_interval
        self.waits_for: str | None = "has not joined its group yet"
        """Why the lane does not run, for a person; None while it runs and also while it is paused."""
        self.is_drained = True
        """Whether nothing that was under way was left unsettled at the end."""

    async def run(self, stopping: asyncio.Event, drain: float) -> None:
        """Until `stopping`; then drains within about `drain` seconds. Broker failures are waited out, never raised."""
        failures = 0
        while not stopping.is_set():
            if self._standing is not None and self._standing.unknown is not None:
                self.waits_for = f"{self.name}: it is not known whether it is paused: {self._standing.unknown}"
                await wait_for_stop(stopping, _BASE_WAIT)
                continue
            try:
                joined = await self._deliver(stopping, drain)
            except* Exception as errors:  # a fault of ours, too, is this lane's alone
                joined = False
                self._report(errors, failures)
            if not stopping.is_set():
                failures = 0 if joined else failures + 1
                wait = backoff.full_jitter(min(_MAX_WAIT, _BASE_WAIT * 2 ** min(failures, 10)))
                await wait_for_stop(stopping, wait)
        self._meter.up(False)
        await self._meter.ledger.close()

    async def _deliver(self, stopping: asyncio.Event, drain: float) -> bool:
        dispatcher = self._make_dispatcher()
        inheritance = Inheritance(self._broker, self._pipe, self._destination, dispatcher.reach)
        session = Session(self._group, dispatcher, self._meter, self._commit_interval, inheritance, self._standing)
        joining = self._broker.consumer(self._group, self._topics, start=self._start, on_revoke=session.revoke)
        async with joining as consumer:
            log.info("lane_joined", lane=self.name, topics=self._topics)
            self.waits_for = None
            self._meter.up(True)
            self.is_drained = await session.run(consumer, stopping, drain)
        return True

    def _report(self, errors: BaseExceptionGroup[Exception], failures: int) -> None:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        self.waits_for = f"{self.name}: {first}"
        self._meter.up(False)
        if not failures:
            cause = None if isinstance(first, BrokerError) else first
            log.error(
                "lane_waits",
                lane=self.name,
                error=str(first),
                kind=type(first).__name__,
                hint="it joins again by itself",
                exc_info=cause,
            )
