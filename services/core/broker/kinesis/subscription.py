"""SubscribeToShard: a shard's entries pushed to us, over HTTP/2, which the SDK's connections do not speak.

Source: "SubscribeToShard", Kinesis Data Streams API reference, and "Amazon event stream encoding": the answer is a sequence of
messages, each one event. It ends after five minutes; one consumer may have one subscription to a shard.
"""

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from ssl import SSLContext
from typing import Any

import httpx
import orjson
from botocore.eventstream import EventStreamBuffer, ParserError

from services.core.broker.errors import Throttled, Unavailable
from services.core.broker.kinesis.faults import classify, code_of
from services.core.broker.kinesis.shard_iterator import Answer, BadSequence, Expired
from services.core.broker.kinesis.shards import shard_id
from services.core.broker.kinesis.signed_post import SignedPost, to_error
from services.core.broker.kinesis.timing import Timing

PUSHED = "pushed"
"""In place of an iterator."""

_SILENCE_SECONDS = 30.0
"""The service pushes an event every few seconds, also when nothing came."""


class Subscription:
    """One shard's, on a connection of its own. Open it again when it has expired; not for concurrent use."""

    def __init__(self, tls: SSLContext, post: SignedPost, shard: int, timing: Timing) -> None:
        self._tls, self._post, self._shard, self._timing = tls, post, shard, timing
        self._http: httpx.AsyncClient | None = None
        self._chunks: AsyncIterator[bytes]
        self._buffer = EventStreamBuffer()
        self._ends = 0.0
        self._is_first = True

    async def open(self, consumer: str, where: Mapping[str, Any]) -> None:
        """Begin there (what GetShardIterator would be asked), as this consumer (an ARN).

        Raises BadSequence, Throttled, UnknownTopic, Unavailable.
        """
        await self.close()
        position: dict[str, Any] = {"Type": where["ShardIteratorType"]}
        if "StartingSequenceNumber" in where:
            position["SequenceNumber"] = where["StartingSequenceNumber"]
        if "Timestamp" in where:
            position["Timestamp"] = where["Timestamp"].timestamp()
        asked = {"ConsumerARN": consumer, "ShardId": shard_id(self._shard), "StartingPosition": position}
        body = orjson.dumps(asked)
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

    async def next(self) -> Answer:
        """The next event. Raises Expired at the end of the subscription, Throttled, Unavailable.

        An empty one right at the beginning is passed over: that nothing is there is said by an event that came after looking.
        """
        answer = await self._event()
        if self._is_first and not answer.entries and answer.next is not None:
            answer = await self._event()
        self._is_first = False
        return answer

    async def _event(self) -> Answer:
        try:
            while (message := next(self._buffer, None)) is None:
                chunk = await anext(self._chunks, None)
                if chunk is None or asyncio.get_running_loop().time() > self._ends:
                    raise Expired("the subscription has ended")
                self._buffer.add_data(chunk)
        except (httpx.HTTPError, ParserError) as error:
            raise Expired(f"the subscription broke: {error!r}") from error
        kind = message.headers.get(":exception-type") or message.headers.get(":error-code")
        if kind is not None:
            raise _refused(400, orjson.dumps({"__type": kind, "message": message.payload.decode(errors="replace")}))
        return _parse(orjson.loads(message.payload))

    async def close(self) -> None:
        """End it. Idempotent."""
        http, self._http = self._http, None
        if http is not None:
            await http.aclose()


def _parse(event: Mapping[str, Any]) -> Answer:
    entries = [
        {
            **one,
            "Data": b64decode(one["Data"]),
            "ApproximateArrivalTimestamp": datetime.fromtimestamp(one["ApproximateArrivalTimestamp"], UTC),
        }
        for one in event["Records"]
    ]
    ended = event.get("ContinuationSequenceNumber") is None or event.get("ChildShards")
    return Answer(entries, int(event.get("MillisBehindLatest") or 0), None if ended else PUSHED)


def _refused(status: int, said: bytes) -> Exception:
    error = to_error("SubscribeToShard", status, said)
    code = code_of(error)
    if code == "InvalidArgumentException":
        return BadSequence(str(error))
    if code == "ResourceInUseException":  # within five seconds of the last one, ours or our predecessor's
        return Throttled(str(error))
    return classify(error, "subscribe to a shard")
