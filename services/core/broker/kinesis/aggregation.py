"""The KPL's aggregated format: many user records as one Kinesis record.

Source: "KPL Aggregated Record Format", github.com/awslabs/amazon-kinesis-producer. Magic number, a protobuf message, the
MD5 of that message:

    AggregatedRecord  1: repeated string partition_key_table  2: repeated string explicit_hash_key_table  3: repeated Record
    Record            1: uint64 partition_key_index  2: optional uint64 explicit_hash_key_index  3: bytes data  4: tags

What we write has one partition key and one hash key, to which every user record points: all of them are for one partition.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import md5
from typing import NamedTuple

MAGIC = b"\xf3\x89\x9a\xc2"
MAX_HEAD_BYTES = 16
"""Above what stands before the data of any user record that fits a Kinesis record."""

_DIGEST_BYTES = 16
_VARINT, _BYTES = 0, 2
_MAX_VARINT_BYTES = 10
_KEYS, _HASH_KEYS, _RECORDS = 1, 2, 3
_KEY_INDEX, _HASH_INDEX, _DATA, _TAGS = 1, 2, 3, 4


class BadAggregate(ValueError):
    """The checksum is right and the message is not what the format says: whoever wrote it, wrote it wrongly."""


class UserRecord(NamedTuple):
    """One record of an aggregate. hash_key: its explicit hash key, if its writer gave one."""

    partition_key: str
    hash_key: str | None
    data: bytes


class Packer:
    """Builds aggregates for one partition key and hash key. prefix: what begins every payload, below 100 bytes."""

    def __init__(self, partition_key: str, hash_key: int, prefix: bytes = b"") -> None:
        self._tables = _field(_KEYS, partition_key.encode()) + _field(_HASH_KEYS, str(hash_key).encode())
        self._prefix = prefix

    def overhead(self) -> int:
        """Bytes of an aggregate beside its user records."""
        return len(MAGIC) + len(self._tables) + _DIGEST_BYTES

    def pack(self, payloads: Sequence[bytes]) -> bytes:
        """One aggregate of all payloads, in order. Its size: `overhead` and the `packed_size` of each payload with its prefix."""
        prefix = self._prefix
        parts = [b""] * (2 * len(payloads))
        parts[::2] = [_record_head(len(payload), prefix) for payload in payloads]
        parts[1::2] = payloads
        message = b"".join((self._tables, *parts))
        return b"".join((MAGIC, message, md5(message, usedforsecurity=False).digest()))


def packed_size(length: int) -> int:
    """Bytes that a payload of this length takes within an aggregate."""
    return len(_record_head(length)) + length


def unpack(data: bytes) -> list[UserRecord] | None:
    """The user records, in order; None when this is no aggregate: another magic, or a checksum that is not its own.

    So the KCL does it, too: such data are one record of somebody's. Raises BadAggregate.
    """
    if not data.startswith(MAGIC) or len(data) < len(MAGIC) + _DIGEST_BYTES:
        return None
    message = data[len(MAGIC) : -_DIGEST_BYTES]
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
    for number, value in _fields(body):
        if number == _DATA and isinstance(value, bytes):
            data = value
        elif number == _KEY_INDEX and isinstance(value, int):
            key_index = value
        elif number == _HASH_INDEX and isinstance(value, int):
            hash_index = value
        elif number != _TAGS:
            raise BadAggregate(f"a record of the aggregate has an unknown field {number}")
    if data is None or key_index is None:
        raise BadAggregate("a record of the aggregate has no data or no partition key")
    return UserRecord(keys[key_index], None if hash_index is None else hash_keys[hash_index], data)


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """(field number, value) in order. Raises BadAggregate when the message ends within one, or IndexError."""
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


@lru_cache(maxsize=4096)
def _record_head(length: int, prefix: bytes = b"") -> bytes:
    """What stands before so many bytes of a user record, the prefix of its data included."""
    length += len(prefix)
    inner = bytes((_KEY_INDEX << 3, 0, _HASH_INDEX << 3, 0, _DATA << 3 | _BYTES)) + _to_varint(length)
    return bytes((_RECORDS << 3 | _BYTES,)) + _to_varint(len(inner) + length) + inner + prefix
