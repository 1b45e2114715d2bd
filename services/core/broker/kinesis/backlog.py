"""What is read of one shard: what was not returned yet, and what was returned and is not processed. No I/O."""

import asyncio
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from services.core import metrics
from services.core.broker.contract import MAX_APPEND_BYTES, Lag
from services.core.broker.errors import BrokerError
from services.core.broker.kinesis.read_budget import Polls, ReadBudget
from services.core.broker.kinesis.runs import Run
from services.core.broker.record import Batch, Record, TopicPartition

_POLL_BYTES = 1_000_000


class _Open(NamedTuple):
    """Returned, not processed: offsets and record times of a run."""

    offsets: Sequence[int]
    times: Sequence[int]
    arrived: int


class _GivenUp(NamedTuple):
    """Read, not returned, and let go: the place of the first record, its time, and when it arrived; how many records."""

    offset: int
    time: int
    arrived: int
    records: int


class Backlog:
    """size: about the memory of what was read and not returned yet. is_paused: it is not polled.

    behind: how far reading is behind the shard's end (ms), None until it is known. ended: the shard has no more. error: why
    reading does not go on. settled: when nothing unprocessed was left behind (wall clock, ms; 0 if never).
    """

    def __init__(self, source: TopicPartition, budget: ReadBudget | None = None, polls: Polls | None = None) -> None:
        """budget: what it shares with others; None: nothing is shared. polls: of the consumer that gets it."""
        self._source = self.source = source
        self._budget, self._polls = budget or ReadBudget(), polls or Polls()
        self._budget.join(self)
        self._given_up: _GivenUp | None = None
        self._is_rewound = False
        self._is_paused = False
        self._runs: deque[Run] = deque()
        self._open: deque[_Open] = deque()
        self._taken_of_first = 0
        self._settled = 0
        self._looked = 0
        self._room = asyncio.Event()
        self._asks = 0
        self._answered = 0
        self.size = 0
        self.is_full = False
        self.behind: int | None = None
        self.ended = False
        self.error: BrokerError | None = None

    @property
    def is_paused(self) -> bool:
        """See the class."""
        return self._is_paused

    @is_paused.setter
    def is_paused(self, paused: bool) -> None:
        self._is_paused = paused
        self._budget.wake()

    @property
    def is_idle(self) -> bool:
        """See `read_budget.Holder`."""
        return self._is_paused or self._polls.is_idle

    async def make_room(self, limit: int) -> None:
        """Wait until less than `limit` bytes were not returned yet."""
        while self.size >= limit:
            self.is_full = True
            self._room.clear()
            await self._room.wait()
        self.is_full = False

    @asynccontextmanager
    async def reading(self, expected: int) -> AsyncIterator[None]:
        """Wait until all readers together have room for so many bytes; it is kept during the block."""
        self.is_full = True
        async with self._budget.reading(self, expected):
            self.is_full = False
            yield

    async def returned(self) -> None:
        """Wait until all of an ended shard was returned, or given up: then it has not ended."""
        while self.ended and self._runs:
            self._room.clear()
            await self._room.wait()

    def give_up(self) -> None:
        """Let go of what was not returned; the reader goes back to it."""
        if self._runs:
            first, start = self._runs[0], self._taken_of_first
            count = sum(len(run.records) for run in self._runs) - start
            self._given_up = _GivenUp(first.offsets[start], first.records[start].timestamp, first.arrived, count)
            metrics.BROKER_READ_AGAIN.labels(self._source.topic).inc(count)
        self._is_rewound = self.ended = False
        self.behind = self.behind or 1
        self._drop()

    def _drop(self) -> None:
        self._runs.clear()
        self._taken_of_first = 0
        freed, self.size = self.size, 0
        self._room.set()
        self._budget.change(-freed)

    def must_rewind(self) -> bool:
        """Whether the reader is to call `rewind`; until then nothing is added."""
        return self._given_up is not None and not self._is_rewound

    def rewind(self) -> tuple[int, int] | None:
        """Where reading goes on: (offset, when that record arrived). None: where it was."""
        if self._given_up is None:
            return None
        self._is_rewound = True
        return self._given_up.offset, self._given_up.arrived

    def close(self) -> None:
        """It is another's to read: nothing is held any more."""
        self._drop()
        self._budget.leave(self)

    def asked(self) -> int:
        """A read is under way; one at a time. Gives its number."""
        self._asks += 1
        return self._asks

    @property
    def asks(self) -> int:
        """The number of the last read that began."""
        return self._asks

    def knows(self, asks: int) -> bool:
        """Whether a read was answered that began after the one of this number; or none will be."""
        return self._answered > asks or self.is_full or self.ended or self.error is not None

    def add(self, runs: Sequence[Run], behind: int, now_ms: int) -> None:
        """An answer came: what it held, and how far behind the end it was. now_ms: when it was asked for."""
        if self.must_rewind():
            return
        kept = [run for run in runs if run.records]
        if kept or behind == 0:
            self._given_up = None
        self._runs.extend(kept)
        more = sum(run.memory for run in kept)
        self.size += more
        self._budget.change(more)
        self._answered = self._asks
        self.behind = behind
        if behind == 0:
            self._looked = now_ms
        self._note_settled()

    @property
    def is_processed(self) -> bool:
        """Whether everything that was read is processed."""
        return not self._runs and not self._open and self._given_up is None

    @property
    def is_finished(self) -> bool:
        """Whether the shard has ended and all of it is processed."""
        return self.ended and self.is_processed

    @property
    def settled(self) -> int:
        """As in the class."""
        return self._settled

    def has_records(self) -> bool:
        """Whether `take` would return something."""
        return bool(self._runs)

    def take(self, count: int) -> list[Batch]:
        """The next records, at most `count` and about a megabyte, as one batch; damage is a batch of its own."""
        offsets: list[int] = []
        records: list[Record] = []
        size = 0
        batches: list[Batch] = []
        while self._runs and len(records) < count and size < _POLL_BYTES:
            run = self._runs[0]
            if run.damage is not None:
                if not records:
                    batches.append(Batch(*self._source, run.offsets, run.records, run.damage))
                    self._pass(run, len(run.records))
                break
            start = self._taken_of_first
            stop = min(len(run.records), start + count - len(records))
            offsets += run.offsets[start:stop]
            records += run.records[start:stop]
            size += min(run.size, MAX_APPEND_BYTES)
            self._pass(run, stop)
        if records:
            batches.append(Batch(*self._source, offsets, records))
        return batches

    def _pass(self, run: Run, stop: int) -> None:
        start = self._taken_of_first
        taken = run.records[start:stop]
        self._open.append(_Open(run.offsets[start:stop], [record.timestamp for record in taken], run.arrived))
        if stop == len(run.records):
            self._runs.popleft()
            self._taken_of_first = 0
            self.size -= run.memory
            self._room.set()
            self._budget.change(-run.memory)
        else:
            self._taken_of_first = stop

    def arrived(self, offset: int) -> int:
        """When the record of a returned offset arrived, ms; 0 when it is not known any more."""
        at = bisect_left(self._open, offset, key=lambda run: run.offsets[-1])
        return self._open[at].arrived if at < len(self._open) else 0

    def has_returned(self, offset: int) -> bool:
        """Whether a record of this offset was returned, and is not processed."""
        at = bisect_left(self._open, offset, key=lambda run: run.offsets[-1])
        return at < len(self._open) and offset in self._open[at].offsets

    def processed(self, offset: int) -> None:
        """Everything that was returned up to this offset is processed."""
        while self._open and self._open[0].offsets[-1] <= offset:
            self._open.popleft()
        if self._open and self._open[0].offsets[0] <= offset:
            first = self._open[0]
            done = bisect_right(first.offsets, offset)
            self._open[0] = _Open(first.offsets[done:], first.times[done:], first.arrived)
        self._note_settled()

    def _note_settled(self) -> None:
        if self.is_processed and self.behind == 0:
            self._settled = max(self._settled, self._looked)

    def lag(self, now_ms: int) -> Lag:
        """What is not processed. Exact when reading is at the shard's end; behind it, the records that are known of."""
        count = sum(len(run.offsets) for run in self._open) + sum(len(run.records) for run in self._runs)
        count += self._given_up.records if self._given_up is not None else -self._taken_of_first
        if self._open:
            oldest, stored = self._open[0].times[0], self._open[0].arrived
        elif self._runs:
            oldest, stored = self._runs[0].records[self._taken_of_first].timestamp, self._runs[0].arrived
        elif self._given_up is not None:
            oldest, stored = self._given_up.time, self._given_up.arrived
        else:
            return Lag(1, self.behind, now_ms - self.behind) if self.behind else Lag(0, 0)
        return Lag(count, max(0, now_ms - oldest), stored)
