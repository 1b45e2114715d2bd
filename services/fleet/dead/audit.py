"""Operators' actions on dead letters: appended to `penstock.audit`, kept for ever, read to find what is redriven or discarded."""

import getpass
import os
import socket
from bisect import bisect_right
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import accumulate

from services.core.audit import DISCARD, REDRIVE, ActedUpon, Entry, decode_entry, write_entries
from services.core.broker.contract import Reader
from services.core.broker.errors import UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.reading import read_topic
from services.core.pipe_file.topic_names import AUDIT
from services.core.undelivered.dead_letter import DeadLetter, Position
from services.fleet.console import print_note
from services.fleet.problem import CommandFailed

FATES = {REDRIVE: "redriven", DISCARD: "discarded"}


async def read_audit(reader: Reader) -> AsyncIterator[Entry]:
    """All entries, oldest first; none when the topic does not exist. Prints a note for each record that is no entry."""
    try:
        stored = await reader.describe(AUDIT)
    except UnknownTopic:
        return
    async for batch in read_topic(reader, AUDIT, 0, stored[0]):
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            try:
                yield decode_entry(record.value)
            except ValueError as error:
                print_note(f"{AUDIT}:0:{offset} is not an audit entry and is ignored: {error}", "yellow")


class _Acts:
    """The records of one action in one partition: ranges by their first offset, with the digests of their records."""

    def __init__(self, ranges: Sequence[tuple[int, int, bytes]]) -> None:
        self._ranges = sorted(ranges)
        self._reach = list(accumulate((last for _, last, _ in self._ranges), max))
        """The last offset of all ranges up to this one: bounds the search where ranges overlap."""

    def holds(self, offset: int, digest: bytes) -> bool:
        """Whether this record was acted upon. Digests of an earlier version are shorter, or missing: then all at the offsets."""
        index = bisect_right(self._ranges, offset, key=lambda found: found[0]) - 1
        while index >= 0 and self._reach[index] >= offset:
            first, last, digests = self._ranges[index]
            size = len(digests) // (last - first + 1)
            at = (offset - first) * size
            if offset <= last and digest.startswith(digests[at : at + size]):
                return True
            index -= 1
        return False


class AuditedActions:
    """The fate of each dead letter. Memory: the ranges, and a digest per dead letter."""

    def __init__(self, entries: Sequence[Entry] = ()) -> None:
        found: defaultdict[tuple[str, str, int], list[tuple[int, int, bytes]]] = defaultdict(list)
        for entry in entries:
            found[entry.action, entry.topic, entry.partition] += _with_digests(entry)
        self._acts = {key: _Acts(ranges) for key, ranges in found.items()}

    @classmethod
    async def read(cls, reader: Reader) -> "AuditedActions":
        """From the whole audit topic."""
        return cls([entry async for entry in read_audit(reader)])

    def fate(self, position: Position, digest: bytes) -> str:
        """`redriven`; `discarded` if never redriven; "" without an action. digest: of the dead letter at this position."""
        for action, word in FATES.items():
            acts = self._acts.get((action, position.topic, position.partition))
            if acts is not None and acts.holds(position.offset, digest):
                return word
        return ""


def _with_digests(entry: Entry) -> Iterator[tuple[int, int, bytes]]:
    size, begin = len(entry.digests) // max(1, sum(last - first + 1 for first, last in entry.ranges)), 0
    for first, last in entry.ranges:
        end = begin + (last - first + 1) * size
        yield first, last, entry.digests[begin:end]
        begin = end


class Auditor:
    """Writes the entries of one command. `who`: user@host."""

    def __init__(self, producer: Producer, who: str, filters: Mapping[str, str]) -> None:
        self._producer, self._who, self._filters = producer, who, dict(filters)

    async def require_topic(self) -> None:
        """Raise CommandFailed when the audit topic is missing. To be called before any action."""
        try:
            await self._producer.partition_count(AUDIT)
        except UnknownTopic as error:
            raise CommandFailed(f"there is no topic {AUDIT}", "penstock apply, which creates it") from error

    async def write(self, action: str, letters: Sequence[DeadLetter]) -> None:
        """Write the entries durably. To be called after the action is durable. Raises BrokerError kinds."""
        acted_upon = [ActedUpon(*letter.position, letter.digest) for letter in letters]
        await write_entries(self._producer, action, self._who, self._filters, acted_upon)


def whoami() -> str:
    """user@host. Blocking."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a passwd entry
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
