"""Ingest in this process, over a broker in memory: everything but start-up, files and signals."""

from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from services.core.broker.contract import Reader
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.broker.retry import AppendPolicy
from services.core.control.key_marks import KeyMarker
from services.core.offset_token import mark_of
from services.core.pipe_file.stream import Stream
from services.ingest.access import Access
from services.ingest.app import OPENAPI
from services.ingest.endpoint import Endpoint
from services.ingest.http_server import HttpServer, Timeouts
from services.ingest.intake import Intake
from services.ingest.json_events import Limits
from tests.support.memory_appender import MemoryAppender
from tests.support.raw_http import Client, Reply, make_request

STREAMS = {
    "plain": Stream(),
    "orders": Stream(id="id", key="customer.id", time="at"),
}
LIMITS = Limits(events=100, event_bytes=2_000, body_bytes=50_000)
FAST = AppendPolicy(deadline=0.2, append_timeout=0.2, base_wait=0.01, max_wait=0.02)
_OPENAPI = OPENAPI.read_bytes()


@dataclass
class Service:
    """What a test talks to."""

    port: int
    appender: MemoryAppender
    intakes: dict[str, Intake]
    access: Access

    async def post(
        self, body: bytes, stream: str = "plain", *, media: str | None = "application/json", **headers: str
    ) -> Reply:
        """One request on a connection of its own."""
        return await self.send(make_request(f"/v1/streams/{stream}/events", body, media=media, **headers))

    async def send(self, request: bytes) -> Reply:
        """The same for bytes as they are."""
        async with Client(self.port) as client:
            return await client.request(request)

    def stored(self, stream: str = "plain") -> list[Record]:
        """Everything in the stream."""
        return self.appender.records(stream)

    def values(self, stream: str = "plain") -> list[bytes | None]:
        """Every payload in the stream."""
        return [record.value for record in self.stored(stream)]


@asynccontextmanager
async def running(
    *,
    access: Access | None = None,
    streams: Mapping[str, Stream] = STREAMS,
    max_pending: int = 1 << 20,
    limits: Limits = LIMITS,
) -> AsyncIterator[Service]:
    """Serve on a free port until the context is left."""
    appender = MemoryAppender()
    access = access or Access(None)
    with ThreadPoolExecutor(1) as executor:
        async with Producer(appender, max_pending_bytes=max_pending, policy=FAST) as producer:
            intakes = {name: Intake(name, stream, producer.rotate_keyless) for name, stream in streams.items()}
            for name, intake in intakes.items():
                appender.create(name)
                intake.partitions = 4
                intake.topic = mark_of(name) if intake.compact else ""
            marker = KeyMarker(producer, cast("Reader", None), "ingest")
            endpoint = Endpoint(intakes, producer, marker, access, limits, _OPENAPI, executor, ["invoices"])
            server = HttpServer(endpoint.handle, timeouts=Timeouts(30, 30, 30), max_connections=50, max_in_flight=10**7)
            async with server.listen("127.0.0.1", 0, reuse_port=False) as (_, port):
                yield Service(port, appender, intakes, access)
