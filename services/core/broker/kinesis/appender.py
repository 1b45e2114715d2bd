"""Writing: an append is one entry (an aggregated Kinesis record), or several when it is larger than one may be.

Entries of one stream for several shards travel in one PutRecords request.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from services.core import metrics
from services.core.broker.contract import Appended
from services.core.broker.errors import BrokerClosed, BrokerError, OutcomeUnknown, Throttled, Unavailable
from services.core.broker.kinesis.aws import AWS_ERRORS, Put, Timing, classify_entry, classify_put
from services.core.broker.kinesis.pace import WritePace
from services.core.broker.kinesis.record_format import (
    EntryNames,
    PutEntry,
    digest_bodies,
    digest_records,
    make_entries,
    offset_of,
)
from services.core.broker.kinesis.streams import Streams, Topology, hash_key_of, shard_of
from services.core.broker.record import Record

SendPuts = Callable[[str, Sequence[Put]], Awaitable[list[dict[str, Any]]]]
"""`PutRecords`, or its replacement in a test."""

MAX_ENTRIES = 500
MAX_REQUEST_BYTES = 5_000_000
"""Of one PutRecords request, partition keys included; the service accepts 5 MiB."""

_REQUESTS = 4
"""Requests under way at once. A slow one delays no other shard; more requests would only be smaller ones."""


@dataclass(slots=True, eq=False)
class PendingPut:
    """One entry to be sent. answer: its sequence number. sent: it may be stored, even if nobody waits for the answer.

    leave_by (the loop's time): it is not sent later, because no answer could come in time.
    """

    put: Put
    leave_by: float
    answer: "asyncio.Future[str]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    sent: bool = False


class PutBatcher:
    """Gathers the entries of one loop tick, and those that come while all requests are under way."""

    def __init__(self, send: SendPuts, topic: str) -> None:
        self._send, self._topic = send, topic
        self._waiting: list[PendingPut] = []
        self.running: set[asyncio.Task[None]] = set()
        self._is_woken = False

    def add(self, pending: PendingPut) -> None:
        """Send it soon. One whose answer is cancelled before its request leaves is never sent."""
        self._waiting.append(pending)
        if not self._is_woken and len(self.running) < _REQUESTS:
            self._is_woken = True
            asyncio.get_running_loop().call_soon(self._wake)

    def _wake(self) -> None:
        self._is_woken = False
        while self._waiting and len(self.running) < _REQUESTS:
            puts = self._next_request()
            if puts:
                task = asyncio.create_task(self._put(puts), name=f"put {self._topic}")
                self.running.add(task)
                task.add_done_callback(self._done)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self.running.discard(task)
        self._wake()

    def _next_request(self) -> list[PendingPut]:
        size = count = 0
        for pending in self._waiting[:MAX_ENTRIES]:
            size += len(pending.put.data) + len(pending.put.partition_key)
            if count and size > MAX_REQUEST_BYTES:
                break
            count += 1
        puts, self._waiting = self._waiting[:count], self._waiting[count:]
        now, late = asyncio.get_running_loop().time(), f"append to {self._topic}: its request could not leave in time"
        for pending in puts:
            if pending.leave_by < now:
                _settle(pending, error=Unavailable(late))
        sent_now = [pending for pending in puts if not pending.answer.done()]
        for pending in sent_now:
            pending.sent = True  # from here on it cannot be held back
        return sent_now

    async def _put(self, puts: list[PendingPut]) -> None:
        try:
            rows = await self._send(self._topic, [pending.put for pending in puts])
        except AWS_ERRORS as error:
            for pending in puts:
                _settle(pending, error=classify_put(error, f"append to {self._topic}"))
        except Exception as error:  # a bug of ours
            for pending in puts:
                _settle(pending, error=error)
        except BaseException:
            for pending in puts:
                pending.answer.cancel()
            raise
        else:
            for pending, row in zip(puts, rows, strict=True):
                code = row.get("ErrorCode")
                refusal = (
                    classify_entry(code, row.get("ErrorMessage", ""), f"append to {self._topic}") if code else None
                )
                _settle(pending, row.get("SequenceNumber", ""), refusal)


def _settle(pending: PendingPut, sequence: str = "", error: Exception | None = None) -> None:
    if pending.answer.done():
        return
    if error is None:
        pending.answer.set_result(sequence)
    else:
        pending.answer.set_exception(error)


class AppendNames:
    """Names each entry that is put; a repeat of an entry that was not confirmed gets the same name.

    Kinesis has no idempotent put. By its name a reader knows the second copy of an entry. The producer repeats an append
    before it sends anything else to the partition, so one unconfirmed entry per partition is remembered. The records of a
    repeat may be fewer: then it is another entry.
    """

    def __init__(self) -> None:
        self._process, self._count = secrets.token_hex(8), 0
        self._unconfirmed: dict[tuple[str, int], tuple[bytes, bytes]] = {}
        """(digest of the records, name) of the entry that was not confirmed, by topic and partition."""

    def of(self, topic: str, partition: int) -> EntryNames:
        """For the entries of one append, in order."""

        def name(bodies: Sequence[bytes]) -> bytes:
            digest, known = self._unconfirmed.pop((topic, partition), (b"", b""))
            if digest and digest == digest_bodies(bodies):
                return known
            self._count += 1
            return f"{self._process}{self._count:016x}".encode()

        return name

    def keep(self, topic: str, partition: int, records: Iterable[Record], name: bytes) -> None:
        """The put of this entry failed, or its outcome is unknown."""
        self._unconfirmed[topic, partition] = digest_records(records), name


_ANSWER_SHARE = 0.5
"""The share of an append's time that is kept for the answer. The pace and a free request are waited for in the rest."""

_LATE_SECONDS = 0.25
"""Tolerance for entries that were due just in time."""


class KinesisAppender:
    """Durable when PutRecords answered: the service stores in three zones. Paced per shard; never retries.

    An append that fits one entry is stored whole or not at all. A larger one goes entry by entry, each after the one
    before it, so order holds and only a tail can fail.
    """

    def __init__(self, send: SendPuts, streams: Streams, timing: Timing) -> None:
        self._send, self._streams, self._timing = send, streams, timing
        self._batchers: dict[str, PutBatcher] = {}
        self._paces: dict[tuple[str, str], WritePace] = {}
        self._names = AppendNames()
        self._closed = False

    async def partition_count(self, topic: str) -> int:
        return (await self._streams.find(topic)).partitions

    async def append(
        self,
        topic: str,
        partition: int,
        records: Sequence[Record],
        *,
        timeout: float,
        given_names: EntryNames | None = None,
    ) -> Appended:
        """As in the contract. Raises Throttled, with the seconds to wait, when the shard's pace does not allow it in
        time.

        given_names: of a caller that gives a repeat its name itself, also in another process.
        """
        if self._closed:
            raise BrokerClosed("the Kinesis connection was closed")
        deadline = asyncio.get_running_loop().time() + timeout
        leave_by = deadline - min(self._timing.request, _ANSWER_SHARE * timeout)
        progress = _Progress(len(records))
        try:
            async with asyncio.timeout_at(deadline):
                topology = await self._streams.find(topic)
                if not 0 <= partition < topology.partitions:
                    raise Unavailable(f"{topic}[{partition}]: the topic has {topology.partitions} partitions")
                hash_key = hash_key_of(partition, topology.partitions)
                names = given_names or self._names.of(topic, partition)
                entries, refused = make_entries(records, str(partition), hash_key, names)
                progress.failed.update(refused)
                for entry in entries:
                    progress.sending(entry)
                    sequence = await self._put(_Target(topic, partition, hash_key, topology), entry, progress, leave_by)
                    progress.store(entry, sequence)
                    _count(topic, str(partition), len(entry.data))
        except TimeoutError:
            message = f"append to {topic}[{partition}]: no answer within {timeout:g} s"
            progress.fail(OutcomeUnknown(message) if progress.sent else Unavailable(message))
        except BrokerError as error:
            progress.fail(error)
        if progress.unconfirmed is not None and given_names is None:
            entry = progress.unconfirmed
            self._names.keep(topic, partition, [records[index] for index in entry.indexes], entry.name)
        return progress.appended()

    async def _put(self, target: "_Target", entry: PutEntry, progress: "_Progress", leave_by: float) -> str:
        """Store one entry within the shard's pace. Returns its sequence number.

        An entry whose turn comes too late for an answer is not sent: it would be stored, and sent again.
        """
        topic, partition, hash_key, topology = target
        shard = shard_of(hash_key, topology.shards)
        pace = self._pace(topic, "none" if shard is None else str(shard.number), topology)
        progress.seconds_per_byte = await pace.acquire(len(entry.data), leave_by - asyncio.get_running_loop().time())
        pending = PendingPut(Put(entry.data, str(partition), str(hash_key)), leave_by + _LATE_SECONDS)
        self._batcher(topic).add(pending)
        try:
            return await pending.answer
        except Throttled as error:
            pace.throttle()
            raise Throttled(str(error), retry_after=pace.reserve(len(entry.data), patience=-1)) from error
        finally:
            progress.sent = pending.sent

    def _batcher(self, topic: str) -> PutBatcher:
        batcher = self._batchers.get(topic)
        if batcher is None:
            batcher = self._batchers[topic] = PutBatcher(self._send, topic)
        return batcher

    def _pace(self, topic: str, shard: str, topology: Topology) -> WritePace:
        pace = self._paces.get((topic, shard))
        if pace is None:
            closed = {str(one.number) for one in topology.shards if not one.is_open}
            for key in [key for key in self._paces if key[0] == topic and key[1] in closed]:
                self._paces.pop(key).forget()
            pace = self._paces[topic, shard] = WritePace(topic, shard)
        return pace

    async def close(self) -> None:
        """Accept nothing new and wait for requests under way, at most the request time-out."""
        self._closed = True
        running = [task for batcher in self._batchers.values() for task in batcher.running]
        if running:
            await asyncio.wait(running, timeout=self._timing.request + 1)


def _count(topic: str, partition: str, size: int) -> None:
    """Count a stored entry. The autoscaler reads the counts of the partitions to see where a shard can be split."""
    metrics.BROKER_PARTITION_BYTES.labels(topic, partition).inc(size)
    metrics.BROKER_PARTITION_ENTRIES.labels(topic, partition).inc()


class _Target(NamedTuple):
    topic: str
    partition: int
    hash_key: int
    topology: Topology


class _Progress:
    """The outcome of one append: which records are stored, which failed."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._first = self._last = -1
        self._stored: set[int] = set()
        self._under_way: Sequence[int] = ()
        self.unconfirmed: PutEntry | None = None
        """The entry under way when the append failed."""
        self.sent = False
        self.seconds_per_byte = 0.0
        self.failed: dict[int, Exception] = {}

    def sending(self, entry: PutEntry) -> None:
        self._under_way, self.unconfirmed, self.sent = entry.indexes, entry, False

    def store(self, entry: PutEntry, sequence: str) -> None:
        self._stored.update(entry.indexes)
        self.unconfirmed = None
        if self._first < 0:
            self._first = offset_of(sequence)
        self._last = offset_of(sequence, len(entry.indexes) - 1)

    def fail(self, error: BrokerError) -> None:
        """The entry under way failed with this error. The entries behind it were not tried, so they are certainly not
        stored."""
        behind = Unavailable(f"not tried: {error}") if isinstance(error, OutcomeUnknown) else error
        for index in range(self._count):
            if index not in self._stored and index not in self.failed:
                self.failed[index] = error if index in self._under_way else behind

    def appended(self) -> Appended:
        """The answer. Raises when nothing was stored, for a single reason."""
        if not self._stored and len({type(error) for error in self.failed.values()}) == 1:
            raise self.failed[min(self.failed)]
        return Appended(self._first, self._last, tuple(sorted(self.failed.items())), self.seconds_per_byte)
