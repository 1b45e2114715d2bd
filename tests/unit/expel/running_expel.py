"""The whole service, in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.core.lifecycle import Supervision
from services.expel.app import start
from services.expel.settings import ExpelSettings


@asynccontextmanager
async def running_expel(settings: ExpelSettings) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        supervision = Supervision(group)
        running = group.create_task(start(settings, supervision))
        try:
            yield
        finally:
            supervision.stopping.set()
            await running
