"""The groups of instances whose size a person has frozen. `penstock.control` has a record for each change; the newest one counts.

The autoscaler decides about a frozen group and carries nothing out. A freeze is in force when its record is durable. The
autoscaler reads the topic before each decision. The topic is kept for ever, so its records also say who froze
a group, when and why.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec
import structlog

from services.core.broker.contract import Reader
from services.core.broker.errors import UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.pauses import ControlTopic
from services.core.pipes import CONTROL
from services.core.times import format_time

log = structlog.get_logger()

_KEY = "freeze:"


class Freeze(msgspec.Struct, frozen=True):
    """One change. by: a user. at, until: ms since the epoch; until: None: for ever. reason: for a person."""

    state: Literal["frozen", "unfrozen"]
    by: str
    at: int
    reason: str = ""
    until: int | None = None

    def holds(self, now: int) -> bool:
        """Whether the group is frozen at `now`, ms."""
        return self.state == "frozen" and not self.has_ended(now)

    def has_ended(self, now: int) -> bool:
        """Whether the time of a freeze is over at `now`, ms."""
        return self.state == "frozen" and self.until is not None and self.until <= now

    @property
    def text(self) -> str:
        """For a person."""
        until = "" if self.until is None else f" until {format_time(self.until)}"
        return f"frozen by {self.by} since {format_time(self.at)}{until} because: {self.reason}"


class Freezes:
    """The content of the control topic, as far as `refresh` has read it. Not thread-safe."""

    def __init__(self, reader: Reader) -> None:
        self._topic = ControlTopic(reader)
        self._newest: dict[str, Freeze] = {}

    def all(self) -> Mapping[str, Freeze]:
        """The newest change of each group, by its name."""
        return self._newest

    async def refresh(self) -> None:
        """Read new records to the end of the topic; nothing is frozen without the topic. Raises BrokerError kinds."""
        try:
            async for offset, record in self._topic.read_new():
                self._apply(offset, record)
        except UnknownTopic:
            return

    def _apply(self, offset: int, record: Record) -> None:
        key = (record.key or b"").decode(errors="replace")
        if not key.startswith(_KEY):
            return
        try:
            self._newest[key.removeprefix(_KEY)] = msgspec.json.decode(record.value or b"", type=Freeze)
        except msgspec.DecodeError as error:
            log.warning("control_record_unreadable", topic=CONTROL, offset=offset, error=str(error))


async def write_freeze(producer: Producer, group: str, freeze: Freeze) -> None:
    """Write a change durably. Raises BrokerError kinds."""
    record = Record(f"{_KEY}{group}".encode(), msgspec.json.encode(freeze), freeze.at)
    (await producer.send_to(CONTROL, {0: [record]})).raise_first()
