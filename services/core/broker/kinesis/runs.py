"""What one Kinesis record holds: the records of an append, their offsets, or the damage that it is."""

from collections.abc import Sequence
from typing import NamedTuple

from services.core.broker.contract import MAX_APPEND_BYTES
from services.core.broker.kinesis.frames import BadEntry, read_entry
from services.core.broker.kinesis.offsets import offset_of
from services.core.broker.kinesis.shard_iterator import Entry, arrival_of
from services.core.broker.record import Damage, Record

_RECORD_MEMORY, _HEADER_MEMORY = 140, 150
"""Bytes that the objects of a record, and of each of its headers, take beside what they hold."""


class Run(NamedTuple):
    """One entry, or the rest of it. arrived: when the service took it, ms. size: bytes as stored. memory: about what all of its
    records take, decoded.

    damage: it cannot be read; its only record holds its bytes, and takes one offset.
    """

    sequence: str
    offsets: Sequence[int]
    records: Sequence[Record]
    arrived: int
    size: int
    memory: int
    damage: Damage | None = None

    @property
    def next(self) -> int:
        """The offset behind it."""
        return self.offsets[-1] + 1 if self.offsets else offset_of(self.sequence)

    def behind(self, count: int) -> "Run":
        """Without its first `count` records."""
        return self._replace(offsets=self.offsets[count:], records=self.records[count:])


def read_run(entry: Entry) -> Run:
    """All of a stored entry."""
    data, arrived, sequence = entry["Data"], arrival_of(entry), entry["SequenceNumber"]
    first = offset_of(sequence)
    try:
        records = read_entry(data, entry["PartitionKey"], arrived)
    except BadEntry as error:
        buried = Record(None, data[:MAX_APPEND_BYTES], arrived)
        damage = Damage(first, first, str(error))
        return Run(sequence, range(first, first + 1), [buried], arrived, len(data), len(data) + _RECORD_MEMORY, damage)
    return Run(sequence, range(first, first + len(records)), records, arrived, len(data), _memory(len(data), records))


def _memory(size: int, records: Sequence[Record]) -> int:
    """Records of one entry are alike: the first tells how many headers they have."""
    each = _RECORD_MEMORY + _HEADER_MEMORY * len(records[0].headers) if records else 0
    return size + each * len(records)
