"""Scales all Kinesis streams of a pipe file: reads the fleet's counters, decides per stream, changes shards, reports."""

import asyncio
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import replace

import structlog

from services.autoscaler.fleet_metrics import FleetCounters, Window
from services.autoscaler.shards.figures import RULES, Rules, StreamDecision, StreamFigures, StreamMemory, Update
from services.autoscaler.shards.layout import shard_loads
from services.autoscaler.shards.memory import UpdateHistory, with_updates
from services.autoscaler.shards.policy import decide
from services.autoscaler.shards.resharding import apply_layout
from services.core import metrics
from services.core.broker.errors import BrokerError
from services.core.broker.resharding import Resharding, ShardCapacity, StreamShards
from services.core.process.lifecycle import run_until, wait_for_stop

log = structlog.get_logger()

_LOG_AGAIN_S = 300.0
"""How often an unchanged reason is logged again."""

_FIGURES = re.compile(r"[\d.,]+")
"""Numbers, in which two texts of one reason may differ."""


_BYTES, _ENTRIES = "penstock_broker_partition_bytes_total", "penstock_broker_partition_entries_total"
_THROTTLES, _WAITS = "penstock_broker_shard_throttles_total", "penstock_broker_shard_wait_seconds_total"

_WAITING = 0.5
"""Entries waiting at a time, on average, above which a shard is full."""

_BUSY, _REFUSED = 0.5, 0.05
"""A shard with less load, or a smaller share of refused entries, is full only after two windows: one refusal of an
almost empty shard is a hiccup of the service."""


def measure(
    topic: str, shards: StreamShards, windows: Sequence[Window], capacity: ShardCapacity, covered: float, room: int
) -> StreamFigures:
    """The load of each slot over the windows (not empty, newest last), and the full shards of the newest.

    A shard is full when it delayed or refused entries and was busy, refused many, or did so in the window before too.
    """
    seconds = sum(window.seconds for window in windows)
    newest = windows[-1]
    sizes = _per_slot(topic, _BYTES, shards.partitions, windows)
    entries = _per_slot(topic, _ENTRIES, shards.partitions, windows)
    slots = tuple(
        max(size / capacity.bytes, count / capacity.entries) / seconds
        for size, count in zip(sizes, entries, strict=True)
    )
    held_up = [_throttled(topic, window) for window in windows]
    again = held_up[-1].intersection(*held_up[-2:-1]) if len(windows) > 1 else frozenset()
    refused = dict(_per_shard(topic, _THROTTLES, newest))
    loads = shard_loads(shards.layout, slots)
    counts = shard_loads(shards.layout, _per_slot(topic, _ENTRIES, shards.partitions, [newest]))
    full = frozenset(
        at
        for at, number in enumerate(map(str, shards.numbers))
        if number in held_up[-1]
        and (number in again or loads[at] > _BUSY or refused.get(number, 0.0) > _REFUSED * counts[at])
    )
    return StreamFigures(
        shards.layout, slots, full, covered, not shards.is_active, room, any(window.silent for window in windows)
    )


def _throttled(topic: str, window: Window) -> frozenset[str]:
    """Shards that refused entries, or delayed too many."""
    waits = {shard for shard, value in _per_shard(topic, _WAITS, window) if value > _WAITING * window.seconds}
    return frozenset(waits.union(shard for shard, value in _per_shard(topic, _THROTTLES, window) if value > 0))


def _per_shard(topic: str, metric: str, window: Window) -> Iterator[tuple[str, float]]:
    for labels, value in window.of(metric, topic=topic):
        yield labels["shard"], value


def _per_slot(topic: str, metric: str, partitions: int, windows: Sequence[Window]) -> list[float]:
    found = [0.0] * partitions
    for window in windows:
        for labels, value in window.of(metric, topic=topic):
            if int(labels["partition"]) < partitions:
                found[int(labels["partition"])] += value
    return found


_WINDOWS = 2
"""The load is a mean over so many."""

_DISTURBED_S = 120.0
"""How long consumers may be busy with moved shards after an update."""

_LONGEST_PAUSE_S, _DOUBLINGS = 3_600.0, 10
"""The pauses after repeated refusals."""

Announce = Callable[[str, float], Awaitable[None]]
"""Announces a disturbance of so many seconds to the observer; never raises."""


async def to_nobody(_what: str, _seconds: float) -> None:
    """An `Announce` without an observer."""


class StreamScaler:
    """Decides for one stream by the newest window. A window offered during a change is skipped."""

    def __init__(
        self, topic: str, resharding: Resharding, rules: Rules, *, dry_run: bool, announce: Announce = to_nobody
    ) -> None:
        self._announce = announce
        self._topic, self._resharding, self._rules, self._dry_run = topic, resharding, rules, dry_run
        self._news: asyncio.Queue[Window] = asyncio.Queue(1)
        self._windows: deque[Window] = deque(maxlen=_WINDOWS)
        self._history = UpdateHistory(resharding.tags, topic)
        self._memory: StreamMemory | None = None
        self._shards: StreamShards | None = None
        self._since = time.monotonic()
        self._refusals, self._not_before = 0, 0.0
        self._logged, self._logged_at = "", 0.0

    def offer(self, window: Window) -> None:
        if self._news.empty():
            self._news.put_nowait(window)

    async def run(self, stopping: asyncio.Event) -> None:
        """Until the stop. A change under way is left to the service."""
        await run_until(stopping, self._follow())

    async def _follow(self) -> None:
        while True:
            window = await self._news.get()
            try:
                await self._consider(window)
            except BrokerError as error:
                metrics.AUTOSCALER_DECISIONS.labels(self._topic, "failed").inc()
                log.warning("shards_failed", stream=self._topic, error=str(error), hint="the next figures decide anew")
                self._windows.clear()

    async def _consider(self, window: Window) -> None:
        shards = await self._resharding.shards(self._topic)
        now = time.monotonic()
        ahead = time.time() - now
        if self._shards is None or shards.numbers != self._shards.numbers:
            self._since = now
            self._windows.clear()
        self._shards = shards
        if now - self._since < window.seconds:
            return  # the window began before these shards existed
        self._windows.append(window)
        if self._memory is None:
            self._memory = await self._history.read(now, ahead)
        room = await self._resharding.room()
        figures = measure(self._topic, shards, self._windows, self._resharding.capacity, now - self._since, room)
        await self._decide(replace(figures, ahead=ahead), self._memory, now)

    async def _decide(self, figures: StreamFigures, memory: StreamMemory, now: float) -> None:
        decision, after = decide(figures, memory, now, self._rules)
        if decision.layout is not None and now < self._not_before:
            wait = f"Kinesis refused the update; the next attempt is in {self._not_before - now:.0f} s"
            decision = StreamDecision(None, f"{wait}: {decision.reason}")
        self._report(figures, decision, after)
        if decision.layout is None or self._dry_run:
            # Samples are remembered; an update that was only proposed is not.
            self._memory = replace(after, updates=memory.recent(now))
            await self._keep_day(memory, self._memory)
            return
        if found := await self._history.find_unknown(memory, now, figures.ahead):
            self._memory = with_updates(replace(after, updates=memory.recent(now)), found)
            hint = "another autoscaler scales the same stream. Try: stop one of the two"
            log.warning("updates_of_another", stream=self._topic, updates=len(found), hint=hint)
            return  # they may change the decision
        # Before the change: a crash in between costs one of ten updates, and never the count.
        await self._history.write_updates(after, figures.ahead)
        self._memory = after
        try:
            await apply_layout(self._resharding, self._topic, figures.layout, decision, self._accepted)
        except BrokerError:
            await self._take_back(memory.recent(now), figures.ahead)
            raise
        await self._finish(figures.ahead)
        log.info("shards_changed", stream=self._topic, seconds=round(time.monotonic() - now, 1))

    def _report(self, figures: StreamFigures, decision: StreamDecision, memory: StreamMemory) -> None:
        """A log line per change, and per new or repeated reason not to change. memory: after the decision."""
        loads = shard_loads(figures.layout, figures.slots)
        wanted = decision.layout
        verdict = "hold" if wanted is None else ("up" if len(wanted) > len(loads) else "down")
        metrics.AUTOSCALER_DECISIONS.labels(self._topic, verdict).inc()
        metrics.AUTOSCALER_REFUSED.labels(self._topic).set(decision.is_refused)
        metrics.AUTOSCALER_SHARDS.labels(self._topic).set(len(loads))
        metrics.AUTOSCALER_LOAD.labels(self._topic).set(max(loads, default=0.0))
        metrics.AUTOSCALER_UPDATES.labels(self._topic).set(len(memory.updates))
        kind, now = _FIGURES.sub("", decision.reason.partition(":")[0]), time.monotonic()
        if wanted is None and kind == self._logged and now - self._logged_at < _LOG_AGAIN_S:
            return
        self._logged, self._logged_at = kind, now
        log.info(
            "shards_decided",
            stream=self._topic,
            decision=verdict,
            reason=decision.reason,
            loads=[round(load, 3) for load in loads],
            full=sorted(figures.full),
            layout=wanted,
            at_once=decision.at_once,
            dry_run=self._dry_run,
        )

    async def _accepted(self) -> None:
        self._refusals = 0
        await self._announce(f"shards of {self._topic}", _DISTURBED_S)

    async def _finish(self, ahead: float) -> None:
        if self._memory is not None:
            self._memory = self._memory.with_update_finished(time.monotonic())
            await self._history.write_updates(self._memory, ahead)

    async def _take_back(self, updates: tuple[Update, ...], ahead: float) -> None:
        """A refused update that changed nothing does not count. The pause before the next attempt doubles."""
        pause = min(_LONGEST_PAUSE_S, self._rules.cover * 2**self._refusals)
        self._refusals = min(self._refusals + 1, _DOUBLINGS)
        self._not_before = time.monotonic() + pause
        shards = await self._resharding.shards(self._topic)
        if self._memory is None or self._shards is None:
            return
        if shards != self._shards:
            await self._finish(ahead)
            return
        self._memory = replace(self._memory, updates=updates)
        await self._history.write_updates(self._memory, ahead)

    async def _keep_day(self, before: StreamMemory, after: StreamMemory) -> None:
        """Store the day's pattern every quarter of an hour."""
        if before.day.quarter != after.day.quarter and not self._dry_run:
            await self._history.write_day(after)


class ShardScaler:
    """Reads the counters every `every` seconds and offers them to each stream."""

    def __init__(
        self,
        topics: Collection[str],
        resharding: Resharding,
        targets: str,
        *,
        dry_run: bool,
        rules: Rules = RULES,
        every: float,
        announce: Announce = to_nobody,
    ) -> None:
        self._every = every
        self._counters = FleetCounters(targets, "without them no stream gets other shards")
        self._streams = [StreamScaler(topic, resharding, rules, dry_run=dry_run, announce=announce) for topic in topics]
        self._silent: tuple[str, ...] = ()
        self.waits_for: str | None = "no figures yet"

    async def run(self, stopping: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as tasks:
            for stream in self._streams:
                tasks.create_task(stream.run(stopping))
            while not stopping.is_set():
                await self._read_metrics()
                await wait_for_stop(stopping, self._every)

    async def _read_metrics(self) -> None:
        window = await self._counters.read()
        if window is None:
            # With groups only, there may be no targets.
            is_waiting = self._counters.problem is None
            self.waits_for = "no process of the targets has answered twice" if is_waiting else None
            return
        if window.silent and window.silent != self._silent:
            log.warning("targets_silent", addresses=window.silent, hint="no shards are merged meanwhile")
        self._silent, self.waits_for = window.silent, None
        for stream in self._streams:
            stream.offer(window)
