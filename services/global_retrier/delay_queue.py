"""The waiting events: the delay topics, the clock, and the records read ahead of each partition."""

import asyncio
import time
from bisect import bisect_right
from collections import deque
from itertools import islice
from typing import NamedTuple, Protocol

from services.core.broker.record import Batch, Record, TopicPartition, estimate_size
from services.core.clock import boot_ns
from services.core.pipe_file.topic_names import DELAYS_S, RETRY_IN, delay_topic
from services.core.undelivered.retry_state import BadRetryRecord, read_wait

DELAY_BY_TOPIC = {RETRY_IN: 0} | {delay_topic(seconds): seconds * 1000 for seconds in DELAYS_S}
"""The topics that the retrier reads, and how long a record stays in each, ms."""
SHORTEST_MS = DELAYS_S[0] * 1000
MAX_EVENTS, MAX_BYTES = 500, 1_000_000
"""Read ahead of one partition; one poll may exceed it once."""
MOVE_EVENTS = 200
"""The most records in one move. About as many are moved again when the process dies before the commit."""
GATHER_MS = 200
"""The wait after a move that left no ready record. Events that become due in it are moved together, unless the queue is full."""
_LONGEST_SLEEP_S = 30.0
"""The event loop's timers stop while the machine is suspended. Checking this often bounds the delay."""
_DELAYS = [seconds * 1000 for seconds in DELAYS_S]
_TOPICS = [delay_topic(seconds) for seconds in DELAYS_S]


def choose_delay(left: int) -> str | None:
    """The topic with the longest delay within the time left (ms); None when no time is left.

    An event with less time than the shortest delay goes to that topic too, and leaves it when it is due (`find_wake`).
    """
    if left <= 0:
        return None
    return _TOPICS[max(0, bisect_right(_DELAYS, left) - 1)]


def choose_delays(least: int, most: int) -> list[str | None]:
    """Every result of `choose_delay` for a time left between these two (ms), ascending by delay."""
    first, last = (bisect_right(_DELAYS, max(left, _DELAYS[0])) - 1 if left > 0 else -1 for left in (least, most))
    return [_TOPICS[at] if at >= 0 else None for at in range(first, last + 1)]


def find_wake(delay: int, written: int, due: int, now: int) -> int:
    """When a record leaves its topic (ms): after the topic's delay, but not later than it is due.

    written: when it was written to the topic, by its writer's clock. A time after `now` counts as `now`.
    """
    return min(min(written, now) + delay, due)


class Clock(Protocol):
    """Milliseconds since the epoch that never go backwards and never jump."""

    def now_ms(self) -> int:
        """Now."""

    async def sleep_until(self, at_ms: int) -> None:
        """Returns at that time or shortly after it, never before."""


class SteadyClock:
    """The wall clock at the start, plus the time since then by a clock that cannot be set. So a jump releases nothing early."""

    def __init__(self) -> None:
        self._offset = time.time_ns() - boot_ns()

    def now_ms(self) -> int:
        return (self._offset + boot_ns()) // 1_000_000

    async def sleep_until(self, at_ms: int) -> None:
        while (left := at_ms - self.now_ms()) > 0:  # noqa: ASYNC110 - it waits for a time
            await asyncio.sleep(min(left / 1000, _LONGEST_SLEEP_S))


class DelayedRecord(NamedTuple):
    """A record read ahead. wake: when it leaves its topic; due: when the event is due (ms).

    pipe, destination: its lane. problem: why it becomes a dead letter (a stable word), else empty; detail: the same for a
    person. without_value: the dead letter has no value, because it was too large.
    """

    offset: int
    record: Record
    size: int
    wake: int
    pipe: str = ""
    destination: str = ""
    due: int = 0
    problem: str = ""
    detail: str = ""
    without_value: bool = False


class DelayQueue:
    """The records read ahead of one partition of retry-in or of a delay topic: first in, first out. Not thread-safe.

    All records of a delay topic wait equally long, so the first one read is the first to leave, and the others can stay in the
    topic. Records are settled in order, so a crash repeats only the current move. busy: popped records are being moved.
    committing: they were moved. moves: how many have ended.
    """

    def __init__(self, source: TopicPartition) -> None:
        self.source = source
        self.busy = self.committing = False
        self.moves = 0
        self._delay = DELAY_BY_TOPIC[source.topic]
        self._waiting: deque[DelayedRecord] = deque()
        self._bytes = 0
        self._next_move = 0
        self._arrived, self._filled = asyncio.Event(), asyncio.Event()

    def add(self, batch: Batch, now: int) -> None:
        """Queue a polled batch. now: ms."""
        added = [self._parse(offset, record, now) for offset, record in zip(batch.offsets, batch.records, strict=True)]
        if batch.damage is not None:
            detail = f"offsets {batch.damage.first} to {batch.damage.last}: {batch.damage.detail}"
            added = [item._replace(wake=now, problem="damaged", detail=detail) for item in added]
        self._waiting += added
        self._bytes += sum(item.size for item in added)
        self._arrived.set()
        if self.is_full:
            self._filled.set()

    def _parse(self, offset: int, record: Record, now: int) -> DelayedRecord:
        size = estimate_size((record,))
        try:
            pipe, destination, due = read_wait(record)
        except BadRetryRecord as error:
            return DelayedRecord(offset, record, size, now, problem="bad_retry_record", detail=str(error))
        wake = find_wake(self._delay, record.timestamp, due, now)
        return DelayedRecord(offset, record, size, wake, pipe, destination, due)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether no more should be polled for now."""
        return len(self._waiting) >= MAX_EVENTS or self._bytes >= MAX_BYTES

    def is_ready(self, now: int) -> bool:
        """Whether the first record may leave."""
        return bool(self._waiting) and self._waiting[0].wake <= now

    @property
    def has_room(self) -> bool:
        """Whether enough is free to poll on."""
        return len(self._waiting) <= MAX_EVENTS // 2 and self._bytes <= MAX_BYTES // 2

    def first_due(self) -> int | None:
        """When the earliest of the queued events is due; None without any."""
        return min((item.due for item in self._waiting if not item.problem), default=None)

    async def wait_until_ready(self, clock: Clock) -> None:
        """Wait until the first record may leave. Later records cannot leave before it."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        await self._gather(clock)
        await clock.sleep_until(self._waiting[0].wake)

    async def _gather(self, clock: Clock) -> None:
        """Wait until the next move may begin or the queue is full."""
        if self._next_move <= clock.now_ms() or self.is_full:
            return
        self._filled.clear()
        ends = [asyncio.ensure_future(end) for end in (clock.sleep_until(self._next_move), self._filled.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    def pop_ready(self, now: int) -> list[DelayedRecord]:
        """The records that may leave, at most MOVE_EVENTS and about MAX_BYTES."""
        size = count = 0
        for item in islice(self._waiting, MOVE_EVENTS):
            size += item.size
            if item.wake > now or (count and size > MAX_BYTES):
                break
            count += 1
        ready = [self._waiting.popleft() for _ in range(count)]
        self._bytes -= sum(item.size for item in ready)
        is_more = bool(self._waiting) and self._waiting[0].wake <= now
        self._next_move = now if is_more else now + GATHER_MS
        return ready
