"""The metrics of the retrier that need more than a call (Prometheus), and its reports of events that left it (the ledger)."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import structlog

from services.core import metrics
from services.core.broker.contract import Lag
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.group_lag import GroupLag
from services.core.ledger.report import Node, Outcome, Span, released_span, since_span
from services.core.ledger.reporter import Reporter, close_reporters, new_instance
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import claims_of, lane_name
from services.global_retrier.delay_queue import DELAY_BY_TOPIC, SHORTEST_MS, DelayedRecord, DelayQueue

log = structlog.get_logger()

NODE: Node = "retrier"
_MAX_LOGGED = 100
"""The most unknown destinations that are logged by name."""


class RetrierMetrics:
    """pipes: the pipe file, which says which lanes exist. None: events that no lane will deliver are not counted."""

    def __init__(self, pipes: PipeFile | None = None) -> None:
        self._pipes = None if pipes is None else frozenset(pipes.pipes)
        self._is_claimed = claims_of(pipes) if pipes is not None else lambda _lane: True
        self._logged: set[str] = set()

    def count_released(self, items: Sequence[DelayedRecord], now: int) -> None:
        """Count events that are durable in their pipe's retry topic. now: when they were appended, ms."""
        if self._pipes is not None:
            self._count_unclaimed(Counter(lane_name(item.pipe, item.destination) for item in items), self._pipes)
        by_pipe: dict[str, list[int]] = {}
        for item in items:
            by_pipe.setdefault(item.pipe, []).append(now - item.due)
        for pipe, late in by_pipe.items():
            metrics.RETRIER_RELEASED.labels(pipe).inc(len(late))
            metrics.RETRIER_LATENESS.labels(pipe).observe(late)

    def _count_unclaimed(self, events: Mapping[str, int], pipes: Collection[str]) -> None:
        for lane in (lane for lane in events if not self._is_claimed(lane)):
            reason = "unknown_destination" if lane.partition("/")[0] in pipes else "unknown_pipe"
            metrics.RETRIER_UNCLAIMED.labels(reason).inc(events[lane])
            if lane not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(lane)
                log.error(
                    "unclaimed_events",
                    lane=lane,
                    reason=reason,
                    events=events[lane],
                    hint="these events stay in the pipe's retry topic until its retention ends. Try: penstock check",
                )

    def set_next_due(self, queues: Iterable[DelayQueue]) -> None:
        """Show when the next of the records read ahead is due."""
        dues = [due for queue in queues if (due := queue.first_due()) is not None]
        metrics.RETRIER_NEXT_DUE.set(min(dues) / 1000 if dues else 0)


class RetrierLedger:
    """Reports the events that left the retrier, by pipe and destination: released to expel, or dead.

    Expel reported waiting events as `retrying`, so no minute waits for the retrier. The backlog of the process is reported once,
    for all pipes. Without a producer it reports nothing.
    """

    def __init__(self, producer: Producer | None, group: GroupLag | None = None) -> None:
        self._producer, self._group, self._instance = producer, group, new_instance()
        self._own = None if producer is None else Reporter(producer, self._instance, NODE, "")
        self._reporters: dict[tuple[str, str], Reporter] = {}

    async def measure_ends(self) -> None:
        """Nothing is measured: records wait on purpose."""

    async def set_lags(self, own: Mapping[TopicPartition, Lag]) -> None:
        """The lag of the group's own partitions, measured just now; `group` completes it. Raises BrokerError kinds."""
        if self._own is None:
            return
        lags = own if self._group is None else await self._group.complete(own)
        if lags is not None:
            self._own.record_behind(max((_find_overdue(source.topic, lag) for source, lag in lags.items()), default=0))

    def add(self, outcome: Outcome, items: Sequence[DelayedRecord]) -> None:
        """These are durable in their pipe's retry topic (released), or as dead letters (dead).

        A record that is not a retry record belongs to no pipe, and is not reported.
        """
        if self._producer is None:
            return
        owners: dict[tuple[str, str, Span], list[Record]] = {}
        now = int(time.time() * 1000)
        for item in items:
            if item.pipe:
                span = released_span(item.due) if outcome == "released" else since_span(now, item.due)
                owners.setdefault((item.pipe, item.destination, span), []).append(item.record)
        for (pipe, destination, span), own in owners.items():
            self._find_reporter(self._producer, pipe, destination).settled.add(outcome, own, span)

    def _find_reporter(self, producer: Producer, pipe: str, destination: str) -> Reporter:
        found = self._reporters.get((pipe, destination))
        if found is None:
            found = Reporter(producer, self._instance, NODE, pipe, destination, has_backlog=False)
            self._reporters[pipe, destination] = found
        return found

    async def report(self) -> None:
        """Returns when every event that left is reported durably. All reports are one append. Raises Unavailable."""
        done = await asyncio.gather(*(reporter.report() for reporter in self._all()), return_exceptions=True)
        for error in done:
            if error is not None:
                raise error

    async def close(self) -> None:
        """Send the last report."""
        await close_reporters(self._all())

    def _all(self) -> list[Reporter]:
        return [*self._reporters.values(), *([self._own] if self._own is not None else [])]


def _find_overdue(topic: str, lag: Lag) -> int:
    """How long ago the oldest record's event may have been due, ms. The shortest delay holds events that are due at any time."""
    delay = DELAY_BY_TOPIC[topic]
    return max(0, lag.millis - (delay if delay > SHORTEST_MS else 0))
