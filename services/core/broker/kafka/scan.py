"""Walk over the raw batches of a fetch answer: which cannot be read, and where reading may go on behind it.

A batch's checksum covers neither its offset nor its length. So neither is believed alone: reading goes on where, by the
lengths, a batch lies whose own checksum holds. Where nothing lies behind (the end of a segment or of the partition), the
header must agree with itself and then with the broker: see `damage`.
"""

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from aiokafka.errors import CorruptRecordException, UnsupportedCodecError
from aiokafka.record.memory_records import MemoryRecords

_FRAME = struct.Struct(">qi")
_EPOCH = struct.Struct(">i")
_HEADER = struct.Struct(">qiibIhiqqqhii")
_MAGIC, _MAGIC_AT = 2, 16
_IS_TRANSACTIONAL, _IS_CONTROL = 1 << 4, 1 << 5
_SMALLEST = 14
"""Bytes behind the frame of the smallest record of any version."""


class Row(NamedTuple):
    """A record as it is decoded."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int
    headers: tuple[tuple[str, bytes | None], ...]


class Unreadable(NamedTuple):
    """first: the first offset that cannot be read, not before the position. raw: as stored, of all that is passed over.

    is_next: no readable record lies between the position and it. resume: the first readable offset behind it; None when
    that is not certain. claimed_end: one behind its last offset as its header says, if nothing lies behind it and
    the header is in order. passable: False when it is not damaged, but we cannot decompress it.
    """

    first: int
    raw: bytes
    detail: str
    is_next: bool
    resume: int | None
    claimed_end: int | None
    passable: bool = True


def find_unreadable(data: bytes, position: int) -> Unreadable | None:
    """The first batch at or behind `position` that cannot be read; None when all of `data` can.

    What the fetch cut off at its end is ignored, unless it stands first: Kafka sends at least one whole batch.
    """
    at, is_next = 0, True
    while piece := _cut(data, at):
        fault, readable = _examine(piece, position)
        if fault is not None:
            return _describe(data, at, position, fault, is_next)
        is_next = is_next and not readable
        at += len(piece)
    if at or not data:
        return None
    return Unreadable(position, data, "the length of a batch is altered", True, None, None)


def readable_rows(data: bytes, position: int) -> Iterator[Row]:
    """The records from `position` on, up to the first batch that cannot be read or is cut off."""
    at = 0
    while piece := _cut(data, at):
        if _examine(piece, position)[0] is not None:
            return
        batch = MemoryRecords(piece).next_batch()
        if batch is not None and not batch.is_control_batch:
            for row in batch:
                if row.offset >= position:
                    yield Row(row.offset, row.key, row.value, row.timestamp, tuple(row.headers))
        at += len(piece)


def drop_aborted(data: bytes, aborted: Iterable[tuple[int, int]]) -> bytes:
    """The batches without those of rolled-back transactions; what cannot be read stays.

    aborted: (producer id, first offset) of each, as a fetch answer lists them.
    """
    waiting = sorted(aborted, key=lambda each: each[1], reverse=True)
    rolled_back: set[int] = set()
    kept: list[bytes] = []
    at = 0
    while waiting or rolled_back:
        if not (piece := _cut(data, at)):
            break
        at += len(piece)
        while waiting and waiting[-1][1] <= _base(piece):
            rolled_back.add(waiting.pop()[0])
        is_ours = len(piece) >= _HEADER.size and piece[_MAGIC_AT] == _MAGIC
        attributes, producer = (_HEADER.unpack_from(piece)[at] for at in (5, 9)) if is_ours else (0, -1)
        if attributes & _IS_CONTROL:
            rolled_back.discard(producer)
        elif attributes & _IS_TRANSACTIONAL and producer in rolled_back:
            continue
        kept.append(piece)
    return b"".join(kept) + data[at:] if at else data


def end_of(data: bytes, position: int) -> int:
    """One behind the last whole batch; `position` when there is none, or all lies before it."""
    at = 0
    while piece := _cut(data, at):
        at += len(piece)
        position = max(position, _claimed_last(piece) + 1)
    return position


def epochs_of(data: bytes) -> Iterator[tuple[int, int]]:
    """(first offset, epoch of the leader that wrote it) of each whole batch."""
    at = 0
    while len(data) - at >= _FRAME.size:
        base, length = _FRAME.unpack_from(data, at)
        if length < _SMALLEST or at + _FRAME.size + length > len(data):
            return
        if data[at + _MAGIC_AT] == _MAGIC:
            yield base, _EPOCH.unpack_from(data, at + _FRAME.size)[0]
        at += _FRAME.size + length


def _claimed_last(piece: bytes) -> int:
    """The batch's last offset as its header says; of old formats the base, which is their last record's."""
    if len(piece) < _HEADER.size or piece[_MAGIC_AT] != _MAGIC:
        return _base(piece)
    last_delta: int = _HEADER.unpack_from(piece)[6]
    return _base(piece) + last_delta


def first_offset(data: bytes) -> int | None:
    """The offset of the first batch, if it is intact."""
    piece = _cut(data, 0)
    return _base(piece) if piece and _examine(piece, 0)[0] is None else None


def _cut(data: bytes, at: int) -> bytes:
    """The batch there, as long as it says; empty when it is not whole."""
    if len(data) - at < _FRAME.size:
        return b""
    length: int = _FRAME.unpack_from(data, at)[1]
    end = at + _FRAME.size + length
    return data[at:end] if length >= _SMALLEST and end <= len(data) else b""


def _base(piece: bytes) -> int:
    offset: int = _FRAME.unpack_from(piece)[0]
    return offset


def _examine(piece: bytes, position: int) -> tuple[Exception | None, bool]:
    """(why it cannot be read, whether it holds records from `position` on)."""
    try:
        batch = MemoryRecords(piece).next_batch()
        if batch is None or not batch.validate_crc():
            raise CorruptRecordException("checksum mismatch")
        if batch.is_control_batch:
            return None, False
        return None, max((record.offset for record in batch), default=-1) >= position
    except Exception as error:  # whatever altered bytes make of a decoder
        return error, False


def _describe(data: bytes, at: int, position: int, fault: Exception, is_next: bool) -> Unreadable:
    magic = data[at + _MAGIC_AT]
    detail = f"{type(fault).__name__}: {fault}" if magic == _MAGIC else f"unknown magic {magic}: {fault}"
    first = max(_base(data[at:]), position)
    behind, resume = at, None
    while piece := _cut(data, behind):
        if behind > at and _examine(piece, 0)[0] is None:
            resume = _base(piece) if _base(piece) > first else None
            break
        last, behind = piece, behind + len(piece)
    claimed = _claimed_end(last) if behind == len(data) else None
    passable = not isinstance(fault, UnsupportedCodecError)
    return Unreadable(first, data[at:behind], detail, is_next, resume, claimed, passable)


def _claimed_end(piece: bytes) -> int | None:
    """One behind the batch's last offset, if two fields of the header agree on it."""
    if len(piece) < _HEADER.size:
        return None
    base, _, _, magic, _, _, last_delta, _, _, _, _, _, count = _HEADER.unpack_from(piece)
    return base + count if magic == _MAGIC and 0 < count == last_delta + 1 else None
