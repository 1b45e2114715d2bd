"""A group's lease table in DynamoDB, in the KCL's format for several streams, so that its tools can read it.

Our additional columns begin with `penstock`; the KCL ignores them. The meaning of a row: `leases`. Source: "DynamoDB
metadata tables and load balancing in KCL", Kinesis Data Streams developer guide.
"""

import asyncio
import re
import time
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import ClientError

from services.core.broker.errors import Unavailable
from services.core.broker.kinesis.aws import Timing, bounded, code_of
from services.core.broker.kinesis.leases import OLDEST, Lease, StartPosition
from services.core.broker.kinesis.record_format import offset_of, split_offset
from services.core.broker.kinesis.streams import shard_id, shard_number

TABLE_PREFIX = "penstock-"
SHARD_END = "SHARD_END"
_SENTINELS = {"oldest": "TRIM_HORIZON", "arrival": "AT_TIMESTAMP", "date": "AT_TIMESTAMP", "offset": "AT_TIMESTAMP"}
_LIMIT = "checkpointOwnerTimeoutTimestampMillis"
_CREATE_SECONDS = 60.0
_PAUSE = 0.1

Item = dict[str, dict[str, Any]]


def table_name(group: str, prefix: str = "") -> str:
    """The group's table; prefix: of the fleet. A character that DynamoDB does not allow becomes its code in underscores."""
    return prefix + TABLE_PREFIX + re.sub(r"[^A-Za-z0-9.-]", lambda found: f"_{ord(found[0]):x}_", group)


class DynamoTable:
    """`LeaseTable` in DynamoDB. Reads are consistent."""

    def __init__(self, dynamodb: Any, group: str, timing: Timing, prefix: str = "") -> None:
        self._dynamodb, self._name, self._timing = dynamodb, table_name(group, prefix), timing

    async def prepare(self) -> None:
        """Create the table if it is missing; returns when it can be used."""
        deadline = time.monotonic() + _CREATE_SECONDS
        while (status := await self._status()) != "ACTIVE":
            if status is None:
                await self._create()
            if time.monotonic() > deadline:
                raise Unavailable(f"DynamoDB did not make the table {self._name} within {_CREATE_SECONDS:g} s")
            await asyncio.sleep(_PAUSE)

    async def exists(self) -> bool:
        """Whether the group ever had members or offsets."""
        return await self._status() is not None

    async def _status(self) -> str | None:
        async with self._bounded("describe"):
            try:
                answer = await self._dynamodb.describe_table(TableName=self._name)
            except ClientError as error:
                if code_of(error) == "ResourceNotFoundException":
                    return None
                raise
            return str(answer["Table"]["TableStatus"])

    async def _create(self) -> None:
        async with self._bounded("create"):
            try:
                await self._dynamodb.create_table(
                    TableName=self._name,
                    AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
                    KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
                    BillingMode="PAY_PER_REQUEST",
                )
            except ClientError as error:
                if code_of(error) != "ResourceInUseException":  # another member creates it
                    raise

    async def rows(self) -> dict[str, Lease]:
        found: list[Item] = []
        page: dict[str, Any] = {}
        async with self._bounded("scan"):
            while True:
                answer = await self._dynamodb.scan(TableName=self._name, ConsistentRead=True, **page)
                found += answer["Items"]
                if not answer.get("LastEvaluatedKey"):
                    break
                page = {"ExclusiveStartKey": answer["LastEvaluatedKey"]}
        leases = [parse_lease(item) for item in found if "shardId" in item and "streamName" in item]
        return {lease.key: lease for lease in leases}

    async def get(self, key: str) -> Lease | None:
        async with self._bounded("read"):
            answer = await self._dynamodb.get_item(
                TableName=self._name, Key={"leaseKey": {"S": key}}, ConsistentRead=True
            )
        return parse_lease(answer["Item"]) if answer.get("Item") else None

    async def add(self, lease: Lease) -> None:
        async with self._bounded("write"):
            await self._if_allowed(
                self._dynamodb.put_item(
                    TableName=self._name, Item=to_item(lease), ConditionExpression="attribute_not_exists(leaseKey)"
                )
            )

    async def remove(self, old: Lease) -> None:
        async with self._bounded("write"):
            await self._if_allowed(
                self._dynamodb.delete_item(
                    TableName=self._name,
                    Key={"leaseKey": {"S": old.key}},
                    ConditionExpression="leaseCounter = :was",
                    ExpressionAttributeValues={":was": {"N": str(old.counter)}},
                )
            )

    async def replace(self, old: Lease, new: Lease) -> bool:
        was, now = to_item(old), to_item(new._replace(counter=old.counter + 1))
        # The KCL's time limit of a handover. Ours is the holder's lease; a KCL worker needs a value.
        limit = {"N": str(int((time.time() + self._timing.drain) * 1000))}
        if old.draining:
            was[_LIMIT] = limit
        if new.draining:
            now[_LIMIT] = limit
        update, names, values = _update(was, now)
        async with self._bounded("write"):
            return await self._if_allowed(
                self._dynamodb.update_item(
                    TableName=self._name,
                    Key={"leaseKey": {"S": old.key}},
                    UpdateExpression=update,
                    ConditionExpression="leaseCounter = :was",
                    ExpressionAttributeNames=names,
                    ExpressionAttributeValues={**values, ":was": {"N": str(old.counter)}},
                )
            )

    async def _if_allowed(self, writing: Any) -> bool:
        try:
            await writing
        except ClientError as error:
            if code_of(error) == "ConditionalCheckFailedException":
                return False
            raise
        return True

    def _bounded(self, what: str) -> Any:
        return bounded(f"{what} lease table {self._name}", self._timing.request)


def to_item(lease: Lease) -> Item:
    sequence, sub = _SENTINELS[lease.start.kind], 0
    if lease.is_done:
        sequence = SHARD_END
    elif lease.committed is not None:
        sequence, sub = split_offset(lease.committed)
    item: Item = {
        "leaseKey": {"S": lease.key},
        "streamName": {"S": lease.stream},
        "shardId": {"S": shard_id(lease.shard)},
        "leaseCounter": {"N": str(lease.counter)},
        "checkpoint": {"S": sequence},
        "checkpointSubSequenceNumber": {"N": str(sub)},
        "ownerSwitchesSinceCheckpoint": {"N": str(lease.switches)},
        "penstockBegin": {"S": f"{lease.start.kind}:{lease.start.value}"},
        "penstockArrivedMillis": {"N": str(lease.arrived)},
        "penstockSettledMillis": {"N": str(lease.settled)},
        "penstockRetentionMillis": {"N": str(lease.retention)},
        "penstockOpenMillis": {"N": str(lease.open)},
    }
    if lease.owner is not None:
        item["leaseOwner"] = {"S": lease.owner}
    if lease.draining is not None:
        item["checkpointOwner"] = {"S": lease.draining}
    if lease.parents:
        item["parentShardId"] = {"SS": [shard_id(number) for number in lease.parents]}
    if lease.is_done and lease.committed is not None:
        item["penstockCommitted"] = {"S": str(lease.committed)}
    return item


def parse_lease(item: Mapping[str, Mapping[str, Any]]) -> Lease:
    """From a row of ours, or of a KCL application. Raises KeyError, ValueError."""
    checkpoint = _text(item, "checkpoint", "TRIM_HORIZON")
    committed = None
    if checkpoint.isdecimal():
        committed = offset_of(checkpoint, _number(item, "checkpointSubSequenceNumber"))
    elif "penstockCommitted" in item:
        committed = int(item["penstockCommitted"]["S"])
    return Lease(
        stream=item["streamName"]["S"],
        shard=shard_number(item["shardId"]["S"]),
        parents=tuple(sorted(shard_number(name) for name in item.get("parentShardId", {}).get("SS", ()))),
        start=_parse_start(_text(item, "penstockBegin", "")),
        owner=_text(item, "leaseOwner", "") or None,
        draining=_text(item, "checkpointOwner", "") or None,
        counter=_number(item, "leaseCounter"),
        committed=committed,
        is_done=checkpoint == SHARD_END,
        arrived=_number(item, "penstockArrivedMillis"),
        settled=_number(item, "penstockSettledMillis"),
        switches=_number(item, "ownerSwitchesSinceCheckpoint"),
        retention=_number(item, "penstockRetentionMillis"),
        open=_number(item, "penstockOpenMillis" if "penstockOpenMillis" in item else "penstockSettledMillis"),
    )


def _parse_start(text: str) -> StartPosition:
    kind, _, value = text.partition(":")
    match kind:
        case "arrival" | "date" | "offset":
            return StartPosition(kind, int(value))
    return OLDEST


def _text(item: Mapping[str, Mapping[str, Any]], name: str, default: str) -> str:
    return str(item[name]["S"]) if name in item else default


def _number(item: Mapping[str, Mapping[str, Any]], name: str) -> int:
    return int(item[name]["N"]) if name in item else 0


def _update(old: Item, new: Item) -> tuple[str, dict[str, str], Item]:
    """(expression, names, values) of the update from `old` to `new`; other columns stay."""
    changed = [name for name, value in new.items() if old.get(name) != value]
    gone = [name for name in old if name not in new]
    names = {f"#{name}": name for name in changed + gone}
    values = {f":{name}": new[name] for name in changed}
    text = "SET " + ", ".join(f"#{name} = :{name}" for name in changed)
    if gone:
        text += " REMOVE " + ", ".join(f"#{name}" for name in gone)
    return text, names, values
