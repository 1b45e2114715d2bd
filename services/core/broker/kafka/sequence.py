"""Exactly once per session: a batch whose fate is unknown goes out again under its old sequence number.

Kafka keeps, per producer id and partition, the sequence numbers of the last five batches. When the portable producer
repeats an append after OutcomeUnknown, the same records under the same number are stored once, even when the first
attempt had succeeded or the leader changed in between; the broker answers with the first attempt's offset.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

from services.core.broker.kafka.packing import Identity
from services.core.broker.record import Record

_WRAP = 0x7FFFFFFF


@dataclass(slots=True)
class SequenceState:
    """One partition's numbering under one identity."""

    identity: Identity
    next: int = 0
    doubtful: Sequence[Record] = ()

    def repeats(self, records: Sequence[Record]) -> bool:
        """Whether `records` begin with the very batch whose fate is unknown (the same objects: a retry passes them on)."""
        return len(records) >= len(self.doubtful) and all(map(is_, self.doubtful, records))

    def sending(self, records: Sequence[Record]) -> None:
        """These leave now; until told otherwise their fate is unknown."""
        self.doubtful = records

    def stored(self) -> None:
        """The broker has them."""
        self.next = (self.next + len(self.doubtful)) & _WRAP
        self.doubtful = ()

    def refused(self) -> None:
        """The broker has not stored them: the number is free again."""
        self.doubtful = ()
