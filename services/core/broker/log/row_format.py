"""The format of a batch in the log: one row, the records as one msgpack block, with its position under the checksum.

Position = partition << 40 | offset of the first record, the row's primary key. The checksum covers the position and
every other column, so a row that moved, lost its tail or had one bit changed is found when it is read.

A row of a compacted topic may be **sparse**: it spans `count` offsets and holds fewer records, maybe none. The spans of rows have
no gap, so a removed record never looks like a lost one. A sparse block begins with a byte that no msgpack has.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import msgspec

from services.core.broker.errors import RecordTooLarge
from services.core.broker.record import Record, content_bytes, split_by_size

OFFSET_BITS = 40
MAX_OFFSET = (1 << OFFSET_BITS) - 1
MAX_PARTITIONS = 1024
MAX_RECORD_BYTES = 1_048_576
"""Key + value + headers of one record."""

BLOCK_BYTES = 256 << 10
"""A row holds about this much; more only in an append that is larger itself."""

Failed = tuple[tuple[int, Exception], ...]

_ENCODE = msgspec.msgpack.Encoder().encode
_DECODE = msgspec.msgpack.Decoder(list[Record]).decode
_SPARSE = b"\xc1"
_POSITION = struct.Struct("<QQqqqQ").pack


class _Sparse(msgspec.Struct, frozen=True, array_like=True):
    """positions: of the records, counted from the row's first offset. cleaned: as in `Block`, by position."""

    positions: list[int]
    records: list[Record]
    cleaned: dict[int, int]


_DECODE_SPARSE = msgspec.msgpack.Decoder(_Sparse).decode


class Block(NamedTuple):
    """The records of a row and their offsets. cleaned: of its tombstones, by offset, when (ms) compaction had removed all older
    records of the key."""

    offsets: Sequence[int]
    records: list[Record]
    cleaned: dict[int, int]


class Packed(NamedTuple):
    """Records ready to be stored as one row. length: of its span; how many records, unless it is sparse.
    max_ts: the newest of their timestamps, milliseconds."""

    length: int
    max_ts: int
    data: bytes


class Row(NamedTuple):
    """One stored row, in the order of its columns. length (column `count`): how many offsets it spans.

    top_ts, stored_ms and total never decrease within a partition, so all three can be searched by halves.
    top_ts: the newest timestamp up to and including this row. stored_ms: wall time of the append.
    total: bytes of data stored in the partition up to and including this row, since the topic was made.
    """

    pos: int
    length: int
    max_ts: int
    top_ts: int
    stored_ms: int
    total: int
    crc: int
    data: bytes

    @property
    def first(self) -> int:
        """Offset of its first record."""
        return self.pos & MAX_OFFSET

    @property
    def end(self) -> int:
        """Offset behind its last record."""
        return (self.pos & MAX_OFFSET) + (self.length if type(self.length) is int else 0)  # damage may change its type


def row_position(partition: int, offset: int) -> int:
    """The primary key of the row that begins at this offset."""
    return (partition << OFFSET_BITS) + offset


def pack(records: Sequence[Record]) -> tuple[Packed | None, Failed]:
    """Encode records as one block, without those above MAX_RECORD_BYTES, which are named by (index, RecordTooLarge).

    None when nothing is left. Single records are measured only when all together exceed the limit of one.
    """
    data = _ENCODE(records)
    failed: Failed = ()
    if len(data) > MAX_RECORD_BYTES:
        failed = tuple(
            (index, RecordTooLarge(f"a record of {size:,} bytes; the limit is {MAX_RECORD_BYTES:,}"))
            for index, record in enumerate(records)
            if (size := content_bytes(record)) > MAX_RECORD_BYTES
        )
    if failed:
        bad = {index for index, _ in failed}
        records = [record for index, record in enumerate(records) if index not in bad]
        data = _ENCODE(records)
    if not records:
        return None, failed
    return Packed(len(records), max([record.timestamp for record in records]), data), failed


def pack_all(records: Sequence[Record]) -> list[Packed]:
    """Encode any number of records as blocks of about BLOCK_BYTES. Raises RecordTooLarge for the first one that is."""
    blocks = []
    for _, some in split_by_size(records, BLOCK_BYTES):
        packed, failed = pack(some)
        if failed:
            raise failed[0][1]
        assert packed is not None
        blocks.append(packed)
    return blocks


def merge(blocks: Sequence[Packed]) -> Packed:
    """Several blocks as one, records in the blocks' order, without decoding them."""
    if len(blocks) == 1:
        return blocks[0]
    count = sum([block.length for block in blocks])
    bodies = [_array_header(count), *[block.data[len(_array_header(block.length)) :] for block in blocks]]
    return Packed(count, max([block.max_ts for block in blocks]), b"".join(bodies))


def _array_header(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 | count,))
    if count < 0x10000:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def make_row(pos: int, packed: Packed, top_ts: int, stored_ms: int, total: int) -> Row:
    """The row to insert, checksum included."""
    count, max_ts, data = packed
    crc = crc32(data, crc32(_POSITION(pos, count, max_ts, top_ts, stored_ms, total)))
    return Row(pos, count, max_ts, top_ts, stored_ms, total, crc, data)


def read_row(row: Row) -> Block | None:
    """The records of a row; None when it is damaged (any column may hold anything)."""
    try:
        seed = crc32(_POSITION(row.pos, row.length, row.max_ts, row.top_ts, row.stored_ms, row.total))
        if crc32(row.data, seed) != row.crc:
            return None
        if row.data[:1] == _SPARSE:
            return _read_sparse(row)
        records = _DECODE(row.data)
    except (struct.error, TypeError, msgspec.MsgspecError):
        return None
    first = row.first
    return Block(range(first, first + row.length), records, {}) if len(records) == row.length else None


def _read_sparse(row: Row) -> Block | None:
    positions, records, cleaned = msgspec.structs.astuple(_DECODE_SPARSE(row.data[1:]))
    if len(positions) != len(records):
        return None
    first = row.first
    offsets = [first + position for position in positions]
    return Block(offsets, records, {first + position: since for position, since in cleaned.items()})


def pack_span(first: int, length: int, block: Block) -> Packed:
    """Encode what a compacted row keeps of the `length` offsets from `first` on. max_ts is 0 when it keeps nothing."""
    newest = max([record.timestamp for record in block.records], default=0)
    if len(block.records) == length and not block.cleaned:
        return Packed(length, newest, _ENCODE(block.records))
    positions = [offset - first for offset in block.offsets]
    cleaned = {offset - first: since for offset, since in block.cleaned.items()}
    return Packed(length, newest, _SPARSE + _ENCODE(_Sparse(positions, block.records, cleaned)))
