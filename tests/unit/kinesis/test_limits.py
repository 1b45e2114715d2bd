"""The proxy that stands for the service's limits in the contract suite: whether it keeps them. In simulated time."""

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientSession, web

from tests.support.clock import Clock
from tests.support.kinesis_limits import PROVISIONED, KinesisLimits
from tests.support.serving import serve_on_loopback

_HALF = 1 << 127


class _Emulator:
    """Takes everything and gives `answer` to every read. Two shards."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.answer: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.Response:
        asked = json.loads(await request.read())
        operation = request.headers["X-Amz-Target"].partition(".")[2]
        said: dict[str, Any] = {}
        if operation == "ListShards":
            said["Shards"] = [
                {
                    "ShardId": f"shardId-{n:012d}",
                    "HashKeyRange": {"StartingHashKey": str(n * _HALF), "EndingHashKey": str((n + 1) * _HALF - 1)},
                    "SequenceNumberRange": {"StartingSequenceNumber": "1"},
                }
                for n in range(2)
            ]
        elif operation == "PutRecords":
            self.taken += [one["PartitionKey"] for one in asked["Records"]]
            said["Records"] = [{"SequenceNumber": str(len(self.taken))} for _ in asked["Records"]]
        elif operation == "GetShardIterator":
            said["ShardIterator"] = asked["ShardId"]
        elif operation == "GetRecords":
            said = {"Records": self.answer, "NextShardIterator": asked["ShardIterator"], "MillisBehindLatest": 0}
        return web.json_response(said)


class _Client:
    def __init__(self, session: ClientSession, limits: KinesisLimits, emulator: _Emulator, clock: Clock) -> None:
        self._session, self.limits, self.emulator, self.clock = session, limits, emulator, clock

    async def ask(self, operation: str, **asked: Any) -> tuple[int, dict[str, Any]]:
        headers = {"X-Amz-Target": f"Kinesis_20131202.{operation}"}
        async with self._session.post(self.limits.endpoint, json=asked, headers=headers) as answer:
            said = await answer.json(content_type=None)
            assert isinstance(said, dict)
            return answer.status, said

    async def put(self, *sizes: int, shard: int = 0) -> list[bool]:
        """Which entries of these sizes were taken, when they come in one request."""
        entries = [
            {
                "Data": base64.b64encode(b"x" * size).decode(),
                "PartitionKey": str(index),
                "ExplicitHashKey": str(shard * _HALF),
            }
            for index, size in enumerate(sizes)
        ]
        status, said = await self.ask("PutRecords", StreamName="t", Records=entries)
        assert status == 200
        codes = [row.get("ErrorCode") for row in said["Records"]]
        assert set(codes) <= {None, PROVISIONED}
        assert said["FailedRecordCount"] == len(codes) - codes.count(None)
        return [code is None for code in codes]

    async def read(self, shard: int = 0) -> bool:
        """Whether a read of the shard is answered."""
        _, given = await self.ask(
            "GetShardIterator", StreamName="t", ShardId=f"shardId-{shard:012d}", ShardIteratorType="TRIM_HORIZON"
        )
        status, said = await self.ask("GetRecords", ShardIterator=given["ShardIterator"])
        assert (status, said.get("__type")) in ((200, None), (400, PROVISIONED))
        return status == 200


@asynccontextmanager
async def _proxy() -> AsyncIterator[_Client]:
    emulator, clock = _Emulator(), Clock()
    app = web.Application(client_max_size=16 << 20)
    app.router.add_post("/", emulator.handle)
    async with serve_on_loopback(app) as port:
        limited = KinesisLimits(f"http://127.0.0.1:{port}", clock)
        async with limited.serve() as limits, ClientSession() as session:
            yield _Client(session, limits, emulator, clock)


async def test_a_shard_takes_a_megabyte_a_second() -> None:
    """If it fails, the contract suite runs against a service that takes more than the real one does."""
    async with _proxy() as client:
        assert await client.put(*[100_000] * 12) == [True] * 10 + [False] * 2
        assert await client.put(100_000) == [False]
        assert await client.put(100_000, shard=1) == [True], "another shard's capacity is its own"
        client.clock.now += 0.5
        assert sum(await client.put(*[100_000] * 12)) == 5
        client.clock.now += 60
        assert sum(await client.put(*[100_000] * 12)) == 10, "capacity is not saved up"
        assert len(client.emulator.taken) == 26


async def test_a_shard_takes_a_thousand_entries_a_second() -> None:
    """If it fails, entries that are not aggregated cost nothing in the suite, and are throttled in production."""
    async with _proxy() as client:
        taken = [sum(await client.put(*[10] * 500)) for _ in range(3)]
        assert taken == [500, 500, 0]
        client.clock.now += 0.1
        assert sum(await client.put(*[10] * 500)) in range(99, 102)


async def test_only_the_entries_that_are_too_many_are_refused() -> None:
    """If it fails, the suite never sees a request of which a part failed."""
    async with _proxy() as client:
        assert await client.put(600_000, 600_000, 300_000) == [True, False, True]


async def test_a_shard_answers_five_reads_a_second() -> None:
    """If it fails, readers that share a shard never see a throttle in the suite."""
    async with _proxy() as client:
        assert [await client.read() for _ in range(7)] == [True] * 5 + [False] * 2
        assert await client.read(shard=1)
        client.clock.now += 0.2
        assert [await client.read() for _ in range(2)] == [True, False]


async def test_a_shard_gives_two_megabytes_a_second() -> None:
    """If it fails, catching up is faster in the suite than in production."""
    async with _proxy() as client:
        client.emulator.answer = [{"Data": "A" * 4 * 2_000_000, "SequenceNumber": "1"}]  # six megabytes
        assert await client.read()
        client.clock.now += 1.5
        assert not await client.read()
        client.clock.now += 1.0
        assert await client.read()


async def test_more_than_a_request_may_hold_is_refused() -> None:
    """If it fails, a request that is too large passes in the suite."""
    async with _proxy() as client:
        entry = {"Data": "eA==", "PartitionKey": "k"}
        status, said = await client.ask("PutRecords", StreamName="t", Records=[entry] * 501)
        assert (status, said["__type"]) == (400, "ValidationException")
        large = {"Data": base64.b64encode(b"x" * ((1 << 20) + 300)).decode(), "PartitionKey": "k"}
        assert (await client.ask("PutRecords", StreamName="t", Records=[large]))[0] == 400
