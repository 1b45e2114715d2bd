"""From what an attempt brought to what happens with each of its events."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from services.expel.delivery import Delivery
from services.expel.disposition import MAX_HOLD, Again, Bury, Disable, HandOver, RetryLimits, decide
from services.expel.outcome import Failure


@dataclass(frozen=True, slots=True)
class Verdict:
    """Indexes into the delivery; each event stands in exactly one of the four, unless the destination is gone.

    wait: seconds until the next attempt for `again`. hold: seconds that the receiver wants nothing at all (Retry-After).
    gone: the destination took nothing, and is paused.
    """

    delivered: list[int]
    again: list[int]
    hand_over: dict[int, Failure]
    bury: dict[int, Failure]
    wait: float = 0.0
    hold: float = 0.0
    reason: str = ""
    gone: Failure | None = None


def judge(
    delivery: Delivery,
    failures: Mapping[int, Failure],
    limits: RetryLimits,
    jitter: Callable[[float], float],
    now_ms: int,
    *,
    keyed: bool,
) -> Verdict:
    """`delivery.attempts` counts the attempt that failed.

    keyed: when an event goes again, later ones of its key go again with it although they were taken, so that a receiver
    that keeps the newest state ends with the newest.
    """
    age = (now_ms - delivery.first_failure) / 1000
    decisions = {failure: decide(failure, delivery.attempts, limits, jitter, age) for failure in set(failures.values())}
    again: set[int] = set()
    hand_over: dict[int, Failure] = {}
    bury: dict[int, Failure] = {}
    for index in sorted(failures):
        match decisions[failures[index]]:
            case Again():
                again.add(index)
            case HandOver(failure):
                hand_over[index] = failure
            case Bury(failure):
                bury[index] = failure
            case Disable(failure):
                return Verdict([], [], {}, {}, gone=failure)
    if keyed and again:
        again |= _followers(delivery, again, bury)
    undelivered = again | hand_over.keys() | bury.keys()
    return Verdict(
        [index for index in range(len(delivery)) if index not in undelivered],
        sorted(again),
        hand_over,
        bury,
        max((decision.wait for decision in decisions.values() if isinstance(decision, Again)), default=0.0),
        min(MAX_HOLD, max((failure.retry_after or 0.0 for failure in decisions), default=0.0)),
        next((failures[index].reason for index in sorted(again) if index in failures), ""),
    )


def _followers(delivery: Delivery, again: set[int], bury: Mapping[int, Failure]) -> set[int]:
    keys = set()
    found = set()
    for index, record in enumerate(delivery.records):
        if index in again:
            keys.add(record.key)
        elif record.key is not None and record.key in keys and index not in bury:
            found.add(index)
    return found
