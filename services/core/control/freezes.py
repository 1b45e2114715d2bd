"""The groups of instances whose size a person has frozen. `penstock.control` has a record for each change; the newest one counts.

The autoscaler decides about a frozen group and carries nothing out. A freeze is in force when its record is durable. The
autoscaler reads the topic before each decision. The topic is kept for ever, so its records also say who froze
a group, when and why.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from services.core.broker.contract import Reader
from services.core.broker.errors import UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.control.topic import ControlTopic
from services.core.pipe_file.topic_names import CONTROL
from services.core.times import format_time

ON_PLATFORM = "frozen on its platform"
"""The beginning of the words about a freeze by an annotation or a tag."""
_VERSION = 1


class Freeze(msgspec.Struct, frozen=True):
    """One change. by: a user. at, until: ms since the epoch; until: None: for ever. reason: for a person.

    version: of this format.
    """

    state: Literal["frozen", "unfrozen"]
    by: str
    at: int
    reason: str = ""
    until: int | None = None
    version: int = _VERSION

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
        self._topic = ControlTopic(reader, "freeze")
        self._newest: dict[str, Freeze] = {}

    def all(self) -> Mapping[str, Freeze]:
        """The newest change of each group, by its name."""
        return self._newest

    def in_force(self, now: int) -> Mapping[str, Freeze]:
        """The groups that are frozen at `now`, ms."""
        return {group: freeze for group, freeze in self._newest.items() if freeze.holds(now)}

    async def refresh(self) -> None:
        """Read new records to the end of the topic; nothing is frozen without the topic. Raises BrokerError kinds."""
        try:
            async for offset, group, record in self._topic.read_new():
                if (freeze := self._topic.parse(Freeze, offset, record, _VERSION)) is not None:
                    self._newest[group] = freeze
        except UnknownTopic:
            return


async def write_freeze(producer: Producer, group: str, freeze: Freeze) -> None:
    """Write a change durably. Raises BrokerError kinds."""
    record = Record(f"freeze:{group}".encode(), msgspec.json.encode(freeze), freeze.at)
    (await producer.send_to(CONTROL, {0: [record]})).raise_first()
