"""The health of the pipes: metrics, readiness, batches without progress, and whether the process must end."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.core.metrics import (
    BROKER_LAG_RECORDS,
    BROKER_LAG_SECONDS,
    LAG_IN,
    LAG_OUT,
    TRANSFORM_DEAD,
    TRANSFORM_FAILURES,
    TRANSFORM_PAUSED,
    TRANSFORM_READ,
    TRANSFORM_UP,
    TRANSFORM_WRITTEN,
)
from spark.batch_report import NODE, BatchReport
from spark.brokers.contract import Measurement

MAX_FAILURES = 5
"""A pipe with this number of failures, and no stored batch between them, counts as broken."""
OLD_JAVA_S = 1800.0
"""When Spark itself fails one pipe again and again, the process ends if its Java is older than this. A younger Java is kept: the
last fresh one did not help, and each restart costs the other pipes seconds."""
PART = 0.1
"""Share of the time limit of a batch, for one part of a batch and for one trial."""
FIRST_PART = 0.5
"""The same, for the first of a process: Java and Python load what it needs, on a busy machine for more than half a minute."""
SLOW = 0.2
"""Share of the time limit after which the pipe is not ready."""
ANSWER = "answer"
"""As if it was a query, for the watchdog: the pipe's thread, which alone asks, waits for an answer of Java."""
PLANNING = "planning"
"""The same: between two batches, Spark asks the source for the next one. That needs no executor."""
STARTING = "starting"
"""The problem of a query that has neither failed nor completed a trigger. `penstock doctor` knows the word."""
STANDBY_S = 600.0
"""A process that stands by for a pipe longer than this is not ready: an update has handed over by then."""


class Watchdog:
    """Times the work of one pipe's queries. Thread-safe. Plain Python: it works while Java answers nobody.

    limit: seconds that one batch may take.
    """

    def __init__(self, limit: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self._clock = limit, clock
        self._begun: dict[str, tuple[str, float, float]] = {}
        self._part_ended = False
        """Whether a part or a trial has ended."""

    def begin(self, query: str, work: str, share: float = 1.0) -> None:
        """This query begins some work; its earlier work has ended. share: of the limit, for this work; at least FIRST_PART until
        a part or a trial has ended."""
        self.end(query)
        if query != ANSWER and not self._part_ended:
            share = max(share, FIRST_PART)
        self._begun[query] = (work, self._clock(), share * self.limit)

    @property
    def at_work(self) -> bool:
        """Whether a query has begun some work. One that has nothing to do only asks Java."""
        return any(query not in (ANSWER, PLANNING) for query in tuple(self._begun))

    def end(self, query: str) -> None:
        """The query is idle."""
        _, _, limit = self._begun.pop(query, ("", 0.0, self.limit))
        if query != ANSWER and limit < self.limit:
            self._part_ended = True

    @contextmanager
    def watching(self, query: str, work: str, share: float = 1.0) -> Iterator[None]:
        self.begin(query, work, share)
        try:
            yield
        finally:
            self.end(query)

    def slow(self) -> str | None:
        """The work that makes the pipe not ready."""
        return self._older(lambda limit: SLOW * max(limit, self.limit))

    def stuck(self) -> str | None:
        """Work beyond its limit."""
        return self._older(lambda limit: limit)

    def _older(self, than: Callable[[float], float]) -> str | None:
        now = self._clock()
        for work, begun, limit in tuple(self._begun.values()):
            if now - begun > than(limit):
                return f"{work} has made no progress for {now - begun:.0f} s"
        return None


@dataclass(frozen=True, slots=True)
class QueryState:
    """The state of a pipe's query.

    problem: None once it has completed a trigger since its start, else the reason, for a person. failures: in a row. of_spark:
    the last failure was neither the broker's nor the transform's nor the checkpoint's. paused: who paused the pipe and why, for a
    person; empty when it is not paused. standby: the process that runs the pipe instead, for a person; empty when it is this one.
    """

    pipe: str
    problem: str | None
    failures: int
    of_spark: bool = False
    paused: str = ""
    standby: str = ""

    @property
    def broken(self) -> bool:
        """Whether restarts have not helped often enough."""
        return self.failures >= MAX_FAILURES


class PipesHealth:
    """Not thread-safe: jobs call it by `call_soon_threadsafe`.

    `gave_up`: the process must end, because no pipe's query keeps running, or one of them does not in this old Java.
    """

    def __init__(
        self,
        pipes: Iterable[str],
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock, self._begun, self._wall = clock, clock(), wall_clock
        self.why_waiting: Callable[[], str | None] = lambda: None
        """Why all work waits; None when it does not."""
        self._watchdogs: dict[str, Watchdog] = {}
        self._states = {pipe: QueryState(pipe, STARTING, 0) for pipe in pipes}
        self._phases: dict[str, str] = {}
        self._standby_since: dict[str, float] = {}
        self.gave_up = asyncio.Event()
        for pipe in self._states:
            TRANSFORM_UP.labels(pipe).set(0)
            TRANSFORM_PAUSED.labels(pipe).set(0)

    def ready(self) -> str | None:
        """None once every query has completed a trigger since it was (re)started and no batch takes long; else the reasons.

        A trigger is a batch, or a poll that found nothing new. A query that keeps failing on its first batch is never ready.
        A paused pipe needs no query. Nor does one that another process runs, for `STANDBY_S`: an update that starts the next
        process first stops the former one only when the next is ready.
        """
        down = {pipe: self._with_phase(pipe, state.problem) for pipe, state in self._states.items() if state.problem}
        now = self._clock()
        down |= {
            pipe: f"it has stood by for {now - since:.0f} s, {self._states[pipe].standby}"
            for pipe, since in self._standby_since.items()
            if now - since > STANDBY_S
        }
        slow = {pipe: text for pipe, watchdog in self._watchdogs.items() if (text := watchdog.slow()) is not None}
        reasons = [f"{pipe}: {text}" for pipe, text in (slow | down).items()]
        if (waiting := self.why_waiting()) is not None:
            reasons.insert(0, waiting)
        return "; ".join(reasons) or None

    def _with_phase(self, pipe: str, problem: str) -> str:
        phase = self._phases.get(pipe) if problem == STARTING else None
        return problem if phase is None else f"{problem} ({phase})"

    def note(self) -> str | None:
        """The pipes that are paused, by whom and why, or that another process runs; None when there are none."""
        found = ((state.pipe, state.paused or state.standby) for state in self._states.values())
        return "; ".join(f"{pipe}: {text}" for pipe, text in found if text) or None

    def record_phase(self, phase: str, pipe: str | None = None) -> None:
        """What a start is doing, for a person who waits for it. pipe: None for all of them."""
        self._phases |= dict.fromkeys(self._states if pipe is None else [pipe], phase)

    def record_waiting(self, reason: str) -> None:
        """No query can start yet, for this reason."""
        self._states = {pipe: QueryState(pipe, reason, 0) for pipe in self._states}

    def add_watchdog(self, pipe: str, watchdog: Watchdog) -> None:
        self._watchdogs[pipe] = watchdog

    def has_work(self) -> bool:
        """Whether a query of any pipe is at work."""
        return any(watchdog.at_work for watchdog in list(self._watchdogs.values()))

    def stuck(self) -> str | None:
        """Work of any pipe beyond its limit."""
        found = ((pipe, watchdog.stuck()) for pipe, watchdog in self._watchdogs.items())
        return next((f"{pipe}: {text}" for pipe, text in found if text is not None), None)

    def record_state(self, state: QueryState) -> None:
        self._states[state.pipe] = state
        if state.standby:
            self._standby_since.setdefault(state.pipe, self._clock())
        else:
            self._standby_since.pop(state.pipe, None)
        TRANSFORM_UP.labels(state.pipe).set(0 if state.problem or state.paused or state.standby else 1)
        TRANSFORM_PAUSED.labels(state.pipe).set(1 if state.paused else 0)
        if state.failures:
            TRANSFORM_FAILURES.labels(state.pipe).inc()
        needs_java = state.broken and state.of_spark and self._clock() - self._begun > OLD_JAVA_S
        wanted = [each for each in self._states.values() if not each.paused]
        if needs_java or (wanted and all(each.broken for each in wanted)):
            self.gave_up.set()

    def record_batch(self, report: BatchReport) -> None:
        TRANSFORM_READ.labels(report.pipe).inc(report.read)
        TRANSFORM_WRITTEN.labels(report.pipe).inc(report.written)
        for reason, events in report.dead.items():
            TRANSFORM_DEAD.labels(report.pipe, reason).inc(events)
        LAG_IN.labels(report.pipe, NODE).observe_counts(report.lag_in)
        LAG_OUT.labels(report.pipe, NODE).observe_counts(report.lag_out)

    def record_backlog(self, pipe: str, found: Measurement) -> None:
        """The age is that of the pipe's oldest record that is not reported, in each partition with a backlog."""
        waits = 0.0 if found.settled_up_to is None else max(0.0, self._wall() - found.settled_up_to / 1000)
        for (topic, partition), records in found.backlog.items():
            BROKER_LAG_RECORDS.labels(pipe, topic, str(partition)).set(records)
            BROKER_LAG_SECONDS.labels(pipe, topic, str(partition)).set(waits if records else 0.0)
