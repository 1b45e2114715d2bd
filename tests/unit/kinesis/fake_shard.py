"""One shard in memory behind the two requests that read it, with the ways it can fail."""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from botocore.exceptions import ClientError

from services.core.broker.kinesis.aws import Timing
from services.core.broker.kinesis.pace import ReadPace
from services.core.broker.kinesis.record_format import make_entries
from services.core.broker.kinesis.shard_source import ShardSource
from services.core.broker.record import Record


class Hurried(ReadPace):
    """Counts as the real one, and waits for nothing but the other tasks."""

    async def acquire(self) -> None:
        await asyncio.sleep(0)


class FakeShard:
    """The client. fail: error codes that the next reads answer with. per_read: entries an answer holds at most.

    given: entries in all answers.

    hesitates: so many reads give nothing, and say that it was all. grows: with each read one more entry arrives, a second later.
    is_gone: it cannot be read, and unless is_listed the stream has no such shard.
    """

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.now_ms = 1_000_000_000
        self.closed = False
        self.fail: list[str] = []
        self.per_read = 100
        self.grows = self.is_gone = self.is_listed = False
        self.hesitates = 0
        self.reads = 0
        self.given = 0
        self.iterators: list[str] = []
        self._next = 1

    def put(self, numbers: Sequence[int], data: bytes | None = None, size: int = 0) -> int:
        """One entry with these records of `size` bytes or more, each as old as its number; gives its sequence number."""
        records = [Record(b"k", (b"%d" % number).ljust(size), number) for number in numbers]
        ((entry,), _) = make_entries(records, "0", 0)
        sequence, self._next = self._next, self._next + 10
        arrived = datetime.fromtimestamp(self.now_ms / 1000, UTC)
        stored = entry.data if data is None else data
        self.entries.append(
            {
                "SequenceNumber": str(sequence),
                "ApproximateArrivalTimestamp": arrived,
                "Data": stored,
                "PartitionKey": "0",
            }
        )
        return sequence

    def trim(self, sequence: int) -> None:
        """Retention takes what is older."""
        self.entries = [entry for entry in self.entries if int(entry["SequenceNumber"]) >= sequence]

    def source(self) -> ShardSource:
        """To be read from."""
        return ShardSource(self, "t", 0, Hurried("t", 0), Timing(), self.closed)

    async def get_shard_iterator(self, **asked: Any) -> dict[str, Any]:
        if self.is_gone:
            raise ClientError({"Error": {"Code": "ResourceNotFoundException", "Message": ""}}, "GetShardIterator")
        kind = asked["ShardIteratorType"]
        self.iterators.append(kind)
        if kind == "AT_SEQUENCE_NUMBER":
            return {"ShardIterator": asked["StartingSequenceNumber"]}
        if kind == "AFTER_SEQUENCE_NUMBER":
            return {"ShardIterator": str(int(asked["StartingSequenceNumber"]) + 1)}
        if kind == "TRIM_HORIZON":
            return {"ShardIterator": "0"}
        at = asked["Timestamp"]
        later = [int(e["SequenceNumber"]) for e in self.entries if e["ApproximateArrivalTimestamp"] >= at]
        return {"ShardIterator": str(min(later, default=self._next))}

    async def get_records(self, **asked: Any) -> dict[str, Any]:
        if self.fail:
            raise ClientError({"Error": {"Code": self.fail.pop(0), "Message": ""}}, "GetRecords")
        self.reads += 1
        if self.grows:
            self.now_ms += 1000
            self.put([self.now_ms])
        if self.hesitates:
            self.hesitates -= 1
            return {"Records": [], "MillisBehindLatest": 0, "NextShardIterator": asked["ShardIterator"]}
        at = int(asked["ShardIterator"])
        rest = [entry for entry in self.entries if int(entry["SequenceNumber"]) >= at]
        given = rest[: min(self.per_read, asked["Limit"])]
        self.given += len(given)
        position = int(given[-1]["SequenceNumber"]) + 1 if given else at
        is_over = self.closed and len(given) == len(rest)
        return {
            "Records": given,
            "MillisBehindLatest": 0 if len(given) == len(rest) else 1000,
            "NextShardIterator": None if is_over else str(position),
        }
