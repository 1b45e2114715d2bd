"""The position of a query in a stream's shards, and its next records: children come after their parents. Records that retention
removed unread are an error.

The end of a shard is only known by reading it. So the records of a micro-batch are read when it is planned.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import NamedTuple

from services.core.broker.contract import Reader
from services.core.broker.errors import OffsetOutOfRange
from services.core.broker.kinesis.incarnation import Stream
from services.core.broker.kinesis.streams import Shard
from services.core.broker.record import Batch, estimate_size
from spark.sources.offsets import Offset

BATCH_BYTES = 16 << 20
"""The bytes of one stream in a micro-batch, about."""
SETTLED_EVERY_MS = 3_600_000
"""The interval of an idle stream's empty batches. With each, the checkpoint records until when nothing was missed."""
_READ_RECORDS = 5_000
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


class Planned(NamedTuple):
    """The next records of one shard: from `start` on. Reading continues at `position`."""

    start: int
    position: ShardPosition
    batches: list[Batch]


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

    A batch reads only shards that the batch before it listed. So its start offset records until when nothing of them was missed.
    Raises OffsetOutOfRange when a shard expired that was not read for a whole retention.
    """
    kept = {shard.number for shard in stream.shards}
    known = {number: position.with_retention(stream.retention_ms) for number, position in known.items()}
    for number, position in known.items():
        if number not in kept and not position.ended and is_overdue(stream, position, now_ms):
            raise OffsetOutOfRange(topic, number, position.next, position.next + 1, position.next + 1, contiguous=False)
    listed = dict[int, ShardPosition]()
    for shard in stream.shards:
        parents = [known[number] for number in shard.parents if number in known]
        settled = min((parent.settled for parent in parents), default=now_ms)
        shortest = min((parent.retention for parent in parents), default=stream.retention_ms)
        listed[shard.number] = known.get(shard.number, ShardPosition(0, settled, retention=shortest))
    return dict(sorted(listed.items()))


def is_overdue(stream: Stream, position: ShardPosition, now_ms: int) -> bool:
    """Whether records may have arrived and expired since the last read."""
    return position.settled + position.with_retention(stream.retention_ms).retention < now_ms


def check_beginning(topic: str, stream: Stream, shard: int, position: ShardPosition, now_ms: int) -> None:
    """Raise OffsetOutOfRange when a shard is to be read from its beginning, and its first records may be gone."""
    if not position.next and is_overdue(stream, position, now_ms):
        raise OffsetOutOfRange(topic, shard, 0, 1, 1, contiguous=False)


def readable(stream: Stream, known: Shards) -> list[Shard]:
    """Shards that have not ended, and whose parents ended in an earlier batch: so keys keep their order between tasks, too."""
    unfinished = {number for number, position in known.items() if not position.ended}
    return [shard for shard in stream.shards if shard.number in unfinished and unfinished.isdisjoint(shard.parents)]


async def read_shards(reader: Reader, topic: str, stream: Stream, known: Shards, room: int) -> dict[int, Planned]:
    """About `room` records and BATCH_BYTES at most, shared evenly by the readable shards.

    Raises OffsetOutOfRange, UnknownTopic, Unavailable.
    """
    shards = readable(stream, known)
    if not shards:
        return {}
    share, size = -(-room // len(shards)), BATCH_BYTES // len(shards)
    found = await asyncio.gather(
        *(_read_shard(reader, topic, stream, shard, known[shard.number], share, size) for shard in shards)
    )
    return {shard.number: planned for shard, planned in zip(shards, found, strict=True)}


async def _read_shard(
    reader: Reader, topic: str, stream: Stream, shard: Shard, known: ShardPosition, room: int, size: int
) -> Planned:
    known = known.with_retention(stream.retention_ms)
    at, batches = known.next, list[Batch]()
    check_beginning(topic, stream, shard.number, known, time.time_ns() // 1_000_000)
    is_more = True
    while room > 0 and size > 0 and is_more:  # up to the end: later records are for the next batch
        now = time.time_ns() // 1_000_000
        overdue = is_overdue(stream, known, now)
        asked = min(room, _READ_RECORDS)
        try:
            batch = await reader.read(topic, shard.number, at, max_records=asked)
        except OffsetOutOfRange as error:
            if batches or overdue or error.start <= at:
                raise
            at = error.start  # only records that were read before have expired: the last read was in time
            continue
        if batch is None:
            if overdue and not batches:
                await _check_last(reader, topic, shard.number, at)
            position = _position_after(known, at, batches)._replace(ended=not shard.is_open)
            if batches or now - known.settled > SETTLED_EVERY_MS:
                position = position._replace(settled=now, retention=stream.retention_ms)
            return Planned(known.next, position, batches)
        batches.append(batch)
        at = batch.offsets[-1] + 1
        room -= len(batch.records)
        size -= (given := estimate_size(batch.records))
        is_more = len(batch.records) == asked or given >= _FULL_BYTES
    return Planned(known.next, _position_after(known, at, batches), batches)


def _position_after(known: ShardPosition, at: int, batches: list[Batch]) -> ShardPosition:
    return known._replace(next=at, begun=batches[0].offsets[0] if batches else known.begun)


async def _check_last(reader: Reader, topic: str, shard: int, at: int) -> None:
    """Raise OffsetOutOfRange unless the last read record is still there: then no later record expired."""
    if await reader.read(topic, shard, at - 1, max_records=1) is None:
        raise OffsetOutOfRange(topic, shard, at, at + 1, at + 1, contiguous=False)
