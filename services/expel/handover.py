"""Handing events over to the global retrier: when each is due again, and what is over.

The waits are the destination's schedule, each within ±20 %, so that what failed together does not come back together; a
receiver's Retry-After is the least wait. What was handed over as often as the schedule is long goes to the dead letters.
"""

import random
from collections.abc import Callable, Mapping, Sequence

from services.core.broker.record import Record
from services.core.ledger.due import due_span
from services.core.retry_state import RetryState, state_of, wrap
from services.expel.delivery import Delivery
from services.expel.letters import Letter
from services.expel.outcome import Failure

WINDOW_OVER = "window_over"
JITTER = 0.2


class Handover:
    """One destination's. schedule: seconds before each round; empty: nothing is handed over."""

    def __init__(
        self,
        pipe: str,
        destination: str,
        schedule: Sequence[float],
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._pipe, self._destination = pipe, destination
        self._schedule, self._jitter = schedule, jitter

    def write(
        self, delivery: Delivery, failures: Mapping[int, Failure], now_ms: int
    ) -> tuple[list[Letter], dict[int, Failure]]:
        """Letters for retry-in, and those (by index) whose window is over, with why."""
        places = delivery.places()
        letters: list[Letter] = []
        over: dict[int, Failure] = {}
        for index, failure in failures.items():
            source, offset, _ = places[index]
            record = delivery.records[index]
            state = self._next(record, f"{source.topic}:{source.partition}:{offset}", delivery, failure, now_ms)
            if state is None:
                over[index] = Failure(WINDOW_OVER, f"{failure.reason}: {failure.detail}", recoverable=False)
                continue
            letter = Letter(
                wrap(record, state, now_ms),
                record,
                source,
                offset,
                delivery.weight / len(delivery),
                failure.reason,
                tried=True,
            )
            due = due_span(state.due, state.due - now_ms)
            letters.append(letter._replace(disowned=source in delivery.disowned, due=due))
        return letters, over

    def _next(
        self, record: Record, source: str, delivery: Delivery, failure: Failure, now_ms: int
    ) -> RetryState | None:
        """The state of the next round; None when the last one is over."""
        earlier = state_of(record)
        rounds = 0 if earlier is None else earlier.rounds
        if rounds >= len(self._schedule):
            return None
        wait = self._schedule[rounds] * self._jitter(1 - JITTER, 1 + JITTER)
        first_failure = delivery.first_failure or now_ms
        return RetryState(
            pipe=self._pipe,
            destination=self._destination,
            attempts=delivery.attempts + (0 if earlier is None else earlier.attempts),
            rounds=rounds + 1,
            first_failure=(0 if earlier is None else earlier.first_failure) or first_failure,
            due=now_ms + int(1000 * max(wait, failure.retry_after or 0.0)),
            reason=failure.reason,
            detail=failure.detail,
            source=source if earlier is None else earlier.source,
            time=record.timestamp,
        )
