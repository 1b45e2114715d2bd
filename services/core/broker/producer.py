"""The portable sending part: group commit, order, retry and bounds, once for all backends.

Requests that arrive together travel together. Each (topic, partition) has a `Lane` with at most one append under way;
what arrives meanwhile is the next batch. So order per partition holds through retries, batches grow with load, and a
lane that waits for its leader holds up no other lane.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import TracebackType
from typing import Self

import msgspec

from services.core.broker import errors
from services.core.broker.contract import MAX_APPEND_BYTES, Appended, Driver
from services.core.broker.partitioner import split_by_key
from services.core.broker.record import Record, estimate_size
from services.core.broker.retry import RetryPolicy, append_with_retry

TOPIC_SHARE = 2
"""One topic may take this part (a half) of the bound: others go on while one of its partitions has no leader."""

_LONGEST_WAIT_S = 60.0
"""Nobody is told to stay away longer: paces recover, and a stream gets more shards."""

_FAILED = attrgetter("failed")


class PartResult(msgspec.Struct, frozen=True):
    """What became of the records that one `send_to` gave to one partition.

    first, last: offsets between which its records lie, -1 when none was stored; exactly its own where offsets are
    contiguous and nothing of the shared batch failed. failed: (index in the given list, error).
    """

    partition: int
    count: int
    first: int
    last: int
    failed: tuple[tuple[int, Exception], ...] = ()


class SendResult(msgspec.Struct, frozen=True):
    """One answer per call: where each part of it went."""

    parts: tuple[PartResult, ...]

    @property
    def failed(self) -> bool:
        """Whether any record was not stored (or might not have been)."""
        return any(map(_FAILED, self.parts))

    def raise_first(self) -> None:
        """Raise the first failure, for callers for whom all or nothing counts."""
        for part in self.parts:
            for _, error in part.failed:
                raise error


class Producer:
    """Sends batches durably; an async context manager that drains on exit.

    `max_pending_bytes` bounds everything that waits or is under way, and a topic takes half of it at most; beyond that
    sends raise Overloaded at once. `policy` says how long records may be tried, counted from their `send_to`: each call ends by
    its deadline plus one append time-out. What the broker's rate limits would hold up for longer than its patience is Throttled
    at once, with the seconds after which there is room.
    """

    def __init__(self, driver: Driver, *, max_pending_bytes: int = 64 << 20, policy: RetryPolicy | None = None) -> None:
        self._driver = driver
        self._policy = policy or RetryPolicy()
        self._max_pending = max_pending_bytes
        self._pending = 0
        self._queues: dict[str, _Queue] = {}
        self._sticky: dict[str, int] = {}
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._cancel()
        await self.close()

    @property
    def pending_bytes(self) -> int:
        """Bytes that wait or are under way."""
        return self._pending

    async def partition_count(self, topic: str) -> int:
        """How many partitions the topic has. Raises UnknownTopic, Unavailable."""
        return await self._driver.partition_count(topic)

    def rotate_keyless(self, topic: str, partitions: int) -> int:
        """The partition for keyless records now: the next one for each call, so that batches stay whole and load spreads."""
        chosen = (self._sticky.get(topic, -1) + 1) % partitions
        self._sticky[topic] = chosen
        return chosen

    async def send(self, topic: str, records: Sequence[Record]) -> SendResult:
        """Send by key (murmur2); keyless records of one call go together. As `send_to` otherwise.

        The result's indexes count within each part, whose order is that of the call.
        """
        count = await self.partition_count(topic)
        return await self.send_to(topic, split_by_key(records, count, self.rotate_keyless(topic, count)))

    async def send_to(self, topic: str, parts: Mapping[int, Sequence[Record]]) -> SendResult:
        """Store the records of each part in its partition, in order; answers when every part is durable or has failed.

        Never raises for a record that could not be stored: that stands in the result. Raises Overloaded when the queue
        is full and BrokerClosed after close; nothing was queued then. Cancelling leaves the outcome unknown.
        """
        if self._closed:
            raise errors.BrokerClosed("the producer is closed")
        if not parts:
            return SendResult(())
        queue = self._queues.get(topic)
        if queue is None:
            queue = self._queues[topic] = _Queue(topic)
        sizes = [estimate_size(records) for records in parts.values()]
        self._admit(queue, sum(sizes))
        call = _Call(len(parts), asyncio.get_running_loop().create_future(), time.monotonic() + self._policy.deadline)
        for (partition, records), size in zip(parts.items(), sizes, strict=True):
            lane = queue.lanes.get(partition)
            if lane is None:
                lane = queue.lanes[partition] = _Lane(self, queue, partition)
            piece = _Piece(call, partition, records, size)
            if lane.wait() > self._policy.patience:
                lane.refuse(piece)
            else:
                lane.add(piece)
        return await call.done

    def _admit(self, queue: "_Queue", size: int) -> None:
        """Count these bytes as pending, or raise Overloaded. A call above a bound passes while nothing else waits."""
        if self._pending and self._pending + size > self._max_pending:
            raise errors.Overloaded(f"{self._pending} bytes are waiting for the broker already")
        if queue.pending and queue.pending + size > self._max_pending // TOPIC_SHARE:
            raise errors.Overloaded(f"{queue.pending} bytes are waiting for {queue.topic} already")
        self._pending += size
        queue.pending += size

    async def close(self) -> None:
        """Wait for what is under way, which ends as `policy` says; refuse what is new."""
        self._closed = True
        lanes = [lane for queue in self._queues.values() for lane in queue.lanes.values()]
        running = [lane.task for lane in lanes if lane.task is not None]
        if running:
            await asyncio.wait(running)
        for lane in lanes:
            lane.abandon()

    def _cancel(self) -> None:
        """Give up at once what is under way: its outcome is unknown."""
        for queue in self._queues.values():
            for lane in queue.lanes.values():
                if lane.task is not None:
                    lane.task.cancel()


class _Queue:
    """One topic: its lanes, and the bytes that they hold."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.pending = 0
        self.lanes: dict[int, _Lane] = {}


class _Call(msgspec.Struct, eq=False):
    """One `send_to`: resolved when its last piece is settled. One future per call, none per record.

    deadline (monotonic seconds): nothing of it is tried later.
    """

    remaining: int
    done: "asyncio.Future[SendResult]"
    deadline: float
    results: list[PartResult] = []

    def settle(self, result: PartResult) -> None:
        self.results.append(result)
        self.remaining -= 1
        if not self.remaining and not self.done.done():
            self.done.set_result(SendResult(tuple(self.results)))


class _Piece(msgspec.Struct, eq=False):
    """The records of one call for one partition."""

    call: _Call
    partition: int
    records: Sequence[Record]
    size: int


class _Batch(msgspec.Struct, eq=False):
    """The pieces of one append that wait for their answer. start: how many records of it were answered already."""

    pieces: list[_Piece]
    start: int = 0

    def take_first(self, count: int) -> list[_Piece]:
        """Take out the pieces that lie whole within the first `count` records of the append."""
        taken: list[_Piece] = []
        while self.pieces and self.start + len(self.pieces[0].records) <= count:
            taken.append(self.pieces.pop(0))
            self.start += len(taken[-1].records)
        return taken


class _Lane:
    """One partition's pieces. A task runs only while there is something to send, so idle lanes cost nothing."""

    def __init__(self, producer: Producer, queue: _Queue, partition: int) -> None:
        self._producer, self._queue, self._partition = producer, queue, partition
        self._name = f"{queue.topic}[{partition}]"
        self._waiting: list[_Piece] = []
        self._pending = 0
        self._seconds_per_byte = 0.0
        """The broker's rate limits, as the last append met them; 0: not at all."""
        self.task: asyncio.Task[None] | None = None

    def wait(self) -> float:
        """Seconds after which the broker's rate limits will have let through what is here already."""
        return self._pending * self._seconds_per_byte

    def refuse(self, piece: _Piece) -> None:
        """There is no room for it in time."""
        error = self._throttled()
        self._pending += piece.size
        self._settle([piece], error)

    def _throttled(self) -> errors.Throttled:
        wait = min(self.wait(), _LONGEST_WAIT_S)
        return errors.Throttled(
            f"{self._name}: what waits already takes {wait:.1f} s or more; not stored", retry_after=wait
        )

    def add(self, piece: _Piece) -> None:
        self._waiting.append(piece)
        self._pending += piece.size
        if self.task is None:
            self.task = asyncio.create_task(self._run(), name=self._name)

    async def _run(self) -> None:
        """The task starts on the loop's next turn: everything that this turn added is the first batch."""
        try:
            while self._waiting:
                self._expire()
                batch = _Batch(self._take())
                if not batch.pieces:
                    return
                try:
                    outcome: Appended | Exception = await self._append(batch)
                except asyncio.CancelledError:
                    self._settle(batch.pieces, errors.OutcomeUnknown("given up while it was being sent"))
                    raise
                except Exception as error:  # settled into each caller's result, which is where it is handled
                    outcome = error
                self._settle(batch.pieces, outcome, batch.start)
        finally:
            self.task = None

    def abandon(self) -> None:
        """Settle what still waits after the task was cancelled, perhaps before its first step."""
        pieces, self._waiting = self._waiting, []
        self._settle(pieces, errors.BrokerClosed("given up before it was sent"))

    def _settle(self, pieces: list[_Piece], outcome: Appended | Exception, start: int = 0) -> None:
        size = sum([piece.size for piece in pieces])
        self._pending -= size
        self._producer._pending -= size
        self._queue.pending -= size
        _settle(pieces, outcome, start)

    def _expire(self) -> None:
        """Fail what waited behind others until its deadline."""
        now = time.monotonic()
        if self._waiting[0].call.deadline < now:
            late = [piece for piece in self._waiting if piece.call.deadline < now]
            del self._waiting[: len(late)]  # deadlines are in the order of arrival
            late_by = errors.Unavailable(f"{self._name}: its turn did not come in time; nothing was stored")
            self._settle(late, self._throttled() if self._seconds_per_byte else late_by)

    def _take(self) -> list[_Piece]:
        """As many whole pieces as fit one append; a piece that is larger than that travels alone (and is cut in `_append`)."""
        size = taken = 0
        for piece in self._waiting:
            size += piece.size
            if taken and size > MAX_APPEND_BYTES:
                break
            taken += 1
        pieces, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return pieces

    async def _append(self, batch: "_Batch") -> Appended:
        """Send it; pieces whose time is over while others are tried again are answered and taken out of it at once."""
        pieces = tuple(batch.pieces)
        records = pieces[0].records if len(pieces) == 1 else [record for piece in pieces for record in piece.records]
        size = sum([piece.size for piece in pieces])

        def settled(count: int, appended: Appended) -> None:
            start = batch.start
            self._settle(batch.take_first(count), appended, start)

        appended = await append_with_retry(
            self._producer._driver,
            self._queue.topic,
            self._partition,
            records,
            self._producer._policy,
            size=size,
            deadlines=lambda: [piece.call.deadline for piece in pieces for _ in piece.records],
            settled=settled,
        )
        self._seconds_per_byte = appended.seconds_per_byte
        for _, error in appended.failed:
            if isinstance(error, errors.Throttled):
                # Of a few bytes it tells when the next append may leave, not how long each byte takes.
                self._seconds_per_byte = (error.retry_after or 0.0) / max(size, MAX_APPEND_BYTES)
        return appended


def _settle(pieces: list[_Piece], outcome: Appended | Exception, start: int) -> None:
    """Give each call its share: index ranges of the batch map back to the pieces in order, the first begins at `start`."""
    total = sum(len(piece.records) for piece in pieces)
    begin = outcome.first - start if isinstance(outcome, Appended) else 0
    for piece in pieces:
        count = len(piece.records)
        if isinstance(outcome, Exception):
            result = PartResult(piece.partition, count, -1, -1, tuple((index, outcome) for index in range(count)))
        elif not outcome.failed and outcome.last - outcome.first + 1 == total:
            first = begin + start
            result = PartResult(piece.partition, count, first, first + count - 1)
        else:
            failed = tuple((i - start, error) for i, error in outcome.failed if start <= i < start + count)
            result = PartResult(piece.partition, count, outcome.first, outcome.last, failed)
        piece.call.settle(result)
        start += count
