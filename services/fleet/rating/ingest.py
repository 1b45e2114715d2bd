"""Rating ingest: requests leave at their time, whether earlier ones are answered or not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from services.fleet.ports import free_port
from services.fleet.rating.expel import payload
from services.fleet.rating.rig import Rig, Shape, one_instance, read_instance
from services.fleet.stop import Stop

MAX_UNDER_WAY = 500
"""Unanswered requests; what is offered beyond is not sent, because of an instance that is slow to answer."""
TIMEOUT = aiohttp.ClientTimeout(total=30.0)
CONNECTIONS = 64


@asynccontextmanager
async def ingest_rig(folder: Path, shape: Shape, stop: Stop) -> AsyncIterator[Rig]:
    """As `Rig`, until the context is left."""
    listen = f"127.0.0.1:{free_port()}"
    async with (
        one_instance("ingest", "services.ingest", folder, free_port(), shape, ("--listen", listen), stop) as (
            _url,
            management,
        ),
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS), timeout=TIMEOUT) as session,
        asyncio.TaskGroup() as group,
    ):
        client = _Client(session, f"http://{listen}/v1/streams/rated/events", shape, group)

        async def totals() -> tuple[float, float]:
            sample = await read_instance(management)
            return sample.total("penstock_ingest_events_accepted_total"), sample.total("process_cpu_seconds_total")

        async def behind() -> int:
            return client.under_way * shape.batch

        yield Rig(client.offer, lambda: client.made, totals, behind)


class _Client:
    """Many clients in one: requests of `batch` events each."""

    def __init__(self, session: aiohttp.ClientSession, url: str, shape: Shape, group: asyncio.TaskGroup) -> None:
        self._session, self._url, self._batch, self._group = session, url, shape.batch, group
        self._owed = 0
        self._body = b"[" + b",".join(payload(n, shape.size) for n in range(shape.batch)) + b"]"
        self.under_way = self.made = 0

    def offer(self, count: int) -> None:
        """As `Rig.offer`; what is less than a request waits for the next call."""
        self._owed += count
        while self._owed >= self._batch:
            self._owed -= self._batch
            self.made += self._batch
            if self.under_way < MAX_UNDER_WAY:
                self.under_way += 1
                self._group.create_task(self._post())

    async def _post(self) -> None:
        """What is refused or lost is not done; ingest's own count tells."""
        try:
            async with self._session.post(
                self._url, data=self._body, headers={"Content-Type": "application/json"}
            ) as answer:
                await answer.read()
        except (aiohttp.ClientError, TimeoutError):
            await asyncio.sleep(0.1)
        finally:
            self.under_way -= 1
