"""What an operator, or an autoscaler, does to a stream while it is used."""

from services.core.broker.kinesis.aws import Clients
from services.core.broker.kinesis.streams import Shard, parse_shard, shard_id
from tests.contract.traffic import until_async


class Resharding:
    """Splits and merges of one stream. Each call waits until the stream is active again."""

    def __init__(self, clients: Clients, stream: str) -> None:
        self._kinesis, self._stream = clients.kinesis, stream

    async def shards(self) -> dict[int, Shard]:
        """Those that can be written to."""
        rows = (await self._kinesis.list_shards(StreamName=self._stream))["Shards"]
        return {shard.number: shard for shard in map(parse_shard, rows) if shard.is_open}

    async def split(self, number: int) -> None:
        """Into two halves."""
        shard = (await self.shards())[number]
        middle = (shard.first_key + shard.last_key + 1) // 2
        await self._kinesis.split_shard(
            StreamName=self._stream, ShardToSplit=shard_id(number), NewStartingHashKey=str(middle)
        )
        await self._settled()

    async def merge(self, left: int, right: int) -> None:
        """Two neighbours into one."""
        await self._kinesis.merge_shards(
            StreamName=self._stream, ShardToMerge=shard_id(left), AdjacentShardToMerge=shard_id(right)
        )
        await self._settled()

    async def _settled(self) -> None:
        async def is_active() -> bool:
            said = await self._kinesis.describe_stream_summary(StreamName=self._stream)
            return bool(said["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE")

        await until_async(is_active, "the stream is active again")
