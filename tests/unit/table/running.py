"""A table over the embedded log: everything but settings, files of keys and signals."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Headers, Record
from services.core.offset_token import mark_of
from services.table.access import Access
from services.table.api import Api
from services.table.follower import Begin, Follower
from services.table.http_server import HttpServer
from tests.support.raw_http import Client, Reply

STREAM = "accounts"
AGE_MS = 3_600_000


@dataclass
class Table:
    """What a test talks to."""

    port: int
    broker: Broker
    producer: Producer
    follower: Follower
    access: Access

    async def put(self, key: str, value: bytes | None, headers: Headers = ()) -> str:
        """Append an event; gives its token."""
        result = await self.producer.send(STREAM, [Record(key.encode(), value, 1, headers)])
        result.raise_first()
        return f"{await self.topic()}.{result.parts[0].partition}:{result.parts[0].last}"

    async def topic(self) -> str:
        """The mark of the topic in tokens."""
        return mark_of(await self.broker.admin.incarnation(STREAM))

    async def get(self, path: str = "", **headers: str) -> Reply:
        """path: behind the table's own."""
        return await self.ask(f"/v1/tables/{STREAM}{path}", **headers)

    async def ask(self, path: str, method: str = "GET", **headers: str) -> Reply:
        """One request on a connection of its own."""
        async with Client(self.port) as client:
            return await client.request(make_get(path, method, **headers))

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for it."""
        async with asyncio.timeout(300):
            while not condition():
                await asyncio.sleep(0.01)

    async def caught_up(self) -> None:
        """Wait until the table is ready."""
        await self.until(lambda: self.follower.why_not_ready(300_000) is None)


def make_get(path: str, method: str = "GET", **headers: str) -> bytes:
    """The bytes of a request."""
    headers = {"Host": "localhost", **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


@asynccontextmanager
async def following(
    broker: Broker, folder: Path, *, age_ms: int = AGE_MS, begin: Begin | None = None
) -> AsyncIterator[Follower]:
    """A follower of the stream, with its file in `folder`."""
    stopping = asyncio.Event()
    with ThreadPoolExecutor(1) as thread:
        follower = Follower(broker, STREAM, age_ms, folder, thread, begin)
        running = asyncio.create_task(follower.run(stopping))
        try:
            yield follower
        finally:
            stopping.set()
            await running
            await follower.close()


@asynccontextmanager
async def running(
    path: Path, *, age_ms: int = AGE_MS, wait: float = 60.0, partitions: int = 2, max_changes: int = 2, **more: Any
) -> AsyncIterator[Table]:
    """Serve until the context is left. path: of the log and the table."""
    async with LogBroker.open(str(path / "log")) as broker, Producer(broker.appender) as producer:
        if STREAM not in await broker.admin.topics():
            await broker.admin.create_topic(TopicSpec(STREAM, partitions, retention_ms=age_ms, compact=True))
        async with following(broker, path, age_ms=age_ms) as follower:
            access = Access(**more)
            api = Api({STREAM: follower}, access, b"{}", wait=wait, behind_ms=300_000, max_changes=max_changes)
            async with HttpServer(api.handle, max_connections=20).listen("127.0.0.1", 0) as address:
                yield Table(int(address.rpartition(":")[2]), broker, producer, follower, access)
