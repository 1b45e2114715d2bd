"""Which destinations are paused: `penstock.control` has a record for each change, and the newest of a destination counts.

A pause or resume is in force when its record is durable; who follows the topic knows within about `FOLLOW_S`. It is kept for
ever and read without a group, from its beginning: a few records for each outage that an operator or a receiver ended.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

import msgspec
import structlog

from services.core.broker.contract import Reader
from services.core.broker.errors import BrokerError, OffsetOutOfRange
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record
from services.core.pipes import CONTROL

log = structlog.get_logger()

FOLLOW_S = 1.0
"""Seconds between two looks."""
OPERATOR, GONE = "operator", "410"
_PAGE = 500
_KEY = "pause:"


class Pause(msgspec.Struct, frozen=True):
    """One change. state `paused`; `resumed`: parked events may go; `replayed`: where order counts, they went.

    reason: `operator` or `410`. detail: for a person. by: who. at: ms since the epoch. of: the offset of the resume that a
    `replayed` ends: it says nothing about a later pause.
    """

    state: Literal["paused", "resumed", "replayed"]
    reason: str
    by: str
    at: int
    detail: str = ""
    of: int = -1


class Pauses:
    """What the control topic says, as far as `refresh` has read it. Not thread-safe."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._next = 0
        self._newest: dict[str, tuple[int, Pause]] = {}
        self._changed = asyncio.Event()
        self.unknown: str | None = "it was not read yet"
        """Why it is not known what is paused; None once the topic was read to its end. Later failures leave what was read."""

    def of(self, lane: str) -> tuple[int, Pause] | None:
        """The change that is in force for `<pipe>/<destination>`, with its offset; None: it was never paused, or all is over."""
        return self._newest.get(lane)

    def paused(self) -> Mapping[str, Pause]:
        """Every lane that is paused."""
        return {lane: pause for lane, (_, pause) in self._newest.items() if pause.state == "paused"}

    async def wait_for_change(self) -> None:
        """Until any destination's state changes."""
        await self._changed.wait()

    async def refresh(self) -> None:
        """Read on to the end of the topic. Raises BrokerError kinds."""
        changed = False
        try:
            while (batch := await self._read()) is not None:
                for offset, record in zip(batch.offsets, batch.records, strict=True):
                    changed |= self._note(offset, record)
                self._next = batch.offsets[-1] + 1
            self.unknown = None
        finally:  # also when the next read fails: what was read is not read again
            if changed:
                event, self._changed = self._changed, asyncio.Event()
                event.set()

    async def follow(self, stopping: asyncio.Event) -> None:
        """Look again every FOLLOW_S until `stopping`. What fails is told once and tried again."""
        is_failing = False
        while not stopping.is_set():
            try:
                await self.refresh()
                is_failing = False
            except BrokerError as error:
                if self.unknown is not None:
                    self.unknown = str(error)
                if not is_failing:
                    log.warning("control_unreadable", topic=CONTROL, error=str(error), hint="it is tried again")
                is_failing = True
            with suppress(TimeoutError):
                async with asyncio.timeout(FOLLOW_S):
                    await stopping.wait()

    async def _read(self) -> Batch | None:
        try:
            return await self._reader.read(CONTROL, 0, self._next, max_records=_PAGE)
        except OffsetOutOfRange as error:  # made anew, or cut at its beginning: what is there counts
            log.warning("control_out_of_range", topic=CONTROL, wanted=self._next, start=error.start)
            self._next = error.start
            return await self._reader.read(CONTROL, 0, self._next, max_records=_PAGE)

    def _note(self, offset: int, record: Record) -> bool:
        """Whether it changed anything."""
        key = (record.key or b"").decode(errors="replace")
        if not key.startswith(_KEY):
            return False
        try:
            pause = msgspec.json.decode(record.value or b"", type=Pause)
        except msgspec.DecodeError as error:
            log.warning("control_record_unreadable", topic=CONTROL, offset=offset, error=str(error))
            return False
        lane = key.removeprefix(_KEY)
        if pause.state != "replayed":
            self._newest[lane] = (offset, pause)
            return True
        known = self._newest.get(lane)
        if known is None or known[0] != pause.of:
            return False
        del self._newest[lane]
        return True


async def write_pause(producer: Producer, lane: str, pause: Pause) -> None:
    """Durably. lane: `<pipe>/<destination>`. Raises BrokerError kinds."""
    record = Record(f"{_KEY}{lane}".encode(), msgspec.json.encode(pause), pause.at)
    (await producer.send_to(CONTROL, {0: [record]})).raise_first()
