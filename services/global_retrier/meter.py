"""What the retrier counts, per batch."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import structlog

from services.core import metrics
from services.core.broker.record import Batch
from services.core.pipes import PipeFile, lane_name, lanes_of
from services.global_retrier.line import Line, Waiting

log = structlog.get_logger()

_MOST_TOLD = 100
"""Destinations that nobody has, told by name."""


class Meter:
    """The labels are few: the retrier's topics and the pipes. pipes: the pipe file, by which it is known who gets what."""

    def __init__(self, pipes: PipeFile | None = None) -> None:
        self._pipes = None if pipes is None else frozenset(pipes.pipes)
        self._lanes = frozenset[str]() if pipes is None else lanes_of(pipes) | pipes.removed.keys()
        self._told: set[str] = set()

    def took(self, batch: Batch) -> None:
        """A polled batch arrived."""
        metrics.RETRIER_TAKEN.labels(batch.topic).inc(len(batch.records))

    def moved(self, topic: str, count: int) -> None:
        """So many are durable in this delay topic."""
        metrics.RETRIER_MOVED.labels(topic).inc(count)

    def already_moved(self, topic: str, count: int) -> None:
        """So many were read in this topic and stood already where they were to go."""
        metrics.RETRIER_ALREADY_MOVED.labels(topic).inc(count)

    def released(self, items: Sequence[Waiting], now: int) -> None:
        """These are durable in their pipe's retry topic; `now` was when they were sent there."""
        if self._pipes is not None:
            self._note_unclaimed(Counter(lane_name(item.pipe, item.destination) for item in items), self._pipes)
        by_pipe: dict[str, list[int]] = {}
        for item in items:
            by_pipe.setdefault(item.pipe, []).append(now - item.due)
        for pipe, late in by_pipe.items():
            metrics.RETRIER_RELEASED.labels(pipe).inc(len(late))
            metrics.RETRIER_LATENESS.labels(pipe).observe(late)

    def _note_unclaimed(self, events: Mapping[str, int], pipes: Collection[str]) -> None:
        for lane in events.keys() - self._lanes:
            reason = "unknown_destination" if lane.partition("/")[0] in pipes else "unknown_pipe"
            metrics.RETRIER_UNCLAIMED.labels(reason).inc(events[lane])
            if lane not in self._told and len(self._told) < _MOST_TOLD:
                self._told.add(lane)
                log.error(
                    "unclaimed_events",
                    lane=lane,
                    reason=reason,
                    events=events[lane],
                    hint="they stay in the pipe's retry topic until its retention ends. Try: penstock check",
                )

    def buried(self, items: Sequence[Waiting]) -> None:
        """These are durable among the dead letters."""
        for problem, count in Counter(item.problem for item in items).items():
            metrics.RETRIER_DEAD.labels(problem).inc(count)

    def failed(self, topic: str, error: Exception, count: int) -> None:
        """So many could not be written there and will be tried again."""
        metrics.RETRIER_MOVE_FAILURES.labels(topic, type(error).__name__).inc(count)

    def holds(self, lines: Iterable[Line]) -> None:
        """What is read ahead now."""
        dues = [due for line in lines if (due := line.first_due()) is not None]
        metrics.RETRIER_NEXT_DUE.set(min(dues) / 1000 if dues else 0)

    def up(self, is_up: bool) -> None:
        """Whether it is a member of its group and reads."""
        metrics.RETRIER_UP.set(1 if is_up else 0)
