"""Kafka's record batch: packed from records, decoded, and searched for damage."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from aiokafka.errors import CorruptRecordException, UnsupportedCodecError
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords

from services.core.broker.record import Batch, Headers, Record, TopicPartition
from services.core.event import MAX_MILLIS_DIGITS, TIME

_UNCOMPRESSED = 0

MAX_RECORD_BYTES = (1 << 20) + (64 << 10)
"""Key + value + headers of one record: a payload of 1 MiB with room for key and headers."""

BATCH_FRAMING = 16 << 10
"""More than the batch header, record header and header lengths of one record."""

MAX_BATCH_BYTES = MAX_RECORD_BYTES + BATCH_FRAMING
"""max.message.bytes of our topics."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The producer's identity: by it the broker recognises a batch that it has already. See `appender`."""

    producer_id: int
    epoch: int


@dataclass(slots=True)
class Packed:
    """The first `count` of the given records, as Kafka stores them."""

    count: int
    data: bytes


def pack(records: Sequence[Record], limit: int, identity: Identity, sequence: int, *, timed: bool = True) -> Packed:
    """Pack as many of the records as a batch of `limit` bytes holds, but at least one. timed: their times are also in TIME."""
    builder = DefaultRecordBatchBuilder(_MAGIC, _UNCOMPRESSED, 0, identity.producer_id, identity.epoch, sequence, limit)
    add = builder.append
    count, before = 0, None
    for record in records:
        time = record.timestamp
        if time != before:  # events of one request often have the same
            before, header = time, (TIME, b"%d" % time)
        headers = [*record.headers, header] if timed and time >= 0 else list(record.headers)
        if add(count, time, record.key, record.value, headers) is None:
            break
        count += 1
    return Packed(count, builder.build())


def make_batch(source: TopicPartition, rows: Sequence[Any], *, timed: bool = True) -> Batch:
    """Rows of one partition, at least one, in offset order; each has offset, key, value, timestamp and headers.

    The records are as their writer had them: the timestamp is the time in TIME, where there is one. timed: False for a topic of
    others, where that header is of another fleet, or of anybody.
    """
    first, last = rows[0].offset, rows[-1].offset
    dense = last - first + 1 == len(rows)
    offsets = range(first, last + 1) if dense else [row.offset for row in rows]
    if not any(row.headers for row in rows):  # usual in topics of others
        return Batch(*source, offsets, [Record(row.key, row.value, row.timestamp) for row in rows])
    has_null = bool([1 for row in rows for _, value in row.headers if value is None])
    records = []
    name = TIME if timed else None
    for row in rows:
        time, headers = row.timestamp, _without_null(row.headers) if has_null else tuple(row.headers)
        if headers and headers[-1][0] == name:  # as `restore_time`: a call for each record takes as long as all of this
            text = headers[-1][1]
            if text.isdigit() and len(text) <= MAX_MILLIS_DIGITS:
                time, headers = int(text), headers[:-1]
        records.append(Record(row.key, row.value, time, headers))
    return Batch(*source, offsets, records)


def _without_null(headers: Iterable[tuple[str, bytes | None]]) -> Headers:
    """Kafka allows headers without a value, and other producers write some. We read them as empty."""
    return tuple((name, value or b"") for name, value in headers)


# Reading the raw batches of a fetch answer: which batch cannot be read, and where reading may go on behind it.
#
# A batch's checksum covers neither its offset nor its length, so neither is trusted alone. Reading goes on at the next batch, as
# the lengths tell, whose own checksum is right. If no batch follows (the end of a segment or of the partition), two fields of the
# header must agree with each other, and then with the broker: see `reader`.

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
    """first: the first offset that cannot be read, not before the position. raw: the stored bytes that are passed over.

    is_next: no readable record is between the position and it. resume: the first readable offset behind it; None when
    that is not certain. claimed_end: one behind the last offset by its header, if nothing follows and the header agrees
    with itself. passable: False when it is not damaged, but compressed in a way that we cannot read.
    """

    first: int
    raw: bytes
    detail: str
    is_next: bool
    resume: int | None
    claimed_end: int | None
    passable: bool = True


def find_unreadable(data: bytes, position: int) -> Unreadable | None:
    """The first batch at or behind `position` that cannot be read; None when all can.

    A batch that the fetch cut off is ignored, unless it is the first: Kafka sends at least one whole batch.
    """
    at, is_next = 0, True
    while piece := _cut(data, at):
        fault, readable = _examine(piece, position)
        if fault is not None:
            return _describe(data, at, position, fault, is_next)
        is_next = is_next and not readable
        at += len(piece)
    is_cut_off = at > 0 and not (len(data) - at >= _FRAME.size and _FRAME.unpack_from(data, at)[1] < _SMALLEST)
    if is_cut_off or not data:
        return None
    return Unreadable(end_of(data, position), data[at:], "the length of a batch is altered", is_next, None, None)


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
    """The batches without those of rolled-back transactions. Unreadable ones stay.

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
    """The offset behind the last whole batch, at least `position`."""
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
    """The batch's last offset by its header; in old formats the base is the last offset."""
    if len(piece) < _HEADER.size or piece[_MAGIC_AT] != _MAGIC:
        return _base(piece)
    last_delta: int = _HEADER.unpack_from(piece)[6]
    return _base(piece) + last_delta


def first_offset(data: bytes) -> int | None:
    """The offset of the first batch, if it is intact."""
    piece = _cut(data, 0)
    return _base(piece) if piece and _examine(piece, 0)[0] is None else None


def _cut(data: bytes, at: int) -> bytes:
    """The batch at this position, by its own length; empty when it is not whole."""
    if len(data) - at < _FRAME.size:
        return b""
    length: int = _FRAME.unpack_from(data, at)[1]
    end = at + _FRAME.size + length
    return data[at:end] if length >= _SMALLEST and end <= len(data) else b""


def _base(piece: bytes) -> int:
    offset: int = _FRAME.unpack_from(piece)[0]
    return offset


def _examine(piece: bytes, position: int) -> tuple[Exception | None, bool]:
    """(the error of reading it, whether it has records from `position` on)."""
    try:
        batch = MemoryRecords(piece).next_batch()
        if batch is None or not batch.validate_crc():
            raise CorruptRecordException("checksum mismatch")
        if batch.is_control_batch:
            return None, False
        return None, max((record.offset for record in batch), default=-1) >= position
    except Exception as error:  # altered bytes make a decoder raise anything
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
