"""What stands between our client and the emulator: a proxy that keeps the service's limits, and hurts on purpose.

The emulator takes whatever comes. The service does not: a shard takes 1 MB and 1,000 entries a second, gives 2 MB and 5
answers a second, and refuses what is above with ProvisionedThroughputExceeded (of PutRecords entry by entry). Source:
"Quotas and limits", Kinesis Data Streams developer guide. It may cut a shard's old end off, as retention does.
"""

import asyncio
import base64
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

PROVISIONED = "ProvisionedThroughputExceededException"
_JSON = "application/x-amz-json-1.1"
_TARGET = "Kinesis_20131202."
_WRITE_BYTES, _WRITE_ENTRIES = 1 << 20, 1_000
_READ_BYTES, _READ_CALLS = 2 << 20, 5
_LARGEST_ANSWER = 10 << 20

Answer = tuple[int, dict[str, Any]]


class Bucket:
    """So many tokens a second, as many at once. `owe` may overdraw: the service gives a large answer, then none for a while."""

    def __init__(self, rate: float, clock: Callable[[], float]) -> None:
        self._rate, self._clock = rate, clock
        self._tokens, self._at = rate, clock()

    def has(self, tokens: float) -> bool:
        now = self._clock()
        self._tokens = min(self._rate, self._tokens + (now - self._at) * self._rate)
        self._at = now
        return self._tokens >= tokens

    def owe(self, tokens: float) -> None:
        self._tokens -= tokens


class _Shard:
    def __init__(self, clock: Callable[[], float], scale: float) -> None:
        self.write_bytes, self.write_entries = (
            Bucket(_WRITE_BYTES * scale, clock),
            Bucket(_WRITE_ENTRIES * scale, clock),
        )
        self.read_bytes, self.read_calls = Bucket(_READ_BYTES, clock), Bucket(_READ_CALLS, clock)

    def takes(self, size: int) -> bool:
        if not (self.write_bytes.has(size) and self.write_entries.has(1)):
            return False
        self.write_bytes.owe(size)
        self.write_entries.owe(1)
        return True


@dataclass
class Faults:
    """What to do to coming requests; tests set and unset it.

    down: connections are cut: before the request is passed on, or after it when it was under way.
    errors: by operation, codes to answer next.
    refuse: asked for (stream, index) of each entry, whether to refuse just that. latency: seconds before each answer.
    """

    down: bool = False
    errors: dict[str, list[str]] = field(default_factory=dict)
    refuse: Callable[[str, int], bool] | None = None
    latency: float = 0.0


class KinesisLimits:
    """The proxy. `endpoint` is for clients. counts: requests and refusals by what they were.

    write_scale: the part of a shard's write limits that it gives, for loads that an emulator can take.
    """

    def __init__(self, upstream: str, clock: Callable[[], float] = time.monotonic, *, write_scale: float = 1.0) -> None:
        self._upstream, self._clock, self._write_scale = upstream, clock, write_scale
        self._shards: dict[tuple[str, str], _Shard] = {}
        self._ranges: dict[str, tuple[float, list[dict[str, Any]]]] = {}
        self._iterators: dict[str, tuple[str, str]] = {}
        self._floors: dict[tuple[str, str], tuple[str, str]] = {}
        self._session: ClientSession | None = None
        self.faults = Faults()
        self.counts: Counter[str] = Counter()
        self.endpoint = ""

    def cut(self, stream: str, shard: str, sequence: str, *, too: bool) -> None:
        """Forget what lies before the entry of this sequence number, as retention would; `too`: and that entry."""
        self._floors[stream, shard] = ("AFTER_SEQUENCE_NUMBER" if too else "AT_SEQUENCE_NUMBER", sequence)

    @contextmanager
    def serve_in_thread(self) -> "Iterator[KinesisLimits]":
        """As `serve`, on a loop of its own: for several tests, each with a loop that ends with it."""
        ready, done = threading.Event(), threading.Event()

        async def run() -> None:
            async with self.serve():
                ready.set()
                await asyncio.to_thread(done.wait)

        thread = threading.Thread(target=asyncio.run, args=(run(),), name="kinesis-limits", daemon=True)
        thread.start()
        try:
            assert ready.wait(30), "the proxy does not listen"
            yield self
        finally:
            done.set()
            thread.join(30)

    @asynccontextmanager
    async def serve(self) -> "AsyncIterator[KinesisLimits]":
        """Listen on a free loopback port for the time of the context."""
        app = web.Application(client_max_size=16 << 20)
        app.router.add_post("/", self._answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", int(self.endpoint.rpartition(":")[2] or 0))
            await site.start()
            self.endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}"
            async with ClientSession(timeout=ClientTimeout(total=60)) as self._session:
                yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        operation = request.headers.get("X-Amz-Target", "").removeprefix(_TARGET)
        body = await request.read()
        if self._is_down():
            return self._cut_off(request)
        if self.faults.latency:
            await asyncio.sleep(self.faults.latency)
        self.counts[operation] += 1
        asked: dict[str, Any] = json.loads(body or b"{}")
        if queue := self.faults.errors.get(operation):
            code = queue.pop(0)
            self.counts[f"{operation} {code}"] += 1
            return _error(code, 500 if code == "InternalFailure" else 400)
        handler = getattr(self, f"_{operation}", None)
        try:
            status, said = await (handler(asked, request) if handler else self._pass(operation, asked, request))
        except ClientError:
            return self._cut_off(request)
        if self._is_down():
            return self._cut_off(request)
        if status != 200:
            self.counts[f"{operation} {said.get('__type', status)}"] += 1
        return web.Response(status=status, body=json.dumps(said).encode(), content_type=_JSON)

    def _is_down(self) -> bool:
        return self.faults.down

    def _cut_off(self, request: web.Request) -> web.StreamResponse:
        self.counts["cut off"] += 1
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)

    async def _pass(self, operation: str, asked: dict[str, Any], request: web.Request) -> Answer:
        assert self._session is not None, "not serving"
        kept = ("Authorization", "X-Amz-Date", "X-Amz-Security-Token")
        headers = {name: request.headers[name] for name in kept if name in request.headers}
        headers |= {"X-Amz-Target": _TARGET + operation, "Content-Type": _JSON}
        async with self._session.post(self._upstream, data=json.dumps(asked).encode(), headers=headers) as answer:
            said = await answer.read()
            return answer.status, json.loads(said) if said else {}

    async def _PutRecords(self, asked: dict[str, Any], request: web.Request) -> Answer:  # noqa: N802 - AWS's name
        stream, entries = asked["StreamName"], asked["Records"]
        sizes = [len(base64.b64decode(one["Data"])) + len(one["PartitionKey"].encode()) for one in entries]
        if len(entries) > 500 or sum(sizes) > 5 << 20 or max(sizes, default=0) > 1 << 20:
            return 400, {"__type": "ValidationException", "message": f"{len(entries)} entries, {sum(sizes)} bytes"}
        ranges = await self._open_ranges(stream, request)
        if not ranges:
            return await self._pass("PutRecords", asked, request)
        taken = [i for i, one in enumerate(entries) if self._takes(stream, ranges, one, sizes[i], i)]
        rows: list[dict[str, Any]] = [{"ErrorCode": PROVISIONED, "ErrorMessage": "Rate exceeded"} for _ in entries]
        if taken:
            status, said = await self._pass("PutRecords", {**asked, "Records": [entries[i] for i in taken]}, request)
            if status != 200:
                return status, said
            for index, row in zip(taken, said["Records"], strict=True):
                rows[index] = row
        self.counts["entries"] += len(taken)
        self.counts["entries refused"] += len(entries) - len(taken)
        failed = sum("ErrorCode" in row for row in rows)
        return 200, {"FailedRecordCount": failed, "Records": rows, "EncryptionType": "NONE"}

    def _takes(self, stream: str, ranges: list[dict[str, Any]], entry: dict[str, Any], size: int, index: int) -> bool:
        if self.faults.refuse is not None and self.faults.refuse(stream, index):
            return False
        key = entry.get("ExplicitHashKey") or int(hashlib.md5(entry["PartitionKey"].encode()).hexdigest(), 16)
        for one in ranges:
            if int(one["HashKeyRange"]["StartingHashKey"]) <= int(key) <= int(one["HashKeyRange"]["EndingHashKey"]):
                return self._shard(stream, one["ShardId"]).takes(size)
        return True

    async def _GetShardIterator(self, asked: dict[str, Any], request: web.Request) -> Answer:  # noqa: N802
        stream, shard = asked["StreamName"], asked["ShardId"]
        floor = self._floors.get((stream, shard))
        if floor is not None and _is_below(asked, floor):
            asked = {"StreamName": stream, "ShardId": shard, "ShardIteratorType": floor[0]}
            asked["StartingSequenceNumber"] = floor[1]
        status, said = await self._pass("GetShardIterator", asked, request)
        if "Unable to find record" in said.get("message", ""):  # the emulator's word for what the service calls invalid
            return 400, {"__type": "InvalidArgumentException", "message": said["message"]}
        if status == 200:
            self._iterators[said["ShardIterator"]] = (stream, shard)
        return status, said

    async def _GetRecords(self, asked: dict[str, Any], request: web.Request) -> Answer:  # noqa: N802
        place = self._iterators.get(asked["ShardIterator"])
        if place is None:
            return 400, {"__type": "ExpiredIteratorException", "message": "not an iterator of this proxy's"}
        shard = self._shard(*place)
        if not (shard.read_calls.has(1) and shard.read_bytes.has(1)):
            return 400, {"__type": PROVISIONED, "message": f"Rate exceeded for shard {place[1]}"}
        status, said = await self._pass("GetRecords", asked, request)
        if status == 200:
            shard.read_calls.owe(1)
            shard.read_bytes.owe(min(_LARGEST_ANSWER, sum(len(one["Data"]) * 3 // 4 for one in said["Records"])))
            if said.get("NextShardIterator"):
                self._iterators[said["NextShardIterator"]] = place
        return status, said

    def _shard(self, stream: str, shard: str) -> _Shard:
        return self._shards.setdefault((stream, shard), _Shard(self._clock, self._write_scale))

    async def _open_ranges(self, stream: str, request: web.Request) -> list[dict[str, Any]]:
        """The stream's open shards, at most a second old; empty when there is no such stream."""
        known = self._ranges.get(stream)
        if known is None or self._clock() - known[0] > 1:
            status, said = await self._pass("ListShards", {"StreamName": stream}, request)
            rows = said.get("Shards", []) if status == 200 else []
            rows = [one for one in rows if one["SequenceNumberRange"].get("EndingSequenceNumber") is None]
            known = self._ranges[stream] = (self._clock(), rows)
        return known[1]


def _is_below(asked: dict[str, Any], floor: tuple[str, str]) -> bool:
    kind, first = asked["ShardIteratorType"], int(floor[1]) + (floor[0] == "AFTER_SEQUENCE_NUMBER")
    if kind in ("AT_SEQUENCE_NUMBER", "AFTER_SEQUENCE_NUMBER"):
        return int(asked["StartingSequenceNumber"]) < first
    return kind in ("TRIM_HORIZON", "AT_TIMESTAMP")


def _error(code: str, status: int) -> web.Response:
    body = json.dumps({"__type": code, "message": "on purpose"}).encode()
    return web.Response(status=status, body=body, content_type=_JSON)
