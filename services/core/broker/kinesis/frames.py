"""Records to Kinesis entries and back: our frame within each user record of an aggregate.

A frame is `MAGIC` and the record as msgpack [key, value, timestamp, headers]; 0xc1 begins neither msgpack nor text. A KCL
consumer gets one user record per event and takes the value from it. What others wrote has no frame: the data are
the value, the partition key is the key, the time of arrival the timestamp.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from services.core.broker.errors import RecordTooLarge
from services.core.broker.kinesis.aggregation import MAX_HEAD_BYTES, BadAggregate, Packer, packed_size, unpack
from services.core.broker.record import Record

MAGIC = b"\xc1PS\x01"
MAX_ENTRY_BYTES = 1 << 20
"""Data and partition key of one Kinesis record."""

MAX_RECORD_BYTES = MAX_ENTRY_BYTES - 1024
"""Key + value + headers of one of our records: an entry, less key tables, checksum and framing of some thirty headers."""

_MAX_OVERHEAD = len(MAGIC) + MAX_HEAD_BYTES
"""Of one record's msgpack within an entry."""

_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(Record).decode


class BadEntry(ValueError):
    """What a Kinesis entry holds cannot be read, and reading it again does not help."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Some records of an append, in order, as the data of one Kinesis record. indexes: theirs in the append."""

    indexes: Sequence[int]
    data: bytes


def make_entries(
    records: Sequence[Record], partition_key: str, hash_key: int
) -> tuple[list[Entry], dict[int, RecordTooLarge]]:
    """The records in as few entries as the size limit allows, and by index those that fit none."""
    packer = Packer(partition_key, hash_key, MAGIC)
    room = MAX_ENTRY_BYTES - len(partition_key) - packer.overhead()
    bodies = [_ENCODE(record) for record in records]
    if sum(map(len, bodies)) + _MAX_OVERHEAD * len(bodies) <= min(room, MAX_RECORD_BYTES):
        return [Entry(range(len(bodies)), packer.pack(bodies))], {}
    refused = {
        index: RecordTooLarge(f"a record of {size:,} bytes; this broker takes at most {MAX_RECORD_BYTES:,}")
        for index, (record, body) in enumerate(zip(records, bodies, strict=True))
        if (size := content_bytes(record)) > MAX_RECORD_BYTES or packed_size(len(MAGIC) + len(body)) > room
    }
    kept = [index for index in range(len(bodies)) if index not in refused]
    sizes = [packed_size(len(MAGIC) + len(bodies[index])) for index in kept]
    return [
        Entry(kept[start:end], packer.pack([bodies[index] for index in kept[start:end]]))
        for start, end in _spans(sizes, room)
    ], refused


def read_entry(data: bytes, partition_key: str, arrival: int) -> list[Record]:
    """The records of one stored Kinesis record, in order; may be none. arrival: when it was stored, ms. Raises BadEntry."""
    try:
        parts = unpack(data)
    except BadAggregate as error:
        raise BadEntry(str(error)) from error
    if parts is None:
        return [_read_frame(data, partition_key, arrival)]
    return [_read_frame(part.data, part.partition_key, arrival) for part in parts]


def content_bytes(record: Record) -> int:
    """Key + value + headers, as the limit counts them."""
    size = len(record.key or b"") + len(record.value or b"")
    return size + sum([len(name.encode()) + len(value) for name, value in record.headers])


def _read_frame(data: bytes, partition_key: str, arrival: int) -> Record:
    if not data.startswith(MAGIC):
        return Record(partition_key.encode(), data, arrival)
    try:
        return _DECODE(memoryview(data)[len(MAGIC) :])
    except msgspec.MsgspecError as error:
        raise BadEntry(f"a record's frame cannot be read: {error}") from error


def _spans(sizes: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """[start, end) of runs that fit the room."""
    start = used = 0
    for index, size in enumerate(sizes):
        if used + size > room:
            yield start, index
            start, used = index, 0
        used += size
    if start < len(sizes):
        yield start, len(sizes)
