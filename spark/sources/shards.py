"""The position of a query in a stream's shards, and its next records: children come after their parents. Records that retention
removed unread are an error.

The end of a shard is only known by reading it. So a micro-batch is planned with the beginning of each shard, and the task that
reads a shard decides where the batch ends in it (`ends`).
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from services.core.broker.errors import OffsetOutOfRange
from services.core.broker.kinesis.incarnation import Stream
from services.core.broker.kinesis.pace import ReadPace
from services.core.broker.kinesis.shard_lookup import KnownEnds
from services.core.broker.kinesis.streams import Shard
from services.core.broker.record import Batch, estimate_size
from spark.sources.offsets import Offset

BATCH_BYTES = 16 << 20
"""The bytes of one stream in a micro-batch, about."""
SETTLED_EVERY_MS = 3_600_000
"""The interval of an idle stream's empty batches. With each, the checkpoint records until when nothing was missed."""
_READ_RECORDS = 5_000
_LONGEST_READ_S = 20.0
"""A shard that others read, too, may give little: the batch ends with what was read so far, before its time limit ends it."""
_FULL_BYTES = 500_000
"""A read returns about a megabyte at most: after half of one there may be more."""


class ShardPosition(NamedTuple):
    """next: the offset to read next; 0: the beginning. settled: when (ms) the shard had no more records. ended: it gets no more.

    retention: the shortest (ms) since `settled`, for a longer one brings nothing back; 0: not known. begun: the first offset of
    the last batch that read something here; 0: none did.
    """

    next: int
    settled: int
    ended: bool = False
    retention: int = 0
    begun: int = 0

    def with_retention(self, retention_ms: int) -> "ShardPosition":
        """With the present retention of the stream."""
        return self._replace(retention=min(self.retention or retention_ms, retention_ms))


Shards = dict[int, ShardPosition]
"""By number."""


class ShardRecords(Protocol):
    """The records of shards, as `KinesisAdmin` reads them. ends: of what it has read."""

    ends: KnownEnds

    async def read_shard(self, topic: str, shard: Shard, offset: int, *, max_records: int) -> Batch | None:
        """As `Reader.read`."""

    def pace(self, topic: str, shard: int) -> ReadPace:
        """Of this process's reads."""


class ShardStart(NamedTuple):
    """Where a batch begins in a shard. retention: the stream's, ms.

    arrived: when the entry arrived that ends there, ms; 0: not known. rate, next_read: the pace of the reads before, a second,
    and the time (ms) of the next one; 0: none is known. refused: reads of the batches before that the service refused.
    """

    topic: str
    shard: Shard
    position: ShardPosition
    retention: int
    arrived: int = 0
    rate: float = 0.0
    next_read: int = 0
    refused: int = 0


class ShardRead(NamedTuple):
    """What was read of a shard. The next batch begins at `position`. more: it stopped at its limit, not at the shard's end."""

    position: ShardPosition
    batches: list[Batch]
    more: bool

    @property
    def records(self) -> int:
        return sum(len(batch.records) for batch in self.batches)


def pack_shards(topics: Mapping[str, tuple[str, Shards]]) -> Offset:
    """topic -> (incarnation of the stream, shards), in the form of `offsets`; big numbers as text."""
    packed = {
        topic: {
            "incarnation": incarnation,
            "next": {str(number): str(shards[number].next) for number in sorted(shards)},
            "settled": {str(number): shards[number].settled for number in sorted(shards)},
            "ended": [number for number in sorted(shards) if shards[number].ended],
            "retention": {str(number): shards[number].retention for number in sorted(shards)},
            "begun": {str(number): str(shards[number].begun) for number in sorted(shards)},
        }
        for topic, (incarnation, shards) in sorted(topics.items())
    }
    return {"topics": packed}


def shards_of(offset: Offset, topic: str) -> tuple[str, Shards]:
    """Of one topic; ("", {}) for one that the query has not read yet."""
    found = offset["topics"].get(topic)
    if found is None:
        return "", {}
    settled, ended = found["settled"], found["ended"]
    retention, begun = found.get("retention", {}), found.get("begun", {})  # not in older checkpoints
    return found["incarnation"], {
        int(number): ShardPosition(
            int(following),
            settled[number],
            int(number) in ended,
            retention.get(number, 0),
            int(begun.get(number, 0)),
        )
        for number, following in found["next"].items()
    }


def list_shards(topic: str, stream: Stream, known: Shards, now_ms: int) -> Shards:
    """The shards as they are now: new ones at their beginning, without those that expired.

    A batch begins at positions that are in Spark's log before it runs: these record until when nothing was missed. Raises
    OffsetOutOfRange when a shard expired that was not read for a whole retention.
    """
    kept = {shard.number for shard in stream.shards}
    known = {number: position.with_retention(stream.retention_ms) for number, position in known.items()}
    for number, position in known.items():
        if number not in kept and not position.ended and is_overdue(position, stream.retention_ms, now_ms):
            raise OffsetOutOfRange(topic, number, position.next, position.next + 1, position.next + 1, contiguous=False)
    listed = dict[int, ShardPosition]()
    for shard in stream.shards:
        parents = [known[number] for number in shard.parents if number in known]
        settled = min((parent.settled for parent in parents), default=now_ms)
        shortest = min((parent.retention for parent in parents), default=stream.retention_ms)
        listed[shard.number] = known.get(shard.number, ShardPosition(0, settled, retention=shortest))
    return dict(sorted(listed.items()))


def is_overdue(position: ShardPosition, retention_ms: int, now_ms: int) -> bool:
    """Whether records may have arrived and expired since the last read. retention_ms: the stream's, now."""
    return position.settled + position.with_retention(retention_ms).retention < now_ms


def check_beginning(topic: str, shard: int, position: ShardPosition, retention_ms: int, now_ms: int) -> None:
    """Raise OffsetOutOfRange when a shard is to be read from its beginning, and its first records may be gone."""
    if not position.next and is_overdue(position, retention_ms, now_ms):
        raise OffsetOutOfRange(topic, shard, 0, 1, 1, contiguous=False)


def readable(stream: Stream, known: Shards) -> list[Shard]:
    """Shards that have not ended, and whose parents ended in an earlier batch: so keys keep their order between tasks, too."""
    unfinished = {number for number, position in known.items() if not position.ended}
    return [shard for shard in stream.shards if shard.number in unfinished and unfinished.isdisjoint(shard.parents)]


async def has_more(reader: ShardRecords, begin: ShardStart) -> bool:
    """Whether a batch would find anything: records, the end of a closed shard, or an error. Once an hour it does in any case."""
    if time.time_ns() // 1_000_000 - begin.position.settled > SETTLED_EVERY_MS:
        return True
    try:
        batch = await reader.read_shard(begin.topic, begin.shard, begin.position.next, max_records=1)
    except OffsetOutOfRange:
        return True
    return batch is not None or not begin.shard.is_open


async def read_shards(reader: ShardRecords, starts: Sequence[ShardStart], room: int, size: int) -> list[ShardRead]:
    """Of each shard about `room` records and `size` bytes at most, in about 20 s.

    Raises OffsetOutOfRange, UnknownTopic, Unavailable.
    """
    reads = [asyncio.create_task(_read_shard(reader, start, room, size)) for start in starts]
    try:
        return await asyncio.gather(*reads)
    finally:  # after a failure the others would use up the limits of their shards, beside the next attempt
        for read in reads:
            read.cancel()
        await asyncio.gather(*reads, return_exceptions=True)


async def _read_shard(reader: ShardRecords, start: ShardStart, room: int, size: int) -> ShardRead:
    topic, shard, retention = start.topic, start.shard, start.retention
    known = start.position.with_retention(retention)
    at, batches = known.next, list[Batch]()
    check_beginning(topic, shard.number, known, retention, time.time_ns() // 1_000_000)
    is_more, until = True, time.monotonic() + _LONGEST_READ_S
    while room > 0 and size > 0 and is_more:  # up to the end: later records are for the next batch
        if batches and time.monotonic() > until:
            break
        now = time.time_ns() // 1_000_000
        overdue = is_overdue(known, retention, now)
        asked = min(room, _READ_RECORDS)
        try:
            batch = await reader.read_shard(topic, shard, at, max_records=asked)
        except OffsetOutOfRange as error:
            if batches or overdue or error.start <= at:
                raise
            at = error.start  # only records that were read before have expired: the last read was in time
            continue
        if batch is None:
            if overdue and not batches:
                await _check_last(reader, topic, shard, at)
            position = _position_after(known, at, batches)._replace(ended=not shard.is_open)
            if batches or now - known.settled > SETTLED_EVERY_MS:
                position = position._replace(settled=now, retention=retention)
            return ShardRead(position, batches, more=False)
        batches.append(batch)
        at = batch.offsets[-1] + 1
        room -= len(batch.records)
        size -= (given := estimate_size(batch.records))
        is_more = len(batch.records) == asked or given >= _FULL_BYTES
    return ShardRead(_position_after(known, at, batches), batches, is_more)


def _position_after(known: ShardPosition, at: int, batches: list[Batch]) -> ShardPosition:
    return known._replace(next=at, begun=batches[0].offsets[0] if batches else known.begun)


async def _check_last(reader: ShardRecords, topic: str, shard: Shard, at: int) -> None:
    """Raise OffsetOutOfRange unless the last read record is still there: then no later record expired."""
    if await reader.read_shard(topic, shard, at - 1, max_records=1) is None:
        raise OffsetOutOfRange(topic, shard.number, at, at + 1, at + 1, contiguous=False)
