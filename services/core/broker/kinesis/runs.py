"""What one Kinesis record holds: the records of an append, their offsets, or the damage that it is."""

from collections.abc import Sequence
from typing import NamedTuple

from services.core.broker.contract import MAX_APPEND_BYTES
from services.core.broker.kinesis.frames import BadEntry, read_entry
from services.core.broker.kinesis.offsets import offset_of
from services.core.broker.kinesis.shard_iterator import Entry, arrival_of
from services.core.broker.record import Damage, Record


class Run(NamedTuple):
    """One entry, or the rest of it. arrived: when the service took it, ms. size: bytes as stored.

    damage: it cannot be read; its only record holds its bytes, and takes one offset.
    """

    sequence: str
    offsets: Sequence[int]
    records: Sequence[Record]
    arrived: int
    size: int
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
        return Run(sequence, range(first, first + 1), [buried], arrived, len(data), Damage(first, first, str(error)))
    return Run(sequence, range(first, first + len(records)), records, arrived, len(data))
