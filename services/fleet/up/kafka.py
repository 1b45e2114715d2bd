"""Runs Kafka for `--broker kafka`: one node on this machine, its data in the fleet's data folder."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.core.jvm.jars import JarsUnavailable
from services.core.jvm.java import JavaNotFound
from services.core.jvm.kafka import KafkaCluster, KafkaNotReady
from services.fleet.problem import CommandFailed
from services.fleet.stop import Stop
from services.fleet.up.output import Notify

WATCH_S = 1.0


@asynccontextmanager
async def run_kafka(folder: Path, notify: Notify, stop: Stop) -> AsyncIterator[str]:
    """Start Kafka and yield its bootstrap servers. Restarts it when it dies; stops it at the end. Raises CommandFailed."""
    try:
        cluster = await asyncio.to_thread(KafkaCluster, folder, brokers=1)
    except (JavaNotFound, JarsUnavailable) as error:
        raise CommandFailed(str(error)) from error
    try:
        await _start(cluster, stop)
        watcher = asyncio.create_task(_watch(cluster, notify), name="kafka watcher")
        try:
            yield cluster.bootstrap
        finally:
            watcher.cancel()
            await asyncio.wait({watcher})
    finally:
        await asyncio.to_thread(cluster.stop, grace_s=0 if stop.insisted.is_set() else 10)


async def _start(cluster: KafkaCluster, stop: Stop) -> None:
    """Start it and wait until it is ready. If a stop is requested first, kill the process and give up."""
    starting = asyncio.ensure_future(asyncio.to_thread(cluster.start))
    asked = asyncio.ensure_future(stop.asked.wait())
    try:
        await asyncio.wait({starting, asked}, return_when=asyncio.FIRST_COMPLETED)
        await _cut_short(cluster, starting)
        stop.check()
        starting.result()
    except KafkaNotReady as error:
        raise CommandFailed(str(error)) from error
    finally:
        asked.cancel()
        await asyncio.wait({starting})
        starting.exception()


async def _cut_short(cluster: KafkaCluster, starting: asyncio.Future[None]) -> None:
    """Kill what is being started until the start has given up."""
    while not starting.done():
        for broker in cluster.brokers.values():
            if (pid := broker.pid) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        await asyncio.wait({starting}, timeout=0.1)


async def _watch(cluster: KafkaCluster, notify: Notify) -> None:
    while True:
        await asyncio.sleep(WATCH_S)
        if not all(broker.is_running for broker in cluster.brokers.values()):
            notify("error", f"Kafka died and is restarted. Its log: {cluster.folder}")
            starting = asyncio.ensure_future(asyncio.to_thread(cluster.restart))
            try:
                await asyncio.shield(starting)
            except (KafkaNotReady, OSError) as error:
                notify("error", f"Kafka could not be started, which is tried again: {error}")
            finally:  # no thread may start it while another one stops it
                await _cut_short(cluster, starting)
