"""What the jobs tell, seen from the event loop: metrics, readiness, and when to give up."""

import asyncio
import time
from collections.abc import Callable, Iterable

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
from spark.jobs.pulse import Pulse
from spark.observed import BatchReport

OLD_JAVA_S = 1800.0
"""A Spark that failed one pipe again and again, in ways of its own, is given up when it is older. A younger one is not: a new one
did not help the last time, and the other pipes lose some seconds with each."""


class Board:
    """Not thread-safe: jobs reach it by `call_soon_threadsafe`. `given_up`: the process is to end, since no pipe's query can be
    kept running, or one cannot in this Java, which is old."""

    def __init__(self, pipes: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._begun = clock, clock()
        self._pulses: dict[str, Pulse] = {}
        self._states = {pipe: JobState(pipe, "starting", 0) for pipe in pipes}
        self.given_up = asyncio.Event()
        for pipe in self._states:
            TRANSFORM_UP.labels(pipe).set(0)

    def ready(self) -> str | None:
        """None once every query works: it has completed a trigger since it was (re)started, a batch, or a look that found
        nothing new, and no batch is at work for long. Else which do not and why; a query that keeps failing on its first batch
        is never ready."""
        down = {pipe: state.problem for pipe, state in self._states.items() if state.problem}
        slow = {pipe: said for pipe, pulse in self._pulses.items() if (said := pulse.slow()) is not None}
        return "; ".join(f"{pipe}: {said}" for pipe, said in (slow | down).items()) or None

    def watch(self, pipe: str, pulse: Pulse) -> None:
        """Look at this from now on."""
        self._pulses[pipe] = pulse

    def stuck(self) -> str | None:
        """What is at work beyond its time."""
        found = ((pipe, pulse.stuck()) for pipe, pulse in self._pulses.items())
        return next((f"{pipe}: {said}" for pipe, said in found if said is not None), None)

    def note_state(self, state: JobState) -> None:
        """A query works, or has failed."""
        self._states[state.pipe] = state
        TRANSFORM_UP.labels(state.pipe).set(0 if state.problem else 1)
        if state.problem:
            TRANSFORM_FAILURES.labels(state.pipe).inc()
        needs_java = state.broken and state.of_spark and self._clock() - self._begun > OLD_JAVA_S
        if needs_java or all(each.broken for each in self._states.values()):
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
