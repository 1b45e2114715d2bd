"""The whole service, in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.core.broker.contract import Broker
from services.core.pipe_file.pipes import load_pipes
from services.core.process.lifecycle import Supervision
from services.core.provision import ensure_topics
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


async def set_up_hook(folder: Path, broker: Broker, hook: str) -> ExpelSettings:
    """A pipe file with one webhook, of this text, and its topics on the broker, a log in `folder`."""
    path = folder / "pipes.yaml"
    path.write_text(
        f"streams: {{s: {{partitions: 1}}}}\n"
        f"pipes: {{late: {{sources: [s], destinations: [{{name: hook, webhook: {hook}}}]}}}}"
    )
    await ensure_topics(broker.admin, await asyncio.to_thread(load_pipes, path))
    return ExpelSettings.model_validate(
        {"pipes": path, "broker": f"log://{folder}/log", "drain": "2s", "allow_networks": "127.0.0.0/8"}
    )
