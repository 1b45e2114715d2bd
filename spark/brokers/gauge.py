"""How far a pipe is behind: asked beside its query, so that it is known, and grows, while the query is down."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from services.core.ledger.age import Age
from spark.place import Position, Span

Backlog = dict[tuple[str, int], int]
"""Records by topic and partition."""


class Look(NamedTuple):
    """backlog: records that are not done. settled_up_to: everything that was stored before this time (ms) is told of; None: not
    known."""

    backlog: Backlog
    settled_up_to: int | None


class Gauge(Protocol):
    """Of one pipe's sources. Blocking; one thread at a time."""

    def look(self, done: Position, told: Position) -> Look:
        """done, told: up to where the query is, and what is told of. Raises BrokerError kinds, Spark's errors."""


class EndsGauge:
    """Where offsets count records, and a partition's end can be asked for."""

    def __init__(self, held: Callable[[], Sequence[Span]]) -> None:
        self._held, self._age = held, Age()

    def look(self, done: Position, told: Position) -> Look:
        """See Gauge."""
        begun = time.time_ns() // 1_000_000
        held = self._held()
        starts = {(span.topic, span.partition): span.start for span in held}
        ends = {(span.topic, span.partition): span.end for span in held}
        return Look(measure_backlog(held, done), self._age.done_up_to(begun, starts, ends, told))


def measure_backlog(held: Iterable[Span], done: Position) -> Backlog:
    """From what was done to the present ends."""
    return {
        (topic, partition): max(0, end - max(start, done.get((topic, partition), start)))
        for topic, partition, start, end in held
    }
