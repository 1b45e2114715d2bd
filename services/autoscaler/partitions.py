"""When a Kafka topic gets more partitions.

Partitions cannot be removed, so the policy is slow. More partitions move keys and break their order. So a stream
whose events have keys is only reported, and a person decides (`penstock apply --grow`).
"""

import asyncio
import math
import time
from dataclasses import dataclass, replace

import structlog

from services.autoscaler.fleet_metrics import FleetCounters, Window
from services.core.broker.contract import Broker, Reader
from services.core.broker.errors import BrokerError
from services.core.lifecycle import wait_for_stop
from services.core.pipes import PipeFile

HIGH, TARGET = 0.85, 0.7
WINDOW_S, COOL_DOWN_S = 600.0, 3_600.0


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """bytes: incoming, per second. capacity: bytes per second of one partition. keyed: events have keys."""

    bytes: float
    partitions: int
    capacity: float
    keyed: bool


@dataclass(frozen=True, slots=True)
class TopicMemory:
    """samples: (time, bytes per second) of the last minutes. acted: when partitions may have been added last."""

    samples: tuple[tuple[float, float], ...] = ()
    acted: float | None = None


@dataclass(frozen=True, slots=True)
class TopicDecision:
    """partitions: the new total; None: no change. reason: for a person, with figures."""

    partitions: int | None
    reason: str


def decide(figures: TopicFigures, memory: TopicMemory, now: float) -> tuple[TopicDecision, TopicMemory]:
    """At most double, at most once an hour, after ten minutes above the limit."""
    kept = tuple(sample for sample in memory.samples if sample[0] > now - 1.2 * WINDOW_S)
    memory = TopicMemory((*kept, (now, figures.bytes)), memory.acted)
    window = [load for at, load in memory.samples if at >= now - WINDOW_S]
    used = min(window) / (figures.partitions * figures.capacity)
    about = (
        f"{figures.bytes:,.0f} bytes a second in {figures.partitions} partitions of {figures.capacity:,.0f}; "
        f"{used:.0%} at least in the last {WINDOW_S:.0f} s"
    )
    if used <= HIGH or now - memory.samples[0][0] < WINDOW_S:
        return TopicDecision(None, f"the partitions fit the load: {about}"), memory
    if figures.keyed:
        remedy = "more of them would break the order of keys. Try: penstock apply --grow, when it may break"
        return TopicDecision(None, f"more partitions are needed, but events have keys, and {remedy}: {about}"), memory
    if memory.acted is not None and now - memory.acted < COOL_DOWN_S:
        return TopicDecision(
            None, f"more partitions are needed, but within the hour some were added, or the autoscaler began: {about}"
        ), memory
    wanted = math.ceil(min(window) / (TARGET * figures.capacity))
    wanted = min(2 * figures.partitions, max(figures.partitions + 1, wanted))
    return TopicDecision(wanted, f"the partitions are too full: {about}"), TopicMemory((), now)


log = structlog.get_logger()

EVERY_S = 60.0
_CHECKED = 100
"""Records per partition that are checked for keys."""
_BYTES = "penstock_ingest_payload_bytes_total"


class PartitionScaler:
    """Decides once a minute, for streams only: the topics of transforms are left to a person."""

    def __init__(self, pipes: PipeFile, broker: Broker, targets: str, capacity: float, *, dry_run: bool) -> None:
        self._pipes, self._broker, self._capacity, self._dry_run = pipes, broker, capacity, dry_run
        self._counters = FleetCounters(targets, "without them no stream gets partitions")
        self._memories: dict[str, TopicMemory] = {}
        self._logged: dict[str, str] = {}
        self._warned = ""

    async def run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            try:
                if (window := await self._counters.read()) is not None:
                    await self._consider(window)
            except BrokerError as error:
                if self._warned != str(error):
                    log.warning("partitions_unknown", error=str(error), hint="it is tried again")
                self._warned = str(error)
            await wait_for_stop(stopping, EVERY_S)

    async def _consider(self, window: Window) -> None:
        counts = await self._broker.admin.topics()
        for name, stream in self._pipes.streams.items():
            if name not in counts:
                continue
            load = sum(value for _, value in window.of(_BYTES, stream=name)) / window.seconds
            is_full = load > HIGH * counts[name] * self._capacity
            keyed = stream.key is not None or (is_full and await has_keys(self._broker.reader, name))
            figures = TopicFigures(load, counts[name], self._capacity, keyed)
            now = time.monotonic()
            # The time of the last change is not stored: after a restart an hour passes first.
            before = self._memories.get(name, TopicMemory((), now))
            decision, after = decide(figures, before, now)
            self._report(name, decision)
            if decision.partitions is None:
                self._memories[name] = after
            elif not self._dry_run:
                self._memories[name] = replace(before, samples=())  # a failure starts the ten minutes again
                await self._broker.admin.add_partitions(name, decision.partitions)
                self._memories[name] = after

    def _report(self, name: str, decision: TopicDecision) -> None:
        kind = decision.reason.partition(":")[0]
        if decision.partitions is not None or self._logged.get(name) != kind:
            self._logged[name] = kind
            log.info(
                "partitions_decided",
                stream=name,
                partitions=decision.partitions,
                reason=decision.reason,
                dry_run=self._dry_run,
            )


async def has_keys(reader: Reader, topic: str) -> bool:
    """Whether a recent record has a key: clients may set one without a key field in the pipe file."""
    for partition, stored in (await reader.describe(topic)).items():
        first = max(stored.start, stored.end - _CHECKED)
        batch = await reader.read(topic, partition, first, max_records=_CHECKED) if first < stored.end else None
        if batch is not None and any(record.key is not None for record in batch.records):
            return True
    return False
