"""Reading a shard without a group: for operators, and for counting what a group has before it."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import TypeVar

from services.core.broker.contract import MAX_POLL_BYTES, Lag, Start
from services.core.broker.errors import OffsetOutOfRange, Throttled
from services.core.broker.kinesis.backlog import Backlog
from services.core.broker.kinesis.offsets import split_offset
from services.core.broker.kinesis.runs import Run, read_run
from services.core.broker.kinesis.shard_iterator import OLDEST, BadSequence, ShardSource, at_sequence, at_time
from services.core.broker.kinesis.stored import stored_range
from services.core.broker.record import Batch, TopicPartition

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
    """As `Admin.read`. Offset 0 is the beginning of what is kept. At the end of a shard it costs one read."""
    sequence, sub = split_offset(offset)
    is_kept, count = offset == 0, 0
    found = Backlog(TopicPartition(source.topic, source.shard))
    async for run in _runs_from(source, offset, min(_ENTRIES, max_records + 1)):
        if run.sequence == sequence:
            is_kept = run.next >= offset
            run = run.behind(sub)
        found.add([run], 0, 0)
        count += len(run.records)
        if count >= max_records or found.size >= MAX_POLL_BYTES:
            break
    if not is_kept:
        await _check_stored(source, offset)
    batches = found.take(max_records)
    return batches[0] if batches else None


async def offset_at(source: ShardSource, start: Start) -> int:
    """As `Admin.offsets_at`, of one shard. A date is looked for from the records that arrived five minutes before it."""
    if isinstance(start, datetime):
        millis = round(start.timestamp() * 1000)
        async for answer in source.read_on(at_time(millis - _CLOCKS_AHEAD_MS), _ENTRIES):
            for run in map(read_run, answer.entries):
                for offset, record in zip(run.offsets, run.records, strict=True):
                    if record.timestamp >= millis:
                        return offset
    stored = await stored_range(source)
    return stored.start if start == "earliest" else stored.end


async def lag_behind(source: ShardSource, committed: int | None, now_ms: int) -> Lag:
    """What lies behind the committed offset, counted by reading it: exact up to 32 MiB, a lower bound above that."""
    offset = 0 if committed is None else committed + 1
    sequence, sub = split_offset(offset)
    count = size = 0
    oldest: int | None = None
    async for run in _runs_from(source, offset, _ENTRIES):
        rest = run.records[sub:] if run.sequence == sequence else run.records
        if rest and oldest is None:
            oldest = rest[0].timestamp
        count += len(rest)
        size += run.size
        if size > _COUNT_BYTES:
            break
    return Lag(count, 0 if oldest is None else max(0, now_ms - oldest))


async def _runs_from(source: ShardSource, offset: int, limit: int) -> AsyncIterator[Run]:
    """The entry in which the offset lies, as a whole, if it is kept, and all behind it; `limit` entries a read."""
    first = split_offset(offset)[0]
    try:
        async for answer in source.read_on(at_sequence(first) if offset else OLDEST, limit):
            for entry in answer.entries:
                yield read_run(entry)
    except BadSequence:  # never was one of this shard's: what lies behind it does, all the same
        async for answer in source.read_on(OLDEST, _ENTRIES):
            for entry in answer.entries:
                if int(entry["SequenceNumber"]) >= int(first):
                    yield read_run(entry)


async def _check_stored(source: ShardSource, offset: int) -> None:
    """Raise OffsetOutOfRange unless the offset lies within what is stored, or at its end, or nothing is."""
    stored = await stored_range(source)
    if stored.end and not stored.start <= offset <= stored.end:
        raise OffsetOutOfRange(source.topic, source.shard, offset, stored.start, stored.end, contiguous=False)
