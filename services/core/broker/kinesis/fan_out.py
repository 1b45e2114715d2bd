"""Enhanced fan-out: each group gets 2 MB a second of every shard for itself, pushed, instead of a share of five reads a second.

A group is a registered consumer of the stream, by its name. It stays registered, and is paid for, until somebody deregisters
it or deletes the stream; a stream takes 20.
"""

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ssl import SSLContext
from typing import Any

from botocore.exceptions import ClientError

from services.core.broker.errors import BrokerError, Throttled, Unavailable, UnknownTopic
from services.core.broker.kinesis.faults import bounded, code_of
from services.core.broker.kinesis.shard_iterator import Answer, ShardSource
from services.core.broker.kinesis.signed_post import SignedPost
from services.core.broker.kinesis.streams import Streams
from services.core.broker.kinesis.subscription import PUSHED, Subscription
from services.core.broker.kinesis.timing import Timing

_PAUSE = 0.2
_AGAIN_SECONDS = 5.0
_NO_ROOM = "Try: deregister consumers that nobody needs, or leave out fan_out=1"


class FanOut:
    """One broker's consumers."""

    def __init__(self, tls: SSLContext, post: SignedPost, kinesis: Any) -> None:
        self._tls, self._post, self._kinesis = tls, post, kinesis
        self._consumers: dict[tuple[str, str], str] = {}
        self._failures: dict[tuple[str, str], tuple[float, BrokerError]] = {}
        self._locks: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def pushed(
        self, source: ShardSource, streams: Streams, stream: str, group: str
    ) -> AsyncIterator["PushedSource"]:
        """The same shard, pushed to this group. stream: names its life, see `membership.Stream`."""
        subscription = Subscription(self._tls, self._post, source.shard, source.timing)
        shard = (source.kinesis, source.topic, source.shard, source.pace, source.timing, source.is_closed)
        try:
            yield PushedSource(*shard, self, streams, stream, group, subscription)
        finally:
            await subscription.close()

    async def consumer(self, topic: str, stream: str, group: str, timing: Timing) -> str:
        """The ARN of the group's consumer of this stream, which is active; registered once for all its shards.

        Raises UnknownTopic, Throttled, and Unavailable too when the stream has no room for one more.
        """
        async with self._locks[stream, group]:
            known = self._consumers.get((stream, group))
            if known is None:
                known = self._consumers[stream, group] = await self._try_to_register(topic, stream, group, timing)
            return known

    def forget(self, stream: str, group: str) -> None:
        """The service knows its consumer no longer: register it anew next time."""
        self._consumers.pop((stream, group), None)

    async def _try_to_register(self, topic: str, stream: str, group: str, timing: Timing) -> str:
        """One try for all shards: who comes soon after one that failed is told the same."""
        tried, failure = self._failures.get((stream, group), (0.0, None))
        if failure is not None and time.monotonic() - tried < _AGAIN_SECONDS:
            raise failure
        try:
            arn = await self._register(topic, group, timing)
        except BrokerError as error:
            self._failures[stream, group] = time.monotonic(), error
            raise
        self._failures.pop((stream, group), None)
        return arn

    async def _register(self, topic: str, group: str, timing: Timing) -> str:
        name = re.sub(r"[^A-Za-z0-9.-]", lambda found: f"_{ord(found[0]):x}_", group)
        async with bounded(f"describe {topic}", timing.request):
            summary = await self._kinesis.describe_stream_summary(StreamName=topic)
        arn = summary["StreamDescriptionSummary"]["StreamARN"]
        async with bounded(f"register {group} with {topic}", timing.request):
            try:
                await self._kinesis.register_stream_consumer(StreamARN=arn, ConsumerName=name)
            except ClientError as error:
                if code_of(error) == "LimitExceededException":
                    raise Unavailable(f"{group} cannot be registered with {topic}: {error}. {_NO_ROOM}") from error
                if code_of(error) != "ResourceInUseException":  # it is registered
                    raise
        deadline = time.monotonic() + timing.settle
        while time.monotonic() < deadline:
            async with bounded(f"describe {group} of {topic}", timing.request):
                answer = await self._kinesis.describe_stream_consumer(StreamARN=arn, ConsumerName=name)
            found = answer["ConsumerDescription"]
            if found["ConsumerStatus"] == "ACTIVE":
                return str(found["ConsumerARN"])
            await asyncio.sleep(_PAUSE)
        raise Unavailable(f"{group} is not an active consumer of {topic} after {timing.settle:g} s")


@dataclass(frozen=True, slots=True)
class PushedSource(ShardSource):
    """A shard whose entries are pushed: an iterator is an open subscription, a read is its next event.

    What is left of a closed shard is read as elsewhere: it has an end, and nothing more comes.
    """

    fan_out: FanOut
    streams: Streams
    stream: str
    group: str
    subscription: Subscription

    async def iterator(self, where: Mapping[str, Any]) -> str:
        """As in ShardSource."""
        shards = (await self.streams.of(self.topic)).shards
        if not any(shard.is_open for shard in shards if shard.number == self.shard):
            await self.subscription.close()
            return await ShardSource.iterator(self, where)
        await self.pace.turn()
        async with self._throttled():
            consumer = await self.fan_out.consumer(self.topic, self.stream, self.group, self.timing)
        async with self._throttled(), bounded(f"subscribe to {self.topic}[{self.shard}]", self.timing.request):
            try:
                await self.subscription.open(consumer, where)
            except UnknownTopic as error:  # the shard was there just now: it is the consumer that is gone
                self.fan_out.forget(self.stream, self.group)
                raise Unavailable(f"{self.group} was deregistered from {self.topic}, and is registered anew") from error
        return PUSHED

    def answers_at_once(self, iterator: str) -> bool:
        """As in ShardSource."""
        return iterator != PUSHED

    async def read(self, iterator: str, limit: int) -> Answer:
        """As in ShardSource, but for `limit`: an event has what the service puts into it."""
        if iterator != PUSHED:
            return await ShardSource.read(self, iterator, limit)
        async with self._throttled():
            return await self.subscription.next()

    @asynccontextmanager
    async def _throttled(self) -> AsyncIterator[None]:
        """Let a refusal slow down the next try."""
        try:
            yield
        except Throttled:
            self.pace.throttle()
            raise
