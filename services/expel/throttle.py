"""Decides whether a request may be sent now: rate limit, circuit breaker, slow start after an outage, and the load shedder, which
limits how fast a lane with an open breaker moves its events to the retry topic.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal

import structlog

from services.core import metrics
from services.core.http_failure import Failure
from services.core.topic_names import lane_name
from services.expel.delivery import Delivery
from services.expel.retry_policy import Outcome

log = structlog.get_logger()

BreakerState = Literal["closed", "open", "half-open"]
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

    @property
    def is_blocked(self) -> bool:
        """Whether no request may be sent because the last ones failed."""
        return self._breaker.is_blocked

    @property
    def state(self) -> BreakerState:
        """The breaker's state now."""
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
        self._notice.note(outcome)

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
                hint="its events wait; one request at a time tests whether its receiver is back. When: penstock status",
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
            metrics.EXPEL_NEXT_PROBE.remove(*self._labels)
        else:
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

    def note(self, outcome: Outcome) -> None:
        """Note the outcome of a request."""
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


WINDOW_S = 30.0
MIN_ATTEMPTS = 10
OPEN_SHARE = 0.7
FIRST_WAIT_S, MAX_WAIT_S = 2.0, 300.0
"""A short outage ends with a short wait: the next probe comes after about the time that the breaker has been open."""
_BUCKET_S = 3.0


class CircuitBreaker:
    """Closed: every request is sent. It opens when at least MIN_ATTEMPTS requests ended within WINDOW_S and OPEN_SHARE of them
    failed. Open: no request is sent, for a wait that doubles with each failed probe. Then half-open: one request is sent as a
    probe; its success closes the breaker, its failure opens it again. The slow start that follows belongs to the same outage:
    when it fails, the breaker opens for twice the last wait. Source of the rule: Convoy opens at 70 % of at least 10 requests
    (Standard Webhooks leaves it open).

    Called once per request, not per event: `begin(request)` unless `is_blocked`, then exactly one of `succeed`, `close`, `fail`,
    `abandon` with the same request. So a late response to an earlier request is not mistaken for the probe's.
    `clock` is monotonic seconds. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[list[float]] = deque()
        """[begin, attempts, failures] of each short interval of the window."""
        self._is_closed = True
        self._opened = 0
        """How often it opened in this outage."""
        self._open_until = 0.0
        self._probe: object = None

    @property
    def state(self) -> BreakerState:
        """The state now."""
        if self._is_closed:
            return "closed"
        return "open" if self._clock() < self._open_until else "half-open"

    @property
    def open_until(self) -> float:
        """Monotonic seconds when a probe may be sent; in the past when it is not open."""
        return self._open_until

    @property
    def is_blocked(self) -> bool:
        """Whether no request may be sent now: it is open, or waits for its probe."""
        return not self._is_closed and (self._probe is not None or self._clock() < self._open_until)

    def begin(self, request: object) -> None:
        """This request is sent; while half-open it is the probe."""
        if not self._is_closed:
            self._probe = request

    def succeed(self, request: object) -> bool:
        """The receiver answered: it accepted the events, or refused them finally. True when that closed the breaker."""
        if self._is_closed:
            self._count(failed=False)
        return self.close(request)

    def close(self, request: object) -> bool:
        """The receiver asked to slow down (429): it answers, and that is all. True when that closed the breaker."""
        was_probe = self._end(request)
        if was_probe:
            self._is_closed = True
            self._buckets.clear()
        return was_probe

    def fail(self, request: object, *, is_new: bool = True, has_recovered: bool = True) -> bool:
        """The request failed. True when that opened a closed breaker.

        is_new: a breaker that opens now has a new outage, not one whose slow start still runs. has_recovered: False opens it at
        once.
        """
        was_probe = self._end(request)
        if not self._is_closed:
            if was_probe:
                self._open()
            return False
        self._count(failed=True)
        attempts, failures = sum(bucket[1] for bucket in self._buckets), sum(bucket[2] for bucket in self._buckets)
        if has_recovered and (attempts < MIN_ATTEMPTS or failures < OPEN_SHARE * attempts):
            return False
        if is_new:
            self._opened = 0
        self._open()
        return True

    def forget(self) -> None:
        """The next outage is a new one, unless the breaker is open."""
        if self._is_closed:
            self._opened = 0

    def abandon(self, request: object) -> None:
        """The request says nothing about the receiver: it was cancelled."""
        self._end(request)

    def _end(self, request: object) -> bool:
        """Whether it was the probe."""
        if self._probe is not request:
            return False
        self._probe = None
        return True

    def _open(self) -> None:
        self._open_until = self._clock() + min(MAX_WAIT_S, FIRST_WAIT_S * 2 ** min(self._opened, 16))
        self._opened += 1
        self._is_closed = False
        self._buckets.clear()

    def _count(self, *, failed: bool) -> None:
        now = self._clock()
        while self._buckets and self._buckets[0][0] <= now - WINDOW_S:
            self._buckets.popleft()
        if not self._buckets or self._buckets[-1][0] <= now - _BUCKET_S:
            self._buckets.append([now, 0, 0])
        self._buckets[-1][1] += 1
        self._buckets[-1][2] += failed


ROUND_S = 0.5
"""The shortest round of a slow start. Some receivers answer before they do the work: their fast answers prove little."""
LEAST_WINDOW = 0.25
"""Requests per round. When one fails although there are so few, and OPEN_SHARE of the last MIN_ATTEMPTS answers were failures,
the receiver has not recovered."""
_DOUBLE, _GROW = 2.0, 1.125
"""How the window grows after a good round: before the first sign of overload, and after it."""
_SLOWER, _NOISE_S = 2.0, 0.1
"""Answers that take so many times as long as the fastest one, and longer by so many seconds, are a sign of overload."""
LEAST_CAP = 10.0
"""Events per second."""
MAX_FACTOR = 2.0
"""The cap, in usual rates."""
AT_CAP_S = 120.0
"""After this time at the cap, the cap doubles."""
_UNLIMITED_S = 10.0
"""After this time without a limit that is reached, the slow start is over."""
_AVERAGE_S = 120.0
"""Time constant of the usual rate."""


class SlowStart:
    """Limits the requests after an outage by the receiver's answers, as TCP does (RFC 5681).

    The window is the number of requests in a round, and the most in flight. It begins with one request. A round is over when
    as many requests were answered, and takes at least ROUND_S. After a good round the window doubles. A failure or a 429 halves
    it, at most once per round, because the other requests of the round were sent before. After the first sign of overload (a
    failure, a 429, or answers that take much longer than at first), the window grows by an eighth per round.

    The cap is twice the usual rate of before. So the backlog of an outage takes about as long as the outage. What the answers do
    not show, such as a queue behind the receiver, grows no faster than before the outage. The usual rate is an average over some
    minutes of healthy delivery. While it is unknown (the process started during the outage) there is no cap. It may be too low
    for the events that arrive now: when a destination still has a backlog after minutes at its cap, the cap doubles. Otherwise
    its lag would grow until its events expire. The slow start is over when the destination stayed below its limits for a
    while, because then the backlog is gone. The time after a failure or a 429 counts only from the next good answer, because
    the lane may wait for its retries, or for the receiver's Retry-After.

    `begin(request)`, then one of `end` and `abandon`. `clock` is monotonic seconds. Not thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usual: float | None = None
        self._counted, self._observed_s = 0, 0.0
        self._counting_since: float | None = None
        self._window: float | None = None
        """Requests per round; None without a slow start."""
        self._growth = _DOUBLE
        self._begun: dict[object, float] = {}
        """When each request in flight was sent, of those that were sent in this slow start."""
        self._next_at = self._halved_at = self._limited_at = 0.0
        self._is_failing = False
        """Whether the last answer was a failure or a 429."""
        self._last: deque[bool] = deque(maxlen=5 * MIN_ATTEMPTS)
        """Whether each of the last answers was good, also of earlier slow starts in the same outage."""
        self._answered, self._is_full = 0, False
        """Of this round: good answers, and whether a request had to wait for the window."""
        self._fastest = self._fastest_of_round = math.inf
        self._cap: TokenBucket | None = None
        self._raise_at = 0.0

    @property
    def is_over(self) -> bool:
        """Whether requests are not limited."""
        return self._window is None

    @property
    def takes_some(self) -> bool:
        """Whether the receiver fails now and then, and not always: when the breaker opens again, that is no longer the outage."""
        return len(self._last) >= MIN_ATTEMPTS and self._failed_share(len(self._last)) < OPEN_SHARE

    def _failed_share(self, count: int) -> float:
        """Of so many of the last answers."""
        newest = list(self._last)[-count:]
        return newest.count(False) / len(newest)

    @property
    def usual(self) -> float | None:
        """Events per second of healthy delivery; None while it is unknown."""
        return self._usual

    def record_delivered(self, events: int) -> None:
        """So many events were delivered. Outside of a slow start they count for the usual rate."""
        if self._window is not None:
            return
        now = self._clock()
        if self._counting_since is None:  # the idle time before the first events says nothing about their rate
            self._counting_since = now
            return
        self._counted += events
        passed = now - self._counting_since
        if passed >= 1.0:
            self._observed_s += passed
            weight = max(1.0 - math.exp(-passed / _AVERAGE_S), passed / self._observed_s)  # at first the plain mean
            rate = self._counted / passed
            self._usual = rate if self._usual is None else self._usual + weight * (rate - self._usual)
            self._counted, self._counting_since = 0, now

    def stop(self) -> None:
        """Limit nothing. The time until the next delivery does not count for the usual rate."""
        self._window = None
        self._counted, self._counting_since = 0, None

    def start(self, *, least: bool = False) -> None:
        """The destination recovered. least: it asks for few requests (429)."""
        now = self._clock()
        self._window, self._growth = (LEAST_WINDOW, _GROW) if least else (1.0, _DOUBLE)
        self._begun.clear()
        self._limited_at, self._next_at = now, now + (ROUND_S / LEAST_WINDOW if least else 0.0)
        self._halved_at = -math.inf
        self._is_failing = least
        self._fastest = math.inf
        self._begin_round()
        self._cap = None if self._usual is None else TokenBucket(max(LEAST_CAP, MAX_FACTOR * self._usual), self._clock)
        self._raise_at = now + AT_CAP_S

    def wait(self) -> float:
        """Seconds until the next request may be sent, or until the next check while answers are missing; 0 for now."""
        if self._window is None:
            return 0.0
        now = self._clock()
        wait = ROUND_S if len(self._begun) >= max(1.0, self._window) else max(0.0, self._next_at - now)
        if wait:
            self._is_full = True
        elif self._cap is not None:
            wait = self._wait_for_cap(self._cap, now)
        if wait:
            self._limited_at = now + wait
        elif not self._is_failing and now - self._limited_at > _UNLIMITED_S:
            self.stop()
            self._last.clear()
        return wait

    def _wait_for_cap(self, cap: "TokenBucket", now: float) -> float:
        wait = cap.wait()
        if wait and now >= self._raise_at:
            self._usual = cap.rate  # more events arrive now than usual
            cap.set_rate(MAX_FACTOR * cap.rate)
            self._raise_at = now + AT_CAP_S
            wait = cap.wait()
        return wait

    def begin(self, request: object, events: int) -> None:
        """A request with so many events is sent now."""
        if self._window is None:
            return
        now = self._clock()
        self._begun[request] = now
        self._next_at = max(now, self._next_at) + ROUND_S / self._window
        if self._cap is not None:
            self._cap.spend(events)

    def abandon(self, request: object) -> None:
        """The request says nothing about the receiver."""
        self._begun.pop(request, None)

    def end(self, request: object, *, good: bool) -> bool:
        """The receiver answered, or failed to. good: it accepted the events, or refused them finally.

        False: it has not recovered, because the request failed although the window was the smallest one, as most did before it.
        """
        begun = self._begun.pop(request, None)
        if self._window is None or begun is None:
            return True
        now = self._clock()
        if good and self._is_failing:
            self._limited_at = max(self._limited_at, now)
        self._is_failing = not good
        self._last.append(good)
        if good:
            self._count_answer(now - begun)
        elif begun > self._halved_at:
            if self._window == LEAST_WINDOW and self._failed_share(MIN_ATTEMPTS) >= OPEN_SHARE:
                return False
            self._window, self._growth = max(LEAST_WINDOW, self._window / 2), _GROW
            self._next_at, self._halved_at = now + ROUND_S / self._window, now
            self._begin_round()
        return True

    def _count_answer(self, took: float) -> None:
        assert self._window is not None
        self._answered += 1
        self._fastest_of_round = min(self._fastest_of_round, took)
        if self._answered >= self._window:
            self._fastest = min(self._fastest, self._fastest_of_round)
            if self._fastest_of_round > _SLOWER * self._fastest + _NOISE_S:
                self._growth = _GROW
            if self._is_full:
                self._window *= self._growth
            self._begin_round()

    def _begin_round(self) -> None:
        self._answered, self._is_full, self._fastest_of_round = 0, False, math.inf


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


_BURST_SECONDS = 0.1
_ROUNDING = 1e-6
"""Of a token: a sum of floats may never reach a whole one."""


class TokenBucket:
    """At most `rate` events per second on average; at once at most the events of a tenth of a second, or one request.

    It may go into debt, so no request is split. `clock` is monotonic seconds. Not thread-safe.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.rate, self._capacity = rate, max(1.0, rate * _BURST_SECONDS)
        self._tokens, self._filled_at = self._capacity, clock()

    def wait(self) -> float:
        """Seconds until the next request may be sent; 0 for now."""
        self._fill()
        return 0.0 if self._tokens > 1.0 - _ROUNDING else (1.0 - self._tokens) / self.rate

    def spend(self, events: int) -> None:
        """A request with so many events is sent now; later ones pay its debt."""
        self._tokens -= events

    def set_rate(self, rate: float) -> None:
        """Change the rate; the debt stays."""
        self._fill()
        self.rate, self._capacity = rate, max(1.0, rate * _BURST_SECONDS)

    def _fill(self) -> None:
        now = self._clock()
        self._tokens = min(self._capacity, self._tokens + (now - self._filled_at) * self.rate)
        self._filled_at = now
