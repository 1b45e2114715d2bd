"""What happens next to an event that was not delivered. The one place that decides."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import backoff

from services.expel.outcome import Failure

MAX_HOLD = 60.0
"""Seconds for which a receiver's Retry-After is waited out here, uncommitted. The rest is the global retrier's."""


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """attempts: in all, the first included; None: without end (our own broker, which everybody waits for).

    base, max_wait in seconds: the wait after attempt n is uniformly random up to min(max_wait, base * 2^(n-1)).
    window: seconds after its first failure in which an event is tried again here; with `attempts`, what ends first.
    hands_over: what is recoverable goes to the global retrier afterwards, else to the dead letters.
    """

    attempts: int | None
    base: float
    max_wait: float
    window: float | None = None
    hands_over: bool = False

    def bound(self, attempts: int) -> float:
        """The upper bound of the wait after so many attempts (>= 1), before jitter."""
        waits = backoff.expo(base=2, factor=self.base, max_value=self.max_wait)
        return float(
            next(islice(waits, min(attempts, 64), None))
        )  # backoff's generators yield once before their values


@dataclass(frozen=True, slots=True)
class Again:
    """Try again after `wait` seconds."""

    wait: float


@dataclass(frozen=True, slots=True)
class HandOver:
    """To the global retrier: enough was tried here for now."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Bury:
    """To the dead letters, with the failure's reason."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Disable:
    """Deliver nothing more to this destination: it is paused, and what it has not taken is parked."""

    failure: Failure


Disposition = Again | HandOver | Bury | Disable


def decide(
    failure: Failure,
    attempts: int,
    limits: RetryLimits,
    jitter: Callable[[float], float] = backoff.full_jitter,
    age: float = 0.0,
) -> Disposition:
    """attempts: how many this event has had here, this one included. age: seconds since the first of them failed.

    A receiver's Retry-After is the least wait, up to MAX_HOLD.
    """
    if failure.gone:
        return Disable(failure)
    if not failure.recoverable:
        return Bury(failure)
    is_over = (limits.attempts is not None and attempts >= limits.attempts) or (
        limits.window is not None and age >= limits.window
    )
    if is_over and not failure.ours:
        return HandOver(failure) if limits.hands_over else Bury(failure)
    return Again(max(jitter(limits.bound(max(1, attempts))), min(MAX_HOLD, failure.retry_after or 0.0)))
