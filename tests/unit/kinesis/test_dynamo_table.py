"""The lease table in DynamoDB: the KCL's columns, and writes that only the last reader's counter allows."""

import pytest

from services.core.aws_emulator import AwsEmulator
from services.core.broker.kinesis.dynamo_table import DynamoTable, parse_lease, table_name, to_item
from services.core.broker.kinesis.group_offsets import committed, set_committed
from services.core.broker.kinesis.leases import Begin, Lease
from services.core.broker.kinesis.membership import Stream
from services.core.broker.kinesis.offsets import offset_of
from services.core.broker.kinesis.sdk import open_clients
from services.core.broker.kinesis.shards import Shard
from services.core.broker.kinesis.timing import Timing
from services.core.broker.kinesis_url import parse_address
from tests.support.kafka import unique_name

STREAM = "123456789012:events:1700000000"
LEASE = Lease(
    STREAM,
    7,
    parents=(2, 3),
    begin=Begin("arrival", 5),
    owner="new",
    draining="old",
    counter=12,
    committed=offset_of(49_590_338_271_490_256_608_559_692_538_361_571_095_921_575_989_136_588_898, 3),
    arrived=1,
    settled=2,
    switches=4,
)


def test_the_columns_are_the_kcls() -> None:
    """If it fails, the KCL's tools cannot read where our groups are, nor take over from them."""
    item = to_item(LEASE)
    assert {name: value for name, value in item.items() if not name.startswith("penstock")} == {
        "leaseKey": {"S": f"{STREAM}:shardId-000000000007"},
        "streamName": {"S": STREAM},
        "shardId": {"S": "shardId-000000000007"},
        "leaseOwner": {"S": "new"},
        "checkpointOwner": {"S": "old"},
        "leaseCounter": {"N": "12"},
        "checkpoint": {"S": "49590338271490256608559692538361571095921575989136588898"},
        "checkpointSubSequenceNumber": {"N": "3"},
        "ownerSwitchesSinceCheckpoint": {"N": "4"},
        "parentShardId": {"SS": ["shardId-000000000002", "shardId-000000000003"]},
    }


@pytest.mark.parametrize(
    ("lease", "checkpoint"),
    [
        (LEASE, "49590338271490256608559692538361571095921575989136588898"),
        (Lease(STREAM, 0), "TRIM_HORIZON"),
        (Lease(STREAM, 0, begin=Begin("date", 17)), "AT_TIMESTAMP"),
        (Lease(STREAM, 0, begin=Begin("offset", 17)), "AT_TIMESTAMP"),
        (LEASE._replace(is_done=True), "SHARD_END"),
        (Lease(STREAM, 0, is_done=True), "SHARD_END"),
    ],
)
def test_a_row_comes_back_as_it_was(lease: Lease, checkpoint: str) -> None:
    """If it fails, a group forgets where it is, or which shards are done."""
    item = to_item(lease)
    assert item["checkpoint"] == {"S": checkpoint}
    assert parse_lease(item) == lease


def test_a_row_that_the_kcl_wrote_is_read() -> None:
    """If it fails, a group that a KCL application began cannot be taken over."""
    item = {name: value for name, value in to_item(LEASE).items() if not name.startswith("penstock")}
    read = parse_lease(item | {"throughputKBps": {"N": "17.5"}})
    assert read == LEASE._replace(begin=Begin("oldest"), arrived=0, settled=0)


def test_every_group_has_a_table_of_its_own() -> None:
    """If it fails, two groups share offsets: each skips what the other has read."""
    names = [table_name(group) for group in ("a", "a.b", "a_b", "a/b", "a b", "_2f_", "ä", "A")]
    assert len(set(names)) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") for name in names)


@pytest.mark.kinesis
async def test_only_the_last_reader_writes(kinesis_emulator: AwsEmulator) -> None:
    """If it fails, two members own a shard, or a handover loses what others keep in the row."""
    async with open_clients(parse_address(kinesis_emulator.url), 30.0) as clients:
        table = DynamoTable(clients.dynamodb, unique_name("g"), Timing(request=30.0))
        assert not await table.exists()
        await table.prepare()
        await table.prepare()
        lease = Lease(STREAM, 0, owner="a")
        await table.add(lease)
        await table.add(lease._replace(owner="b"))
        assert await table.rows() == {lease.key: lease}
        asked = lease.asked_by("b")
        assert await table.replace(lease, asked)
        assert not await table.replace(lease, lease.taken_by("c"))
        row = await table.get(lease.key)
        assert row == asked._replace(counter=1)
        assert (row.owner, row.holder) == ("b", "a")
        assert await table.replace(row, row.left_by("a"))
        row = await table.get(lease.key)
        assert row is not None
        assert (row.owner, row.draining, row.holder, row.counter) == ("b", None, "b", 2)
        assert await table.get("nothing") is None


@pytest.mark.kinesis
async def test_an_operator_moves_a_group_that_never_was(kinesis_emulator: AwsEmulator) -> None:
    """If it fails, a group cannot be placed before it is started."""
    timing = Timing(request=30.0)
    stream = Stream(STREAM, (Shard(0, (), 0, 1, is_open=True),), 86_400_000)
    async with open_clients(parse_address(kinesis_emulator.url), 30.0) as clients:
        table = DynamoTable(clients.dynamodb, unique_name("g"), timing)
        await table.prepare()
        for offset in (9, 4):
            await set_committed(table, stream, {0: offset}, timing, 1)
            assert await committed(table, STREAM) == {0: offset}
        assert await committed(table, "another") == {}
