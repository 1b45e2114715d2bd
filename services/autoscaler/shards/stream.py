"""One stream that is looked after: figures in, decisions logged, carried out and remembered with the stream."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from services.autoscaler.counters import Window
from services.autoscaler.shards.act import carry_out
from services.autoscaler.shards.figures import StreamDecision, StreamFigures, StreamMemory, Update
from services.autoscaler.shards.measure import measure
from services.autoscaler.shards.notes import Notes, with_updates
from services.autoscaler.shards.policy import decide
from services.autoscaler.shards.rules import Rules
from services.autoscaler.shards.telling import Telling
from services.core import metrics
from services.core.broker.errors import BrokerError
from services.core.broker.resharding import Resharding, StreamShards

log = structlog.get_logger()

_WINDOWS = 2
"""Of which the load is a mean."""

_DISTURBED_S = 120.0
"""How long consumers may be busy with handing shards over, from the beginning of an update."""

_LONGEST_PAUSE_S, _DOUBLINGS = 3_600.0, 10
"""After an update was refused again and again."""

Announce = Callable[[str, float], Awaitable[None]]
"""Tells whoever watches health what is about to be disturbed, and for how many seconds; never raises."""


async def to_nobody(_what: str, _seconds: float) -> None:
    """An `Announce` for when nobody watches."""


class StreamScaler:
    """`offer` it every window; `run` decides by the newest. A window that comes while a change is under way is passed over."""

    def __init__(
        self, topic: str, resharding: Resharding, rules: Rules, *, dry_run: bool, announce: Announce = to_nobody
    ) -> None:
        self._announce = announce
        self._topic, self._resharding, self._rules, self._dry_run = topic, resharding, rules, dry_run
        self._news: asyncio.Queue[Window] = asyncio.Queue(1)
        self._windows: deque[Window] = deque(maxlen=_WINDOWS)
        self._notes = Notes(resharding, topic)
        self._memory: StreamMemory | None = None
        self._shards: StreamShards | None = None
        self._since = time.monotonic()
        self._refusals, self._not_before = 0, 0.0
        self._telling = Telling(topic, dry_run=dry_run)

    def offer(self, window: Window) -> None:
        """The newest window, unless the one before is still being worked on."""
        if self._news.empty():
            self._news.put_nowait(window)

    async def run(self, stopping: asyncio.Event) -> None:
        """Until the stop; a change that is under way is left to the service."""
        stop = asyncio.create_task(stopping.wait())
        following = asyncio.create_task(self._follow())
        try:
            await asyncio.wait({stop, following}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                following.result()
        finally:
            for task in (stop, following):
                task.cancel()
            await asyncio.gather(stop, following, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            window = await self._news.get()
            try:
                await self._consider(window)
            except BrokerError as error:
                metrics.AUTOSCALER_DECISIONS.labels(self._topic, "failed").inc()
                log.warning("shards_failed", stream=self._topic, error=str(error), hint="it is tried again")
                self._windows.clear()

    async def _consider(self, window: Window) -> None:
        shards = await self._resharding.shards(self._topic)
        now = time.monotonic()
        ahead = time.time() - now
        if self._shards is None or shards.numbers != self._shards.numbers:
            self._since = now
            self._windows.clear()
        self._shards = shards
        if now - self._since < window.seconds:
            return  # it began before these shards were there
        self._windows.append(window)
        if self._memory is None:
            self._memory = await self._notes.read(now, ahead)
        room = await self._resharding.room()
        figures = measure(self._topic, shards, self._windows, self._resharding.capacity, now - self._since, room)
        await self._decide(replace(figures, ahead=ahead), self._memory, now)

    async def _decide(self, figures: StreamFigures, memory: StreamMemory, now: float) -> None:
        decision, after = decide(figures, memory, now, self._rules)
        if decision.layout is not None and now < self._not_before:
            wait = f"the service refused it, it is tried again in {self._not_before - now:.0f} s"
            decision = StreamDecision(None, f"{wait}: {decision.reason}")
        self._telling.tell(figures, decision, after)
        if decision.layout is None or self._dry_run:
            # Looks are remembered, the update that was only proposed is not.
            self._memory = replace(after, updates=memory.recent(now))
            await self._keep_day(memory, self._memory)
            return
        if found := await self._notes.news(memory, now, figures.ahead):
            self._memory = with_updates(replace(after, updates=memory.recent(now)), found)
            hint = "another autoscaler looks after the same stream. Try: one of them"
            log.warning("updates_of_another", stream=self._topic, updates=len(found), hint=hint)
            return  # with these the decision may be another one
        # Before the change: a crash in between costs one of ten, not the count of them.
        await self._notes.write_updates(after, figures.ahead)
        self._memory = after
        try:
            await carry_out(self._resharding, self._topic, figures.layout, decision, self._accepted)
        except BrokerError:
            await self._take_back(memory.recent(now), figures.ahead)
            raise
        await self._finish(figures.ahead)
        log.info("shards_changed", stream=self._topic, seconds=round(time.monotonic() - now, 1))

    async def _accepted(self) -> None:
        self._refusals = 0
        await self._announce(f"shards of {self._topic}", _DISTURBED_S)

    async def _finish(self, ahead: float) -> None:
        if self._memory is not None:
            self._memory = self._memory.finished(time.monotonic())
            await self._notes.write_updates(self._memory, ahead)

    async def _take_back(self, updates: tuple[Update, ...], ahead: float) -> None:
        """An update that was refused, and left everything as it was, does not count. It is tried again ever more seldom."""
        pause = min(_LONGEST_PAUSE_S, self._rules.cover * 2**self._refusals)
        self._refusals = min(self._refusals + 1, _DOUBLINGS)
        self._not_before = time.monotonic() + pause
        shards = await self._resharding.shards(self._topic)
        if self._memory is None or self._shards is None:
            return
        if shards != self._shards:
            await self._finish(ahead)
            return
        self._memory = replace(self._memory, updates=updates)
        await self._notes.write_updates(self._memory, ahead)

    async def _keep_day(self, before: StreamMemory, after: StreamMemory) -> None:
        """The day's pattern, once a quarter of an hour."""
        if before.day.quarter != after.day.quarter and not self._dry_run:
            await self._notes.write_day(after)
