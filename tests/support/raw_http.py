"""HTTP as bytes: for requests that no client library would send, and to see exactly what comes back."""

import asyncio
from dataclasses import dataclass
from typing import Any

import orjson

TIMEOUT_S = 300.0
"""Longer than ingest waits for its broker."""


@dataclass
class Reply:
    """One answer. `closed`: the server said that it ends the connection with it."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def closed(self) -> bool:
        """Whether the server announced the end of the connection."""
        return self.headers.get("connection") == "close"

    def json(self) -> Any:
        """The body, parsed."""
        return orjson.loads(self.body)

    @property
    def problem(self) -> str:
        """The last part of an RFC 9457 type."""
        assert self.headers["content-type"] == "application/problem+json"
        document = self.json()
        assert document["status"] == self.status
        return str(document["type"]).removeprefix("urn:penstock:problem:")


class Client:
    """One connection. Use as an async context manager."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def __aenter__(self) -> "Client":
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return

    async def send(self, data: bytes) -> None:
        """Write bytes as they are."""
        self._writer.write(data)
        await self._writer.drain()

    def end(self) -> None:
        """Send no more; still read."""
        self._writer.write_eof()

    async def reply(self) -> Reply:
        """The next answer."""
        async with asyncio.timeout(TIMEOUT_S):
            head = await self._reader.readuntil(b"\r\n\r\n")
            first, *lines = head[:-4].split(b"\r\n")
            headers = {}
            for line in lines:
                name, _, value = line.decode().partition(": ")
                headers[name.lower()] = value
            body = await self._reader.readexactly(int(headers.get("content-length", "0")))
        return Reply(int(first.split()[1]), headers, body)

    async def is_over(self) -> bool:
        """Waits until the server ends the connection; False when it sends something instead."""
        async with asyncio.timeout(TIMEOUT_S):
            return await self._reader.read(1) == b""

    async def request(self, data: bytes) -> Reply:
        """Send bytes, read one answer."""
        await self.send(data)
        return await self.reply()


def make_request(
    path: str, body: bytes = b"", *, method: str = "POST", media: str | None = "application/json", **headers: str
) -> bytes:
    """A well-formed request. Header names take _ for -."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    if media is not None:
        lines.append(f"Content-Type: {media}")
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
