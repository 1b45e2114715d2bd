"""One partition of retry-in or of a delay topic: the few records read ahead, first in first out, and when the first may go.

All records of a delay topic wait equally long, so the first one read is the next one to go, and the rest can stay where it is.
Settling in order keeps what a crash repeats small: only what was under way.
"""

import asyncio
from collections import deque
from itertools import islice
from typing import NamedTuple

from services.core.broker.record import Batch, Record, TopicPartition, estimate_size
from services.core.retry_state import BadRetryRecord, read_wait
from services.global_retrier.clock import Clock
from services.global_retrier.route import DELAY_BY_TOPIC, find_wake

MAX_EVENTS, MAX_BYTES = 500, 1_000_000
"""Read ahead of one partition; what one poll brings may exceed it once."""
MOVE_EVENTS = 200
"""Written on at once at most: about what is repeated when the process dies in between."""
GATHER_MS = 200
"""After a move that left nothing behind that could go: what becomes due meanwhile travels together, unless the line is full."""


class Waiting(NamedTuple):
    """A record read ahead. wake: when it leaves its topic; due: when the event is due (ms).

    pipe, destination: whom it is for. problem: why it goes to the dead letters (a stable word), else empty; detail: the same for
    a person. bare: its letter goes without the value.
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
    bare: bool = False


class Line:
    """Not thread-safe. `busy` while records that were cut are being written on."""

    def __init__(self, source: TopicPartition) -> None:
        self.source = source
        self.busy = False
        self._delay = DELAY_BY_TOPIC[source.topic]
        self._waiting: deque[Waiting] = deque()
        self._bytes = 0
        self._next_move = 0
        self._arrived, self._filled = asyncio.Event(), asyncio.Event()

    def take(self, batch: Batch, now: int) -> None:
        """Queue a polled batch. now: ms."""
        taken = [self._read(offset, record, now) for offset, record in zip(batch.offsets, batch.records, strict=True)]
        if batch.damage is not None:
            detail = f"offsets {batch.damage.first} to {batch.damage.last}: {batch.damage.detail}"
            taken = [item._replace(wake=now, problem="damaged", detail=detail) for item in taken]
        self._waiting += taken
        self._bytes += sum(item.size for item in taken)
        self._arrived.set()
        if self.is_full:
            self._filled.set()

    def _read(self, offset: int, record: Record, now: int) -> Waiting:
        size = estimate_size((record,))
        try:
            pipe, destination, due = read_wait(record)
        except BadRetryRecord as error:
            return Waiting(offset, record, size, now, problem="bad_retry_record", detail=str(error))
        wake = find_wake(self._delay, record.timestamp, due, now)
        return Waiting(offset, record, size, wake, pipe, destination, due)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_full(self) -> bool:
        """Whether nothing more should be read for the time being."""
        return len(self._waiting) >= MAX_EVENTS or self._bytes >= MAX_BYTES

    @property
    def has_room(self) -> bool:
        """Whether it is worth reading on."""
        return len(self._waiting) <= MAX_EVENTS // 2 and self._bytes <= MAX_BYTES // 2

    def first_due(self) -> int | None:
        """When the earliest of the events read ahead is due; None without any."""
        return min((item.due for item in self._waiting if not item.problem), default=None)

    async def wait_until_ready(self, clock: Clock) -> None:
        """Until the first record may leave. Nothing is looked at meanwhile: later ones cannot come before it."""
        while not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()
        await self._gather(clock)
        await clock.sleep_until(self._waiting[0].wake)

    async def _gather(self, clock: Clock) -> None:
        """Until the next move may begin, or there is enough for several."""
        if self._next_move <= clock.now_ms() or self.is_full:
            return
        self._filled.clear()
        ends = [asyncio.ensure_future(end) for end in (clock.sleep_until(self._next_move), self._filled.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    def cut(self, now: int) -> list[Waiting]:
        """Take out what may leave, at most `MOVE_EVENTS` and about `MAX_BYTES`."""
        size = count = 0
        for item in islice(self._waiting, MOVE_EVENTS):
            size += item.size
            if item.wake > now or (count and size > MAX_BYTES):
                break
            count += 1
        moved = [self._waiting.popleft() for _ in range(count)]
        self._bytes -= sum(item.size for item in moved)
        is_more = bool(self._waiting) and self._waiting[0].wake <= now
        self._next_move = now if is_more else now + GATHER_MS
        return moved
