"""The bytes of a Kinesis record: the KPL's aggregated format, our frames in it, offsets.

A Kinesis record is an *entry* here; its records are the KPL's *user records*. An aggregate is a magic number, a
protobuf message, and the MD5 of that message:

    AggregatedRecord  1: repeated string partition_key_table  2: repeated string explicit_hash_key_table  3: repeated Record
    Record            1: uint64 partition_key_index  2: optional uint64 explicit_hash_key_index  3: bytes data  4: tags

    Tag               1: string key  2: optional string value

All user records of an entry belong to one partition, so they share one partition key and one hash key. The data of
each is a frame: `FRAME_MAGIC` and msgpack of [key, value, timestamp, headers]. 0xc1 starts neither msgpack nor text.
A record of another producer has no frame: its data is the value, its partition key the key, its arrival time the
timestamp.

The first user record has a tag, `penstock`: the name of the append. A repeat of an append has the name of the first
attempt. Readers that do not know names, and the KCL, pass tags over.

An offset is sequence number << 20 | index within the entry, the KCL's sub-sequence number. An entry has at most 1
MiB, so fewer than 2^20 records. Offsets are ordered within a shard, and from a shard to its children.

Source: "KPL Aggregated Record Format", github.com/awslabs/amazon-kinesis-producer.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, md5
from typing import Any, NamedTuple

import msgspec

from services.core.broker.contract import MAX_APPEND_BYTES
from services.core.broker.errors import RecordTooLarge
from services.core.broker.record import Damage, Record, content_bytes
from services.core.version import newer_format

AGGREGATE_MAGIC = b"\xf3\x89\x9a\xc2"
MAX_HEAD_BYTES = 16
"""The most bytes before the data of a user record."""

_DIGEST_BYTES = 16
_VARINT, _BYTES = 0, 2
_MAX_VARINT_BYTES = 10
_KEYS, _HASH_KEYS, _RECORDS = 1, 2, 3
_KEY_INDEX, _HASH_INDEX, _DATA, _TAGS = 1, 2, 3, 4
_TAG_KEY, _TAG_VALUE = 1, 2
_NAME_TAG = b"penstock"


class BadAggregate(ValueError):
    """The checksum is right, but the message does not follow the format."""


class UserRecord(NamedTuple):
    """One record of an aggregate. hash_key: the explicit one, if there is one. name: of the append; empty: none."""

    partition_key: str
    hash_key: str | None
    data: bytes
    name: bytes = b""


class Packer:
    """Builds aggregates for one partition key and hash key. prefix: starts every payload, below 100 bytes."""

    def __init__(self, partition_key: str, hash_key: int, prefix: bytes = b"") -> None:
        self._tables = _field(_KEYS, partition_key.encode()) + _field(_HASH_KEYS, str(hash_key).encode())
        self._prefix = prefix

    def overhead(self, name: bytes = b"") -> int:
        """Bytes of an aggregate beside its user records, at most."""
        return len(AGGREGATE_MAGIC) + len(self._tables) + _DIGEST_BYTES + (len(_name_tag(name)) + 2 if name else 0)

    def pack(self, payloads: Sequence[bytes], name: bytes = b"") -> bytes:
        """One aggregate of all payloads, in order. name: of the append, ASCII; empty: none.

        Its size is `overhead` and the `packed_size` of each payload with its prefix, or a little less with a name.
        """
        prefix = self._prefix
        parts = [b""] * (2 * len(payloads))
        parts[::2] = [_record_head(len(payload), prefix) for payload in payloads]
        if name and payloads:
            parts[0] = _make_head(len(payloads[0]), prefix, _name_tag(name))
        parts[1::2] = payloads
        message = b"".join((self._tables, *parts))
        return b"".join((AGGREGATE_MAGIC, message, md5(message, usedforsecurity=False).digest()))


def packed_size(length: int) -> int:
    """Bytes of a payload of this length within an aggregate."""
    return len(_record_head(length)) + length


def unpack(data: bytes) -> list[UserRecord] | None:
    """The user records, in order. None when the data is no aggregate: no magic number, or a wrong checksum. The KCL
    does the same. Raises BadAggregate."""
    if not data.startswith(AGGREGATE_MAGIC) or len(data) < len(AGGREGATE_MAGIC) + _DIGEST_BYTES:
        return None
    message = data[len(AGGREGATE_MAGIC) : -_DIGEST_BYTES]
    if md5(message, usedforsecurity=False).digest() != data[-_DIGEST_BYTES:]:
        return None
    try:
        return _read(message)
    except (IndexError, UnicodeDecodeError) as error:
        raise BadAggregate("an index or a text in the aggregate is not valid") from error


def _read(message: bytes) -> list[UserRecord]:
    keys: list[str] = []
    hash_keys: list[str] = []
    bodies: list[bytes] = []
    for number, value in _fields(message):
        if isinstance(value, int) or number not in (_KEYS, _HASH_KEYS, _RECORDS):
            raise BadAggregate(f"the aggregate has an unknown field {number}")
        if number == _RECORDS:
            bodies.append(value)
        else:
            (keys if number == _KEYS else hash_keys).append(value.decode())
    return [_read_record(body, keys, hash_keys) for body in bodies]


def _read_record(body: bytes, keys: list[str], hash_keys: list[str]) -> UserRecord:
    key_index = hash_index = data = None
    name = b""
    for number, value in _fields(body):
        if number == _DATA and isinstance(value, bytes):
            data = value
        elif number == _KEY_INDEX and isinstance(value, int):
            key_index = value
        elif number == _HASH_INDEX and isinstance(value, int):
            hash_index = value
        elif number == _TAGS and isinstance(value, bytes):
            name = _read_name(value) or name
        elif number != _TAGS:
            raise BadAggregate(f"a record of the aggregate has an unknown field {number}")
    if data is None or key_index is None:
        raise BadAggregate("a record of the aggregate has no data or no partition key")
    return UserRecord(keys[key_index], None if hash_index is None else hash_keys[hash_index], data, name)


def _read_name(tag: bytes) -> bytes:
    """The append's name, when this tag has it. Others' tags may hold anything."""
    try:
        found = dict(_fields(tag))
    except (BadAggregate, IndexError):
        return b""
    name = found.get(_TAG_VALUE)
    return name if found.get(_TAG_KEY) == _NAME_TAG and isinstance(name, bytes) else b""


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(field number, value) in order. Raises BadAggregate when the message ends within a field, or IndexError."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        value, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            yield tag >> 3, value
        elif kind == _BYTES:
            if at + value > end:
                raise BadAggregate("the aggregate ends within a field")
            yield tag >> 3, message[at : at + value]
            at += value
        else:
            raise BadAggregate(f"the aggregate has a field of wire type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    byte = message[at]
    if byte < 0x80:
        return byte, at + 1
    value = shift = 0
    for place in range(at, at + _MAX_VARINT_BYTES):
        byte = message[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise BadAggregate("a number in the aggregate does not end")


def _to_varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _field(number: int, value: bytes) -> bytes:
    return _to_varint(number << 3 | _BYTES) + _to_varint(len(value)) + value


def _name_tag(name: bytes) -> bytes:
    return _field(_TAGS, _field(_TAG_KEY, _NAME_TAG) + _field(_TAG_VALUE, name))


@lru_cache(maxsize=4096)
def _record_head(length: int, prefix: bytes = b"") -> bytes:
    """The bytes before the payload of a user record, with the prefix of its data."""
    return _make_head(length, prefix, b"")


def _make_head(length: int, prefix: bytes, tag: bytes) -> bytes:
    length += len(prefix)
    inner = bytes((_KEY_INDEX << 3, 0, _HASH_INDEX << 3, 0)) + tag + bytes((_DATA << 3 | _BYTES,)) + _to_varint(length)
    return bytes((_RECORDS << 3 | _BYTES,)) + _to_varint(len(inner) + length) + inner + prefix


SUB_BITS = 20
_SUB_MASK = (1 << SUB_BITS) - 1


def offset_of(sequence: str | int, sub: int = 0) -> int:
    """The offset of the record at index `sub` of the entry with this sequence number."""
    return int(sequence) << SUB_BITS | sub


def split_offset(offset: int) -> tuple[str, int]:
    """(sequence number as the service writes it, index within the entry)."""
    return str(offset >> SUB_BITS), offset & _SUB_MASK


FRAME_MAGIC = b"\xc1PS\x01"
"""Its last byte is the version of the frame."""
MAX_ENTRY_BYTES = 1 << 20
"""Data and partition key of one entry."""

MAX_RECORD_BYTES = MAX_ENTRY_BYTES - 1024
"""Key, value and headers of one of our records: an entry, less key tables, checksum and framing of about thirty headers."""

_MAX_OVERHEAD = len(FRAME_MAGIC) + MAX_HEAD_BYTES
"""Of one record's msgpack within an entry."""

_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(Record).decode


class BadEntry(ValueError):
    """The entry cannot be parsed; reading it again does not help."""


@dataclass(frozen=True, slots=True)
class PutEntry:
    """Some records of an append, in order, as one entry. indexes: theirs in the append. name: see `EntryNames`."""

    indexes: Sequence[int]
    data: bytes
    name: bytes = b""


EntryNames = Callable[[Sequence[bytes]], bytes]
"""Names an entry by the encoded records in it: a new name, of NAME_BYTES, or that of the entry that this one repeats."""

NAME_BYTES = 32


def no_name(_bodies: Sequence[bytes]) -> bytes:
    """`EntryNames` of entries that are never repeated."""
    return b""


def make_entries(
    records: Sequence[Record], partition_key: str, hash_key: int, names: EntryNames = no_name
) -> tuple[list[PutEntry], dict[int, RecordTooLarge]]:
    """The records in as few entries as the size limit allows, and by index those that fit none."""
    packer = Packer(partition_key, hash_key, FRAME_MAGIC)
    room = MAX_ENTRY_BYTES - len(partition_key) - packer.overhead(bytes(NAME_BYTES))
    bodies = [_ENCODE(record) for record in records]

    def pack(indexes: Sequence[int]) -> PutEntry:
        some = bodies if len(indexes) == len(bodies) else [bodies[index] for index in indexes]
        name = names(some)
        return PutEntry(indexes, packer.pack(some, name), name)

    if sum(map(len, bodies)) + _MAX_OVERHEAD * len(bodies) <= min(room, MAX_RECORD_BYTES):
        return [pack(range(len(bodies)))], {}
    refused = {
        index: RecordTooLarge(f"a record of {size:,} bytes; the limit is {MAX_RECORD_BYTES:,}")
        for index, (record, body) in enumerate(zip(records, bodies, strict=True))
        if (size := content_bytes(record)) > MAX_RECORD_BYTES or packed_size(len(FRAME_MAGIC) + len(body)) > room
    }
    kept = [index for index in range(len(bodies)) if index not in refused]
    sizes = [packed_size(len(FRAME_MAGIC) + len(bodies[index])) for index in kept]
    return [pack(kept[start:end]) for start, end in _spans(sizes, room)], refused


def digest_records(records: Iterable[Record]) -> bytes:
    """Of their encoded forms, as `EntryNames` gets them: equal for equal records only."""
    return digest_bodies(map(_ENCODE, records))


def digest_bodies(bodies: Iterable[bytes]) -> bytes:
    """As `digest_records`. msgpack says itself where each body ends."""
    return blake2b(b"".join(bodies), digest_size=16).digest()


def read_entry(data: bytes, partition_key: str, arrival: int) -> list[Record]:
    """The records of an entry, in order; may be none. arrival: when it was stored, ms. Raises BadEntry."""
    return _read_entry(data, partition_key, arrival)[0]


def _read_entry(data: bytes, partition_key: str, arrival: int) -> tuple[list[Record], bytes]:
    """The records, and `StoredEntry.identity`."""
    if (own := _read_own(data)) is not None:
        return own
    try:
        parts = unpack(data)
    except BadAggregate as error:
        raise BadEntry(str(error)) from error
    if parts is None:
        return [_read_frame(data, partition_key, arrival)], b""
    name = parts[0].name if parts else b""
    identity = name + data[-_DIGEST_BYTES:] if name else b""
    return [_read_frame(part.data, part.partition_key, arrival) for part in parts], identity


_FIRST_OWN = re.compile(
    re.escape(AGGREGATE_MAGIC) + rb"\x0a(.)(\d{1,9})\x12(.)(\d{1,39})(?=\x1a)", re.ASCII | re.DOTALL
)
"""The beginning of an aggregate of `Packer` with a number as partition key: magic number and key tables."""
_OWN_KEYS, _OWN_DATA = bytes((_KEY_INDEX << 3, 0, _HASH_INDEX << 3, 0)), _DATA << 3 | _BYTES
_OWN_TAG, _OWN_RECORD = _TAGS << 3 | _BYTES, _RECORDS << 3 | _BYTES


def _read_own(data: bytes) -> tuple[list[Record], bytes] | None:
    """As `_read_entry`, of an entry that `Packer` and `make_entries` made; at a third of the cost. None for any other entry.

    It checks the checksum and every byte that the general way reads, and leaves to that way whatever is not as expected.
    """
    found = _FIRST_OWN.match(data)
    if found is None or [*found[1], *found[3]] != [len(found[2]), len(found[4])]:
        return None
    end = len(data) - _DIGEST_BYTES
    message = memoryview(data)
    if md5(message[len(AGGREGATE_MAGIC) : end], usedforsecurity=False).digest() != data[end:]:
        return None
    at, records, name, magic = found.end(), list[Record](), b"", len(FRAME_MAGIC)
    try:
        while at < end:
            if data[at] != _OWN_RECORD:
                return None
            size, at = _varint(data, at + 1)
            behind = at + size
            if behind > end or not data.startswith(_OWN_KEYS, at):
                return None
            at += len(_OWN_KEYS)
            if data[at] == _OWN_TAG and not records:
                length, at = _varint(data, at + 1)
                name = _read_name(data[at : at + length])
                at += length
            if data[at] != _OWN_DATA:
                return None
            length, at = _varint(data, at + 1)
            if at + length != behind or not data.startswith(FRAME_MAGIC, at):
                return None
            records.append(_DECODE(message[at + magic : behind]))
            at = behind
    except (IndexError, BadAggregate, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return records, name + data[-_DIGEST_BYTES:] if name else b""


def _read_frame(data: bytes, partition_key: str, arrival: int) -> Record:
    if not data.startswith(FRAME_MAGIC):
        if data.startswith(FRAME_MAGIC[:-1]):
            raise BadEntry(newer_format("a record's frame", data[len(FRAME_MAGIC) - 1], FRAME_MAGIC[-1]))
        return Record(partition_key.encode(), data, arrival)
    try:
        return _DECODE(memoryview(data)[len(FRAME_MAGIC) :])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadEntry(f"a record's frame cannot be read: {error}") from error


def _spans(sizes: Sequence[int], room: int) -> Iterator[tuple[int, int]]:
    """[start, end) of the records of each entry."""
    start = used = 0
    for index, size in enumerate(sizes):
        if used + size > room:
            yield start, index
            start, used = index, 0
        used += size
    if start < len(sizes):
        yield start, len(sizes)


RawRecord = Mapping[str, Any]
"""A Kinesis record as the SDK returns it."""

_RECORD_MEMORY, _HEADER_MEMORY = 140, 150
"""Bytes of the objects of a record, and of each header, beside their content."""


class StoredEntry(NamedTuple):
    """An entry that was read, or the rest of it. arrived: arrival time, ms. size: bytes as stored. memory: about the
    bytes of its decoded records.

    damage: it cannot be parsed. Its only record holds its bytes, and takes one offset.

    identity: the name of its append, and the checksum of its bytes; empty for an entry without a name. Entries of one
    identity hold the same records, from one append that was repeated.
    """

    sequence: str
    offsets: Sequence[int]
    records: Sequence[Record]
    arrived: int
    size: int
    memory: int
    damage: Damage | None = None
    identity: bytes = b""

    @property
    def next(self) -> int:
        """The offset behind it."""
        return self.offsets[-1] + 1 if self.offsets else offset_of(self.sequence)

    def without_first(self, count: int) -> "StoredEntry":
        """The rest after its first `count` records."""
        return self._replace(offsets=self.offsets[count:], records=self.records[count:])


def arrival_of(entry: RawRecord) -> int:
    """In ms."""
    return int(entry["ApproximateArrivalTimestamp"].timestamp() * 1000)


def parse_entry(entry: RawRecord) -> StoredEntry:
    data, arrived, sequence = entry["Data"], arrival_of(entry), entry["SequenceNumber"]
    first = offset_of(sequence)
    try:
        records, identity = _read_entry(data, entry["PartitionKey"], arrived)
    except BadEntry as error:
        raw = Record(None, data[:MAX_APPEND_BYTES], arrived)
        damage = Damage(first, first, str(error))
        return StoredEntry(
            sequence, range(first, first + 1), [raw], arrived, len(data), len(data) + _RECORD_MEMORY, damage
        )
    offsets, memory = range(first, first + len(records)), _memory(len(data), records)
    return StoredEntry(sequence, offsets, records, arrived, len(data), memory, identity=identity)


def _memory(size: int, records: Sequence[Record]) -> int:
    """Records of one entry are alike, so the first one's headers are counted."""
    each = _RECORD_MEMORY + _HEADER_MEMORY * len(records[0].headers) if records else 0
    return size + each * len(records)
