"""A load generator that costs little: raw keep-alive connections that send one prepared request again and again.

    python -m bench.load http://127.0.0.1:8080/v1/streams/s/events --events 100 --requests 5000 --connections 64

Bounded by --requests. The last line of output is JSON: requests, seconds, statuses, p50_ms, p99_ms.
"""

import argparse
import asyncio
import time
from collections import Counter
from typing import cast
from urllib.parse import urlsplit

import orjson
import uvloop

from bench.events import make_body


class Connection(asyncio.Protocol):
    """One connection: sends the next request when the answer to the last is complete."""

    def __init__(self, load: "Load") -> None:
        self._load = load
        self._buffer = b""
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        if not self._load.take():
            self._transport.close()
            return
        self._sent = time.perf_counter()
        self._transport.write(self._load.request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, mark, rest = self._buffer.partition(b"\r\n\r\n")
        if not mark:
            return
        lowered = head.lower()
        at = lowered.find(b"content-length:")
        length = int(lowered[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(rest) < length:
            return
        self._buffer = rest[length:]
        self._load.count(head[9:12], time.perf_counter() - self._sent)
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


class Load:
    """The shared budget and the results."""

    def __init__(self, url: str, events: int, requests: int) -> None:
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        body = make_body(events)
        kind = "application/json"
        lines = [f"POST {parts.path} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Type: {kind}"]
        self.request = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body
        self._left = requests
        self.statuses: Counter[str] = Counter()
        self.seconds: list[float] = []

    def take(self) -> bool:
        """Whether one more request may be sent."""
        self._left -= 1
        return self._left >= 0

    def count(self, status: bytes, seconds: float) -> None:
        """One answer."""
        self.statuses[status.decode()] += 1
        self.seconds.append(seconds)

    async def run(self, connections: int) -> dict[str, object]:
        """Send everything; the answer is the report."""
        loop = asyncio.get_running_loop()
        started = time.perf_counter()
        opened = [
            await loop.create_connection(lambda: Connection(self), self.host, self.port) for _ in range(connections)
        ]
        await asyncio.wait_for(asyncio.gather(*(connection.done for _, connection in opened)), 300)
        elapsed = time.perf_counter() - started
        ordered = sorted(self.seconds)
        return {
            "requests": len(ordered),
            "seconds": elapsed,
            "statuses": dict(self.statuses),
            "p50_ms": _share(ordered, 0.5),
            "p99_ms": _share(ordered, 0.99),
        }


def _share(ordered: list[float], part: float) -> float:
    """Milliseconds at this share of the sorted seconds."""
    return round(ordered[int(part * (len(ordered) - 1))] * 1000, 3) if ordered else 0.0


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--connections", type=int, default=64)
    args = parser.parse_args()
    print(orjson.dumps(uvloop.run(Load(args.url, args.events, args.requests).run(args.connections))).decode())


if __name__ == "__main__":
    main()
