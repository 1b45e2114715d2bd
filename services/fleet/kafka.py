"""A real Kafka on this machine, for `--broker kafka`: one node, its data in the fleet's data folder."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.core.jvm.jars import JarsUnavailable
from services.core.jvm.java import JavaNotFound
from services.core.jvm.kafka_broker import KafkaNotReady
from services.core.jvm.kafka_server import KafkaCluster
from services.fleet.output import Say
from services.fleet.problem import CommandFailed
from services.fleet.stop import Stop

WATCH_S = 1.0


@asynccontextmanager
async def run_kafka(folder: Path, say: Say, stop: Stop) -> AsyncIterator[str]:
    """Start it, yield its bootstrap servers, restart it when it dies; then stop it in good order. Raises CommandFailed."""
    try:
        cluster = await asyncio.to_thread(KafkaCluster, folder, brokers=1)
    except (JavaNotFound, JarsUnavailable) as error:
        raise CommandFailed(str(error)) from error
    try:
        await _start(cluster, stop)
        watcher = asyncio.create_task(_watch(cluster, say), name="kafka watcher")
        try:
            yield cluster.bootstrap
        finally:
            watcher.cancel()
            await asyncio.wait({watcher})
    finally:
        await asyncio.to_thread(cluster.stop, grace_s=0 if stop.insisted.is_set() else 10)


async def _start(cluster: KafkaCluster, stop: Stop) -> None:
    """Until it is ready. When asked to stop meanwhile, its process is killed and its start given up."""
    starting = asyncio.ensure_future(asyncio.to_thread(cluster.start))
    asked = asyncio.ensure_future(stop.asked.wait())
    try:
        await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
        while not starting.done():
            for broker in cluster.brokers.values():
                if (pid := broker.pid) is not None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            await asyncio.wait({starting}, timeout=0.1)
        stop.check()
        starting.result()
    except KafkaNotReady as error:
        raise CommandFailed(str(error)) from error
    finally:
        asked.cancel()
        await asyncio.wait({starting})
        starting.exception()


async def _watch(cluster: KafkaCluster, say: Say) -> None:
    while True:
        await asyncio.sleep(WATCH_S)
        if not all(broker.is_running for broker in cluster.brokers.values()):
            say("error", f"Kafka died and is started again. Its log: {cluster.folder}")
            try:
                await asyncio.to_thread(cluster.restart)
            except KafkaNotReady as error:
                say("error", str(error))
