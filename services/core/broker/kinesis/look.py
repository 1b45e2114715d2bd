"""Reading a shard without a group: for operators, and for counting what a group has before it."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from typing import TypeVar

from services.core.broker.contract import MAX_POLL_BYTES, Lag, Start
from services.core.broker.errors import OffsetOutOfRange, Throttled, Unavailable
from services.core.broker.kinesis.backlog import Backlog
from services.core.broker.kinesis.offsets import split_offset
from services.core.broker.kinesis.runs import Run, read_run
from services.core.broker.kinesis.shard_iterator import (
    OLDEST,
    BadSequence,
    ShardSource,
    after_sequence,
    at_sequence,
    at_time,
)
from services.core.broker.kinesis.stored import stored_range
from services.core.broker.record import Batch, TopicPartition

_CLOCKS_AHEAD_MS = 300_000
_ENTRIES = 1_000
_COUNT_BYTES = 32 << 20
_PATIENCE_SECONDS = 20.0
_WAIT_SECONDS = (0.1, 0.5)
_CERTAINLY_KEPT_MS = 23 * 3_600_000
"""A stream keeps at least a day. An hour is for clocks."""
_MOST_ENDS = 10_000

_T = TypeVar("_T")


async def patiently(ask: Callable[[], Awaitable[_T]]) -> _T:
    """Ask again while the service throttles (consumers read the shard, too) or does not answer; after 20 s, raise."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            return await ask()
        except (Throttled, Unavailable):
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(random.uniform(*_WAIT_SECONDS))  # noqa: S311 - no secret


class Ends:
    """Of each shard, the offset behind the last entry that was read as a whole, and when that arrived (ms).

    An entry younger than the shortest retention is certainly kept, so who goes on behind it need not read it again.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        """now_ms: the service's wall clock."""
        self._now_ms = now_ms
        self._ends: dict[TopicPartition, tuple[int, int]] = {}

    def note(self, shard: TopicPartition, offset: int, arrived: int) -> None:
        """It ends there."""
        if len(self._ends) >= _MOST_ENDS:
            self._ends.clear()
        self._ends[shard] = offset, arrived

    def is_behind_kept(self, shard: TopicPartition, offset: int) -> bool:
        """Whether an entry ends right before this offset that cannot be gone."""
        end, arrived = self._ends.get(shard, (0, 0))
        return end == offset != 0 and self._now_ms() < arrived + _CERTAINLY_KEPT_MS


async def look(source: ShardSource, offset: int, max_records: int, *, ends: Ends | None = None) -> Batch | None:
    """As `Admin.read`. Offset 0 is the beginning of what is kept. At the end of a shard it costs one read.

    None of a closed shard: there will be no more, the service gave all of it.
    """
    sequence, sub = split_offset(offset)
    shard, arrivals = TopicPartition(source.topic, source.shard), dict[int, int]()
    is_whole = ends is not None and ends.is_behind_kept(shard, offset)
    is_kept, count = offset == 0 or is_whole, 0
    found = Backlog(shard)
    limit = min(_ENTRIES, max_records + 1)
    async for run in _runs_from(source, offset, limit, is_whole=is_whole):
        arrivals[run.next] = run.arrived
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
    end = batches[0].offsets[-1] + 1 if batches else offset
    if ends is not None and end in arrivals:
        ends.note(shard, end, arrivals[end])
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
    stored: int | None = None
    async for run in _runs_from(source, offset, _ENTRIES):
        rest = run.records[sub:] if run.sequence == sequence else run.records
        if rest and oldest is None:
            oldest, stored = rest[0].timestamp, run.arrived
        count += len(rest)
        size += run.size
        if size > _COUNT_BYTES:
            break
    return Lag(count, 0 if oldest is None else max(0, now_ms - oldest), stored)


async def _runs_from(source: ShardSource, offset: int, limit: int, *, is_whole: bool = False) -> AsyncIterator[Run]:
    """The entry in which the offset lies, as a whole, if it is kept, and all behind it; `limit` entries a read.

    is_whole: the offset is the end of that entry, which is left out.
    """
    first = split_offset(offset)[0]
    begin = after_sequence(first) if is_whole else at_sequence(first) if offset else OLDEST
    try:
        async for answer in source.read_on(begin, limit):
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
