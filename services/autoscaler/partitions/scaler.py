"""Kafka topics of a pipe file: figures from ingest's counters, partitions added where no key can be hurt."""

import asyncio
import time
from dataclasses import replace

import structlog

from services.autoscaler.counters import Counters, Window
from services.autoscaler.partitions.policy import HIGH, TopicDecision, TopicFigures, TopicMemory, decide
from services.autoscaler.targets import NoTargets, find_targets
from services.core.broker.contract import Admin
from services.core.broker.errors import BrokerError
from services.core.lifecycle import wait_for_stop
from services.core.pipes import PipeFile

log = structlog.get_logger()

EVERY_S = 60.0
_LOOKED_AT = 100
_BYTES = "penstock_ingest_payload_bytes_total"


class PartitionScaler:
    """Looks once a minute. Streams alone: what transforms write follows their partitions only when a person says so."""

    def __init__(self, pipes: PipeFile, admin: Admin, targets: str, capacity: float, *, dry_run: bool) -> None:
        self._pipes, self._admin, self._targets = pipes, admin, targets
        self._capacity, self._dry_run = capacity, dry_run
        self._counters = Counters()
        self._memories: dict[str, TopicMemory] = {}
        self._said: dict[str, str] = {}
        self._warned = ""

    async def run(self, stopping: asyncio.Event) -> None:
        """Until the stop."""
        while not stopping.is_set():
            try:
                window = await self._counters.look(await find_targets(self._targets))
                if window is not None:
                    await self._consider(window)
            except NoTargets as error:
                self._warn("no_targets", str(error), "without them no stream gets partitions")
            except BrokerError as error:
                self._warn("partitions_unknown", str(error), "it is tried again")
            await wait_for_stop(stopping, EVERY_S)

    async def _consider(self, window: Window) -> None:
        counts = await self._admin.topics()
        for name, stream in self._pipes.streams.items():
            if name not in counts:
                continue
            load = sum(value for _, value in window.of(_BYTES, stream=name)) / window.seconds
            is_full = load > HIGH * counts[name] * self._capacity
            keyed = stream.key is not None or (is_full and await has_keys(self._admin, name))
            figures = TopicFigures(load, counts[name], self._capacity, keyed)
            now = time.monotonic()
            # Nobody wrote down when partitions were added last: a restart waits as if it had just been done.
            before = self._memories.get(name, TopicMemory((), now))
            decision, after = decide(figures, before, now)
            self._tell(name, decision)
            if decision.partitions is None:
                self._memories[name] = after
            elif not self._dry_run:
                self._memories[name] = replace(before, looks=())  # a failure begins the ten minutes anew
                await self._admin.add_partitions(name, decision.partitions)
                self._memories[name] = after

    def _warn(self, event: str, error: str, hint: str) -> None:
        """Once, until it is another error."""
        if self._warned != error:
            self._warned = error
            log.warning(event, error=error, hint=hint)

    def _tell(self, name: str, decision: TopicDecision) -> None:
        kind = decision.reason.partition(":")[0]
        if decision.partitions is not None or self._said.get(name) != kind:
            self._said[name] = kind
            log.info(
                "partitions_decided",
                stream=name,
                partitions=decision.partitions,
                reason=decision.reason,
                dry_run=self._dry_run,
            )


async def has_keys(admin: Admin, topic: str) -> bool:
    """Whether any of the newest records has a key: a client may give one although the pipe file names no field for it."""
    for partition, stored in (await admin.describe(topic)).items():
        first = max(stored.start, stored.end - _LOOKED_AT)
        batch = await admin.read(topic, partition, first, max_records=_LOOKED_AT) if first < stored.end else None
        if batch is not None and any(record.key is not None for record in batch.records):
            return True
    return False
