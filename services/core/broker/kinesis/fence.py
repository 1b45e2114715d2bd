"""The end of a stream, exactly: an entry without records in each open shard, which is read back.

A record that was acknowledged may not be readable yet, and no answer of the service says so. But a shard is read in the order
of its sequence numbers. So who has read the fence has read everything that was stored before it. Readers pass an entry without
records over, as the KCL does.
"""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from services.core.broker.errors import OutcomeUnknown, Unavailable
from services.core.broker.kinesis.appender import MAX_ENTRIES, SendPuts
from services.core.broker.kinesis.aws import AWS_ERRORS, Put, classify_entry, classify_put
from services.core.broker.kinesis.record_format import FRAME_MAGIC, Packer, offset_of
from services.core.broker.kinesis.shard_source import IteratorExpired, ShardSource, UnknownSequence, at_sequence
from services.core.broker.kinesis.streams import Shard, shard_id

_ENTRIES = 100
_KEY = "0"


class Fence(NamedTuple):
    """seen: when it was read, monotonic. began_ms: it arrived later than that, by the service's clock."""

    seen: float
    offset: int
    began_ms: int


async def put_fences(send: SendPuts, topic: str, shards: Sequence[Shard]) -> dict[int, str]:
    """Store one in each of these open shards. Gives its sequence number by shard. May be repeated.

    Raises Throttled, Unavailable.
    """
    found: dict[int, str] = {}
    what = f"find the end of {topic}"
    for first in range(0, len(shards), MAX_ENTRIES):
        some = shards[first : first + MAX_ENTRIES]
        puts = [Put(Packer(_KEY, one.first_key, FRAME_MAGIC).pack([]), _KEY, str(one.first_key)) for one in some]
        try:
            rows = await send(topic, puts)
        except AWS_ERRORS as error:
            raise _repeatable(classify_put(error, what)) from error
        for shard, row in zip(some, rows, strict=True):
            if code := row.get("ErrorCode"):
                raise _repeatable(classify_entry(code, row.get("ErrorMessage", ""), what))
            if row["ShardId"] != shard_id(shard.number):
                raise Unavailable(f"{what}: its shards have just changed")
            found[shard.number] = row["SequenceNumber"]
    return found


def _repeatable(error: Exception) -> Exception:
    """A fence of unknown outcome is put again: a second one changes nothing."""
    return Unavailable(str(error)) if isinstance(error, OutcomeUnknown) else error


async def read_fence(source: ShardSource, sequence: str, within: float) -> int:
    """Wait until it can be read. Gives its offset. Raises Throttled, Unavailable."""
    try:
        async with asyncio.timeout(within):
            iterator: str | None = await source.iterator(at_sequence(sequence))
            while iterator is not None:
                await source.acquire(iterator)
                answer = await source.read(iterator, _ENTRIES)
                if any(entry["SequenceNumber"] == sequence for entry in answer.entries):
                    return offset_of(sequence)
                iterator = answer.next
    except (TimeoutError, IteratorExpired, UnknownSequence) as error:  # the last: another host does not know it yet
        raise Unavailable(f"{source.topic}[{source.shard}]: its end could not be read within {within:g} s") from error
    raise Unavailable(f"{source.topic}[{source.shard}] was split or merged meanwhile")
