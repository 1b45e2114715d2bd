"""A stream whose capacity is used up, as clients of ingest see it: real requests, the emulator behind the service's limits."""

import asyncio
from collections import Counter
from pathlib import Path

import orjson

from services.core.aws_emulator import AwsEmulator
from tests.contract.harness_kinesis import KinesisHarness
from tests.contract.traffic import DEADLINE, until, until_async
from tests.integration.ingest_process import Ingest, running
from tests.support.kinesis_limits import KinesisLimits

_EVENTS, _EVENT_BYTES = 100, 5_000
_AT_ONCE, _MOST = 13, 60
"""Requests of half a megabyte, to a shard that takes two of them a second."""


def _body(request: int) -> bytes:
    fill = "x" * _EVENT_BYTES
    return orjson.dumps([{"id": f"{request}-{n}", "fill": fill} for n in range(_EVENTS)])


class _Clients:
    """Each sends one request again and again until it is stored, when it is told to. refused: seconds it was told."""

    def __init__(self, ingest: Ingest, stream: str) -> None:
        self._ingest, self._stream = ingest, stream
        self.statuses = Counter[int]()
        self.refused: list[int] = []

    async def store(self, request: int) -> None:
        body = _body(request)
        while True:
            reply = await self._ingest.post(body, self._stream)
            self.statuses[reply.status] += 1
            if reply.status == 200:
                return
            assert reply.status == 429
            assert orjson.loads(reply.body)["type"] == "urn:penstock:problem:stream-full"
            seconds = int(reply.headers["retry-after"])
            self.refused.append(seconds)
            await asyncio.sleep(seconds)


async def test_a_full_stream_is_429_until_there_is_room(
    kinesis_emulator: AwsEmulator, kinesis_limits: KinesisLimits, tmp_path: Path
) -> None:
    """If it fails, clients of a full stream wait for a time-out, are told 503, or come again while it is full still."""
    harness = KinesisHarness(kinesis_emulator, kinesis_limits)
    async with harness.open() as broker:
        topic = await harness.create_topic(broker)
        pipes = tmp_path / "full.yaml"
        await asyncio.to_thread(pipes.write_text, f"version: 1\nstreams:\n  {topic}: {{id: id, partitions: 1}}\n")
        async with running(tmp_path, broker=harness.url, pipes=pipes) as ingest:
            await ingest.until_ready()
            clients = _Clients(ingest, topic)
            async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
                for sent in range(_AT_ONCE):
                    tasks.create_task(clients.store(sent))
                await until(lambda: bool(clients.statuses), "the first is stored, and the shard's pace is known")
                sent = _AT_ONCE
                while not clients.refused and sent < _MOST:
                    tasks.create_task(clients.store(sent))
                    sent += 1
                    await asyncio.sleep(0.05)
                await until_async(lambda: _is_seen_to_be_used(ingest, topic), "the metrics show it")
            assert clients.refused, "the shard was never full"
            assert max(clients.refused) <= 15, "no longer than a queue of ours lasts"
            # each came again once, perhaps twice, in the time that the queue took: no storm
            assert len(clients.refused) <= 3 * sent
            assert clients.statuses[200] == sent


async def _is_seen_to_be_used(ingest: Ingest, topic: str) -> bool:
    """Above 1 only where the emulator takes half a megabyte faster than the shard does."""
    _, told = await ingest.get("/metrics")
    return _sample(told, "penstock_broker_shard_capacity_used_ratio", topic) > 0.1


def _sample(told: str, name: str, topic: str) -> float:
    """The metric's value for shard 0 of the topic."""
    (line,) = [line for line in told.splitlines() if line.startswith(f'{name}{{shard="0",topic="{topic}"}}')]
    return float(line.rpartition(" ")[2])
