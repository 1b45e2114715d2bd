"""What happens next to an event that was not delivered. The one place that decides.

Today: again soon, to the dead letters, or the destination is disabled. When events can be handed to a global retrier, that is
one more `Disposition` here, in place of the dead letters for what is recoverable.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import backoff

from services.expel.outcome import Failure


@dataclass(frozen=True, slots=True)
class RetryLimits:
    """attempts: in all, the first included; None: without end (our own broker, which everybody waits for).

    base, max_wait in seconds: the wait after attempt n is uniformly random up to min(max_wait, base * 2^(n-1)).
    """

    attempts: int | None
    base: float
    max_wait: float

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
class Bury:
    """To the dead letters, with the failure's reason."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class Disable:
    """Deliver nothing more to this destination; what it has not taken stays uncommitted in its stream."""

    failure: Failure


Disposition = Again | Bury | Disable


def decide(
    failure: Failure,
    attempts: int,
    limits: RetryLimits,
    jitter: Callable[[float], float] = backoff.full_jitter,
) -> Disposition:
    """`attempts`: how many this event has had, this one included. A receiver's Retry-After is the least wait."""
    if failure.gone:
        return Disable(failure)
    is_over = limits.attempts is not None and attempts >= limits.attempts and not failure.ours
    if is_over or not failure.recoverable:
        return Bury(failure)
    return Again(max(jitter(limits.bound(max(1, attempts))), failure.retry_after or 0.0))
