"""Reads one held shard into its backlog: where to begin, what was lost meanwhile, when it ends."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from services.core.broker.errors import BrokerError, OffsetOutOfRange, Throttled, UnknownTopic
from services.core.broker.kinesis.held import Held
from services.core.broker.kinesis.leases import Begin
from services.core.broker.kinesis.offsets import split_offset
from services.core.broker.kinesis.runs import Run, read_run
from services.core.broker.kinesis.shard_iterator import (
    FIRST_ENTRIES,
    OLDEST,
    Answer,
    BadSequence,
    Expired,
    ShardSource,
    about_a_megabyte,
    at_sequence,
    at_time,
)
from services.core.broker.kinesis.stored import stored_range
from services.core.broker.record import TopicPartition

_ROOM_BYTES = 4_000_000
"""Of decoded records of one shard; all readers together have a budget."""

_LARGEST_ENTRY = 1 << 20
_MOST_ENTRIES, _MOST_GROWTH = 10_000, 4
_RETRY_SECONDS = 0.5
_CLOCKS_AHEAD_MS = 300_000
"""A start at a date looks this much earlier by time of arrival: for events of clients whose clocks are ahead."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What all readers of a member share. note: told of passing faults. wake: told of everything that poll may look at.

    is_listed: whether the stream has the shard. Raises as `Streams.of`.
    """

    now_ms: Callable[[], int]
    note: Callable[[BrokerError], None]
    wake: Callable[[], None]
    is_listed: Callable[[TopicPartition], Awaitable[bool]]


async def read_shard(reading: Reading, held: Held, source: ShardSource) -> None:
    """Until the shard ends, something was lost, or this is cancelled. Passing faults are noted and tried again."""
    reader = _Reader(reading, held, source)
    while not held.backlog.ended:
        try:
            await reader.run()
            await held.backlog.returned()
        except OffsetOutOfRange as error:
            held.backlog.error = error
            held.is_placed = True
            reading.wake()
            return
        except Throttled:  # no iterator was given
            await source.pace.turn()
        except BrokerError as error:
            reading.note(error)
            reading.wake()
            await asyncio.sleep(_RETRY_SECONDS)


class _Reader:
    """next: the offset to go on from; None while nothing was read and nothing committed. `arrived`, `settled`: see Lease."""

    def __init__(self, reading: Reading, held: Held, source: ShardSource) -> None:
        self._reading, self._held, self._source = reading, held, source
        row = held.row
        self._shortest = row.retention or held.retention
        self._next = None if row.committed is None else row.committed + 1
        self._arrived, self._settled = row.arrived, row.settled
        self._expected: int | None = None
        """The offset with which the next entry must begin, or that must lie in it."""
        self._date: int | None = None
        self._not_before = 0
        self._limit, self._entry_memory = FIRST_ENTRIES, _LARGEST_ENTRY

    @property
    def _retention(self) -> int:
        """The shortest that was seen since `settled`: a longer one brings nothing back."""
        self._shortest = min(self._shortest, self._held.retention)
        return self._shortest

    async def run(self) -> None:
        """Read from where this member is to the end of the shard."""
        try:
            await self._read_on()
        except UnknownTopic:
            if await self._reading.is_listed(self._held.source):
                raise
            self._check_aged_out()
        self._held.is_placed = self._held.backlog.ended = True
        self._reading.wake()

    async def _read_on(self) -> None:
        iterator: str | None = await self._begin()
        backlog = self._held.backlog
        while iterator is not None:
            expected = self._limit * self._entry_memory if self._source.answers_at_once(iterator) else 0
            await backlog.make_room(_ROOM_BYTES)
            await self._source.turn(iterator)
            async with backlog.reading(expected):
                if backlog.must_rewind():
                    iterator = await self._begin()
                    continue
                asked = self._reading.now_ms()
                backlog.asked()
                try:
                    answer = await self._source.read(iterator, self._limit)
                except Expired:
                    iterator = await self._begin()
                    continue
                except Throttled:  # the pace knows, and is slower from here on
                    continue
                if not backlog.must_rewind():
                    await self._accept(answer, asked)
            iterator = await self._begin() if backlog.must_rewind() else answer.next

    def _check_aged_out(self) -> None:
        """Retention took the shard with all that was in it. Raises OffsetOutOfRange if some of that was left unprocessed."""
        if self._settled + self._retention < self._reading.now_ms():
            source = self._source
            raise OffsetOutOfRange(source.topic, source.shard, self._next or 0, 0, 0, contiguous=False)

    async def _begin(self) -> str:
        """An iterator for what comes next. Raises OffsetOutOfRange."""
        if (given_up := self._held.backlog.rewind()) is not None:
            self._next, self._arrived = given_up
            self._settled = min(self._settled, self._arrived - 1)  # it is not processed: once it is gone it is lost
        begin = self._held.row.begin
        if self._next is None and begin.kind == "offset":
            self._next = begin.value
        if self._next is not None:
            self._expected = self._next
            try:
                return await self._source.iterator(at_sequence(split_offset(self._next)[0]))
            except BadSequence as error:
                raise await self._lost() from error
        if self._settled + self._retention < self._reading.now_ms():
            raise await self._lost()
        if begin.kind == "oldest":
            return await self._source.iterator(OLDEST)
        at = begin.value
        if begin.kind == "date":
            self._date, at = begin.value, begin.value - _CLOCKS_AHEAD_MS
        else:
            self._not_before = begin.value
        return await self._source.iterator(at_time(min(at, self._reading.now_ms()) - 1000))

    async def _accept(self, answer: Answer, asked: int) -> None:
        runs = [read_run(entry) for entry in answer.entries]
        if self._expected is not None and (runs or answer.behind == 0):
            await self._check_expected(runs)
        kept = [run for run in runs if run.arrived >= self._not_before]
        if self._date is not None:
            kept = await self._find_date(self._date, kept, answer, asked)
        # Nothing below may fail: what counts as read is handed over.
        if runs or answer.behind == 0:
            self._expected = None
        if runs:
            # Of an entry that was passed over whole, `next` is its beginning.
            self._next, self._arrived = max(self._next or 0, runs[-1].next), runs[-1].arrived
            limit = about_a_megabyte(len(runs), sum(run.size for run in runs))
            self._entry_memory = sum(run.memory for run in runs) // len(runs)
            self._limit = min(_MOST_ENTRIES, _MOST_GROWTH * self._limit, limit)
        if answer.behind == 0:
            self._settled, self._shortest = asked, self._held.retention
        self._held.is_placed = self._date is None
        self._held.backlog.add(kept, answer.behind, asked)
        self._reading.wake()

    async def _check_expected(self, runs: list[Run]) -> None:
        """Pass over what is processed already of the first entry. Raises OffsetOutOfRange when it is another one.

        The one that was processed last must be there, unless it is older than the retention. Then nothing is missing if nothing
        was left unprocessed within the retention.
        """
        assert self._expected is not None
        sequence, sub = split_offset(self._expected)
        if runs and runs[0].sequence == sequence:
            if sub > len(runs[0].offsets):
                raise await self._lost()
            runs[0] = runs[0].behind(sub)
        else:
            now = self._reading.now_ms()
            if not (self._arrived and self._arrived + self._retention < now <= self._settled + self._retention):
                raise await self._lost()

    async def _find_date(self, date: int, runs: Sequence[Run], answer: Answer, asked: int) -> list[Run]:
        """What is there from the first record on that is not older. Where the group begins is settled then, and remembered."""
        for index, run in enumerate(runs):
            passed = next((at for at, record in enumerate(run.records) if record.timestamp >= date), None)
            if passed is not None:
                await self._remember(Begin("offset", run.offsets[passed]))
                return [run.behind(passed), *runs[index + 1 :]]
        if answer.behind == 0 and answer.next is not None:
            await self._remember(Begin("arrival", asked))
        return []

    async def _remember(self, begin: Begin) -> None:
        if await self._held.write(lambda row: row._replace(begin=begin)):
            self._date = None

    async def _lost(self) -> OffsetOutOfRange:
        wanted = self._next or 0
        held = await stored_range(self._source)
        return OffsetOutOfRange(self._source.topic, self._source.shard, wanted, held.start, held.end, contiguous=False)
