"""The records that are read ahead of poll, per shard (`Backlog`), and the limit of their memory in all (`ReadBudget`)."""

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from services.core import metrics
from services.core.broker.contract import MAX_APPEND_BYTES, Lag
from services.core.broker.errors import BrokerError
from services.core.broker.kinesis.record_format import StoredEntry
from services.core.broker.record import Batch, Record, TopicPartition

LIMIT_BYTES = 64 << 20


_IDLE_SECONDS = 1.0
_AGAIN_SECONDS = 1.0


class PollActivity:
    """Whether a consumer polls. One whose destination is down may not poll for hours."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, never set back."""
        self._clock = clock
        self._is_in_poll = False
        self._left = clock()

    @property
    def is_idle(self) -> bool:
        """No poll for a second."""
        return not self._is_in_poll and self._clock() - self._left >= _IDLE_SECONDS

    @contextmanager
    def polling(self) -> Iterator[None]:
        """A poll runs during the block."""
        self._is_in_poll = True
        try:
            yield
        finally:
            self._is_in_poll, self._left = False, self._clock()


@dataclass(eq=False, slots=True)
class _Waiter:
    backlog: "Backlog"
    size: int
    granted: "asyncio.Future[None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ReadBudget:
    """The memory limit of all readers of a connection, of decoded records and of reads under way. First come, first
    served.

    When there is no room, the records of idle readers (paused, or not polled) are given up for polled ones, so nobody
    waits for ever. An idle reader waits until half of the limit is free; otherwise it would read the same records
    again and again. A read goes on when nothing is held, whatever its size.

    used: bytes. It passes the limit by as much as answers are larger than expected.
    """

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self._limit = limit
        self._waiting: deque[_Waiter] = deque()
        self._backlogs: set[Backlog] = set()
        self._is_waking = False
        self._again: asyncio.TimerHandle | None = None
        self.used = 0

    def join(self, backlog: "Backlog") -> None:
        """The budget may ask it to give up its records."""
        self._backlogs.add(backlog)

    def leave(self, backlog: "Backlog") -> None:
        """It holds nothing any more."""
        self._backlogs.discard(backlog)

    def change(self, size: int) -> None:
        """Add or release bytes."""
        self.used += size
        if size < 0:
            self.wake()

    @asynccontextmanager
    async def reading(self, backlog: "Backlog", size: int) -> AsyncIterator[None]:
        """Wait for room for a read of this expected size. The room stays reserved during the block."""
        waiter = _Waiter(backlog, size)
        self._waiting.append(waiter)
        self.wake()
        try:
            await waiter.granted
            yield
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self.wake()
            else:
                self.change(-size)

    def wake(self) -> None:
        """Admit the readers that have room. Called when room is freed, or a consumer polls or pauses."""
        if self._is_waking:  # the loop below notices freed room
            return
        self._is_waking = True
        try:
            self._grant()
        finally:
            self._is_waking = False
        if self._waiting and self._again is None:  # a reader may become idle
            self._again = asyncio.get_running_loop().call_later(_AGAIN_SECONDS, self._wake_again)

    def _wake_again(self) -> None:
        self._again = None
        self.wake()

    def _grant(self) -> None:
        for waiter in list(self._waiting):
            is_idle = waiter.backlog.is_idle
            if not is_idle:
                self._make_room(waiter.size)
            if self._has_room(waiter.size, self._limit // 2 if is_idle else self._limit):
                self._waiting.remove(waiter)
                self.change(waiter.size)
                if not waiter.granted.done():
                    waiter.granted.set_result(None)
            elif not is_idle:
                return

    def _has_room(self, size: int, limit: int) -> bool:
        return self.used + size <= limit or self.used == 0

    def _make_room(self, size: int) -> None:
        while not self._has_room(size, self._limit):
            idle = [backlog for backlog in self._backlogs if backlog.size and backlog.is_idle]
            if not idle:
                return
            max(idle, key=lambda backlog: backlog.size).give_up()


_MOST_KNOWN = 1_000


class KnownEntries:
    """The entries that a reader passed on last, to know the second copy of a put that was repeated.

    A copy has the same bytes, and the name of its append is in them. So no record is dropped that is not a copy. One
    reader of one shard: the copy in a child of a shard, or behind MOST_KNOWN other entries, is not known.
    """

    def __init__(self) -> None:
        self._first: dict[bytes, int] = {}
        """The sequence number of each identity. The oldest comes first."""

    def is_copy(self, entry: StoredEntry) -> bool:
        """Whether an entry with a lower sequence number, which was passed on before, has the same records.

        Every entry is passed on unless this is True; so a reader that goes back gets the first of the copies again.
        """
        if not entry.identity:
            return False
        sequence = int(entry.sequence)
        first = self._first.setdefault(entry.identity, sequence)
        if sequence < first:
            self._first[entry.identity] = sequence
        elif len(self._first) > _MOST_KNOWN:
            del self._first[next(iter(self._first))]
        return first < sequence


_POLL_BYTES = 1_000_000


class _Returned(NamedTuple):
    """Returned and unprocessed: the offsets of an entry, and its arrival."""

    offsets: Sequence[int]
    arrived: int


class _GivenUp(NamedTuple):
    """Records that were read and given up: offset and arrival of the first, and their number."""

    offset: int
    arrived: int
    records: int


class Backlog:
    """One shard's records that were read: not returned yet, or returned and not processed. No I/O.

    size: approximate bytes of the records not returned. millis_behind: how far reading is behind the shard's end;
    None until it is known. ended: the shard has no more. error: why reading stopped. settled: when nothing
    unprocessed was left behind (wall clock, ms; 0 if never). reads: the number of the last read; one runs at a time.
    """

    def __init__(
        self, source: TopicPartition, budget: ReadBudget | None = None, polls: PollActivity | None = None
    ) -> None:
        """budget: shared with other readers; None: its own. polls: of its consumer."""
        self.source = source
        self._budget, self._polls = budget or ReadBudget(), polls or PollActivity()
        self._budget.join(self)
        self._given_up: _GivenUp | None = None
        self._is_rewound = False
        self._is_paused = False
        self._entries: deque[StoredEntry] = deque()
        self._returned: deque[_Returned] = deque()
        self._returned_of_first = 0
        self._copies: deque[tuple[int, int]] = deque()
        self._passed_copy: tuple[int, int] | None = None
        self._asked_ms = 0
        self._room = asyncio.Event()
        self._wanted = asyncio.Event()
        self._answered = 0
        self.reads = 0
        self.settled = 0
        self.size = 0
        self.is_full = False
        self.millis_behind: int | None = None
        self.ended = False
        self.error: BrokerError | None = None

    @property
    def is_paused(self) -> bool:
        """Whether its consumer paused it."""
        return self._is_paused

    @is_paused.setter
    def is_paused(self, paused: bool) -> None:
        self._is_paused = paused
        self._budget.wake()

    @property
    def is_idle(self) -> bool:
        """Nobody polls it now."""
        return self._is_paused or self._polls.is_idle

    async def make_room(self, limit: int) -> None:
        """Wait until the records not returned take less than `limit` bytes."""
        while self.size >= limit:
            self.is_full = True
            self._room.clear()
            await self._room.wait()
        self.is_full = False

    @asynccontextmanager
    async def reading(self, expected: int) -> AsyncIterator[None]:
        """Wait for room in the budget. It stays reserved during the block."""
        self.is_full = True
        async with self._budget.reading(self, expected):
            self.is_full = False
            yield

    async def wait_until_returned(self) -> None:
        """Wait until all records of an ended shard are returned or given up. Given up means that it has not ended."""
        while self.ended and self._entries:
            self._room.clear()
            await self._room.wait()

    def give_up(self) -> None:
        """Drop the records that were not returned; the reader goes back to them."""
        if self._entries:
            first, start = self._entries[0], self._returned_of_first
            count = sum(len(entry.records) for entry in self._entries) - start
            self._given_up = _GivenUp(first.offsets[start], first.arrived, count)
            metrics.BROKER_READ_AGAIN.labels(self.source.topic).inc(count)
        self._is_rewound = self.ended = False
        self.millis_behind = self.millis_behind or 1
        self._drop()

    def _drop(self) -> None:
        self._entries.clear()
        self._returned_of_first = 0
        freed, self.size = self.size, 0
        self._room.set()
        self._budget.change(-freed)

    def must_rewind(self) -> bool:
        """Whether the reader must call `rewind`. Until then nothing is added."""
        return self._given_up is not None and not self._is_rewound

    def rewind(self) -> tuple[int, int] | None:
        """Where reading continues: (offset, arrival time of that record). None: at its present position."""
        if self._given_up is None:
            return None
        self._is_rewound = True
        return self._given_up.offset, self._given_up.arrived

    async def rest(self, seconds: float) -> None:
        """Wait before the next read, until somebody wants one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._wanted.wait()
        self._wanted.clear()

    def want_read(self) -> None:
        """The next read does not wait for its `rest`."""
        self._wanted.set()

    def close(self) -> None:
        """Another member reads it now."""
        self._copies.clear()  # a write of the lease may still follow; the records before a copy are dropped, not processed
        self._passed_copy = None
        self._drop()
        self._budget.leave(self)

    def is_newer_than(self, number: int) -> bool:
        """Whether a read that began after this number was answered, or none will be."""
        return self._answered > number or self.is_full or self.ended or self.error is not None

    def add(self, entries: Sequence[StoredEntry], millis_behind: int, now_ms: int) -> None:
        """Add an answer. now_ms: when it was requested."""
        if self.must_rewind():
            return
        kept = [entry for entry in entries if entry.records]
        if kept or millis_behind == 0:
            self._given_up = None
        self._entries.extend(kept)
        more = sum(entry.memory for entry in kept)
        self.size += more
        self._budget.change(more)
        self._answered = self.reads
        self.millis_behind = millis_behind
        if millis_behind == 0:
            self._asked_ms = now_ms
        self._update_settled()

    def drop_copy(self, entry: StoredEntry) -> None:
        """This entry is a second copy, or has no records: it is not returned, and counts as processed once everything before it
        is."""
        if not self._copies or self._copies[-1][0] < entry.next - 1:  # else it is read once more
            self._copies.append((entry.next - 1, entry.arrived))
            metrics.BROKER_COPIES.labels(self.source.topic).inc(len(entry.records))

    def passed_copy(self) -> tuple[int, int] | None:
        """The last copy before which everything is processed: (its last offset, arrival time)."""
        first = self._first_unprocessed()
        while self._copies and (first is None or self._copies[0][0] < first):
            self._passed_copy = self._copies.popleft()
        return self._passed_copy

    def _first_unprocessed(self) -> int | None:
        if self._returned:
            return self._returned[0].offsets[0]
        if self._entries:
            return self._entries[0].offsets[self._returned_of_first]
        return None if self._given_up is None else self._given_up.offset

    @property
    def is_processed(self) -> bool:
        """Whether every record read is processed."""
        return not self._entries and not self._returned and self._given_up is None

    @property
    def is_finished(self) -> bool:
        """Whether the shard has ended and is processed."""
        return self.ended and self.is_processed

    def has_records(self) -> bool:
        """Whether `poll` would return something."""
        return bool(self._entries)

    def poll(self, count: int) -> list[Batch]:
        """The next records, at most `count` and about a megabyte, as one batch. Damage is a batch of its own."""
        offsets: list[int] = []
        records: list[Record] = []
        size = 0
        batches: list[Batch] = []
        while self._entries and len(records) < count and size < _POLL_BYTES:
            entry = self._entries[0]
            if entry.damage is not None:
                if not records:
                    batches.append(Batch(*self.source, entry.offsets, entry.records, entry.damage))
                    self._pass(entry, len(entry.records))
                break
            start = self._returned_of_first
            stop = min(len(entry.records), start + count - len(records))
            offsets += entry.offsets[start:stop]
            records += entry.records[start:stop]
            size += min(entry.size, MAX_APPEND_BYTES)
            self._pass(entry, stop)
        if records:
            batches.append(Batch(*self.source, offsets, records))
        return batches

    def _pass(self, entry: StoredEntry, stop: int) -> None:
        self._returned.append(_Returned(entry.offsets[self._returned_of_first : stop], entry.arrived))
        if stop == len(entry.records):
            self._entries.popleft()
            self._returned_of_first = 0
            self.size -= entry.memory
            self._room.set()
            self._budget.change(-entry.memory)
        else:
            self._returned_of_first = stop

    def arrived(self, offset: int) -> int | None:
        """Arrival time (ms) of a record that was returned and is not processed; None when there is none of this offset."""
        at = bisect_left(self._returned, offset, key=lambda entry: entry.offsets[-1])
        is_there = at < len(self._returned) and offset in self._returned[at].offsets
        return self._returned[at].arrived if is_there else None

    def processed(self, offset: int) -> None:
        """All records returned up to this offset are processed."""
        while self._returned and self._returned[0].offsets[-1] <= offset:
            self._returned.popleft()
        if self._returned and self._returned[0].offsets[0] <= offset:
            first = self._returned[0]
            done = bisect_right(first.offsets, offset)
            self._returned[0] = _Returned(first.offsets[done:], first.arrived)
        self._update_settled()

    def _update_settled(self) -> None:
        if self.is_processed and self.millis_behind == 0:
            self.settled = max(self.settled, self._asked_ms)

    def lag(self, now_ms: int) -> Lag:
        """The lag of unprocessed records. Exact when reading is at the shard's end; else it counts the records that
        were read."""
        count = sum(len(entry.offsets) for entry in self._returned) + sum(len(entry.records) for entry in self._entries)
        count += self._given_up.records if self._given_up is not None else -self._returned_of_first
        if self._returned:
            stored = self._returned[0].arrived
        elif self._entries:
            stored = self._entries[0].arrived
        elif self._given_up is not None:
            stored = self._given_up.arrived
        else:
            return Lag(1, self.millis_behind, now_ms - self.millis_behind) if self.millis_behind else Lag(0, 0)
        return Lag(count, max(0, now_ms - stored), stored)
