"""Events of a paused destination as they stand in the pipe's parked topic: with all that is known of their attempts.

The state is that of the global retrier's records (`retry_state`), so that they go on where they were when they come back.
`due` stays what it was, 0 for an event that was never handed over: so a crash between writing and committing makes twins,
which `Returned` knows.
"""

from dataclasses import dataclass

from services.core.retry_state import RetryState, state_of, wrap
from services.expel.delivery import Delivery
from services.expel.letters import Letter


@dataclass(frozen=True, slots=True)
class ParkedWriter:
    """Makes the parked records of one destination."""

    pipe: str
    destination: str

    def write(self, delivery: Delivery, reason: str, now_ms: int) -> list[Letter]:
        """Letters for the parked topic. reason: why the destination is paused."""
        letters = []
        for (source, offset, _), record in zip(delivery.places(), delivery.records, strict=True):
            earlier = state_of(record)
            state = RetryState(
                pipe=self.pipe,
                destination=self.destination,
                attempts=delivery.attempts + (0 if earlier is None else earlier.attempts),
                rounds=0 if earlier is None else earlier.rounds,
                first_failure=(0 if earlier is None else earlier.first_failure) or delivery.first_failure,
                due=0 if earlier is None else earlier.due,
                reason="paused" if earlier is None else earlier.reason,
                detail=reason if earlier is None else earlier.detail,
                source=f"{source.topic}:{source.partition}:{offset}" if earlier is None else earlier.source,
                time=record.timestamp,
            )
            wrapped = wrap(record, state, now_ms)
            weight = delivery.weight / len(delivery)
            letter = Letter(wrapped, record, source, offset, weight, reason, tried=True)
            letters.append(letter._replace(disowned=source in delivery.disowned))
        return letters
