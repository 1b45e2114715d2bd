"""Writers that send by the clock, as processes of ingest are, at a rate that a test may change meanwhile."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.core.broker.contract import Broker
from tests.contract.traffic import DEADLINE

TICK = 0.2


class PacedWriters(ABC):
    """rate: events a second, of all writers together. sent: how many fell due. Writer w of n has the numbers w, w + n, …"""

    def __init__(self, rate: float) -> None:
        self.rate, self.sent = rate, 0

    @abstractmethod
    async def write(self, broker: Broker, due: AsyncIterator[list[int]]) -> None:
        """One writer: send the numbers that fall due, tick by tick. When they end, return as soon as all are acknowledged."""

    @asynccontextmanager
    async def running(self, brokers: list[Broker]) -> AsyncIterator[None]:
        """A writer for each broker, until the context is left; then until everything is acknowledged."""
        stop = asyncio.Event()
        async with asyncio.timeout(DEADLINE), asyncio.TaskGroup() as tasks:
            for writer, broker in enumerate(brokers):
                tasks.create_task(self.write(broker, self._due(writer, len(brokers), stop)))
            try:
                yield
            finally:
                stop.set()

    async def _due(self, writer: int, writers: int, stop: asyncio.Event) -> AsyncIterator[list[int]]:
        number, owed, last = writer, 0.0, time.monotonic()
        while not stop.is_set():
            await asyncio.sleep(TICK)
            now = time.monotonic()
            # A machine that stood still does not make up for it: that would be another load.
            owed, last = owed + self.rate / writers * min(now - last, 5 * TICK), now
            numbers = list(range(number, number + int(owed) * writers, writers))
            owed -= len(numbers)
            number += len(numbers) * writers
            self.sent += len(numbers)
            yield numbers
