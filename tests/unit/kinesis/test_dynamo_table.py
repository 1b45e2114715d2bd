"""A row of the lease table in DynamoDB: the KCL's columns."""

import pytest

from services.core.broker.kinesis.dynamo_table import parse_lease, table_name, to_item
from services.core.broker.kinesis.leases import Lease, StartPosition
from services.core.broker.kinesis.record_format import offset_of

STREAM = "123456789012:events:1700000000"
LEASE = Lease(
    STREAM,
    7,
    parents=(2, 3),
    start=StartPosition("arrival", 5),
    owner="new",
    draining="old",
    counter=12,
    committed=offset_of(49_590_338_271_490_256_608_559_692_538_361_571_095_921_575_989_136_588_898, 3),
    arrived=1,
    settled=2,
    switches=4,
    retention=8,
    open=9,
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
        (Lease(STREAM, 0, start=StartPosition("date", 17)), "AT_TIMESTAMP"),
        (Lease(STREAM, 0, start=StartPosition("offset", 17)), "AT_TIMESTAMP"),
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
    assert read == LEASE._replace(start=StartPosition("oldest"), arrived=0, settled=0, retention=0, open=0)


def test_every_group_has_a_table_of_its_own() -> None:
    """If it fails, two groups share offsets: each skips what the other has read."""
    names = [table_name(group) for group in ("a", "a.b", "a_b", "a/b", "a b", "_2f_", "ä", "A")]
    assert len(set(names)) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") for name in names)
