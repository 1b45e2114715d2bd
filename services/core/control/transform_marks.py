"""Whether a pipe's transform has begun: marks in `penstock.control`, one record per change, kept for ever.

Spark keeps the position of a transform in its checkpoint. A transform without one reads its sources from the beginning, and
destinations receive every result again. So a new pipe must be told from one whose checkpoint is lost. The mark `begun` is written
before the first batch of a new checkpoint, and names it. The mark `reset` is written when an operator lets the transform begin
again. The newest mark of a pipe counts. A pipe that began before this version gets its mark at the next start.
"""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

import msgspec

from services.core.broker.contract import Reader
from services.core.broker.errors import UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.control.topic import ControlTopic
from services.core.pipe_file.state_plan import StatePlan
from services.core.pipe_file.topic_names import CONTROL
from services.core.times import format_time

_VERSION = 1
SERVICE = "transform"
"""The writer of `begun`."""


class Begin(msgspec.Struct, frozen=True):
    """Where a new checkpoint begins in a topic. incarnation: of the topic. offsets: by partition; others begin at their start."""

    incarnation: str
    offsets: dict[int, int]


class TransformMark(msgspec.Struct, frozen=True):
    """checkpoint: its id; "": not known. by: a user, or the service. at: ms since the epoch. version: of this format.

    plan: of a transform that has left state over several events: what it keeps. None in marks of earlier versions, too.
    begins: of a reset to a time, by topic. former: the name that a reset gave the checkpoint's folder. Version 0.1 knows neither,
    and begins at the oldest record.
    """

    state: Literal["begun", "reset"]
    checkpoint: str
    by: str
    at: int
    version: int = _VERSION
    plan: StatePlan | None = None
    begins: dict[str, Begin] = {}
    former: str = ""

    @property
    def has_begun(self) -> bool:
        return self.state == "begun"

    def fits(self, checkpoint: str) -> bool:
        """Whether the transform began with the checkpoint of this id, as far as the mark says."""
        return self.has_begun and self.checkpoint in ("", checkpoint)

    @property
    def text(self) -> str:
        """Since when it runs and with which checkpoint, for a person."""
        return f"the transform began at {format_time(self.at)} with checkpoint {self.checkpoint or 'of unknown id'}"


class TransformMarks:
    """The marks, as far as `refresh` has read them. Not thread-safe; several tasks may call `refresh` at once."""

    def __init__(self, reader: Reader) -> None:
        self._topic = ControlTopic(reader, "transform")
        self._newest: dict[str, TransformMark] = {}
        self._reading = asyncio.Lock()

    def of(self, pipe: str) -> TransformMark | None:
        """None: the transform never began, or before there were marks."""
        return self._newest.get(pipe)

    async def refresh(self) -> None:
        """Read new records to the end of the topic. Raises BrokerError kinds; UnknownTopic without the control topic."""
        async with self._reading:
            async for _, pipe, record in self._topic.read_new():
                self._newest[pipe] = _parse(record)


def _parse(record: Record) -> TransformMark:
    """A mark that cannot be parsed, perhaps of a later version, counts as `begun`, with a checkpoint of unknown id."""
    with suppress(msgspec.DecodeError):
        mark = msgspec.json.decode(record.value or b"", type=TransformMark)
        if mark.version <= _VERSION:
            return mark
    return TransformMark("begun", "", "an unreadable mark", record.timestamp)


async def read_transform_mark(reader: Reader, pipe: str) -> TransformMark | None:
    """The newest mark of one pipe; None without the control topic, too. Raises BrokerError kinds."""
    marks = TransformMarks(reader)
    with suppress(UnknownTopic):
        await marks.refresh()
    return marks.of(pipe)


async def write_transform_mark(
    producer: Producer,
    pipe: str,
    state: Literal["begun", "reset"],
    checkpoint: str,
    by: str,
    plan: StatePlan | None = None,
    begins: Mapping[str, Begin] | None = None,
    former: str = "",
) -> None:
    """Write it durably. Raises BrokerError kinds; UnknownTopic without the control topic."""
    mark = TransformMark(
        state, checkpoint, by, time.time_ns() // 1_000_000, plan=plan, begins=dict(begins or {}), former=former
    )
    record = Record(f"transform:{pipe}".encode(), msgspec.json.encode(mark), mark.at)
    (await producer.send_to(CONTROL, {0: [record]})).raise_first()
