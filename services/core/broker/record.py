"""A record of a topic: one immutable value type for both directions and every backend."""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec

Headers = tuple[tuple[str, bytes], ...]


class Record(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One record as it is sent or was read.

    key: decides the partition and the order; None means "any partition, no order".
    value: the payload, byte for byte as it was accepted; None only in records that others wrote (a tombstone).
    timestamp: event time, milliseconds since the epoch. In a record of others: what the broker gives it.
    headers: (name, value) in the order they were added; names may repeat.
    """

    key: bytes | None
    value: bytes | None
    timestamp: int
    headers: Headers = ()

    def header(self, name: str) -> bytes | None:
        """The first header of this name, or None. Linear: headers are few."""
        for header_name, value in self.headers:
            if header_name == name:
                return value
        return None


class TopicPartition(NamedTuple):
    """One partition of a topic; the unit of order, ownership and commit."""

    topic: str
    partition: int


class Damage(NamedTuple):
    """Stored records that cannot be read: those from offset `first` to `last`, as far as they exist. detail: the reason."""

    first: int
    last: int
    detail: str


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Consecutive records of one partition, as `Consumer.poll` returns them.

    `offsets[i]` is the offset of `records[i]`: increasing, not necessarily contiguous. Never empty.
    damage: this batch represents damaged records. Its only offset is their last one. Its only record is not an event: the
    value is their stored bytes, or as many as fit, and the timestamp is the time of the read.
    """

    topic: str
    partition: int
    offsets: Sequence[int]
    records: Sequence[Record]
    damage: Damage | None = None

    @property
    def source(self) -> TopicPartition:
        """The partition that this batch was read from."""
        return TopicPartition(self.topic, self.partition)

    def without(self, offsets: Collection[int]) -> "Batch | None":
        """The batch without these offsets; None when nothing remains. Not for a batch with damage."""
        gone = frozenset(offsets)
        kept = [pair for pair in zip(self.offsets, self.records, strict=True) if pair[0] not in gone]
        if not kept:
            return None
        return Batch(self.topic, self.partition, [offset for offset, _ in kept], [record for _, record in kept])


def content_bytes(record: Record) -> int:
    """Key + value + headers, exactly: the size that a broker's largest record is measured by."""
    size = len(record.key or b"") + len(record.value or b"")
    return size + sum([len(name.encode()) + len(value) for name, value in record.headers])


RECORD_OVERHEAD = 64
"""Bytes that are counted for a record's framing, beside its content."""


def estimate_size(records: Sequence[Record]) -> int:
    """The approximate size of these records on the wire and in memory; cheap, for limits."""
    size = RECORD_OVERHEAD * len(records)
    for record in records:
        if record.value is not None:
            size += len(record.value)
        if record.key is not None:
            size += len(record.key)
        for name, value in record.headers:
            size += len(name) + len(value)
    return size


def split_by_size(records: Sequence[Record], limit: int) -> Iterator[tuple[int, Sequence[Record]]]:
    """(index of the first, records): slices in order, each of at most `limit` bytes by `estimate_size`; a larger record alone."""
    start = size = 0
    for index, record in enumerate(records):
        one = estimate_size((record,))
        if index > start and size + one > limit:
            yield start, records[start:index]
            start, size = index, 0
        size += one
    if start < len(records):
        yield start, records[start:]
