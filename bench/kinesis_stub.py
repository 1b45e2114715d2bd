"""A Kinesis that stores nothing, so that what writes to it can be measured: `python -m bench.kinesis_stub PORT`

It knows streams, shards and tags, and takes every PutRecords, answering after 10 ms as the service about does. Its shards read as
empty. The emulator takes 750 entries a second: at that rate the machine's other work would be measured. GET / gives the counts.
"""

import asyncio
import sys
from collections import Counter
from typing import Any

import orjson
import uvloop

_LATENCY_S = 0.010
_HASH_KEYS = 1 << 128


class Streams:
    """What was created, and how much came."""

    def __init__(self) -> None:
        self._shards: dict[str, int] = {}
        self._tags: dict[str, dict[str, str]] = {}
        self.counts = Counter[str]()

    def answer(self, operation: str, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body."""
        self.counts[operation] += 1
        name = asked.get("StreamName", "")
        if operation == "ListStreams":
            return 200, {"StreamNames": sorted(self._shards), "HasMoreStreams": False}
        if operation == "CreateStream":
            self._shards[name], self._tags[name] = asked["ShardCount"], asked.get("Tags", {})
            return 200, {}
        if operation == "GetRecords":
            return 200, {"Records": [], "NextShardIterator": asked["ShardIterator"], "MillisBehindLatest": 0}
        if name not in self._shards:
            return 400, {"__type": "ResourceNotFoundException", "message": name}
        if operation == "PutRecords":
            return 200, self._put(asked["Records"])
        if operation == "ListShards":
            return 200, {"Shards": list(map(_shard, *zip(*_ranges(self._shards[name]), strict=True)))}
        if operation == "ListTagsForStream":
            rows = [{"Key": key, "Value": value} for key, value in self._tags[name].items()]
            return 200, {"Tags": rows, "HasMoreTags": False}
        if operation == "GetShardIterator":
            return 200, {"ShardIterator": f"{name} {asked['ShardId']}"}
        if operation == "DescribeStreamSummary":
            return 200, {"StreamDescriptionSummary": {"StreamName": name, "StreamStatus": "ACTIVE"}}
        return 200, {}

    def _put(self, entries: list[dict[str, Any]]) -> dict[str, Any]:
        first = self.counts["entries"] + (1 << 60)
        self.counts["entries"] += len(entries)
        rows = [{"SequenceNumber": str(first + index), "ShardId": _name(0)} for index in range(len(entries))]
        return {"FailedRecordCount": 0, "Records": rows}


def _ranges(shards: int) -> list[tuple[int, int, int]]:
    return [(n, n * _HASH_KEYS // shards, (n + 1) * _HASH_KEYS // shards - 1) for n in range(shards)]


def _name(number: int) -> str:
    return f"shardId-{number:012d}"


def _shard(number: int, first: int, last: int) -> dict[str, Any]:
    return {
        "ShardId": _name(number),
        "HashKeyRange": {"StartingHashKey": str(first), "EndingHashKey": str(last)},
        "SequenceNumberRange": {"StartingSequenceNumber": "1"},
    }


class Connection(asyncio.Protocol):
    """HTTP as far as the SDK needs it: one request at a time."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end]).lower()
        length = int(_header(head, b"content-length") or 0)
        if len(self._buffer) < end + 4 + length:
            return
        body = bytes(self._buffer[end + 4 : end + 4 + length])
        del self._buffer[: end + 4 + length]
        if head.startswith(b"get"):
            self._send(200, dict(self._streams.counts))
            return
        operation = _operation(bytes(_header(head, b"x-amz-target")))
        status, said = self._streams.answer(operation, orjson.loads(body or b"{}"))
        asyncio.get_running_loop().call_later(_LATENCY_S, self._send, status, said)

    def _send(self, status: int, said: dict[str, Any]) -> None:
        body = orjson.dumps(said)
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/x-amz-json-1.1\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)  # type: ignore[attr-defined]


_OPERATIONS = {
    name.lower(): name
    for name in (
        "ListStreams",
        "CreateStream",
        "PutRecords",
        "ListShards",
        "ListTagsForStream",
        "DescribeStreamSummary",
        "GetShardIterator",
        "GetRecords",
        "IncreaseStreamRetentionPeriod",
    )
}


def _operation(target: bytes) -> str:
    return _OPERATIONS.get(target.decode().rpartition(".")[2], "")


def _header(head: bytes, name: bytes) -> bytes:
    _, found, rest = head.partition(b"\r\n" + name + b":")
    return rest.partition(b"\r\n")[0].strip() if found else b""


async def serve(port: int) -> None:
    """Runs until it is ended."""
    streams = Streams()
    server = await asyncio.get_running_loop().create_server(lambda: Connection(streams), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
