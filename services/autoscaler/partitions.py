"""When a Kafka topic gets more partitions.

Partitions cannot be removed, so the policy is slow, and it acts only where the stream has `max_partitions`. More partitions map
keys to other partitions and break their order. So a stream that may have keys (`core.control.key_marks`) never gets more by
itself. Every need that is not met is reported, and a person decides (`penstock apply --grow`).
"""

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import structlog

from services.autoscaler.fleet_metrics import FleetCounters, Window
from services.core import metrics
from services.core.audit import write_growth
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError, UnknownTopic
from services.core.broker.producer import Producer
from services.core.control.key_marks import KeyMark, read_key_marks
from services.core.pipe_file.pipes import PipeFile, own_streams
from services.core.pipe_file.stream import Stream
from services.core.pipe_file.topic_names import AUDIT
from services.core.process.lifecycle import wait_for_stop
from services.core.times import format_time

HIGH, TARGET = 0.85, 0.7
WINDOW_S, COOL_DOWN_S = 600.0, 3_600.0


@dataclass(frozen=True, slots=True)
class TopicFigures:
    """bytes: incoming, per second. capacity: bytes per second of one partition. most: the largest number of partitions that the
    autoscaler may make; None: it may add none. keys: why events may have keys; None: none ever had one.
    """

    bytes: float
    partitions: int
    capacity: float
    most: int | None
    keys: str | None

    @property
    def is_full(self) -> bool:
        return self.bytes > HIGH * self.partitions * self.capacity


@dataclass(frozen=True, slots=True)
class TopicMemory:
    """samples: (time, bytes per second) of the last minutes. acted: when partitions may have been added last."""

    samples: tuple[tuple[float, float], ...] = ()
    acted: float | None = None


@dataclass(frozen=True, slots=True)
class TopicDecision:
    """partitions: the new total; None: no change. reason: for a person, with figures. is_refused: more are needed, and the
    autoscaler must not add them."""

    partitions: int | None
    reason: str
    is_refused: bool = False


def decide(figures: TopicFigures, memory: TopicMemory, now: float) -> tuple[TopicDecision, TopicMemory]:
    """At most double, at most once an hour, after ten minutes above the limit, never above `most`."""
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
    wanted = math.ceil(min(window) / (TARGET * figures.capacity))
    wanted = min(2 * figures.partitions, max(figures.partitions + 1, wanted))
    if refusal := _refuse(figures, wanted):
        return TopicDecision(None, f"{refusal}: {about}", is_refused=True), memory
    if memory.acted is not None and now - memory.acted < COOL_DOWN_S:
        return TopicDecision(
            None, f"more partitions are needed, but within the hour some were added, or the autoscaler began: {about}"
        ), memory
    wanted = min(wanted, figures.most or wanted)
    return TopicDecision(wanted, f"the partitions are too full: {about}"), TopicMemory((), now)


def _refuse(figures: TopicFigures, wanted: int) -> str | None:
    """Why the autoscaler must not add the partitions that are needed, and a remedy. None: it may."""
    by_hand = f"partitions: {wanted} in the pipe file, then penstock apply --grow"
    if figures.keys is not None:
        return (
            f"{wanted} partitions are needed, but {figures.keys}, and more of them would break the order of keys. Try, when it "
            f"may break once: {by_hand}"
        )
    if figures.most is None:
        return (
            f"{wanted} partitions are needed, but the stream has no max_partitions, so none are added. Try: "
            f"max_partitions: {wanted} in the pipe file and a restart of the autoscaler; or {by_hand}"
        )
    if figures.partitions >= figures.most:
        return f"{wanted} partitions are needed, but the stream has max_partitions: {figures.most}. Try: a higher one"
    return None


def _why_keyed(stream: Stream, mark: KeyMark | None) -> str | None:
    """Why events of the stream may have keys; None: none ever had one."""
    if stream.key is not None:
        return f"the stream has the key {stream.key}"
    if mark is None:
        return "the stream is older than the record of its keys, so its events may have some"
    if mark.state == "seen":
        return f"its events have keys since {format_time(mark.at)} at the latest"
    return None


log = structlog.get_logger()

EVERY_S = 60.0
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
                    log.warning("partitions_unknown", error=str(error), hint="the broker is asked again")
                self._warned = str(error)
            await wait_for_stop(stopping, EVERY_S)

    async def _consider(self, window: Window) -> None:
        counts = await self._broker.admin.topics()
        marks: Mapping[str, KeyMark] | None = None
        for name, stream in own_streams(self._pipes).items():
            if name not in counts:
                continue
            load = sum(value for _, value in window.of(_BYTES, stream=name)) / window.seconds
            figures = TopicFigures(load, counts[name], self._capacity, stream.max_partitions, keys=None)
            if figures.is_full:
                marks = await read_key_marks(self._broker.reader) if marks is None else marks
                figures = replace(figures, keys=_why_keyed(stream, marks.get(name)))
            now = time.monotonic()
            # The time of the last change is not stored: after a restart an hour passes first.
            before = self._memories.get(name, TopicMemory((), now))
            decision, after = decide(figures, before, now)
            self._report(name, decision)
            if decision.partitions is None:
                self._memories[name] = after
            elif not self._dry_run:
                self._memories[name] = replace(before, samples=())  # a failure starts the ten minutes again
                await self._grow(name, figures.partitions, decision.partitions)
                self._memories[name] = after

    async def _grow(self, name: str, has: int, partitions: int) -> None:
        """Recorded first: partitions that nobody added would be a riddle for ever."""
        try:
            async with Producer(self._broker.appender) as producer:
                await write_growth(producer, "autoscaler", name, has, partitions)
        except UnknownTopic as error:
            hint = f"{name} gets no partitions, because they cannot be recorded: there is no topic {AUDIT}"
            raise UnknownTopic(f"{hint}. Try: penstock apply, which creates it") from error
        # The entry may have taken long. Meanwhile the stream may have got its first key, or somebody else may have added some.
        mark = (await read_key_marks(self._broker.reader)).get(name)
        if why := _why_keyed(self._pipes.streams[name], mark):
            log.warning(
                "partitions_not_added",
                stream=name,
                reason=why,
                hint=f"the entry in {AUDIT} was written before, and stays",
            )
            return
        if (await self._broker.admin.topics()).get(name) == has:
            await self._broker.admin.add_partitions(name, partitions)

    def _report(self, name: str, decision: TopicDecision) -> None:
        metrics.AUTOSCALER_REFUSED.labels(name).set(decision.is_refused)
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
