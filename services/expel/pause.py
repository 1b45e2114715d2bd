"""Whether a lane sends, parks or replays: decided by operators, and by the receiver with a 410."""

import asyncio
import enum
import socket
import time
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import structlog

from services.core.backoff import Backoff
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.core.broker.producer import Producer
from services.core.consuming import Membership
from services.core.control.pauses import GONE, Pause, Pauses, write_pause
from services.core.pipe_file.topic_names import delivery_group, lane_name, parked_topic
from services.expel.metrics import LaneMetrics

if TYPE_CHECKING:
    from services.expel.dispatcher import Dispatcher

log = structlog.get_logger()

REPLAY_LEAST_S = 5.0
"""A replay takes at least this long: until every instance has read the resume and parks no more."""
_CHECK_S = 0.5
_BASE_WAIT, _MAX_WAIT = 0.25, 10.0


class LaneMode(enum.Enum):
    """RUNNING: all events are sent. PAUSED: all are parked. REPLAYING: parked events are sent, the others wait."""

    RUNNING = "running"
    PAUSED = "paused"
    REPLAYING = "replaying"


class PauseState:
    """One destination's, in one process. keyed: parked events are sent before later ones, to keep the order of keys."""

    def __init__(
        self, pauses: Pauses, broker: Broker, producer: Producer, pipe: str, destination: str, *, keyed: bool
    ) -> None:
        self._pauses, self._broker, self._producer = pauses, broker, producer
        self._pipe, self._destination, self._keyed = pipe, destination, keyed
        self._lane, self.group = lane_name(pipe, destination), delivery_group(pipe, destination)
        self.was_parked = False
        """Whether this process parked its events and has not resumed since."""

    @property
    def unknown(self) -> str | None:
        """Why it is not known yet whether the destination is paused; None from then on."""
        return self._pauses.unknown

    @property
    def mode(self) -> LaneMode:
        """The mode that the control topic requires."""
        found = self._pauses.of(self._lane)
        if found is None:
            return LaneMode.RUNNING
        if found[1].state == "paused":
            return LaneMode.PAUSED
        return LaneMode.REPLAYING if self._keyed else LaneMode.RUNNING

    @property
    def reason(self) -> str:
        """The reason of the pause, a stable word; empty without a pause."""
        found = self._pauses.of(self._lane)
        return found[1].reason if found is not None and found[1].state == "paused" else ""

    async def wait_for_change(self) -> None:
        """Until the state of any destination changes."""
        await self._pauses.wait_for_change()

    async def pause_gone(self) -> None:
        """Record durably that the destination is paused because the receiver answered 410. Repeated until it succeeds."""
        detail = "the receiver answered 410 Gone"
        await self._write(Pause("paused", GONE, _whoami(), _now_ms(), detail))
        log.error(
            "destination_gone",
            lane=self._lane,
            reason=detail,
            hint=f"its events are parked; nothing is lost. Try: penstock destination resume {self._lane}",
        )

    async def watch_replay(self) -> NoReturn:
        """Record durably when all events parked before the resume are settled. Another resume starts this again."""
        resumed: tuple[int, Pause] | None = None
        ends: dict[int, int] | None = None
        while True:
            if (newest := self._pauses.of(self._lane)) != resumed:  # only the newest resume can be ended
                resumed, ends = newest, None
                await asyncio.sleep(REPLAY_LEAST_S)
                continue
            try:
                if ends is None:
                    ranges = await self._broker.reader.describe(parked_topic(self._pipe))
                    ends = {partition: one.end for partition, one in ranges.items()}
                if resumed is not None and resumed[1].state == "resumed" and await self._is_through(ends):
                    await self._write(Pause("replayed", resumed[1].reason, _whoami(), _now_ms(), of=resumed[0]))
                    log.info("destination_replayed", lane=self._lane)
            except BrokerError as error:
                log.debug("replay_unknown", lane=self._lane, error=str(error))
            await asyncio.sleep(_CHECK_S)

    async def _is_through(self, ends: dict[int, int]) -> bool:
        """Whether the group has settled every parked record before these offsets."""
        topic = parked_topic(self._pipe)
        behind = [part for part, lag in (await self._broker.admin.group_lag(self.group, topic)).items() if lag.records]
        committed = await self._broker.admin.committed(self.group, topic) if behind else {}
        for partition in behind:
            if partition not in committed:
                return False
            batch = await self._broker.reader.read(topic, partition, committed[partition] + 1, max_records=1)
            if batch is not None and batch.offsets[0] < ends.get(partition, 0):
                return False
        return True

    async def _write(self, pause: Pause) -> None:
        retry = Backoff(_BASE_WAIT, _MAX_WAIT)
        while True:
            try:
                await write_pause(self._producer, self._lane, pause)
                await self._pauses.refresh()
            except BrokerError as error:
                if retry.fail():
                    log.warning(
                        "control_unavailable",
                        lane=self._lane,
                        error=str(error),
                        hint="the lane waits; nothing is lost. Try: check the broker and the topic penstock.control",
                    )
                await retry.wait()
            else:
                return


class PauseFollower:
    """Sets whether a dispatcher sends, parks or replays during one membership, and follows changes of the pause state."""

    def __init__(
        self, pause: PauseState, dispatcher: "Dispatcher", membership: Membership, metrics: LaneMetrics
    ) -> None:
        self._pause, self._dispatcher, self._membership, self._metrics = pause, dispatcher, membership, metrics
        self._mode = pause.mode

    def start(self) -> Iterable[Coroutine[Any, Any, None]]:
        """Set the mode. Returns work that runs as long as the membership."""
        pause = self._pause
        self._metrics.paused.set(self._mode is LaneMode.PAUSED)
        if self._mode is LaneMode.PAUSED:
            self._park()
        else:
            if self._mode is LaneMode.REPLAYING:
                self._dispatcher.replay()
            if pause.was_parked:
                pause.was_parked = False
                self._dispatcher.start_slowly()
                log.info("destination_resumed", group=pause.group, mode=self._mode.value)
        yield self._follow_operator()
        yield self._follow_receiver()
        if self._mode is LaneMode.REPLAYING:
            yield pause.watch_replay()

    def _park(self) -> None:
        self._mode, self._pause.was_parked = LaneMode.PAUSED, True
        self._metrics.up.set(False)
        self._metrics.paused.set(True)
        reason = self._pause.reason
        log.warning("destination_paused", group=self._pause.group, reason=reason, hint="its events are parked")
        self._dispatcher.park(reason)

    async def _follow_operator(self) -> None:
        """A running lane is paused without leaving its group: its partitions could go to members that have not read the pause
        yet. Every other change of mode is a new membership. While the old one drains, its retries end with the next pause: they
        would go to a destination that must not get any event.
        """
        while (mode := self._pause.mode) is self._mode or (self._mode, mode) == (LaneMode.RUNNING, LaneMode.PAUSED):
            if mode is not self._mode:
                self._park()
            await self._pause.wait_for_change()
        self._membership.end()
        while True:
            if self._pause.mode is LaneMode.PAUSED:
                self._dispatcher.suspend()
            await self._pause.wait_for_change()

    async def _follow_receiver(self) -> None:
        """The pause is durable before anything is parked: else a crash would send later events of a key before parked ones."""
        await self._dispatcher.gone.wait()
        if self._pause.mode is not LaneMode.PAUSED:
            await self._pause.pause_gone()
        if self._pause.mode is not LaneMode.PAUSED:
            self._membership.end()  # an operator resumed it at the same moment: the receiver is asked once more


def _whoami() -> str:
    return f"expel@{socket.gethostname()}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
