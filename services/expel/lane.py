"""A destination's lane: its own consumer group, connections and limits, so that no destination holds up another."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from typing import Any

import structlog

from services.core.broker.contract import Broker, Start
from services.core.broker.record import Batch, TopicPartition
from services.core.consuming import GroupMember, Membership
from services.core.lifecycle import wait_for_stop
from services.core.pipes import delivery_group
from services.expel.dedup import RetryTakeover
from services.expel.dispatcher import Dispatcher
from services.expel.metrics import LaneMetrics
from services.expel.pause import LaneMode, PauseState

log = structlog.get_logger()

_CHECK_WAIT_S = 0.2
"""Between two checks whether it is known that the destination is paused."""


class Lane:
    """`topics` are those that the destination reads; `make_dispatcher` returns a new one for each membership.

    Without a `pause` it cannot be paused. optional_topics: read too if they exist: events may be there from a time when the
    destination was of another kind.
    """

    def __init__(
        self,
        broker: Broker,
        pipe: str,
        destination: str,
        topics: list[str],
        start: Start,
        metrics: LaneMetrics,
        make_dispatcher: Callable[[], Dispatcher],
        commit_interval: float,
        pause: PauseState | None = None,
        optional_topics: Sequence[str] = (),
    ) -> None:
        self._broker, self._topics, self._optional_topics = broker, topics, optional_topics
        self.name, self._pipe, self._destination = f"{pipe}/{destination}", pipe, destination
        self._group = delivery_group(pipe, destination)
        self._pause, self._metrics, self._make_dispatcher = pause, metrics, make_dispatcher
        self._is_paused_known = pause is None
        self._member = GroupMember(
            broker,
            self._group,
            self._make_processor,
            self._find_topics,
            start=start,
            commit_interval=commit_interval,
            set_up=metrics.set_up,
        )

    @property
    def waits_for(self) -> str | None:
        """Why the lane does not run, for a person. None while it runs, and also while it is paused."""
        if not self._is_paused_known and self._pause is not None:
            return f"{self.name}: it is not known whether it is paused: {self._pause.unknown}"
        return None if self._member.waits_for is None else f"{self.name}: {self._member.waits_for}"

    @property
    def is_drained(self) -> bool:
        """Whether everything under way was settled at the end."""
        return self._member.is_drained

    async def run(self, stopping: asyncio.Event, drain: float) -> None:
        """Until `stopping`; then drains within about `drain` seconds. Broker failures are waited out, never raised."""
        while self._pause is not None and self._pause.unknown is not None and not stopping.is_set():
            await wait_for_stop(stopping, _CHECK_WAIT_S)
        self._is_paused_known = True
        await self._member.run(stopping, drain)
        await self._metrics.ledger.close()

    async def _find_topics(self) -> list[str]:
        if not self._optional_topics:
            return self._topics
        existing = await self._broker.admin.topics()
        return [*self._topics, *(topic for topic in self._optional_topics if topic in existing)]

    def _make_processor(self) -> "LaneProcessor":
        dispatcher = self._make_dispatcher()
        takeover = RetryTakeover(self._broker, self._pipe, self._destination, dispatcher.reach)
        return LaneProcessor(self._group, dispatcher, takeover, self._metrics, self._pause)


class LaneProcessor:
    """`consuming.Processor`: sends, parks or replays the events of one membership, by the destination's pause state."""

    def __init__(
        self,
        group: str,
        dispatcher: Dispatcher,
        takeover: RetryTakeover,
        metrics: LaneMetrics,
        pause: PauseState | None = None,
    ) -> None:
        self._group, self._dispatcher, self._takeover = group, dispatcher, takeover
        self._metrics, self._pause = metrics, pause
        self.tracker, self.ledger = dispatcher.tracker, metrics.ledger
        self.mode = LaneMode.RUNNING

    def open(self, membership: Membership, tasks: asyncio.TaskGroup) -> Iterable[Coroutine[Any, Any, None]]:
        self._dispatcher.open(tasks)
        if (pause := self._pause) is None:
            return
        self.mode = pause.mode
        self._metrics.set_paused(self.mode is LaneMode.PAUSED)
        if self.mode is LaneMode.PAUSED:
            self._park(pause)
        else:
            if self.mode is LaneMode.REPLAYING:
                self._dispatcher.replay()
            if pause.was_parked:
                pause.was_parked = False
                self._dispatcher.start_slowly()
                log.info("destination_resumed", group=self._group, mode=self.mode.value)
        yield self._follow_operator(pause, membership)
        yield self._follow_receiver(pause, membership)
        if self.mode is LaneMode.REPLAYING:
            yield pause.watch_replay()

    def _park(self, pause: PauseState) -> None:
        self.mode, pause.was_parked = LaneMode.PAUSED, True
        self._metrics.set_up(False)
        self._metrics.set_paused(True)
        log.warning("destination_paused", group=self._group, reason=pause.reason, hint="its events are parked")
        self._dispatcher.park(pause.reason)

    async def _follow_operator(self, pause: PauseState, membership: Membership) -> None:
        """A running lane is paused without leaving its group: its partitions might go to members that have not read the pause
        yet. Every other change of mode is a new membership.
        """
        while (mode := pause.mode) is self.mode or (self.mode, mode) == (LaneMode.RUNNING, LaneMode.PAUSED):
            if mode is not self.mode:
                self._park(pause)
            await pause.wait_for_change()
        if mode is LaneMode.PAUSED:  # a replay's retries would go to a destination that must not get any event
            self._dispatcher.hold()
        membership.end()

    async def _follow_receiver(self, pause: PauseState, membership: Membership) -> None:
        """The pause is durable before anything is parked: else a crash would send later events of a key before the parked."""
        await self._dispatcher.gone.wait()
        if pause.mode is not LaneMode.PAUSED:
            await pause.pause_gone()
        if pause.mode is not LaneMode.PAUSED:
            membership.end()  # an operator resumed it at the same moment: the receiver is asked once more

    async def wait_for_room(self) -> int:
        return await self._dispatcher.wait_for_room()

    def reads(self, topic: str) -> bool:
        return self._dispatcher.reads(topic)

    async def prepare(self, polled: Collection[TopicPartition], assigned: Collection[TopicPartition]) -> None:
        await self._takeover.prepare(polled, assigned)

    def accept(self, batch: Batch) -> None:
        self._dispatcher.accept(batch, self._takeover.find(batch))

    async def drain_partitions(self, partitions: frozenset[TopicPartition], limit: float) -> None:
        await self._dispatcher.drain_partitions(partitions, limit)

    def disown(self, partitions: Collection[TopicPartition]) -> None:
        self._takeover.remove(partitions)
        self._dispatcher.disown(partitions)

    async def drain(self, limit: float) -> bool:
        return await self._dispatcher.drain(limit)

    def stop(self) -> None:
        self._dispatcher.stop()

    def update_metrics(self) -> None:
        self._dispatcher.update_metrics()
        self._metrics.flush()
