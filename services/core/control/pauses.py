"""The paused destinations and transforms. `penstock.control` has a record for each change; the newest one of a name counts.

The name of a destination is that of its lane, `<pipe>/<destination>`. The name of a transform is that of its pipe, which has no
slash. So neither service takes a change for its own that is meant for the other.

A pause or resume is in force when its record is durable. Followers of the topic read it within about `FOLLOW_S`. The topic is
kept for ever and read from its beginning, without a group: it has a few records per outage.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

import msgspec
import structlog

from services.core.broker.contract import Reader
from services.core.broker.errors import BrokerError, UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.control.topic import ControlTopic
from services.core.pipe_file.topic_names import CONTROL
from services.core.process.lifecycle import wait_for_stop

log = structlog.get_logger()

FOLLOW_S = 1.0
"""Seconds between two reads."""
OPERATOR, GONE = "operator", "410"
_VERSION = 1


class Pause(msgspec.Struct, frozen=True):
    """One change. state: `paused`; `resumed`: parked events may be sent; `replayed`: of an ordered destination, they were sent.

    reason: `operator` or `410`. detail: for a person. by: a user, or expel. at: ms since the epoch. of: in `replayed`, the
    offset of the resume to which it belongs. It does not end a later pause. A transform has no `replayed`.
    version: of this format.
    """

    state: Literal["paused", "resumed", "replayed"]
    reason: str
    by: str
    at: int
    detail: str = ""
    of: int = -1
    version: int = _VERSION

    @property
    def because(self) -> str:
        """The reason, for a person."""
        return self.detail or ("no reason given" if self.reason == OPERATOR else self.reason)

    @property
    def text(self) -> str:
        """Who paused it and why, for a person."""
        return f"paused by {self.by}: {self.because}"


NOT_READ = "it was not read yet"
"""The first value of `Pauses.unknown`: nothing has failed."""


class Pauses:
    """The content of the control topic, as far as `refresh` has read it. Not thread-safe.

    renames: the lane of each former name (`pipes.renames_of`): a pause of that name is a pause of the lane.
    """

    def __init__(self, reader: Reader, renames: Mapping[str, str] | None = None) -> None:
        self._topic, self.renames = ControlTopic(reader, "pause"), renames or {}
        self._newest: dict[str, tuple[int, Pause]] = {}
        self._changed, self._refreshing = asyncio.Event(), asyncio.Lock()
        self.unknown: str | None = NOT_READ
        """The reason why the pauses are not known; None from the first read to the end on, also when later reads fail."""

    def of(self, name: str) -> tuple[int, Pause] | None:
        """The change in force for `<pipe>/<destination>` or `<pipe>`, with its offset; None: never paused, or replayed since."""
        return self._newest.get(name)

    def paused(self) -> Mapping[str, Pause]:
        """The paused lanes and transforms."""
        return {name: pause for name, (_, pause) in self._newest.items() if pause.state == "paused"}

    async def wait_for_change(self) -> None:
        """Wait until the state of any of them changes."""
        await self._changed.wait()

    async def refresh(self) -> None:
        """Read new records to the end of the topic. Raises BrokerError kinds."""
        async with self._refreshing:  # an older page must not be applied after a newer one
            await self._read_new()

    async def _read_new(self) -> None:
        changed = False
        try:
            async for offset, name, record in self._topic.read_new():
                changed |= self._apply(offset, name, record)
            self.unknown = None
        finally:  # also when a later read fails: the records before it are not read again
            if changed:
                event, self._changed = self._changed, asyncio.Event()
                event.set()

    async def follow(self, stopping: asyncio.Event) -> None:
        """Refresh every FOLLOW_S until `stopping`. A series of failures is logged once."""
        is_failing = False
        while not stopping.is_set():
            try:
                await self.refresh()
                is_failing = False
            except BrokerError as error:
                if self.unknown is not None:
                    self.unknown = str(error)
                if not is_failing:
                    log.warning("control_unreadable", topic=CONTROL, error=str(error), hint="the topic is read again")
                is_failing = True
            await wait_for_stop(stopping, FOLLOW_S)

    def _apply(self, offset: int, name: str, record: Record) -> bool:
        """Returns whether a state changed."""
        if (pause := self._topic.parse(Pause, offset, record, _VERSION)) is None:
            return False
        name = self.renames.get(name, name)
        if pause.state != "replayed":
            self._newest[name] = (offset, pause)
            return True
        known = self._newest.get(name)
        if known is None or known[0] != pause.of:
            return False
        del self._newest[name]
        return True


async def list_paused(reader: Reader, renames: Mapping[str, str]) -> Mapping[str, Pause]:
    """The lanes and transforms that are paused now; none without the topic. renames: as in `Pauses`. Raises BrokerError kinds."""
    pauses = Pauses(reader, renames)
    with suppress(UnknownTopic):
        await pauses.refresh()
    return pauses.paused()


async def write_pause(producer: Producer, name: str, pause: Pause) -> None:
    """Write a change durably. name: `<pipe>/<destination>`, or `<pipe>` for its transform. Raises BrokerError kinds."""
    record = Record(f"pause:{name}".encode(), msgspec.json.encode(pause), pause.at)
    (await producer.send_to(CONTROL, {0: [record]})).raise_first()


async def carry_pauses(reader: Reader, producer: Producer, renames: Mapping[str, str]) -> None:
    """Record each change in force that was made under a former name for the present one, so that it does not end, or begin
    again, when the pipe file no longer has the former name. renames: as in `Pauses`. Repeatable. Raises BrokerError kinds."""
    if not renames:
        return
    present, alone = Pauses(reader, renames), Pauses(reader)
    try:
        await present.refresh()
        await alone.refresh()
    except UnknownTopic:
        return
    for name in dict.fromkeys(renames.values()):
        wanted, found = [None if one is None else one[1] for one in (present.of(name), alone.of(name))]
        if wanted is None and found is not None:
            wanted = msgspec.structs.replace(found, state="resumed")
        if wanted is not None and (found is None or found.state != wanted.state):
            await write_pause(producer, name, wanted)
