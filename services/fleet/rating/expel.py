"""Rating expel: events go straight into its stream, a receiver in this process answers at once."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from services.core.broker.connect import open_broker
from services.core.broker.errors import BrokerError
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.event import ARRIVAL, ID, ORIGIN, Origin
from services.core.listening import serve_app
from services.fleet.ports import free_port
from services.fleet.rating.rig import Rig, Shape, one_instance, read_instance
from services.fleet.stop import Stop

MAX_UNDER_WAY = 1000
"""Batches that wait for the log; what is offered beyond is not made."""
_MARK = b'"filler":'
"""Stands once in each event."""


@asynccontextmanager
async def expel_rig(folder: Path, shape: Shape, stop: Stop) -> AsyncIterator[Rig]:
    """As `Rig`, until the context is left."""
    port, receiver = free_port(), _Receiver()
    async with (
        receiver.listen(port),
        one_instance("expel", "services.expel", folder, port, shape, ("--allow-networks", "127.0.0.0/8"), stop) as (
            url,
            management,
        ),
        open_broker(url) as broker,
        Producer(broker.driver) as producer,
        asyncio.TaskGroup() as group,
    ):
        feed = _Feed(producer, shape, group)

        async def totals() -> tuple[float, float]:
            return receiver.events, (await read_instance(management)).total("process_cpu_seconds_total")

        async def behind() -> int:
            return max(0, feed.on_the_way + feed.stored - receiver.events)

        yield Rig(feed.offer, lambda: feed.stored, totals, behind)


class _Feed:
    """Writes events to the stream, each call's as one batch per partition. What the log does not take is not made."""

    def __init__(self, producer: Producer, shape: Shape, group: asyncio.TaskGroup) -> None:
        self._producer, self._size, self._group = producer, shape.size, group
        self._batches = self._number = 0
        self.stored = self.on_the_way = 0

    def offer(self, count: int) -> None:
        """As `Rig.offer`."""
        if count < 1 or self._batches >= MAX_UNDER_WAY:
            return
        now = int(time.time() * 1000)
        arrival = str(now).encode()
        records = [
            Record(f"k{n % 1009}".encode(), payload(n, self._size), now, _headers(n, arrival))
            for n in range(self._number, self._number + count)
        ]
        self._number += count
        self.on_the_way += count
        self._batches += 1
        self._group.create_task(self._send(records))

    async def _send(self, records: list[Record]) -> None:
        try:
            result = await self._producer.send("rated", records)
            self.stored += sum(part.count - len(part.failed) for part in result.parts)
        except BrokerError:
            await asyncio.sleep(0.1)
        finally:
            self._batches -= 1
            self.on_the_way -= len(records)


def payload(number: int, size: int) -> bytes:
    """A JSON object of about so many bytes."""
    head = f'{{"id":"e{number}",{_MARK.decode()}"'
    return (head + "x" * max(0, size - len(head) - 2) + '"}').encode()


def _headers(number: int, arrival: bytes) -> tuple[tuple[str, bytes], ...]:
    return (ID, f"e{number}".encode()), (ARRIVAL, arrival), (ORIGIN, Origin("rate", 0, number).pack())


class _Receiver:
    """Answers at once, and counts: expel's own counter is up to a second behind."""

    def __init__(self) -> None:
        self.events = 0

    @asynccontextmanager
    async def listen(self, port: int) -> AsyncIterator[None]:
        app = web.Application(client_max_size=20_000_000)
        app.router.add_post("/{path:.*}", self._take)
        async with serve_app(app, f"127.0.0.1:{port}"):
            yield

    async def _take(self, request: web.Request) -> web.Response:
        self.events += (await request.read()).count(_MARK)
        return web.Response(status=204)
