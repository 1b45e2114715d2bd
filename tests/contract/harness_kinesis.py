"""Kinesis in the contract suite: the session's emulator, behind the proxy that keeps the service's limits."""

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from services.core.aws_emulator import AwsEmulator, kinesis_url
from services.core.broker.connect import parse_kinesis_url
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.kinesis import KinesisBroker, Timing
from services.core.broker.kinesis.aws import open_clients
from services.core.broker.kinesis.record_format import split_offset
from services.core.broker.kinesis.streams import shard_id
from tests.support.kafka import unique_name
from tests.support.kinesis_limits import KinesisLimits

_TIMING = Timing(lease=4.0, heartbeat=0.2, sync=1.0, drain=10.0, request=10.0, subscription=4.0)
"""Short, so that tests need not wait for a lost member, and see subscriptions end."""

_DOWN_SECONDS = 1.0


def open_for_tests(url: str, patience: float | None = None) -> AbstractAsyncContextManager[Broker]:
    """A connection with short leases."""
    timing = _TIMING if patience is None else replace(_TIMING, lease=patience, drain=patience)
    return KinesisBroker.open(url, timing=timing)


class KinesisHarness:
    """See `harness.Harness`."""

    member_timeout = _TIMING.lease
    poll_interval = 1.0

    def __init__(
        self, emulator: AwsEmulator, limits: KinesisLimits, prefix: str = "", *, fan_out: bool = False
    ) -> None:
        """fan_out: shards are pushed, past the limits: the proxy does not speak HTTP/2."""
        self._emulator, self._limits, self._prefix = emulator, limits, prefix
        self.url = kinesis_url(limits.endpoint, emulator.dynamodb)
        if fan_out:
            self.url = f"{kinesis_url(emulator.endpoint, emulator.dynamodb)}&fan_out=1"
        if prefix:
            self.url += f"&prefix={prefix}"
        self.spec = f"kinesis:{self.url}"

    def open(self, patience: float | None = None) -> AbstractAsyncContextManager[Broker]:
        return open_for_tests(self.url, patience)

    def other_fleet(self, prefix: str) -> "KinesisHarness":
        """The same account with another prefix."""
        return KinesisHarness(self._emulator, self._limits, prefix)

    async def names(self) -> set[str]:
        """Every name of ours in the account: streams and tables."""
        url = kinesis_url(self._emulator.endpoint, self._emulator.dynamodb)
        async with open_clients(parse_kinesis_url(url), _TIMING.request) as clients:
            streams = (await clients.kinesis.list_streams(Limit=1000))["StreamNames"]
            return {*streams, *(await clients.dynamodb.list_tables())["TableNames"]}

    def fresh_name(self, hint: str) -> str:
        return unique_name(hint)

    async def create_topic(self, broker: Broker, partitions: int = 1) -> str:
        name = unique_name("topic")
        await broker.admin.create_topic(TopicSpec(name, partitions=partitions, retention_ms=86_400_000))
        return name

    async def crash(self, topic: str, partition: int = 0) -> None:
        """The service does not die; it goes away for a second, in the middle of requests that it has carried out."""
        self._limits.faults.down = True
        await asyncio.sleep(_DOWN_SECONDS)
        self._limits.faults.down = False

    async def restart(self) -> None:
        """The service has no restart; what survives one is what another connection sees."""

    compacts = False

    async def compact(self, topic: str) -> None:
        raise NotImplementedError

    async def expire(self, topic: str, partition: int, before: int) -> None:
        """The proxy hides what retention would take: whole entries, as Kinesis does."""
        sequence, sub = split_offset(before)
        self._limits.cut(self._prefix + topic, shard_id(partition), sequence, too=sub > 0)
