"""The lease table in a DynamoDB: writes that only the last reader's counter allows."""

from services.core.aws_emulator import AwsEmulator
from services.core.broker.connect import parse_kinesis_url
from services.core.broker.kinesis.admin import committed, set_committed
from services.core.broker.kinesis.aws import Timing, open_clients
from services.core.broker.kinesis.dynamo_table import DynamoTable
from services.core.broker.kinesis.incarnation import Stream
from services.core.broker.kinesis.leases import Lease
from services.core.broker.kinesis.streams import Shard
from tests.support.kafka import unique_name

STREAM = "123456789012:events:1700000000"


async def test_only_the_last_reader_writes(kinesis_emulator: AwsEmulator) -> None:
    """If it fails, two members own a shard, or a handover loses what others keep in the row."""
    async with open_clients(parse_kinesis_url(kinesis_emulator.url), 30.0) as clients:
        table = DynamoTable(clients.dynamodb, unique_name("g"), Timing(request=30.0))
        assert not await table.exists()
        await table.prepare()
        await table.prepare()
        lease = Lease(STREAM, 0, owner="a")
        await table.add(lease)
        await table.add(lease._replace(owner="b"))
        assert await table.rows() == {lease.key: lease}
        asked = lease.requested_by("b")
        assert await table.replace(lease, asked)
        assert not await table.replace(lease, lease.acquired_by("c"))
        row = await table.get(lease.key)
        assert row == asked._replace(counter=1)
        assert (row.owner, row.holder) == ("b", "a")
        assert await table.replace(row, row.released_by("a"))
        row = await table.get(lease.key)
        assert row is not None
        assert (row.owner, row.draining, row.holder, row.counter) == ("b", None, "b", 2)
        assert await table.get("nothing") is None


async def test_an_operator_moves_a_group_that_never_was(kinesis_emulator: AwsEmulator) -> None:
    """If it fails, a group cannot be placed before it is started."""
    timing = Timing(request=30.0)
    stream = Stream(STREAM, (Shard(0, (), 0, 1, is_open=True),), 86_400_000)
    async with open_clients(parse_kinesis_url(kinesis_emulator.url), 30.0) as clients:
        table = DynamoTable(clients.dynamodb, unique_name("g"), timing)
        await table.prepare()
        for offset in (9, 4):
            await set_committed(table, stream, {0: offset}, timing, 1)
            assert await committed(table, STREAM) == {0: offset}
        assert await committed(table, "another") == {}
