"""The portable sending part: group commit, order, retry and limits, once for all backends.

Each partition has a queue with at most one append under way. Records that arrive meanwhile are the next batch. So order per
partition holds through retries, batches grow with load, and a partition that waits for its leader holds up no other.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from operator import attrgetter
from types import TracebackType
from typing import Self

import msgspec

from services.core.broker import errors
from services.core.broker.contract import MAX_APPEND_BYTES, Appended, Appender
from services.core.broker.partitioner import choose_partition, split_by_key
from services.core.broker.record import Record, estimate_size
from services.core.broker.retry import AppendPolicy, append_with_retry

TOPIC_SHARE = 2
"""One topic may use half of the limit: others go on while one of its partitions has no leader."""

_LONGEST_WAIT_S = 60.0
"""The longest `retry_after`: limits recover, and a stream gets more shards."""

_FAILED = attrgetter("failed")


class PartResult(msgspec.Struct, frozen=True):
    """The outcome for the records that one `send_to` gave to one partition.

    first, last: offsets between which its records lie, -1 when none was stored, or where one lies is not known; exactly its
    own where offsets are contiguous and nothing of the shared batch failed. failed: (index in the given list, error).
    """

    partition: int
    count: int
    first: int
    last: int
    failed: tuple[tuple[int, Exception], ...] = ()


class SendResult(msgspec.Struct, frozen=True):
    """The outcome of one call: one result per partition."""

    parts: tuple[PartResult, ...]

    @property
    def failed(self) -> bool:
        """Whether any record was not stored (or might not have been)."""
        return any(map(_FAILED, self.parts))

    def raise_first(self) -> None:
        """Raise the first failure, for callers that need all records stored."""
        for part in self.parts:
            for _, error in part.failed:
                raise error


class Producer:
    """Sends batches durably; an async context manager that drains on exit.

    `max_pending_bytes` limits all records that wait or are under way; a topic may use half of it. Above the limit sends raise
    Overloaded at once. `policy` limits the time, counted from `send_to`: each call ends by its deadline
    plus one append time-out. Records that the broker's rate limits would delay for longer than the policy's patience are
    Throttled at once, with the seconds after which there is room.
    """

    def __init__(
        self, appender: Appender, *, max_pending_bytes: int = 64 << 20, policy: AppendPolicy | None = None
    ) -> None:
        self._appender = appender
        self._policy = policy or AppendPolicy()
        self._max_pending = max_pending_bytes
        self._pending = 0
        self._queues: dict[str, _TopicQueue] = {}
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
        return await self._appender.partition_count(topic)

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

        Never raises for a record that could not be stored: the result names it. Raises Overloaded when the queue
        is full and BrokerClosed after close; nothing was queued then. Cancelling leaves the outcome unknown.
        """
        if self._closed:
            raise errors.BrokerClosed("the producer is closed")
        if not parts:
            return SendResult(())
        topic_queue = self._queues.get(topic)
        if topic_queue is None:
            topic_queue = self._queues[topic] = _TopicQueue(topic)
        sizes = [estimate_size(records) for records in parts.values()]
        self._admit(topic_queue, sum(sizes))
        call = _Call(len(parts), asyncio.get_running_loop().create_future(), time.monotonic() + self._policy.deadline)
        for (partition, records), size in zip(parts.items(), sizes, strict=True):
            queue = topic_queue.partitions.get(partition)
            if queue is None:
                queue = topic_queue.partitions[partition] = _PartitionQueue(self, topic_queue, partition)
            piece = _Piece(call, partition, records, size)
            if queue.wait() > self._policy.patience:
                queue.refuse(piece)
            else:
                queue.add(piece)
        return await call.done

    def _admit(self, topic_queue: "_TopicQueue", size: int) -> None:
        """Count these bytes as pending, or raise Overloaded. A call above a bound passes while nothing else waits."""
        if self._pending and self._pending + size > self._max_pending:
            raise errors.Overloaded(f"{self._pending} bytes are waiting for the broker already")
        if topic_queue.pending and topic_queue.pending + size > self._max_pending // TOPIC_SHARE:
            raise errors.Overloaded(f"{topic_queue.pending} bytes are waiting for {topic_queue.topic} already")
        self._pending += size
        topic_queue.pending += size

    async def close(self) -> None:
        """Wait for appends under way, which end as `policy` says; refuse new sends."""
        self._closed = True
        queues = [queue for topic_queue in self._queues.values() for queue in topic_queue.partitions.values()]
        running = [queue.task for queue in queues if queue.task is not None]
        if running:
            await asyncio.wait(running)
        for queue in queues:
            queue.abandon()

    def _cancel(self) -> None:
        """Cancel the appends under way: their outcome is unknown."""
        for topic_queue in self._queues.values():
            for queue in topic_queue.partitions.values():
                if queue.task is not None:
                    queue.task.cancel()


async def send_by_key(producer: Producer, topic: str, records: Sequence[Record]) -> dict[int, Exception]:
    """Durably, in order per key; answers when all are settled. Gives {index: error} of those that are not known to be stored:
    after OutcomeUnknown they may be, and sending them again may double them.

    Raises nothing but CancelledError; when nothing could be queued, all records failed with that error.
    """
    places: dict[int, list[int]] = {}
    try:
        count = await producer.partition_count(topic)
        keyless = producer.rotate_keyless(topic, count)
        for index, record in enumerate(records):
            partition = keyless if record.key is None else choose_partition(record.key, count)
            places.setdefault(partition, []).append(index)
        parts = {partition: [records[index] for index in indexes] for partition, indexes in places.items()}
        result = await producer.send_to(topic, parts)
    except errors.BrokerError as error:
        return dict.fromkeys(range(len(records)), error)
    return {places[part.partition][index]: error for part in result.parts for index, error in part.failed}


class _TopicQueue:
    """One topic: the queues of its partitions, and the bytes that they hold."""

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self.pending = 0
        self.partitions: dict[int, _PartitionQueue] = {}


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

    def remove_first(self, count: int) -> list[_Piece]:
        """Remove the pieces that are wholly within the first `count` records of the append; gives them."""
        removed: list[_Piece] = []
        while self.pieces and self.start + len(self.pieces[0].records) <= count:
            removed.append(self.pieces.pop(0))
            self.start += len(removed[-1].records)
        return removed


class _PartitionQueue:
    """The pieces of one partition. Its task runs only while there is something to send."""

    def __init__(self, producer: Producer, queue: _TopicQueue, partition: int) -> None:
        self._producer, self._queue, self._partition = producer, queue, partition
        self._name = f"{queue.topic}[{partition}]"
        self._waiting: list[_Piece] = []
        self._pending = 0
        self._seconds_per_byte = 0.0
        """The pace of the broker's rate limits at the last append; 0: no limit."""
        self.task: asyncio.Task[None] | None = None

    def wait(self) -> float:
        """Seconds that the broker's rate limits need for the pending records."""
        return self._pending * self._seconds_per_byte

    def refuse(self, piece: _Piece) -> None:
        """Answer Throttled: there is no room in time."""
        error = self._throttled()
        self._pending += piece.size
        self._settle([piece], error)

    def _throttled(self) -> errors.Throttled:
        wait = min(self.wait(), _LONGEST_WAIT_S)
        return errors.Throttled(
            f"{self._name}: the waiting records need {wait:.1f} s or more; not stored", retry_after=wait
        )

    def add(self, piece: _Piece) -> None:
        self._waiting.append(piece)
        self._pending += piece.size
        if self.task is None:
            self.task = asyncio.create_task(self._run(), name=self._name)

    async def _run(self) -> None:
        """The task starts on the loop's next turn: all records that this turn added are the first batch."""
        try:
            while self._waiting:
                self._expire()
                batch = _Batch(self._next_pieces())
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
        """Answer the waiting pieces after the task was cancelled, perhaps before its first step."""
        pieces, self._waiting = self._waiting, []
        self._settle(pieces, errors.BrokerClosed("given up before it was sent"))

    def _settle(self, pieces: list[_Piece], outcome: Appended | Exception, start: int = 0) -> None:
        size = sum([piece.size for piece in pieces])
        self._pending -= size
        self._producer._pending -= size
        self._queue.pending -= size
        _settle(pieces, outcome, start)

    def _expire(self) -> None:
        """Answer pieces that waited behind others until their deadline."""
        now = time.monotonic()
        if self._waiting[0].call.deadline < now:
            late = [piece for piece in self._waiting if piece.call.deadline < now]
            del self._waiting[: len(late)]  # deadlines are in the order of arrival
            late_by = errors.Unavailable(f"{self._name}: its turn did not come in time; nothing was stored")
            self._settle(late, self._throttled() if self._seconds_per_byte else late_by)

    def _next_pieces(self) -> list[_Piece]:
        """As many whole pieces as fit into one append; a larger piece goes alone (and is cut in `append_with_retry`)."""
        size = count = 0
        for piece in self._waiting:
            size += piece.size
            if count and size > MAX_APPEND_BYTES:
                break
            count += 1
        pieces, self._waiting = self._waiting[:count], self._waiting[count:]
        return pieces

    async def _append(self, batch: "_Batch") -> Appended:
        """Send the batch. Pieces whose time is over while others are tried again are answered and removed at once."""
        pieces = tuple(batch.pieces)
        records = pieces[0].records if len(pieces) == 1 else [record for piece in pieces for record in piece.records]
        size = sum([piece.size for piece in pieces])

        def settled(count: int, appended: Appended) -> None:
            start = batch.start
            self._settle(batch.remove_first(count), appended, start)

        appended = await append_with_retry(
            self._producer._appender,
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
                # For a few bytes it is the time until the next append may leave, not the time of each byte.
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
