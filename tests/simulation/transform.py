"""A stand-in for the transform service: reads a pipe's sources, passes on or filters, writes, tells the ledger, commits.

It has Spark's place in the fleet and its promises, not its code: at least once, told before committed, in the order of each key.
"""

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from typing import ClassVar

import orjson

from services.core.broker.contract import Broker, Consumer
from services.core.broker.errors import BrokerError, NotOwner
from services.core.broker.offset_tracker import OffsetTracker
from services.core.broker.producer import Producer, send_by_key
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.ledger.reporter import Reporter, close_reporters, new_instance
from services.core.pipe_file.pipes import Pipe, PipeFile
from services.core.pipe_file.topic_names import output_topic
from services.core.process.lifecycle import Supervision, wait_for_stop
from services.core.process.settings import Settings
from services.core.process.startup import open_when_reachable
from tests.simulation.machine import current_process

FILTERED = 7
"""One event of so many is filtered out."""


def transform_group(pipe: str) -> str:
    """Under which the stand-in reads."""
    return f"{pipe}.transform"


def is_filtered(event_id: str) -> bool:
    """Whether an event ends in the transform."""
    return int(event_id[1:]) % FILTERED == 0


class TransformSettings(Settings):
    """What every service has."""

    section: ClassVar[str] = "transform"


async def start(settings: TransformSettings, supervision: Supervision) -> None:
    """Run until the stop."""
    process = current_process()
    assert process is not None
    pipes: PipeFile = process.found["pipes"]
    async with AsyncExitStack() as stack:
        broker = await open_when_reachable(stack, settings.broker, supervision.stopping)
        if broker is None:
            return
        producer = await stack.enter_async_context(Producer(broker.appender))
        instance = new_instance()
        running = [
            supervision.run(_Job(broker, producer, name, pipe, instance).run(supervision.stopping), name)
            for name, pipe in pipes.pipes.items()
            if pipe.transform is not None
        ]
        await supervision.stopping.wait()
        await asyncio.wait(running)


class _Job:
    """One pipe's."""

    def __init__(self, broker: Broker, producer: Producer, name: str, pipe: Pipe, instance: str) -> None:
        self._broker, self._producer, self._name, self._pipe = broker, producer, name, pipe
        self._tracker = OffsetTracker()
        self._reporter = Reporter(producer, instance, "transform", name)

    async def run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            with suppress(BrokerError):
                await self._work(stopping)
            await wait_for_stop(stopping, 0.5)
        await close_reporters([self._reporter])

    async def _work(self, stopping: asyncio.Event) -> None:
        self._tracker = OffsetTracker()
        group, sources = transform_group(self._name), self._pipe.sources
        async with self._broker.consumer(group, sources, start="earliest", on_revoke=self._revoke) as consumer:
            while not stopping.is_set():
                batches = await consumer.poll(max_records=200, max_wait=0.5)
                for batch in batches:  # at once: what is revoked later is no longer among what may be committed
                    self._tracker.add(batch)
                for batch in batches:
                    await self._pass_on(batch, consumer)
                await self._measure(consumer)
                await self._reporter.report()

    async def _revoke(self, sources: frozenset[TopicPartition]) -> None:
        """What is under way is done again by the next owner; marks of these are good no more."""
        self._tracker.remove(sources)

    async def _pass_on(self, batch: Batch, consumer: Consumer) -> None:
        passed: list[Record] = []
        filtered: list[Record] = []
        for record in batch.records:
            value = orjson.loads(record.value or b"{}")
            (filtered if is_filtered(value["id"]) else passed).append(record)
        waiting = [_transform(record) for record in passed]
        while waiting:
            failed = await send_by_key(self._producer, output_topic(self._name), waiting)
            waiting = [waiting[index] for index in failed]
            if waiting:
                await asyncio.sleep(0.3)
        self._tracker.settle(batch.source, batch.offsets)
        marks = self._tracker.committable()
        self._reporter.settled.add("passed", passed)
        self._reporter.settled.add("filtered", filtered)
        await self._reporter.report()
        marks = self._tracker.still_owned(marks)
        with suppress(NotOwner):
            await consumer.commit(marks)
            self._tracker.record_commit(marks)

    async def _measure(self, consumer: Consumer) -> None:
        asked = int(time.time() * 1000)
        lags = await consumer.lag()
        waiting = [asked - lag.stored for lag in lags.values() if lag.stored is not None and lag.records]
        owned = {source for source in lags if source.topic in self._pipe.sources}
        self._reporter.record_behind(max(waiting, default=0) if owned else None)


def _transform(record: Record) -> Record:
    value = orjson.loads(record.value or b"{}")
    return Record(record.key, orjson.dumps(value | {"transformed": True}), record.timestamp, record.headers)
