"""Follows the executors of a cluster: how many there are, which were lost, and whether the master still runs our application.

Spark itself replaces a lost executor and repeats its tasks. What it does not do is told and done here: a batch that waits because
there are no executors is not stuck, and the process ends, for its supervisor to start it again, when the master has ended the
application, or gives it no executor for so long that it may have forgotten it.
"""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import structlog

from services.core.metrics import TRANSFORM_EXECUTORS, TRANSFORM_EXECUTORS_LOST
from spark.errors import shorten
from spark.java import JAVA_ERRORS

log = structlog.get_logger()

POLL_EVERY_S = 0.5
FRESH_S = 10.0
"""What was seen longer ago does not count: then Java itself may hang, and the clock goes on."""
WITHOUT_S = 300.0
"""With work and without an executor for so long, the process ends. A master that was restarted without its files does not know
the application; a new one it serves."""


class ExecutorsGoneError(RuntimeError):
    """Only a new process, with a new application, helps."""


class ExecutorState(NamedTuple):
    """ids: of the live executors. stopped: whether Spark has ended the application."""

    ids: frozenset[str]
    stopped: bool


class ExecutorWatch:
    """Of one application. Thread-safe. `clock` stands still while there are no executors: the time limits of batches use it."""

    def __init__(self, master: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._master, self._now = master, clock
        self._lock = threading.Lock()
        self._polled_at = self._since = clock()
        self._without = 0.0
        """Seconds without executors, up to `_polled_at`."""
        self._waited = 0.0
        """Of these, the last ones, in which there was work."""
        self._state: ExecutorState | None = None
        self._leaving = set[str]()
        """By order, and live at the last poll."""

    def clock(self) -> float:
        """Seconds with executors. As a monotonic clock."""
        with self._lock:
            now = self._now()
            lasts = now - self._polled_at
            return now - self._without - (lasts if self._is_empty() and lasts < FRESH_S else 0.0)

    def expect_end(self, name: str) -> None:
        """This executor leaves by order: its end is no loss. Call it before the order."""
        with self._lock:
            self._leaving.add(name)

    def record(self, state: ExecutorState, *, has_work: bool) -> None:
        """What a poll has shown. has_work: whether a pipe has work for executors."""
        with self._lock:
            now = self._now()
            lasts = now - self._polled_at
            if self._is_empty() and lasts < FRESH_S:
                self._without += lasts
                self._waited = self._waited + lasts if has_work else 0.0
            if state.ids:
                self._waited = 0.0
            lost = frozenset() if self._state is None else self._state.ids - state.ids - self._leaving
            self._leaving &= state.ids
            self._state, self._polled_at = state, now
        TRANSFORM_EXECUTORS.set(len(state.ids))
        if lost and not state.stopped:
            TRANSFORM_EXECUTORS_LOST.inc(len(lost))
            log.warning(
                "executors_lost",
                executors=sorted(lost),
                left=len(state.ids),
                hint="their tasks run again. The lines of Spark before this one have the reasons",
            )

    def count(self) -> int:
        """Live executors."""
        with self._lock:
            return 0 if self._state is None else len(self._state.ids)

    def problem(self) -> str | None:
        """Why work waits; None while there are executors, or no work."""
        with self._lock:
            if not self._waited:
                return None
            return f"{self._master} has given no executor for {self._waited:.0f} s"

    def check(self) -> None:
        """Raise ExecutorsGoneError when this application has no future."""
        with self._lock:
            if self._state is not None and self._state.stopped:
                hint = "the lines of Spark before this one have the reason. Try: nothing; the next start is a new application"
                raise ExecutorsGoneError(f"{self._master} has ended the application: {hint}")
            if self._waited > WITHOUT_S:
                hint = (
                    "the process ends and asks again as a new application. Try: starting workers, or smaller executors"
                )
                raise ExecutorsGoneError(f"{self._master} has given no executor for {self._waited:.0f} s: {hint}")

    def _is_empty(self) -> bool:
        return self._state is not None and not self._state.ids

    def follow(
        self, read: Callable[[], ExecutorState], has_work: Callable[[], bool], stopping: threading.Event
    ) -> None:
        """Look again and again until the stop, or until the application ends. Blocking: in a thread of its own."""
        while not stopping.wait(POLL_EVERY_S):
            try:
                state = read()
            except (*JAVA_ERRORS, OSError) as error:  # the end of Java is noticed elsewhere
                log.debug("executors_unknown", error=shorten(error))
                continue
            self.record(state, has_work=has_work())
            if state.stopped:
                return
