"""A destination's lane: its own consumer group, connections and limits, so that no destination holds up another."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence

from services.core.broker.contract import Broker, Start
from services.core.consuming import GroupMember
from services.core.control.pauses import NOT_READ
from services.core.pipe_file.topic_names import delivery_group, lane_name
from services.core.process.lifecycle import wait_for_stop
from services.core.process.progress import Step
from services.expel.dispatcher import Dispatcher
from services.expel.metrics import LaneMetrics
from services.expel.pause import PauseState

_CHECK_WAIT_S = 0.2
"""Between two checks whether the pause state is known."""


class Lane:
    """topics: those that the destination reads. make_dispatcher: called for each membership.

    pause: None for a destination that cannot be paused. optional_topics: read too if they exist, because they may have events
    from a time when the destination was of another kind. take_over: called before the first join, until it succeeds.
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
        take_over: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._broker, self._topics, self._optional_topics = broker, topics, optional_topics
        self.name = lane_name(pipe, destination)
        self._pause, self._ledger, self._take_over = pause, metrics.ledger, take_over
        self._is_paused_known = pause is None
        self._has_joined = False
        self._member = GroupMember(
            broker,
            delivery_group(pipe, destination),
            make_dispatcher,
            self._find_topics,
            start=start,
            commit_interval=commit_interval,
            set_up=metrics.up.set,
        )

    @property
    def waits_for(self) -> str | None:
        """Why the lane does not run, for a person. None while it runs, and also while it is paused."""
        if not self._is_paused_known and self._pause is not None:
            unknown = self._pause.unknown
            is_new = unknown is None or unknown == NOT_READ
            return f"{self.name}: {'starting' if is_new else f'it is not known whether it is paused: {unknown}'}"
        return None if self._member.waits_for is None else f"{self.name}: {self._member.waits_for}"

    @property
    def is_drained(self) -> bool:
        """Whether all events in flight were settled at the end."""
        return self._member.is_drained

    def steps(self) -> Iterator[Step]:
        """For the `ProgressWatch`."""
        return (step._replace(what=f"{self.name}: {step.what}") for step in self._member.steps())

    async def run(self, stopping: asyncio.Event, drain: float) -> None:
        """Until `stopping`; then drains within about `drain` seconds. Broker failures are waited out, never raised."""
        while self._pause is not None and self._pause.unknown is not None and not stopping.is_set():
            await wait_for_stop(stopping, _CHECK_WAIT_S)
        self._is_paused_known = True
        await self._member.run(stopping, drain)
        await self._ledger.close()

    async def _find_topics(self) -> list[str]:
        if self._take_over is not None:
            await self._take_over()
            self._take_over = None
        if not self._has_joined:
            await self._ledger.before_join()
            self._has_joined = True
        if not self._optional_topics:
            return self._topics
        present = await self._broker.admin.present(self._optional_topics)
        return [*self._topics, *(topic for topic in self._optional_topics if topic in present)]
