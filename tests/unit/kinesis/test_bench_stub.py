"""The Kinesis of the benchmark, which stores nothing, as our client sees it."""

import asyncio

import pytest

from bench.kinesis_stub import Connection, Streams
from services.core.aws_emulator import CREDENTIALS, kinesis_url
from services.core.broker.contract import PartitionRange, TopicSpec
from services.core.broker.kinesis import KinesisBroker


async def test_an_ingest_process_can_meet_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, ingest with its ledger never becomes ready on the benchmark's Kinesis, and nothing is measured."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    streams = Streams()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(streams), "127.0.0.1", 0)
    async with server:
        endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(600), KinesisBroker.open(kinesis_url(endpoint, endpoint)) as broker:
            await broker.admin.create_topic(TopicSpec("s", partitions=2, retention_ms=86_400_000))
            assert await broker.reader.describe("s") == {0: PartitionRange(0, 0), 1: PartitionRange(0, 0)}
