"""What operators, and the receiver by a 410, have decided about one destination: whether its lane sends, parks or replays."""

import asyncio
import enum
import socket
import time
from typing import NoReturn

import backoff
import structlog

from services.core.broker.contract import Admin
from services.core.broker.errors import BrokerError
from services.core.broker.producer import Producer
from services.core.pauses import GONE, Pause, Pauses, write_pause
from services.core.pipes import delivery_group, parked_topic
from services.expel.lane_bounds import LaneShape

log = structlog.get_logger()

REPLAY_LEAST_S = 5.0
"""A replay takes so long at least: until every instance has heard of the resume and parks no more."""
_LOOK_S = 0.5
_BASE_WAIT, _MAX_WAIT = 0.25, 10.0


class Mode(enum.Enum):
    """RUNNING: everything is sent. PAUSED: everything is parked. REPLAYING: parked events are sent, the others wait."""

    RUNNING = "running"
    PAUSED = "paused"
    REPLAYING = "replaying"


class Standing:
    """One destination's, in one process."""

    def __init__(self, pauses: Pauses, admin: Admin, producer: Producer, shape: LaneShape) -> None:
        self._pauses, self._admin, self._producer, self._shape = pauses, admin, producer, shape
        self._lane = f"{shape.pipe}/{shape.destination}"
        self.was_parked = False
        """Whether this process parked its events, and has not begun again since."""

    @property
    def unknown(self) -> str | None:
        """Why it is not known yet whether the destination is paused; None once it is."""
        return self._pauses.unknown

    @property
    def mode(self) -> Mode:
        """As the control topic says. Where keys are in order, what was parked goes before what came later."""
        found = self._pauses.of(self._lane)
        if found is None:
            return Mode.RUNNING
        if found[1].state == "paused":
            return Mode.PAUSED
        return Mode.REPLAYING if self._shape.keyed else Mode.RUNNING

    @property
    def reason(self) -> str:
        """Why it is paused, as a word; empty when it is not."""
        found = self._pauses.of(self._lane)
        return found[1].reason if found is not None and found[1].state == "paused" else ""

    async def wait_for_change(self) -> None:
        """Until somebody's state changed."""
        await self._pauses.wait_for_change()

    async def pause_gone(self) -> None:
        """The receiver answered 410: paused, durably, from now on. Tries for ever."""
        detail = "the receiver answered 410 Gone"
        await self._write(Pause("paused", GONE, _whoami(), _now_ms(), detail))
        log.error(
            "destination_gone",
            lane=self._lane,
            reason=detail,
            hint=f"its events are parked, nothing is lost. Try: penstock destination resume {self._shape.destination}",
        )

    async def watch_replay(self) -> NoReturn:
        """Say, durably, when all that was parked before the resume is delivered. One that is resumed once more begins anew."""
        resumed: tuple[int, Pause] | None = None
        ends: dict[int, int] | None = None
        while True:
            if (newest := self._pauses.of(self._lane)) != resumed:  # only the newest resume can be ended
                resumed, ends = newest, None
                await asyncio.sleep(REPLAY_LEAST_S)
                continue
            try:
                if ends is None:
                    held = await self._admin.describe(parked_topic(self._shape.pipe))
                    ends = {partition: found.end for partition, found in held.items()}
                if resumed is not None and resumed[1].state == "resumed" and await self._is_through(ends):
                    await self._write(Pause("replayed", resumed[1].reason, _whoami(), _now_ms(), of=resumed[0]))
                    log.info("destination_replayed", lane=self._lane)
            except BrokerError as error:
                log.debug("replay_unknown", lane=self._lane, error=str(error))
            await asyncio.sleep(_LOOK_S)

    async def _is_through(self, ends: dict[int, int]) -> bool:
        """Whether the group has settled what lies before these offsets."""
        topic = parked_topic(self._shape.pipe)
        group = delivery_group(self._shape.pipe, self._shape.destination)
        behind = [part for part, lag in (await self._admin.group_lag(group, topic)).items() if lag.records]
        committed = await self._admin.committed(group, topic) if behind else {}
        for partition in behind:
            if partition not in committed:
                return False
            batch = await self._admin.read(topic, partition, committed[partition] + 1, max_records=1)
            if batch is not None and batch.offsets[0] < ends.get(partition, 0):
                return False
        return True

    async def _write(self, pause: Pause) -> None:
        failures = 0
        while True:
            try:
                await write_pause(self._producer, self._lane, pause)
                await self._pauses.refresh()
            except BrokerError as error:
                if not failures:
                    log.warning(
                        "control_unavailable",
                        lane=self._lane,
                        error=str(error),
                        hint="the lane waits, nothing is lost. Try: check the broker and the topic penstock.control",
                    )
                failures += 1
                await asyncio.sleep(backoff.full_jitter(min(_MAX_WAIT, _BASE_WAIT * 2 ** min(failures, 10))))
            else:
                return


def _whoami() -> str:
    return f"expel@{socket.gethostname()}"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
