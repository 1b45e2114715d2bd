"""What operators did with dead letters: appended to `penstock.audit`, kept for ever, and read back for what is settled."""

import getpass
import os
import socket
from bisect import bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from services.core.audit import DISCARD, REDRIVE, Entry, Range, merge_ranges, write_entries
from services.core.broker.contract import Admin
from services.core.broker.errors import UnknownTopic
from services.core.broker.pages import read_topic
from services.core.broker.producer import Producer
from services.core.letter import Position
from services.core.pipes import AUDIT
from services.fleet.console import note
from services.fleet.problem import CommandFailed

FATES = {REDRIVE: "redriven", DISCARD: "discarded"}


async def read_audit(admin: Admin) -> AsyncIterator[Entry]:
    """All entries, oldest first; none when the topic does not exist yet. What is no entry is said on stderr."""
    try:
        held = await admin.describe(AUDIT)
    except UnknownTopic:
        return
    async for batch in read_topic(admin, AUDIT, 0, held[0]):
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            try:
                yield msgspec.json.decode(record.value or b"", type=Entry)
            except msgspec.DecodeError as error:
                note(f"{AUDIT}:0:{offset} is no audit entry and counts for nothing: {error}", "yellow")


class Fates:
    """What became of which letters. Memory grows with the ranges, not with the letters."""

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        found: defaultdict[tuple[str, str, int], list[Range]] = defaultdict(list)
        for entry in entries:
            found[entry.action, entry.topic, entry.partition] += entry.ranges
        self._ranges = {key: merge_ranges(ranges) for key, ranges in found.items()}

    @classmethod
    async def read(cls, admin: Admin) -> "Fates":
        """As the audit says now."""
        return cls([entry async for entry in read_audit(admin)])

    def fate(self, position: Position) -> str:
        """`redriven`; `discarded`, when never redriven; "" while nobody has acted."""
        for action, word in FATES.items():
            ranges = self._ranges.get((action, position.topic, position.partition), [])
            index = bisect_right(ranges, position.offset, key=lambda found: found[0]) - 1
            if index >= 0 and position.offset <= ranges[index][1]:
                return word
        return ""


class Auditor:
    """Writes the entries of one command. `who`: user@host."""

    def __init__(self, producer: Producer, who: str, filters: Mapping[str, str]) -> None:
        self._producer, self._who, self._filters = producer, who, dict(filters)

    async def require_topic(self) -> None:
        """Before anything is done that could not be put on record. Raises CommandFailed."""
        try:
            await self._producer.partition_count(AUDIT)
        except UnknownTopic as error:
            raise CommandFailed(f"there is no topic {AUDIT}", "penstock apply, which makes it") from error

    async def write(self, action: str, positions: Sequence[Position]) -> None:
        """Durably; to be called when the action itself is durable. Raises BrokerError kinds."""
        await write_entries(self._producer, action, self._who, self._filters, positions)


def whoami() -> str:
    """user@host. Blocking."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a passwd entry
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
