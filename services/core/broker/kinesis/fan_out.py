"""Enhanced fan-out: each shard is pushed to each group with SubscribeToShard, 2 MB a second for each group.

Without it all groups share five reads a second. A group is a registered consumer of the stream. Registration costs
money until the consumer or the stream is deleted; a stream has at most 20. The answer of SubscribeToShard is a
sequence of messages over HTTP/2, which the SDK's connections do not support; it ends after five minutes. A consumer
may have one subscription to a shard.

Source: "SubscribeToShard", Kinesis Data Streams API reference, and "Amazon event stream encoding".
"""

import asyncio
import re
import time
from base64 import b64decode
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from ssl import SSLContext
from typing import Any

import httpx
import orjson
from botocore.eventstream import EventStreamBuffer, ParserError
from botocore.exceptions import ClientError

from services.core.broker.errors import BrokerError, Throttled, Unavailable, UnknownTopic
from services.core.broker.kinesis.aws import Clients, SignedPost, Timing, bounded, classify, code_of, parse_refusal
from services.core.broker.kinesis.shard_source import IteratorExpired, ReadResult, ShardSource, UnknownSequence
from services.core.broker.kinesis.streams import Streams, shard_id

SUBSCRIBED = "pushed"
"""The iterator of an open subscription."""

_SILENCE_SECONDS = 30.0
"""The service pushes an event every few seconds, also without records."""


class Subscription:
    """A subscription to one shard, on its own connection. Reopen it after IteratorExpired. Not for concurrent use."""

    def __init__(self, tls: SSLContext, post: SignedPost, shard: int, timing: Timing) -> None:
        self._tls, self._post, self._shard, self._timing = tls, post, shard, timing
        self._http: httpx.AsyncClient | None = None
        self._chunks: AsyncIterator[bytes]
        self._buffer = EventStreamBuffer()
        self._ends = 0.0
        self._is_first = True

    async def open(self, consumer: str, where: Mapping[str, Any]) -> None:
        """Start there (as for GetShardIterator), as this consumer (an ARN).

        Raises UnknownSequence, Throttled, UnknownTopic, Unavailable.
        """
        await self.close()
        position: dict[str, Any] = {"Type": where["ShardIteratorType"]}
        if "StartingSequenceNumber" in where:
            position["SequenceNumber"] = where["StartingSequenceNumber"]
        if "Timestamp" in where:
            position["Timestamp"] = where["Timestamp"].timestamp()
        request_body = {"ConsumerARN": consumer, "ShardId": shard_id(self._shard), "StartingPosition": position}
        body = orjson.dumps(request_body)
        headers = await self._post.headers("SubscribeToShard", body)
        timeout = httpx.Timeout(self._timing.request, read=_SILENCE_SECONDS)
        self._http = http = httpx.AsyncClient(http1=False, http2=True, verify=self._tls, timeout=timeout)
        try:
            request = http.build_request("POST", self._post.url, headers=headers, content=body)
            answer = await http.send(request, stream=True)
            if answer.status_code != 200:
                raise _refused(answer.status_code, await answer.aread())
        except httpx.HTTPError as error:
            raise Unavailable(f"subscribe to shard {self._shard}: {error!r}") from error
        self._chunks, self._buffer = answer.aiter_raw(), EventStreamBuffer()
        self._ends = asyncio.get_running_loop().time() + self._timing.subscription
        self._is_first = True

    async def next(self) -> ReadResult:
        """The next event. Raises IteratorExpired at the end of the subscription, Throttled, Unavailable.

        An empty first event is skipped: it may have been sent before the service checked the shard.
        """
        answer = await self._event()
        if self._is_first and not answer.entries and answer.next is not None:
            answer = await self._event()
        self._is_first = False
        return answer

    async def _event(self) -> ReadResult:
        try:
            while (message := next(self._buffer, None)) is None:
                chunk = await anext(self._chunks, None)
                if chunk is None or asyncio.get_running_loop().time() > self._ends:
                    raise IteratorExpired("the subscription has ended")
                self._buffer.add_data(chunk)
        except (httpx.HTTPError, ParserError) as error:
            raise IteratorExpired(f"the subscription broke: {error!r}") from error
        kind = message.headers.get(":exception-type") or message.headers.get(":error-code")
        if kind is not None:
            raise _refused(400, orjson.dumps({"__type": kind, "message": message.payload.decode(errors="replace")}))
        return _parse_event(orjson.loads(message.payload))

    async def close(self) -> None:
        """Idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()


def _parse_event(event: Mapping[str, Any]) -> ReadResult:
    entries = [
        {
            **one,
            "Data": b64decode(one["Data"]),
            "ApproximateArrivalTimestamp": datetime.fromtimestamp(one["ApproximateArrivalTimestamp"], UTC),
        }
        for one in event["Records"]
    ]
    ended = event.get("ContinuationSequenceNumber") is None or event.get("ChildShards")
    return ReadResult(entries, int(event.get("MillisBehindLatest") or 0), None if ended else SUBSCRIBED)


def _refused(status: int, body: bytes) -> Exception:
    error = parse_refusal("SubscribeToShard", status, body)
    code = code_of(error)
    if code == "InvalidArgumentException":
        return UnknownSequence(str(error))
    if code == "ResourceInUseException":  # within five seconds of the last subscription
        return Throttled(str(error))
    return classify(error, "subscribe to a shard")


_REGISTER_PAUSE = 0.2
_AGAIN_SECONDS = 5.0
_NO_ROOM = "Try: deregister consumers that nobody needs, or leave out fan_out=1"


class FanOut:
    """The registered consumers of one broker."""

    @classmethod
    def of(cls, clients: Clients) -> "FanOut | None":
        """None when shards are polled."""
        if clients.fan_out_tls is None:
            return None
        return cls(clients.fan_out_tls, clients.put_records.post, clients.kinesis)

    def __init__(self, tls: SSLContext, post: SignedPost, kinesis: Any) -> None:
        self._tls, self._post, self._kinesis = tls, post, kinesis
        self._consumers: dict[tuple[str, str], str] = {}
        self._failures: dict[tuple[str, str], tuple[float, BrokerError]] = {}
        self._locks: defaultdict[tuple[str, str], asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def pushed(
        self, source: ShardSource, streams: Streams, stream: str, group: str
    ) -> AsyncIterator["SubscribedSource"]:
        """The same shard, pushed to this group. stream: names its incarnation."""
        subscription = Subscription(self._tls, self._post, source.shard, source.timing)
        shard = (source.kinesis, source.topic, source.shard, source.pace, source.timing, source.is_closed)
        try:
            yield SubscribedSource(*shard, self, streams, stream, group, subscription)
        finally:
            await subscription.close()

    async def consumer(self, topic: str, stream: str, group: str, timing: Timing) -> str:
        """The ARN of the group's active consumer of this stream. Registered once for all shards.

        Raises UnknownTopic, Throttled, and Unavailable, also when the stream has no room for another consumer.
        """
        async with self._locks[stream, group]:
            known = self._consumers.get((stream, group))
            if known is None:
                known = self._consumers[stream, group] = await self._try_to_register(topic, stream, group, timing)
            return known

    def forget(self, stream: str, group: str) -> None:
        """The consumer was deregistered: register it again next time."""
        self._consumers.pop((stream, group), None)

    async def _try_to_register(self, topic: str, stream: str, group: str, timing: Timing) -> str:
        """One attempt for all shards. Soon after a failed one the same error is raised."""
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
            await asyncio.sleep(_REGISTER_PAUSE)
        raise Unavailable(f"{group} is not an active consumer of {topic} after {timing.settle:g} s")


@dataclass(frozen=True, slots=True)
class SubscribedSource(ShardSource):
    """A shard whose entries are pushed. `iterator` opens a subscription, `read` waits for its next event.

    The rest of a closed shard is polled: it has an end, and gets no new records.
    """

    fan_out: FanOut
    streams: Streams
    stream: str
    group: str
    subscription: Subscription

    async def iterator(self, where: Mapping[str, Any]) -> str:
        shards = (await self.streams.find(self.topic)).shards
        if not any(shard.is_open for shard in shards if shard.number == self.shard):
            await self.subscription.close()
            return await ShardSource.iterator(self, where)
        await self.pace.acquire()
        async with self._throttled():
            consumer = await self.fan_out.consumer(self.topic, self.stream, self.group, self.timing)
        async with self._throttled(), bounded(f"subscribe to {self.topic}[{self.shard}]", self.timing.request):
            try:
                await self.subscription.open(consumer, where)
            except UnknownTopic as error:  # the shard exists, so the consumer is gone
                self.fan_out.forget(self.stream, self.group)
                raise Unavailable(
                    f"{self.group} was deregistered from {self.topic}, and is registered again"
                ) from error
        return SUBSCRIBED

    def is_polled(self, iterator: str) -> bool:
        return iterator != SUBSCRIBED

    async def read(self, iterator: str, limit: int) -> ReadResult:
        """The number of entries is the service's choice, whatever `limit`."""
        if iterator != SUBSCRIBED:
            return await ShardSource.read(self, iterator, limit)
        async with self._throttled():
            return await self.subscription.next()
