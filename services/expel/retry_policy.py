"""Decides what happens to an event after an attempt.

After a 503: `fail_by_status` makes a recoverable Failure. `RetryPolicy.decide` repeats the attempt in this lane while attempts
(or the window) are left. Then the event goes to the retry topic, or to the dead letters when the destination has no schedule.
`RetrySchedule` says when an event of the retry topic is due again. When its window is over, it becomes a dead letter. A 410
pauses the destination.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

import backoff

from services.core.http.failure import MAX_HOLD, Failure
from services.core.undelivered.retry_state import BREAKER_OPEN
from services.expel.delivery import Delivery

RECOVERABLE_STATUSES = frozenset({408, 425, 429})
GONE = 410
WINDOW_OVER = "window_over"
JITTER = 0.2


Outcome = None | Failure | Mapping[int, Failure]
"""The outcome of an attempt. None: all events were delivered. A Failure: none. A mapping: these (by index) were not."""


def is_recoverable(status: int) -> bool:
    """408, 425, 429 and 5xx. Other 4xx and 3xx are not (redirects are not followed)."""
    return status in RECOVERABLE_STATUSES or status >= 500


def fail_by_status(status: int, excerpt: str = "", retry_after: float | None = None) -> Failure:
    """The failure that a status outside 2xx means. excerpt: the beginning of the response, printable."""
    detail = f"the receiver answered {status}" + (f": {excerpt}" if excerpt else "")
    return Failure(f"http_{status}", detail, is_recoverable(status), retry_after, gone=status == GONE)


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """attempts: including the first one; None: no limit (our own broker, and `order: key`).

    base, max_wait in seconds: the wait after attempt n is uniformly random up to min(max_wait, base * 2^(n-1)).
    window: seconds after its first failure in which the lane repeats an event. With `attempts`, the limit that is reached first
    counts. uses_retry_topic: then recoverable events go to the global retrier, else to the dead letters.
    """

    attempts: int | None
    base: float
    max_wait: float
    window: float | None = None
    uses_retry_topic: bool = False

    def max_wait_after(self, attempts: int) -> float:
        """The upper bound of the wait after so many attempts (>= 1), before jitter."""
        waits = backoff.expo(base=2, factor=self.base, max_value=self.max_wait)
        return float(next(islice(waits, min(attempts, 64), None)))  # backoff's generators yield None first


class Action(Enum):
    """What to do with a failed event. RETRY: the lane sends it again. PAUSE: pause the destination, park its events."""

    RETRY = "retry"
    RETRY_TOPIC = "retry topic"
    DEAD_LETTER = "dead letter"
    PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """The decision for a request. The index of each event is in exactly one of the first four, unless `pause` is set.

    wait: seconds until the next attempt of `retry`. retry_after: seconds in which the receiver wants no request.
    pause: the destination accepted no event, and is paused.
    """

    delivered: Sequence[int] = ()
    retry: Sequence[int] = ()
    retry_topic: Mapping[int, Failure] = field(default_factory=dict)
    dead_letter: Mapping[int, Failure] = field(default_factory=dict)
    wait: float = 0.0
    retry_after: float = 0.0
    reason: str = ""
    pause: Failure | None = None


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The policy of one destination.

    keyed: when an event is retried, later events of its key are sent again with it, even if the receiver accepted them. So a
    receiver that keeps the last state ends with the newest.
    """

    limits: RetryLimits
    keyed: bool = False
    jitter: Callable[[float], float] = backoff.full_jitter

    def decide(self, delivery: Delivery, failures: Mapping[int, Failure], now_ms: int) -> RetryDecision:
        """The decision after a failed attempt, which `delivery.attempts` already counts."""
        age = (now_ms - delivery.first_failure) / 1000
        actions = {
            failure: self.choose(failure, delivery.attempts, age) for failure in dict.fromkeys(failures.values())
        }
        for failure, action in actions.items():
            if action is Action.PAUSE:
                return RetryDecision(pause=failure)
        by_action: dict[Action, dict[int, Failure]] = {action: {} for action in Action}
        for index in sorted(failures):
            by_action[actions[failures[index]]][index] = failures[index]
        retry, dead = set(by_action[Action.RETRY]), by_action[Action.DEAD_LETTER]
        if self.keyed and retry:
            retry |= _find_followers(delivery, retry, dead)
        undelivered = retry | by_action[Action.RETRY_TOPIC].keys() | dead.keys()
        return RetryDecision(
            [index for index in range(len(delivery)) if index not in undelivered],
            sorted(retry),
            by_action[Action.RETRY_TOPIC],
            dead,
            self._find_wait((one for one, action in actions.items() if action is Action.RETRY), delivery.attempts),
            min(MAX_HOLD, max((failure.retry_after or 0.0 for failure in actions), default=0.0)),
            next((failures[index].reason for index in sorted(retry) if index in failures), ""),
        )

    def choose(self, failure: Failure, attempts: int, age: float = 0.0) -> Action:
        """attempts: of the event in this lane, including this one. age: seconds since the first of them failed."""
        if failure.gone:
            return Action.PAUSE
        if not failure.recoverable:
            return Action.DEAD_LETTER
        limits = self.limits
        is_over = (limits.attempts is not None and attempts >= limits.attempts) or (
            limits.window is not None and age >= limits.window
        )
        if not is_over or failure.ours:
            return Action.RETRY
        return Action.RETRY_TOPIC if limits.uses_retry_topic else Action.DEAD_LETTER

    def _find_wait(self, failures: Iterable[Failure], attempts: int) -> float:
        """A receiver's Retry-After is the least wait, up to MAX_HOLD."""
        bound = self.limits.max_wait_after(max(1, attempts))
        waits = (max(self.jitter(bound), min(MAX_HOLD, failure.retry_after or 0.0)) for failure in failures)
        return max(waits, default=0.0)


def _find_followers(delivery: Delivery, retry: set[int], dead: Mapping[int, Failure]) -> set[int]:
    """Later events of the keys that are retried."""
    keys = set()
    found = set()
    for index, record in enumerate(delivery.records):
        if index in retry:
            keys.add(record.key)
        elif record.key is not None and record.key in keys and index not in dead:
            found.add(index)
    return found


@dataclass(frozen=True, slots=True)
class RetrySchedule:
    """When the events of the retry topic are due. waits: seconds before each round. Each is varied by ±20 %, so events that
    failed together do not come back together.
    """

    waits: Sequence[float]
    jitter: Callable[[float, float], float] = random.uniform

    def next_wait(self, rounds: int, failure: Failure) -> float | None:
        """Seconds until an event with so many rounds is due; at least its Retry-After. None: its window is over.

        An event whose last round found an open breaker was not tried in it. It gets one more, behind the next probe.
        """
        if rounds >= len(self.waits):
            return failure.retry_after if failure.reason == BREAKER_OPEN and rounds == len(self.waits) else None
        return max(self.waits[rounds] * self.jitter(1 - JITTER, 1 + JITTER), failure.retry_after or 0.0)
