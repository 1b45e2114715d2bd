"""A destination's lane: joins its own group, delivers, and starts over when the membership breaks. Shares nothing with others."""

import asyncio
from collections.abc import Callable, Sequence

import structlog

from services.core.broker.contract import Broker, Start
from services.core.lifecycle import wait_for_stop
from services.core.pipes import delivery_group
from services.core.rejoin import Rejoin
from services.expel.dispatch import Dispatcher
from services.expel.inheritance import Inheritance
from services.expel.meter import LaneMeter
from services.expel.session import Session
from services.expel.standing import Standing

log = structlog.get_logger()

_ASK_WAIT = 0.2
"""Seconds between two looks whether it is known that the destination is paused."""


class Lane:
    """`topics` is what the destination reads; `make_dispatcher` gives a fresh one for each membership.

    Without a `standing` it cannot be paused. where_kept: topics that it reads, too, if they exist: events may wait there
    from when it was another kind of destination.
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
        where_kept: Sequence[str] = (),
    ) -> None:
        self._broker, self._topics, self._start = broker, topics, start
        self._where_kept = where_kept
        self.name, self._pipe, self._destination = f"{pipe}/{destination}", pipe, destination
        self._group = delivery_group(pipe, destination)
        self._rejoin = Rejoin(self._group, "lane_waits", "it joins again by itself; nothing is lost")
        self._standing = standing
        self._meter, self._make_dispatcher, self._commit_interval = meter, make_dispatcher, commit_interval
        self.waits_for: str | None = "has not joined its group yet"
        """Why the lane does not run, for a person; None while it runs and also while it is paused."""
        self.is_drained = True
        """Whether nothing that was under way was left unsettled at the end."""

    async def run(self, stopping: asyncio.Event, drain: float) -> None:
        """Until `stopping`; then drains within about `drain` seconds. Broker failures are waited out, never raised."""
        while not stopping.is_set():
            if self._standing is not None and self._standing.unknown is not None:
                self.waits_for = f"{self.name}: it is not known whether it is paused: {self._standing.unknown}"
                await wait_for_stop(stopping, _ASK_WAIT)
                continue
            try:
                await self._deliver(stopping, drain)
            except* Exception as errors:  # a fault of ours, too, is this lane's alone
                self.waits_for = f"{self.name}: {self._rejoin.failed(errors)}"
                self._meter.up(False)
            if not stopping.is_set():
                await self._rejoin.wait(stopping)
        self._meter.up(False)
        await self._meter.ledger.close()

    async def _deliver(self, stopping: asyncio.Event, drain: float) -> None:
        dispatcher = self._make_dispatcher()
        inheritance = Inheritance(self._broker, self._pipe, self._destination, dispatcher.reach)
        session = Session(self._group, dispatcher, self._meter, self._commit_interval, inheritance, self._standing)
        topics = [*self._topics, *await self._find_kept()]
        joining = self._broker.consumer(self._group, topics, start=self._start, on_revoke=session.revoke)
        async with joining as consumer:
            log.info("lane_joined", lane=self.name, topics=topics)
            self._rejoin.joined()
            self.waits_for = None
            self._meter.up(True)
            self.is_drained = await session.run(consumer, stopping, drain)

    async def _find_kept(self) -> list[str]:
        if not self._where_kept:
            return []
        existing = await self._broker.admin.topics()
        return [topic for topic in self._where_kept if topic in existing]
