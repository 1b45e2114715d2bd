"""Reading a shard without a group: for operators, and to count a group's lag.

The service reports neither the first nor the last record of a shard, so both are searched for.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeVar

from services.core.backoff import Backoff
from services.core.broker.contract import MAX_POLL_BYTES, Lag, PartitionRange, Start
from services.core.broker.errors import OffsetOutOfRange, Throttled, Unavailable
from services.core.broker.kinesis.leases import Lease, StartPosition
from services.core.broker.kinesis.prefetch import Backlog
from services.core.broker.kinesis.record_format import RawRecord, StoredEntry, offset_of, parse_entry, split_offset
from services.core.broker.kinesis.shard_source import (
    OLDEST,
    ShardSource,
    UnknownSequence,
    after_sequence,
    at_sequence,
    at_time,
)
from services.core.broker.record import Batch, TopicPartition

_LAST_BACK_MS = (10_000, 600_000, 6 * 3_600_000)
_NEXT_BACK_MS = (10_000, 60_000, 600_000, 3_600_000, 6 * 3_600_000)
_MOST_ENTRIES = 10_000


async def stored_range(source: ShardSource) -> PartitionRange:
    """The offsets stored; 0 to 0 when empty. Reads from ever earlier times to the end until it finds records. For
    operators.

    Raises UnknownTopic (of a shard too), Throttled, Unavailable.
    """
    first = await _first(source)
    if first is None:
        return PartitionRange(0, 0)
    last = await _last(source)
    return PartitionRange(offset_of(first["SequenceNumber"]), parse_entry(first if last is None else last).next)


async def next_at_least(source: ShardSource) -> int:
    """An offset that no later entry is below; 0 when empty. Reads an entry from ever earlier times until there is
    one.

    Raises as `stored_range`.
    """
    now = int(time.time() * 1000)
    for where in (*(at_time(now - back) for back in _NEXT_BACK_MS), OLDEST):
        first = await _first(source, where)
        if first is not None:
            return parse_entry(first).next
    return 0


async def _first(source: ShardSource, where: Mapping[str, Any] = OLDEST) -> RawRecord | None:
    with suppress(UnknownSequence):  # the time is in the service's future
        async for answer in source.read_to_end(where, 1):
            if answer.entries:
                return answer.entries[0]
    return None


async def _last(source: ShardSource) -> RawRecord | None:
    now = int(time.time() * 1000)
    for where in (*(at_time(now - back) for back in _LAST_BACK_MS), OLDEST):
        last: RawRecord | None = None
        with suppress(UnknownSequence):
            async for answer in source.read_to_end(where, _MOST_ENTRIES):
                if answer.entries:
                    last = answer.entries[-1]
        if last is not None:
            return last
    return None


_CLOCKS_AHEAD_MS = 300_000
_ENTRIES = 1_000
_COUNT_BYTES = 32 << 20
_PATIENCE_SECONDS = 20.0
_WAIT_SECONDS = (0.2, 0.6)
_CERTAINLY_KEPT_MS = 23 * 3_600_000
"""A stream keeps records for a day at least. An hour is for clocks."""
_MOST_ENDS = 10_000
_LEAST_SEQUENCE = 1 << 64
"""All of the service are higher. A lower one is an offset that the stream had on another broker."""

_T = TypeVar("_T")


async def retry_briefly(ask: Callable[[], Awaitable[_T]]) -> _T:
    """Repeat while the service throttles or is unavailable. No attempt begins after 20 s; the last one may end later."""
    deadline, backoff = time.monotonic() + _PATIENCE_SECONDS, Backoff(*_WAIT_SECONDS)
    while True:
        try:
            return await ask()
        except (Throttled, Unavailable):
            if time.monotonic() > deadline:
                raise
            backoff.fail()
            await backoff.wait()


class KnownEnds:
    """For each shard: the offset behind the last entry that was read as a whole, and its arrival time (ms).

    An entry younger than the shortest retention certainly exists, so a read behind it need not read it again.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        """now_ms: the service's wall clock."""
        self._now_ms = now_ms
        self._ends: dict[TopicPartition, tuple[int, int]] = {}

    def record(self, shard: TopicPartition, offset: int, arrived: int) -> None:
        if len(self._ends) >= _MOST_ENDS:
            self._ends.clear()
        self._ends[shard] = offset, arrived

    def arrival(self, shard: TopicPartition, offset: int) -> int:
        """When the entry arrived that ends right before this offset, ms; 0: not known."""
        end, arrived = self._ends.get(shard, (0, 0))
        return arrived if end == offset else 0

    def is_behind_kept(self, shard: TopicPartition, offset: int) -> bool:
        """Whether an entry that cannot have expired ends right before this offset."""
        end, arrived = self._ends.get(shard, (0, 0))
        return end == offset != 0 and self._now_ms() < arrived + _CERTAINLY_KEPT_MS


async def read_at(
    source: ShardSource, offset: int, max_records: int, *, ends: KnownEnds | None = None, fence: int = 0
) -> Batch | None:
    """As `Reader.read`. Offset 0 is the oldest record. At the end of a shard it costs one read.

    None for a closed shard means that it has no more. fence: an entry that was read before. None means that this read has seen
    it or a later one, too: so nothing before it was passed over, whichever host answered.
    """
    sequence, sub = split_offset(offset)
    shard, arrivals = TopicPartition(source.topic, source.shard), dict[int, int]()
    is_whole = ends is not None and ends.is_behind_kept(shard, offset)
    is_kept, count = offset == 0 or is_whole, 0
    found = Backlog(shard)
    limit = min(_ENTRIES, max_records + 1)
    async for entry in _entries_from(source, offset, limit, is_whole=is_whole):
        arrivals[entry.next] = entry.arrived
        if entry.sequence == sequence:
            is_kept = entry.next >= offset
            entry = entry.without_first(sub)
        found.add([entry], 0, 0)
        count += len(entry.records)
        if count >= max_records or found.size >= MAX_POLL_BYTES:
            break
    if not is_kept:
        await _check_stored(source, offset)
    batches = found.poll(max_records)
    if not batches and offset < fence and max(arrivals, default=0) < fence:
        raise Unavailable(f"{source.topic}[{source.shard}]: what was read before is not there now")
    end = batches[0].offsets[-1] + 1 if batches else offset
    if ends is not None and end in arrivals:
        ends.record(shard, end, arrivals[end])
    return batches[0] if batches else None


async def offset_at(source: ShardSource, start: Start) -> int:
    """As `Reader.offsets_at`, of one shard. A date is searched from five minutes earlier by arrival time."""
    if isinstance(start, datetime):
        millis = round(start.timestamp() * 1000)
        async for answer in source.read_to_end(at_time(millis - _CLOCKS_AHEAD_MS), _ENTRIES):
            for entry in map(parse_entry, answer.entries):
                for offset, record in zip(entry.offsets, entry.records, strict=True):
                    if record.timestamp >= millis:
                        return offset
    stored = await stored_range(source)
    return stored.start if start == "earliest" else stored.end


async def offset_from(source: ShardSource, start: StartPosition, *, sees_some: bool = False) -> int | None:
    """The offset at which a group with this start begins the shard; None: at its oldest record. sees_some: an entry has arrived
    since. Then a read that finds none has ended early, and Unavailable is raised: the end would be behind unread events."""
    if start.kind == "offset":
        return start.value
    if start.kind == "oldest":
        return None
    if start.kind == "date":
        return await offset_at(source, datetime.fromtimestamp(start.value / 1000, UTC))
    first = await _first(source, at_time(start.value))
    if first is None and sees_some:
        raise Unavailable(f"{source.topic}[{source.shard}]: what was read before is not there now")
    return (await stored_range(source)).end if first is None else offset_of(first["SequenceNumber"])


async def lag_of(source: ShardSource, row: Lease | None, now_ms: int) -> Lag:
    """A group's lag in a shard. Without a commit it counts from where the group begins; without a row from the oldest record."""
    if row is not None and row.is_done:
        return Lag(0, 0)
    committed = None if row is None else row.committed
    if row is not None and committed is None:
        begin = await offset_from(source, row.start)
        committed = None if begin is None else begin - 1
    return await count_lag(source, committed, now_ms)


async def count_lag(source: ShardSource, committed: int | None, now_ms: int) -> Lag:
    """The records behind the committed offset, counted by reading: exact up to 32 MiB, a lower bound above."""
    offset = 0 if committed is None else committed + 1
    sequence, sub = split_offset(offset)
    count = size = 0
    stored: int | None = None
    async for entry in _entries_from(source, offset, _ENTRIES):
        rest = entry.records[sub:] if entry.sequence == sequence else entry.records
        if rest and stored is None:
            stored = entry.arrived
        count += len(rest)
        size += entry.size
        if size > _COUNT_BYTES:
            break
    return Lag(count, 0 if stored is None else max(0, now_ms - stored), stored)


async def _entries_from(
    source: ShardSource, offset: int, limit: int, *, is_whole: bool = False
) -> AsyncIterator[StoredEntry]:
    """The entry of this offset, as a whole, and all behind it; `limit` entries a read.

    is_whole: the offset is the end of that entry, which is left out.
    """
    first = split_offset(offset)[0]
    begin = after_sequence(first) if is_whole else at_sequence(first) if offset else OLDEST
    try:
        if offset and not is_whole and int(first) < _LEAST_SEQUENCE:
            raise UnknownSequence(first)
        async for answer in source.read_to_end(begin, limit):
            for entry in answer.entries:
                yield parse_entry(entry)
    except UnknownSequence:  # the shard never had this sequence number, but may have later ones
        async for answer in source.read_to_end(OLDEST, _ENTRIES):
            for entry in answer.entries:
                if int(entry["SequenceNumber"]) >= int(first):
                    yield parse_entry(entry)


async def _check_stored(source: ShardSource, offset: int) -> None:
    """Raise OffsetOutOfRange unless the offset is stored, or is the end, or the shard is empty."""
    stored = await stored_range(source)
    if stored.end and not stored.start <= offset <= stored.end:
        raise OffsetOutOfRange(source.topic, source.shard, offset, stored.start, stored.end, contiguous=False)
