"""Registering a group as a consumer of a stream, once for all its shards."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from ssl import create_default_context
from types import SimpleNamespace
from typing import Any, cast

import pytest
from botocore.exceptions import ClientError

from services.core.broker.errors import Throttled, Unavailable
from services.core.broker.kinesis import fan_out as fan_out_module
from services.core.broker.kinesis.aws import SignedPost, Timing, classify
from services.core.broker.kinesis.fan_out import SUBSCRIBED, FanOut, SubscribedSource, Subscription
from services.core.broker.kinesis.shard_source import OLDEST
from services.core.broker.kinesis.streams import Shard, Streams
from tests.support.clock import Clock
from tests.unit.kinesis.fake_shard import Hurried
from tests.unit.kinesis.fake_stream import FakeStream

TIMING = Timing()


class _Service(FakeStream):
    """A stream that takes consumers, each registration under another ARN."""

    async def describe_stream_summary(self, **_asked: Any) -> dict[str, Any]:
        self._answer("DescribeStreamSummary")
        return {"StreamDescriptionSummary": {"StreamARN": "arn"}}

    async def register_stream_consumer(self, **_asked: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        self._answer("RegisterStreamConsumer")
        return {}

    async def describe_stream_consumer(self, **_asked: Any) -> dict[str, Any]:
        number = self.asked["RegisterStreamConsumer"]
        return {"ConsumerDescription": {"ConsumerStatus": "ACTIVE", "ConsumerARN": f"consumer-{number}"}}


class _Subscription:
    """Takes every consumer but those that are gone."""

    def __init__(self) -> None:
        self.gone: set[str] = set()
        self.opened = Counter[str]()

    async def open(self, consumer: str, _where: Mapping[str, Any]) -> None:
        if consumer in self.gone:
            error = ClientError({"Error": {"Code": "ResourceNotFoundException", "Message": ""}}, "SubscribeToShard")
            raise classify(error, "subscribe")
        self.opened[consumer] += 1

    async def close(self) -> None:
        pass


def _fan_out(service: _Service) -> FanOut:
    return FanOut(create_default_context(), cast("SignedPost", None), service)


async def test_all_shards_of_a_group_register_it_once() -> None:
    """If it fails, a group of fifty shards is throttled by its own registrations when it starts."""
    service = _Service([])
    fan_out = _fan_out(service)
    found = await asyncio.gather(*(fan_out.consumer("t", "1:t:1", "g", TIMING) for _ in range(50)))
    assert set(found) == {"consumer-1"}
    assert service.asked["RegisterStreamConsumer"] == 1


async def test_a_stream_without_room_for_a_group_is_told_and_not_stormed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, the twenty-first group reads nothing, nobody hears why, and its tries throttle the others'."""
    clock = Clock()
    monkeypatch.setattr(fan_out_module, "time", SimpleNamespace(monotonic=clock))
    service = _Service([])
    service.fail["RegisterStreamConsumer"] = "LimitExceededException"
    fan_out = _fan_out(service)
    for _ in range(50):
        with pytest.raises(Unavailable, match="Try: deregister") as refused:
            await fan_out.consumer("t", "1:t:1", "g", TIMING)
        assert not isinstance(refused.value, Throttled), "which a reader keeps to itself"
    assert service.asked["RegisterStreamConsumer"] == 1
    service.fail.clear()
    clock.now += 5
    assert await fan_out.consumer("t", "1:t:1", "g", TIMING) == "consumer-2"


async def test_a_consumer_that_somebody_deregistered_is_registered_anew() -> None:
    """If it fails, a group reads nothing until its processes are restarted."""
    service, subscription = _Service([Shard(0, (), 0, 9, is_open=True)]), _Subscription()
    streams = Streams(service, TIMING)
    source = SubscribedSource(
        service,
        "t",
        0,
        Hurried("t", 0),
        TIMING,
        False,
        _fan_out(service),
        streams,
        "1:t:1",
        "g",
        cast("Subscription", subscription),
    )
    assert await source.iterator(OLDEST) == SUBSCRIBED
    subscription.gone.add("consumer-1")
    with pytest.raises(Unavailable, match="deregistered"):
        await source.iterator(OLDEST)
    assert await source.iterator(OLDEST) == SUBSCRIBED
    assert list(subscription.opened) == ["consumer-1", "consumer-2"]


def test_a_failure_inside_of_the_service_passes() -> None:
    """If it fails, an error event within a subscription ends the whole session of its group."""
    error = ClientError({"Error": {"Code": "InternalFailureException", "Message": ""}}, "SubscribeToShard")
    assert classify(error, "subscribe").retriable
