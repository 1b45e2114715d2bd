"""The two requests with which a shard is read, paced, with their errors in our words."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from botocore.exceptions import ClientError

from services.core.broker.errors import Throttled, Unavailable
from services.core.broker.kinesis.faults import bounded, code_of
from services.core.broker.kinesis.read_pace import ReadPace
from services.core.broker.kinesis.shards import shard_id
from services.core.broker.kinesis.timing import Timing

Entry = Mapping[str, Any]
"""A Kinesis record as the SDK gives it."""

FIRST_ENTRIES = 4
"""Of a shard about which nothing is known: an entry may be a megabyte, and many shards may be read at once."""

_READ_BYTES = 1_000_000

OLDEST: Mapping[str, Any] = {"ShardIteratorType": "TRIM_HORIZON"}


class Expired(Exception):
    """The iterator is too old: more than five minutes went by since it was given."""


class BadSequence(Exception):
    """The service knows no such sequence number in this shard."""


class Answer(NamedTuple):
    """behind: ms behind the shard's end, 0 at it. next: the iterator to go on with; None: the shard has no more."""

    entries: Sequence[Entry]
    behind: int
    next: str | None


def at_sequence(number: str) -> Mapping[str, Any]:
    """Begin with this entry; with the first that is kept when it is too old."""
    return {"ShardIteratorType": "AT_SEQUENCE_NUMBER", "StartingSequenceNumber": number}


def after_sequence(number: str) -> Mapping[str, Any]:
    """Begin behind this entry; with the first that is kept when it is too old."""
    return {"ShardIteratorType": "AFTER_SEQUENCE_NUMBER", "StartingSequenceNumber": number}


def at_time(millis: int) -> Mapping[str, Any]:
    """Begin with what arrived then or later. The SDK cuts it to whole seconds, downwards."""
    return {"ShardIteratorType": "AT_TIMESTAMP", "Timestamp": datetime.fromtimestamp(max(0, millis) / 1000, UTC)}


def about_a_megabyte(entries: int, size: int) -> int:
    """How many entries to ask for, after so many of `size` bytes in all."""
    return max(1, _READ_BYTES * entries // max(1, size))


def arrival_of(entry: Entry) -> int:
    """When the service took it, ms."""
    return int(entry["ApproximateArrivalTimestamp"].timestamp() * 1000)


@dataclass(frozen=True, slots=True)
class ShardSource:
    """One shard of a stream. Whoever reads waits for its turn before; reads tell `pace` what came.

    is_closed: it was split or merged. It ends where the service gives no further iterator, and there only: `behind` 0 may be said
    too early.
    """

    kinesis: Any
    topic: str
    shard: int
    pace: ReadPace
    timing: Timing
    is_closed: bool

    async def iterator(self, where: Mapping[str, Any]) -> str:
        """An iterator. Raises BadSequence, UnknownTopic (of a shard too), Unavailable."""
        try:
            async with bounded(f"iterator for {self.topic}[{self.shard}]", self.timing.request):
                try:
                    answer = await self.kinesis.get_shard_iterator(
                        StreamName=self.topic, ShardId=shard_id(self.shard), **where
                    )
                except ClientError as error:
                    if code_of(error) == "InvalidArgumentException":
                        raise BadSequence(str(error)) from error
                    raise
        except Throttled:
            self.pace.throttle()
            raise
        return str(answer["ShardIterator"])

    def answers_at_once(self, iterator: str) -> bool:
        """Whether a read is answered as soon as it is made, not when something came."""
        return True

    async def turn(self, iterator: str) -> None:
        """Wait until the next read may be made."""
        if self.answers_at_once(iterator):
            await self.pace.turn()

    async def read(self, iterator: str, limit: int) -> Answer:
        """The next entries, at most `limit` (and 10 MB). Raises Expired, Throttled, UnknownTopic, Unavailable."""
        try:
            async with bounded(f"read {self.topic}[{self.shard}]", self.timing.request):
                try:
                    answer = await self.kinesis.get_records(ShardIterator=iterator, Limit=limit)
                except ClientError as error:
                    if code_of(error) == "ExpiredIteratorException":
                        raise Expired(str(error)) from error
                    raise
        except Throttled:
            self.pace.throttle()
            raise
        entries = answer["Records"]
        self.pace.read(sum(len(entry["Data"]) for entry in entries))
        behind = int(answer.get("MillisBehindLatest") or 0)
        # Milliseconds are coarse: behind a full answer there may be more of the same one.
        return Answer(entries, behind or int(len(entries) >= limit), answer.get("NextShardIterator"))

    async def read_on(self, where: Mapping[str, Any], limit: int) -> AsyncIterator[Answer]:
        """One answer after the other, of at most `limit` entries and about a megabyte, to the end as it was at first.

        Raises as the others do, but Unavailable for Expired.
        """
        iterator: str | None = await self.iterator(where)
        size = min(limit, FIRST_ENTRIES)
        newest: int | None = None
        while iterator is not None:
            await self.turn(iterator)
            try:
                answer = await self.read(iterator, size)
            except Expired as error:  # this process stood still for minutes
                raise Unavailable(f"read {self.topic}[{self.shard}]: {error}") from error
            yield answer
            iterator = answer.next if answer.behind or self.is_closed else None
            if answer.entries:
                read = sum(len(entry["Data"]) for entry in answer.entries)
                size = min(limit, about_a_megabyte(len(answer.entries), read))
                arrived = arrival_of(answer.entries[-1])
                newest = arrived + answer.behind if newest is None else newest
                if arrived > newest and not self.is_closed:
                    return
