"""Kinesis and DynamoDB for readers: what the two services answer to the requests of the real reading code.

What is replaced are the SDK's clients: their methods take the same arguments, and give the same answers or raise its errors.
A shard answers five reads a second. An iterator may expire. A request may be refused, or be carried out without an answer.
"""
# ruff: noqa: N803 - the names of arguments are the SDK's

import asyncio
import random
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any

from botocore.exceptions import ClientError, ReadTimeoutError

from services.core.broker.kinesis.record_format import make_entries
from services.core.broker.kinesis.streams import (
    HASH_KEYS,
    PARTITIONS_TAG,
    Shard,
    hash_key_of,
    open_shards,
    shard_id,
    shard_number,
    shard_of,
)
from services.core.broker.record import Record
from tests.simulation.machine import WORLD, Machine
from tests.support.virtual_loop import EPOCH

_MOST_SHARDS = 6
_READS_PER_SECOND = 5
_HOURS = 24
_THROTTLED = "ProvisionedThroughputExceededException"
_REFUSALS = (_THROTTLED, "LimitExceededException", "InternalFailure", "ServiceUnavailable", "KMSThrottlingException")
_CUT = "ConditionalCheckFailedException"


@dataclass(eq=False)
class Stream:
    """One life of a stream. made: seconds."""

    partitions: int
    made: int
    shards: list[Shard] = field(default_factory=list)
    entries: dict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    reads: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """When each shard was read lately."""


class Service:
    """Both services. faults: by kind of request, how often one is refused, or not answered."""

    def __init__(self, machine: Machine, rng: random.Random) -> None:
        self.machine, self.rng = machine, rng
        self.streams: dict[str, Stream] = {}
        self.tables: dict[str, dict[str, dict[str, Any]]] = {}
        self.faults = {"reads": 0.0, "table": 0.0, "calls": 0.0}
        self.valid_since = 0.0
        """Iterators that were given before this have expired."""
        self.untagged: set[str] = set()
        """Streams whose tag somebody's infrastructure code has removed."""
        self._sequence = 1
        self._names = 0

    def create(self, name: str, partitions: int) -> None:
        """With a shard for each partition. A stream is never made twice in a second."""
        before = self.streams.get(name)
        made = max(int(EPOCH + self.machine.time()), 0 if before is None else before.made + 1)
        step = HASH_KEYS // partitions
        shards = [
            Shard(n, (), n * step, HASH_KEYS - 1 if n + 1 == partitions else (n + 1) * step - 1, True)
            for n in range(partitions)
        ]
        self.streams[name] = Stream(partitions, made, shards)
        self.untagged.discard(name)

    def put(
        self, name: str, partition: int, records: list[Record], copy_of: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """An entry: a new one, or the second copy of one."""
        stream = self.streams[name]
        hash_key = hash_key_of(partition, stream.partitions)
        shard = shard_of(hash_key, stream.shards)
        assert shard is not None
        self._sequence += self.rng.randint(1, 3)
        self._names += 1
        if copy_of is None:
            ((made,), _) = make_entries(records, str(partition), hash_key, lambda _bodies: b"%032d" % self._names)
            data = made.data
        else:
            data = copy_of["Data"]
        entry = {
            "SequenceNumber": str(self._sequence),
            "ApproximateArrivalTimestamp": datetime.fromtimestamp(EPOCH + self.machine.time(), UTC),
            "Data": data,
            "PartitionKey": str(partition),
        }
        stream.entries[shard.number].append(entry)
        return entry

    def split(self, name: str) -> None:
        """An open shard becomes two."""
        stream = self.streams[name]
        shard = self.rng.choice(open_shards(stream.shards))
        if len(open_shards(stream.shards)) < _MOST_SHARDS:
            middle = (shard.first_key + shard.last_key) // 2
            self._replace(stream, [shard], [(shard.first_key, middle), (middle + 1, shard.last_key)])

    def merge(self, name: str) -> None:
        """Two neighbours become one."""
        stream = self.streams[name]
        shards = open_shards(stream.shards)
        if len(shards) > 1:
            at = self.rng.randrange(1, len(shards))
            self._replace(stream, shards[at - 1 : at + 1], [(shards[at - 1].first_key, shards[at].last_key)])

    def _replace(self, stream: Stream, parents: list[Shard], ranges: list[tuple[int, int]]) -> None:
        numbers = tuple(parent.number for parent in parents)
        for parent in parents:
            stream.shards[parent.number] = parent._replace(is_open=False)
        for first, last in ranges:
            stream.shards.append(Shard(len(stream.shards), numbers, first, last, True))

    async def answer(self, kind: str, carry_out: Callable[[], Any]) -> Any:
        """One request of a process, which may end before it is carried out."""
        rng, machine = self.rng, self.machine
        is_bad = rng.random() < self.faults[kind]
        how = rng.choice(("refused", "refused", "request", "answer", "slow")) if is_bad else "ok"
        if how == "refused":
            await asyncio.sleep(0.002)
            raise _error(rng.choice(_REFUSALS))
        waiting: asyncio.Future[Any] = machine.create_future()
        if how != "request":
            delay = rng.uniform(0.1, 2.5) if how == "slow" else rng.choice((0.001, 0.004))
            machine.call_later(delay, _settle, waiting, carry_out, context=WORLD)
        if how in ("request", "answer"):
            await asyncio.sleep(rng.choice((0.01, 2.0)))
            raise ReadTimeoutError(endpoint_url="x")
        return await waiting

    def stream(self, name: str) -> Stream:
        """Raises the SDK's error."""
        if name not in self.streams:
            raise _error("ResourceNotFoundException")
        return self.streams[name]


def _settle(waiting: "asyncio.Future[Any]", carry_out: Callable[[], Any]) -> None:
    try:
        result = carry_out()
    except ClientError as error:
        if not waiting.done():
            waiting.set_exception(error)
            waiting.exception()  # who asked may be gone
    else:
        if not waiting.done():
            waiting.set_result(result)


def _error(code: str) -> ClientError:
    response: Any = {"Error": {"Code": code, "Message": "on purpose"}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    return ClientError(response, "call")


class KinesisClient:
    """The methods of the SDK's client that readers use."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def describe_stream_summary(self, *, StreamName: str) -> Any:
        """As there."""

        def find() -> Any:
            stream = self._service.stream(StreamName)
            summary = {
                "StreamARN": f"arn:aws:kinesis:eu-central-1:123456789012:stream/{StreamName}",
                "StreamName": StreamName,
                "StreamStatus": "ACTIVE",
                "StreamCreationTimestamp": datetime.fromtimestamp(stream.made, UTC),
                "RetentionPeriodHours": _HOURS,
            }
            date = formatdate(int(EPOCH + self._service.machine.time()), usegmt=True)
            return {
                "StreamDescriptionSummary": summary,
                "ResponseMetadata": {"HTTPHeaders": {"date": date}},
            }

        return await self._service.answer("calls", find)

    async def list_shards(self, *, StreamName: str) -> Any:
        """As there, on one page."""

        def find() -> Any:
            return {"Shards": [_row(shard) for shard in self._service.stream(StreamName).shards]}

        return await self._service.answer("calls", find)

    async def list_tags_for_stream(self, *, StreamName: str, Limit: int) -> Any:
        """As there."""

        def find() -> Any:
            tag = {"Key": PARTITIONS_TAG, "Value": str(self._service.stream(StreamName).partitions)}
            return {"Tags": [] if StreamName in self._service.untagged else [tag][:Limit]}

        return await self._service.answer("calls", find)

    async def get_shard_iterator(self, *, StreamName: str, ShardId: str, **where: Any) -> Any:
        """As there."""

        def find() -> Any:
            stream, number = self._service.stream(StreamName), shard_number(ShardId)
            if number >= len(stream.shards):
                raise _error("ResourceNotFoundException")
            match where["ShardIteratorType"]:
                case "AT_SEQUENCE_NUMBER":
                    at = int(where["StartingSequenceNumber"])
                case "AFTER_SEQUENCE_NUMBER":
                    at = int(where["StartingSequenceNumber"]) + 1
                case "TRIM_HORIZON":
                    at = 0
                case _:
                    at = _at_time(stream.entries[number], where["Timestamp"])
            return {"ShardIterator": f"{StreamName} {stream.made} {number} {at} {self._service.machine.time()}"}

        return await self._service.answer("reads", find)

    async def get_records(self, *, ShardIterator: str, Limit: int) -> Any:
        """As there."""

        def read() -> Any:
            service = self._service
            name, made, number, at, given = ShardIterator.split()
            stream, shard, now = service.stream(name), int(number), service.machine.time()
            if int(made) != stream.made:
                raise _error("ResourceNotFoundException")
            if float(given) < service.valid_since:
                raise _error("ExpiredIteratorException")
            lately = stream.reads[shard] = [when for when in stream.reads[shard] if when > now - 1.0]
            if len(lately) >= _READS_PER_SECOND:
                raise _error(_THROTTLED)
            lately.append(now)
            entries = stream.entries[shard]
            rest = entries[bisect_left(entries, int(at), key=lambda one: int(one["SequenceNumber"])) :]
            some = rest[: min(Limit, service.rng.choice((1, 3, 1000)))]
            after = int(some[-1]["SequenceNumber"]) + 1 if some else int(at)
            is_over = not stream.shards[shard].is_open and len(some) == len(rest)
            following = None if is_over else f"{name} {made} {number} {after} {now}"
            behind = 0 if len(some) == len(rest) else 1000
            return {"Records": some, "MillisBehindLatest": behind, "NextShardIterator": following}

        return await self._service.answer("reads", read)


def _at_time(entries: list[dict[str, Any]], when: datetime) -> int:
    when = when.replace(microsecond=0)  # the SDK sends whole seconds
    later = (int(one["SequenceNumber"]) for one in entries if one["ApproximateArrivalTimestamp"] >= when)
    end = int(entries[-1]["SequenceNumber"]) + 1 if entries else 0
    return next(later, end)


def _row(shard: Shard) -> dict[str, Any]:
    row: dict[str, Any] = {
        "ShardId": shard_id(shard.number),
        "HashKeyRange": {"StartingHashKey": str(shard.first_key), "EndingHashKey": str(shard.last_key)},
        "SequenceNumberRange": {} if shard.is_open else {"EndingSequenceNumber": "1"},
    }
    for name, parent in zip(("ParentShardId", "AdjacentParentShardId"), shard.parents, strict=False):
        row[name] = shard_id(parent)
    return row


class DynamoClient:
    """The methods of the SDK's client that lease tables use. Conditions: that the key is new, or the counter unchanged."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def _table(self, name: str) -> dict[str, dict[str, Any]]:
        if name not in self._service.tables:
            raise _error("ResourceNotFoundException")
        return self._service.tables[name]

    async def describe_table(self, *, TableName: str) -> Any:
        """As there."""

        def find() -> Any:
            self._table(TableName)
            return {"Table": {"TableStatus": "ACTIVE"}}

        return await self._service.answer("table", find)

    async def create_table(self, *, TableName: str, **_: Any) -> Any:
        """As there; it can be used at once."""

        def create() -> Any:
            if TableName in self._service.tables:
                raise _error("ResourceInUseException")
            self._service.tables[TableName] = {}

        return await self._service.answer("table", create)

    async def scan(self, *, TableName: str, **_: Any) -> Any:
        """As there, on one page."""
        return await self._service.answer(
            "table", lambda: {"Items": [dict(item) for item in self._table(TableName).values()]}
        )

    async def get_item(self, *, TableName: str, Key: Any, **_: Any) -> Any:
        """As there."""
        key = Key["leaseKey"]["S"]
        return await self._service.answer("table", lambda: {"Item": dict(self._table(TableName).get(key, {}))})

    async def put_item(self, *, TableName: str, Item: Any, ConditionExpression: str) -> Any:
        """As there."""
        assert ConditionExpression == "attribute_not_exists(leaseKey)"

        def put() -> Any:
            if Item["leaseKey"]["S"] in self._table(TableName):
                raise _error(_CUT)
            self._table(TableName)[Item["leaseKey"]["S"]] = dict(Item)

        return await self._service.answer("table", put)

    async def delete_item(
        self,
        *,
        TableName: str,
        Key: Any,
        ConditionExpression: str,
        ExpressionAttributeValues: Any,
    ) -> Any:
        """As there."""
        assert ConditionExpression == "leaseCounter = :was"

        def remove() -> Any:
            self._check(TableName, Key, ExpressionAttributeValues)
            del self._table(TableName)[Key["leaseKey"]["S"]]

        return await self._service.answer("table", remove)

    async def update_item(
        self,
        *,
        TableName: str,
        Key: Any,
        UpdateExpression: str,
        ConditionExpression: str,
        ExpressionAttributeNames: Mapping[str, str],
        ExpressionAttributeValues: Mapping[str, Any],
    ) -> Any:
        """As there: SET of some columns, and REMOVE of others."""
        assert ConditionExpression == "leaseCounter = :was"

        def update() -> Any:
            item = self._check(TableName, Key, ExpressionAttributeValues)
            to_set, _, to_remove = UpdateExpression.removeprefix("SET ").partition(" REMOVE ")
            for each in to_set.split(", "):
                name, _, value = each.partition(" = ")
                item[ExpressionAttributeNames[name]] = ExpressionAttributeValues[value]
            for name in filter(None, to_remove.split(", ")):
                item.pop(ExpressionAttributeNames[name], None)

        return await self._service.answer("table", update)

    def _check(self, table: str, key: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        item = self._table(table).get(key["leaseKey"]["S"])
        if item is None or item["leaseCounter"] != values[":was"]:
            raise _error(_CUT)
        return item
