"""Reads a held shard into its backlog: finds the start, detects losses, finds the end."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.core.broker.errors import BrokerError, OffsetOutOfRange, Throttled, UnknownTopic
from services.core.broker.kinesis.leases import HeldLease, StartPosition
from services.core.broker.kinesis.prefetch import KnownEntries
from services.core.broker.kinesis.record_format import StoredEntry, parse_entry, split_offset
from services.core.broker.kinesis.shard_lookup import stored_range
from services.core.broker.kinesis.shard_source import (
    FIRST_ENTRIES,
    OLDEST,
    IteratorExpired,
    ReadResult,
    ShardSource,
    UnknownSequence,
    at_sequence,
    at_time,
    entries_per_megabyte,
)
from services.core.broker.record import TopicPartition

_ROOM_BYTES = 4_000_000
"""Decoded records of one shard; all readers together share a budget."""

_LARGEST_ENTRY = 1 << 20
_MOST_ENTRIES, _MOST_GROWTH = 10_000, 4
_RETRY_SECONDS = 0.5
_REST_OF_QUIET, _MOST_REST_S = 0.1, 1.0
"""A shard that was empty for ten seconds or longer is read once a second: others need the five reads, and each costs CPU."""
_CLOCKS_AHEAD_MS = 300_000
"""A start at a date begins this much earlier by arrival time, for clients whose clocks are ahead."""


@dataclass(frozen=True, slots=True)
class ReaderContext:
    """Shared by all readers of a member. report: receives passing errors. wake: called when poll should check again.

    is_listed: whether the stream has the shard. Raises as `Streams.find`.
    """

    now_ms: Callable[[], int]
    report: Callable[[BrokerError], None]
    wake: Callable[[], None]
    is_listed: Callable[[TopicPartition], Awaitable[bool]]


async def read_shard(context: ReaderContext, held: HeldLease, source: ShardSource) -> None:
    """Read until the shard ends, records are lost, or this is cancelled. Passing errors are reported, and the read is
    repeated."""
    reader = _Reader(context, held, source)
    while not held.backlog.ended:
        try:
            await reader.run()
            await held.backlog.wait_until_returned()
        except OffsetOutOfRange as error:
            held.backlog.error = error
            held.is_placed = True
            context.wake()
            return
        except Throttled:  # no iterator was returned
            await source.pace.acquire()
        except BrokerError as error:
            context.report(error)
            context.wake()
            await asyncio.sleep(_RETRY_SECONDS)


class _Reader:
    """next: the next offset; None before the first record without a commit. `arrived`, `settled`: see Lease."""

    def __init__(self, context: ReaderContext, held: HeldLease, source: ShardSource) -> None:
        self._context, self._held, self._source = context, held, source
        row = held.row
        self._shortest = row.retention or held.retention
        self._next = None if row.committed is None else row.committed + 1
        self._arrived, self._settled = row.arrived, row.settled
        self._expected: int | None = None
        """The next entry must begin at this offset or contain it."""
        self._date: int | None = None
        self._not_before = 0
        self._limit, self._entry_memory = FIRST_ENTRIES, _LARGEST_ENTRY
        self._known = KnownEntries()

    @property
    def _retention(self) -> int:
        """The shortest since `settled`: a longer one brings nothing back."""
        self._shortest = min(self._shortest, self._held.retention)
        return self._shortest

    async def run(self) -> None:
        """Read from the present position to the end of the shard."""
        try:
            await self._read_on()
        except UnknownTopic:
            if await self._context.is_listed(self._held.source):
                raise
            self._check_aged_out()
        self._held.is_placed = self._held.backlog.ended = True
        self._context.wake()

    async def _read_on(self) -> None:
        iterator: str | None = await self._begin()
        backlog = self._held.backlog
        now = asyncio.get_running_loop().time
        emptied = now()
        while iterator is not None:
            expected = self._limit * self._entry_memory if self._source.is_polled(iterator) else 0
            await backlog.make_room(_ROOM_BYTES)
            await self._source.acquire(iterator)
            async with backlog.reading(expected):
                if backlog.must_rewind():
                    iterator = await self._begin()
                    continue
                requested_ms = self._context.now_ms()
                backlog.reads += 1
                try:
                    answer = await self._source.read(iterator, self._limit)
                except IteratorExpired:
                    iterator = await self._begin()
                    continue
                except Throttled:  # the pace is slower from here on
                    continue
                if not backlog.must_rewind():
                    await self._accept(answer, requested_ms)
            if answer.entries or answer.millis_behind or not self._source.is_polled(iterator):
                emptied = now()
            else:
                await backlog.rest(min(_MOST_REST_S, (now() - emptied) * _REST_OF_QUIET))
            iterator = await self._begin() if backlog.must_rewind() else answer.next

    def _check_aged_out(self) -> None:
        """The whole shard expired. Raises OffsetOutOfRange if some of it was unprocessed."""
        if self._settled + self._retention < self._context.now_ms():
            source = self._source
            raise OffsetOutOfRange(source.topic, source.shard, self._next or 0, 0, 0, contiguous=False)

    async def _begin(self) -> str:
        """An iterator for the next offset. Raises OffsetOutOfRange."""
        if (given_up := self._held.backlog.rewind()) is not None:
            self._next, self._arrived = given_up
            self._settled = min(self._settled, self._arrived - 1)  # it is not processed: if it expires it is lost
        start = self._held.row.start
        if self._next is None and start.kind == "offset":
            self._next = start.value
        if self._next is not None:
            self._expected = self._next
            try:
                return await self._source.iterator(at_sequence(split_offset(self._next)[0]))
            except UnknownSequence as error:
                raise await self._lost() from error
        if self._settled + self._retention < self._context.now_ms():
            raise await self._lost()
        if start.kind == "oldest":
            return await self._source.iterator(OLDEST)
        at = start.value
        if start.kind == "date":
            self._date, at = start.value, start.value - _CLOCKS_AHEAD_MS
        else:
            self._not_before = start.value
        return await self._source.iterator(at_time(min(at, self._context.now_ms()) - 1000))

    async def _accept(self, answer: ReadResult, requested_ms: int) -> None:
        entries = [parse_entry(entry) for entry in answer.entries]
        if self._expected is not None and (entries or answer.millis_behind == 0):
            await self._check_expected(entries)
        kept = [entry for entry in entries if entry.arrived >= self._not_before]
        if self._date is not None:
            kept = await self._find_date(self._date, kept, answer, requested_ms)
        # Nothing below may fail: these records count as read.
        if entries or answer.millis_behind == 0:
            self._expected = None
        if entries:
            # For an entry that was skipped as a whole, `next` is its beginning.
            self._next, self._arrived = max(self._next or 0, entries[-1].next), entries[-1].arrived
            limit = entries_per_megabyte(len(entries), sum(entry.size for entry in entries))
            self._entry_memory = sum(entry.memory for entry in entries) // len(entries)
            self._limit = min(_MOST_ENTRIES, _MOST_GROWTH * self._limit, limit)
        if answer.millis_behind == 0:
            self._settled, self._shortest = requested_ms, self._held.retention
        self._held.is_placed = self._date is None
        self._held.backlog.add(self._drop_copies(kept), answer.millis_behind, requested_ms)
        self._context.wake()

    def _drop_copies(self, entries: Sequence[StoredEntry]) -> list[StoredEntry]:
        """The entries that are no copies, and no fences: entries without records. Only entries that are for the group, or
        processed by it, may be given here."""
        passed: list[StoredEntry] = []
        for entry in entries:
            if self._known.is_copy(entry) or not entry.records:
                self._held.backlog.drop_copy(entry)
            else:
                passed.append(entry)
        return passed

    async def _check_expected(self, entries: list[StoredEntry]) -> None:
        """Drop the processed records of the first entry. Raises OffsetOutOfRange when the expected entry is missing.

        The entry processed last must be there, unless it expired. After that nothing is missing if nothing was left
        unprocessed within the retention.
        """
        assert self._expected is not None
        sequence, sub = split_offset(self._expected)
        if entries and entries[0].sequence == sequence:
            if sub > len(entries[0].offsets):
                raise await self._lost()
            entries[0] = entries[0].without_first(sub)
        else:
            now = self._context.now_ms()
            if not (self._arrived and self._arrived + self._retention < now <= self._settled + self._retention):
                raise await self._lost()

    async def _find_date(
        self, date: int, entries: Sequence[StoredEntry], answer: ReadResult, requested_ms: int
    ) -> list[StoredEntry]:
        """The records from the first one on that is not older. The start of the group is then known, and recorded."""
        for index, entry in enumerate(entries):
            passed = next((at for at, record in enumerate(entry.records) if record.timestamp >= date), None)
            if passed is not None:
                await self._remember(StartPosition("offset", entry.offsets[passed]))
                return [entry.without_first(passed), *entries[index + 1 :]]
        if answer.millis_behind == 0 and answer.next is not None:
            await self._remember(StartPosition("arrival", requested_ms))
        return []

    async def _remember(self, start: StartPosition) -> None:
        if await self._held.write(lambda row: row._replace(start=start)):
            self._date = None

    async def _lost(self) -> OffsetOutOfRange:
        wanted = self._next or 0
        held = await stored_range(self._source)
        return OffsetOutOfRange(self._source.topic, self._source.shard, wanted, held.start, held.end, contiguous=False)
