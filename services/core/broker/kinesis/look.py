"""Reading a shard without a group: for operators, and for counting what a group has before it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import TypeVar

from services.core.broker.contract import MAX_POLL_BYTES, Lag, PartitionRange, Start
from services.core.broker.errors import DataDamaged, OffsetOutOfRange, Throttled
from services.core.broker.kinesis.frames import BadEntry, read_entry
from services.core.broker.kinesis.offsets import offset_of, split_offset
from services.core.broker.kinesis.shard_iterator import (
    OLDEST,
    BadSequence,
    Entry,
    ShardSource,
    arrival_of,
    at_sequence,
    at_time,
)
from services.core.broker.kinesis.stored import stored_range
from services.core.broker.record import Batch, Record, estimate_size

_CLOCKS_AHEAD_MS = 300_000
_ENTRIES = 1_000
_COUNT_BYTES = 32 << 20
_PATIENCE_SECONDS = 20.0

_T = TypeVar("_T")


async def patiently(ask: Callable[[], Awaitable[_T]]) -> _T:
    """Ask again while the shard is throttled: consumers read it, too. Gives up after 20 s, with Throttled."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return await ask()
        except Throttled:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0)  # the next read waits for its pace


async def look(source: ShardSource, offset: int, max_records: int) -> Batch | None:
    """As `Admin.read`."""
    offsets: list[int] = []
    records: list[Record] = []
    size = 0
    async for found, record in _records_from(source, offset):
        size += estimate_size((record,))
        if records and size > MAX_POLL_BYTES:
            break
        offsets.append(found)
        records.append(record)
        if len(records) == max_records:
            break
    if not records or split_offset(offsets[0])[0] != split_offset(offset)[0]:
        await _check_stored(source, offset)
    return Batch(source.topic, source.shard, offsets, records) if records else None


async def offset_at(source: ShardSource, start: Start) -> int:
    """As `Admin.offsets_at`, of one shard. A date is looked for from the records that arrived five minutes before it."""
    if isinstance(start, datetime):
        millis = round(start.timestamp() * 1000)
        async for answer in source.read_on(at_time(millis - _CLOCKS_AHEAD_MS), _ENTRIES):
            for entry in answer.entries:
                for offset, record in read_offsets(source, entry):
                    if record.timestamp >= millis:
                        return offset
    stored = await stored_range(source)
    return stored.start if start == "earliest" else stored.end


async def lag_behind(source: ShardSource, committed: int | None, now_ms: int) -> Lag:
    """What lies behind the committed offset, counted by reading it: exact up to 32 MiB, a lower bound above that."""
    count = size = 0
    oldest: int | None = None
    async for found, record in _records_from(source, 0 if committed is None else committed + 1):
        oldest = record.timestamp if oldest is None else oldest
        count += 1
        size += estimate_size((record,))
        if size > _COUNT_BYTES:
            break
        assert found
    return Lag(count, 0 if oldest is None else max(0, now_ms - oldest))


def read_offsets(source: ShardSource, entry: Entry) -> list[tuple[int, Record]]:
    """(offset, record) of all that an entry holds. Raises DataDamaged."""
    first = offset_of(entry["SequenceNumber"])
    try:
        records = read_entry(entry["Data"], entry["PartitionKey"], arrival_of(entry))
    except BadEntry as error:
        raise DataDamaged(source.topic, ((source.shard, first, first),), str(error)) from error
    return [(first + index, record) for index, record in enumerate(records)]


async def _records_from(source: ShardSource, offset: int) -> AsyncIterator[tuple[int, Record]]:
    sequence, _ = split_offset(offset)
    where = at_sequence(sequence) if offset else OLDEST
    try:
        async for answer in source.read_on(where, _ENTRIES):
            for entry in answer.entries:
                for found in read_offsets(source, entry):
                    if found[0] >= offset:
                        yield found
    except BadSequence:
        async for answer in source.read_on(OLDEST, _ENTRIES):
            for entry in answer.entries:
                for found in read_offsets(source, entry):
                    if found[0] >= offset:
                        yield found


async def _check_stored(source: ShardSource, offset: int) -> None:
    """Raise OffsetOutOfRange unless the offset lies within what is stored, or at its end, or nothing is."""
    stored: PartitionRange = await stored_range(source)
    if stored.end and not stored.start <= offset <= stored.end:
        raise OffsetOutOfRange(source.topic, source.shard, offset, stored.start, stored.end)
