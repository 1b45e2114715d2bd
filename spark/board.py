"""What the jobs tell, seen from the event loop: metrics, readiness, and when to give up."""

import asyncio
from collections.abc import Iterable

from services.core.metrics import (
    BROKER_LAG_RECORDS,
    LAG_IN,
    LAG_OUT,
    TRANSFORM_DEAD,
    TRANSFORM_FAILURES,
    TRANSFORM_READ,
    TRANSFORM_UP,
    TRANSFORM_WRITTEN,
)
from spark.brokers.gauge import Backlog
from spark.dead_letters import NODE
from spark.jobs.job import JobState
from spark.observed import BatchReport


class Board:
    """Not thread-safe: jobs reach it by `call_soon_threadsafe`. `given_up`: no pipe's query can be kept running."""

    def __init__(self, pipes: Iterable[str]) -> None:
        self._states = {pipe: JobState(pipe, "starting", 0) for pipe in pipes}
        self.given_up = asyncio.Event()
        for pipe in self._states:
            TRANSFORM_UP.labels(pipe).set(0)

    def ready(self) -> str | None:
        """None once every query works: it has completed a trigger since it was (re)started, a batch, or a look that found
        nothing new. Else which do not and why; a query that keeps failing on its first batch is never ready."""
        down = [f"{state.pipe}: {state.problem}" for state in self._states.values() if state.problem]
        return "; ".join(down) or None

    def note_state(self, state: JobState) -> None:
        """A query works, or has failed."""
        self._states[state.pipe] = state
        TRANSFORM_UP.labels(state.pipe).set(0 if state.problem else 1)
        if state.problem:
            TRANSFORM_FAILURES.labels(state.pipe).inc()
        if all(each.broken for each in self._states.values()):
            self.given_up.set()

    def note_batch(self, report: BatchReport) -> None:
        """A batch was stored."""
        TRANSFORM_READ.labels(report.pipe).inc(report.read)
        TRANSFORM_WRITTEN.labels(report.pipe).inc(report.written)
        for reason, events in report.dead.items():
            TRANSFORM_DEAD.labels(report.pipe, reason).inc(events)
        LAG_IN.labels(report.pipe, NODE).observe_counts(report.lag_in)
        LAG_OUT.labels(report.pipe, NODE).observe_counts(report.lag_out)

    def note_backlog(self, pipe: str, backlog: Backlog) -> None:
        """What a pipe has not read yet."""
        for (topic, partition), records in backlog.items():
            BROKER_LAG_RECORDS.labels(pipe, topic, str(partition)).set(records)
