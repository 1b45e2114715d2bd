"""Decides whether a request may be sent now, with the rate limit, the circuit breaker and the slow start. Says once that a
destination fails. LoadShedder: how fast a lane with an open breaker moves its events to the retry topic.
"""

import math
import time
from collections.abc import Callable, Mapping

import structlog

from services.core import metrics
from services.core.http.failure import Failure
from services.core.pipe_file.topic_names import lane_name
from services.expel.circuit_breaker import BreakerState, CircuitBreaker
from services.expel.delivery import Delivery
from services.expel.retry_policy import Outcome
from services.expel.slow_start import SlowStart, TokenBucket

log = structlog.get_logger()

_STATES = {"closed": 0, "half-open": 1, "open": 2}
_TOO_MANY = "http_429"
_PROBE_CHECK_S = 1.0
"""The wait for the answer to a probe. The answer itself ends it."""


class SendThrottle:
    """The throttle of one destination in one process; it outlives memberships. `clock` is monotonic seconds. Not thread-safe.

    sheds: while the breaker is open, events go to the retry topic without an attempt (`shedder`).
    """

    def __init__(
        self,
        pipe: str,
        destination: str,
        rate: float | None = None,
        *,
        sheds: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bucket = TokenBucket(rate, clock) if rate else None
        self._lane = lane_name(pipe, destination)
        self._breaker, self._slow_start, self.shedder = CircuitBreaker(clock), SlowStart(clock), LoadShedder(clock)
        self._sheds, self._clock = sheds, clock
        self._notice = FailureNotice(self._lane, clock)
        self._gauge = metrics.EXPEL_BREAKER.labels(pipe, destination)
        self._labels = pipe, destination
        self._shows_probe = True
        """Whether the time of the next probe may be among the metrics: a throttle before this one may have left it."""

    @property
    def is_blocked(self) -> bool:
        """Whether no request may be sent because the last ones failed."""
        return self._breaker.is_blocked

    @property
    def state(self) -> BreakerState:
        return self._breaker.state

    def blocked_for(self) -> float:
        """The least seconds until the next probe; 0 when one may be sent or is open."""
        return max(0.0, self._breaker.open_until - self._clock())

    def wait(self) -> float:
        """Seconds until the next request may be sent, or until events may be shed; 0 for now."""
        if self._breaker.is_blocked:
            blocked_for = self.blocked_for() or _PROBE_CHECK_S
            return min(blocked_for, self.shedder.wait()) if self._sheds else blocked_for
        wait = self._slow_start.wait()
        return wait if self._bucket is None else max(wait, self._bucket.wait())

    def begin(self, request: Delivery) -> None:
        """This request is sent now. Not while `is_blocked`. `end` or `abandon` must follow."""
        self._breaker.begin(request)
        self._slow_start.begin(request, len(request.parts))
        if self._bucket is not None:
            self._bucket.spend(len(request.parts))

    def abandon(self, request: Delivery) -> None:
        """The request was cancelled in this process."""
        self._breaker.abandon(request)
        self._slow_start.abandon(request)

    def end(self, request: Delivery, outcome: Outcome) -> None:
        """The outcome of a request. A receiver that refuses events finally, or answers 429, is healthy. A 429 slows a slow start
        down, as a failure does. A partial answer that refuses every event for now is a failure."""
        failure = _find_failure(outcome, len(request.parts))
        if failure is None:
            if outcome is None and self.state == "closed":
                self._slow_start.record_delivered(len(request.parts))
            self._slow_start.end(request, good=True)
            if self._breaker.succeed(request):
                self._slow_start.start()
                self._say_closed(outcome, len(request.parts))
        elif failure.ours:
            self.abandon(request)
        elif failure.reason == _TOO_MANY:
            self._slow_start.end(request, good=False)
            if self._breaker.close(request):
                self._slow_start.start(least=True)
                self._say_closed(outcome, len(request.parts))
        else:
            self._fail(request, failure)
        self._notice.record(outcome)

    def _say_closed(self, outcome: Outcome, events: int) -> None:
        """Log what the probe proved. A receiver that answers need not accept the events: a breaker waits for answers alone."""
        refusal = _find_refusal(outcome, events)
        if refusal is None:
            self._notice.forget()
            log.warning("breaker_closed", lane=self._lane, hint="its receiver accepts events again")
            return
        self._notice.mark_said()
        hint = "its receiver answers again, and asks for fewer requests"
        if refusal.gone:
            hint = "its receiver answers again, and wants no more events"
        elif not refusal.recoverable:
            hint = "its receiver answers again, and refuses events for good: they are dead letters. Try: penstock dead list"
        log.warning("breaker_closed", lane=self._lane, reason=refusal.reason, detail=refusal.detail, hint=hint)

    def _fail(self, request: Delivery, failure: Failure) -> None:
        is_new = self._slow_start.is_over or self._slow_start.takes_some
        has_recovered = self._slow_start.end(request, good=False)
        if self._breaker.fail(request, is_new=is_new, has_recovered=has_recovered):
            self.shedder.start(self._slow_start.usual, is_new=is_new)
            self._slow_start.stop()
            log.warning(
                "breaker_open",
                lane=self._lane,
                reason=failure.reason,
                detail=failure.detail,
                hint="its events wait. One request at a time tests whether its receiver is back; penstock status says when",
            )

    def start_slowly(self) -> None:
        """A backlog follows: a slow start, as after an outage."""
        self._breaker.forget()
        self._slow_start.start()

    def update_gauge(self) -> None:
        """Set the breaker's metrics. Every few seconds. A destination with a closed breaker has no time of a probe."""
        self._notice.check()
        self._gauge.set(_STATES[self.state])
        if self.state == "closed":
            if self._shows_probe:
                metrics.EXPEL_NEXT_PROBE.remove(*self._labels)
                self._shows_probe = False
        else:
            self._shows_probe = True
            metrics.EXPEL_NEXT_PROBE.labels(*self._labels).set(time.time() + self.blocked_for())


class FailureNotice:
    """Logs when a destination begins to fail, and when it accepts events again; for the person who watches a fleet.

    A circuit breaker opens only after several failed requests, and few events make few requests. A destination that fails now and
    then is named once in AGAIN_S at most.
    """

    AGAIN_S = 60.0
    QUIET_S = 2.0
    """A destination is well when it has accepted a request, and none has failed for so long."""

    def __init__(self, lane: str, clock: Callable[[], float]) -> None:
        self._lane, self._clock = lane, clock
        self._failed_at: float | None = None
        self._said_at = -math.inf
        self._is_said = self._has_accepted = False

    def record(self, outcome: Outcome) -> None:
        if outcome is None and self._failed_at is None:
            return
        now, failure = self._clock(), _worst(outcome)
        if failure is not None:
            self._failed_at, self._has_accepted = now, False
            if not self._is_said and now - self._said_at >= self.AGAIN_S:
                self._is_said, self._said_at = True, now
                log.warning(
                    "destination_fails",
                    lane=self._lane,
                    reason=failure.reason,
                    detail=failure.detail,
                    hint="its events are tried again; nothing is lost. Try: penstock doctor"
                    if failure.recoverable
                    else "it refuses events for good: they are dead letters. Try: mend the receiver, then penstock dead list",
                )
        elif outcome is None:
            self._has_accepted = True
        self.check()

    def check(self) -> None:
        """Log the end of a failure when it is time to. Call it every few seconds."""
        if self._failed_at is None or not self._has_accepted or self._clock() - self._failed_at < self.QUIET_S:
            return
        if self._is_said:
            log.warning("destination_recovered", lane=self._lane, hint="its receiver accepts events again")
        self.forget()

    def mark_said(self) -> None:
        """Something else was logged about this failure."""
        self._is_said, self._said_at = True, self._clock()

    def forget(self) -> None:
        """The failure is over, and was logged."""
        self._failed_at, self._is_said, self._has_accepted = None, False, False


def _worst(outcome: Outcome) -> Failure | None:
    """A failure of the receiver, a final one before others. None: there is none, or it is our own."""
    if outcome is None:
        return None
    found = [outcome] if isinstance(outcome, Failure) else list(outcome.values())
    theirs = [failure for failure in found if not failure.ours]
    return next((failure for failure in theirs if not failure.recoverable), theirs[0] if theirs else None)


def _find_failure(outcome: Outcome, events: int) -> Failure | None:
    """The failure that makes a request with so many events a failed one; a 429 before others. None: the receiver is healthy."""
    if outcome is None:
        return None
    found = [outcome] if isinstance(outcome, Failure) else list(outcome.values())
    if isinstance(outcome, Mapping) and len(found) < events:
        return None
    if not all(failure.recoverable or failure.ours for failure in found):
        return None
    return next((failure for failure in found if failure.reason == _TOO_MANY), found[0])


def _find_refusal(outcome: Outcome, events: int) -> Failure | None:
    """Why a receiver that answered accepted none of so many events; a final refusal before others. None: it accepted some."""
    if outcome is None or (isinstance(outcome, Mapping) and len(outcome) < events):
        return None
    found = [outcome] if isinstance(outcome, Failure) else list(outcome.values())
    return next((failure for failure in found if not failure.recoverable), found[0])


SHED_AFTER_S = 60.0
"""A shorter outage costs its events no round of the retry topic: they wait in their stream, and are sent as soon as it ends."""
TURN_S = 0.5
MIN_SHED_RATE = 500.0
"""Events per second, when fewer are usual or the usual rate is unknown."""
_SHED_FACTOR = 1.25
_DOUBLE_S = 30.0
"""After this time with more events than may be shed, the rate doubles: events must not expire in their stream."""


class LoadShedder:
    """How fast a lane with an open breaker moves its events to the retry topic: in turns, slightly faster than they arrive, from
    SHED_AFTER_S after the beginning of the outage.

    Other events wait in their stream, which costs nothing. If a lane moved its backlog as fast as possible, the retrier and the
    broker would work for the failed destination and slow down the others. A turn moves the events since the last one in few
    large appends. `clock` is monotonic seconds. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._rate = MIN_SHED_RATE
        self._next_turn = self._kept_up_at = 0.0

    def start(self, usual: float | None, *, is_new: bool = True) -> None:
        """The breaker opened. usual: events per second before that, when known. is_new: false when the last outage goes on."""
        self._rate = max(MIN_SHED_RATE, _SHED_FACTOR * (usual or 0.0))
        self._kept_up_at = self._clock() + (SHED_AFTER_S if is_new else 0.0)
        self._next_turn = max(self._next_turn, self._kept_up_at)

    def wait(self) -> float:
        """Seconds until the next turn."""
        return max(0.0, self._next_turn - self._clock())

    def limit(self) -> int:
        """How many events a turn may shed. Its last request may exceed it."""
        return int(self._rate * TURN_S)

    def end_turn(self, shed: int, *, is_more: bool) -> None:
        """A turn shed so many events. is_more: more are waiting, here or in the stream because the lane was full."""
        now = self._clock()
        self._next_turn = now + (min(TURN_S, shed / self._rate) if is_more else TURN_S)
        if not is_more:
            self._kept_up_at = now
        elif now - self._kept_up_at >= _DOUBLE_S:
            self._rate *= 2
            self._kept_up_at = now
