"""GetShardIterator and GetRecords of one shard, paced, with our errors."""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from botocore.exceptions import ClientError

from services.core.broker.errors import Throttled, Unavailable
from services.core.broker.kinesis.aws import Timing, bounded, code_of
from services.core.broker.kinesis.pace import ReadPace
from services.core.broker.kinesis.record_format import RawRecord, arrival_of
from services.core.broker.kinesis.streams import shard_id

FIRST_ENTRIES = 4
"""For the first read of a shard: an entry may be a megabyte, and many shards may be read at once."""

_READ_BYTES = 1_000_000
_PATIENCE_S = 20.0
"""With what was read before: to begin again would take more of the shard's limits."""

OLDEST: Mapping[str, Any] = {"ShardIteratorType": "TRIM_HORIZON"}


class IteratorExpired(Exception):
    """More than five minutes passed since the iterator was returned."""


class UnknownSequence(Exception):
    """The service knows no such sequence number in this shard."""


class ReadResult(NamedTuple):
    """millis_behind: behind the shard's end, 0 at it. next: the next iterator; None: the shard has no more."""

    entries: Sequence[RawRecord]
    millis_behind: int
    next: str | None


def at_sequence(number: str) -> Mapping[str, Any]:
    """From this entry on; from the oldest one when it expired."""
    return {"ShardIteratorType": "AT_SEQUENCE_NUMBER", "StartingSequenceNumber": number}


def after_sequence(number: str) -> Mapping[str, Any]:
    """From behind this entry on; from the oldest one when it expired."""
    return {"ShardIteratorType": "AFTER_SEQUENCE_NUMBER", "StartingSequenceNumber": number}


def at_time(millis: int) -> Mapping[str, Any]:
    """From this arrival time on. The SDK rounds it down to whole seconds."""
    return {"ShardIteratorType": "AT_TIMESTAMP", "Timestamp": datetime.fromtimestamp(max(0, millis) / 1000, UTC)}


def entries_per_megabyte(entries: int, size: int) -> int:
    """The number of entries in a megabyte, when these have `size` bytes in all."""
    return max(1, _READ_BYTES * entries // max(1, size))


@dataclass(frozen=True, slots=True)
class ShardSource:
    """One shard of a stream. The caller calls `acquire` before each read.

    is_closed: it was split or merged. It ends only where the service returns no further iterator: 0 milliseconds
    behind may be reported too early.
    """

    kinesis: Any
    topic: str
    shard: int
    pace: ReadPace
    timing: Timing
    is_closed: bool

    async def iterator(self, where: Mapping[str, Any]) -> str:
        """Raises UnknownSequence, UnknownTopic (of a shard too), Unavailable."""
        async with self._throttled(), bounded(f"iterator for {self.topic}[{self.shard}]", self.timing.request):
            try:
                answer = await self.kinesis.get_shard_iterator(
                    StreamName=self.topic, ShardId=shard_id(self.shard), **where
                )
            except ClientError as error:
                if code_of(error) == "InvalidArgumentException":
                    raise UnknownSequence(str(error)) from error
                raise
        return str(answer["ShardIterator"])

    def is_polled(self, iterator: str) -> bool:
        """Whether a read is answered at once. Else it is answered when records arrive."""
        return True

    async def acquire(self, iterator: str) -> None:
        """Wait until the next read may be made."""
        if self.is_polled(iterator):
            await self.pace.acquire()

    async def read(self, iterator: str, limit: int) -> ReadResult:
        """The next entries, at most `limit` (and 10 MB). Raises IteratorExpired, Throttled, UnknownTopic, Unavailable."""
        async with self._throttled(), bounded(f"read {self.topic}[{self.shard}]", self.timing.request):
            try:
                answer = await self.kinesis.get_records(ShardIterator=iterator, Limit=limit)
            except ClientError as error:
                if code_of(error) == "ExpiredIteratorException":
                    raise IteratorExpired(str(error)) from error
                raise
        entries = answer["Records"]
        self.pace.read(sum(len(entry["Data"]) for entry in entries))
        behind = int(answer.get("MillisBehindLatest") or 0)
        # Milliseconds are coarse: after a full answer there may be more entries of the same one.
        return ReadResult(entries, behind or int(len(entries) >= limit), answer.get("NextShardIterator"))

    async def _read_patiently(self, iterator: str, limit: int) -> ReadResult:
        """As `read`. One that is refused is repeated at the pace, which is slower then, for 20 s at most."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return await self.read(iterator, limit)
            except Throttled:
                if time.monotonic() > deadline:
                    raise
            await self.acquire(iterator)

    @asynccontextmanager
    async def _throttled(self) -> AsyncIterator[None]:
        """A throttle slows down the next request."""
        try:
            yield
        except Throttled:
            self.pace.throttle()
            raise

    async def read_to_end(self, where: Mapping[str, Any], limit: int) -> AsyncIterator[ReadResult]:
        """The answers, of at most `limit` entries and about a megabyte each, up to the end at the time of the first
        one.

        Raises as `iterator` and `read`, with Unavailable for IteratorExpired.
        """
        await self.pace.acquire()  # for the iterator and the first read: a shard gives five of each a second
        iterator: str | None = await self.iterator(where)
        size = min(limit, FIRST_ENTRIES)
        newest: int | None = None
        while iterator is not None:
            try:
                answer = await self._read_patiently(iterator, size)
            except IteratorExpired as error:  # this process was suspended for minutes
                raise Unavailable(f"read {self.topic}[{self.shard}]: {error}") from error
            yield answer
            iterator = answer.next if answer.millis_behind or self.is_closed else None
            if answer.entries:
                read = sum(len(entry["Data"]) for entry in answer.entries)
                size = min(limit, entries_per_megabyte(len(answer.entries), read))
                arrived = arrival_of(answer.entries[-1])
                newest = arrived + answer.millis_behind if newest is None else newest
                if arrived > newest and not self.is_closed:
                    return
            if iterator is not None:
                await self.acquire(iterator)
