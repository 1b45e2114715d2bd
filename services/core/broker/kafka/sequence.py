"""Exactly once per session: a batch whose fate is unknown goes out again under its old sequence number.

Kafka keeps, per producer id and partition, the sequence numbers of the last five batches. When the portable producer
repeats an append after OutcomeUnknown, the same batch under the same number is stored once, even when the first
attempt had succeeded or the leader changed in between; the broker answers with the first attempt's offset.

The number of a batch whose fate is unknown is never given to another batch: the broker would take that for a repeat,
answer success, and store nothing. A broker that refuses the repeat has told nothing of the earlier attempt: most checks
(min ISR, size, rights, leadership) come before the one for repeats. So a batch that was ever in doubt stays in doubt until
a repeat of it succeeds, or its identity is given up: other records then go out under a new producer id.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_

from services.core.broker.kafka.packing import Identity
from services.core.broker.record import Record

_WRAP = 0x7FFFFFFF


@dataclass(slots=True)
class SequenceState:
    """One partition's numbering under one identity. `next`: the number of the batch in doubt, or of the next new one.

    doubtful: the records of the batch whose fate is unknown. given_up: nothing goes out under this identity any more.
    """

    identity: Identity
    next: int = 0
    doubtful: Sequence[Record] = ()
    given_up: bool = False

    @property
    def is_free(self) -> bool:
        """Whether a new batch may take the next number."""
        return not self.doubtful and not self.given_up

    def repeated_from(self, records: Sequence[Record]) -> int | None:
        """At which of the doubtful records `records` begin, when they hold all from there on; None when they do not.

        Compared as objects: a retry passes them on. It leaves out the first ones when their deadline has passed.
        """
        for index, doubtful in enumerate(self.doubtful):
            if records and doubtful is records[0]:
                rest = self.doubtful[index:]
                return index if len(records) >= len(rest) and all(map(is_, rest, records)) else None
        return None

    def in_doubt(self, records: Sequence[Record]) -> int:
        """How many of `records`, from their first, are in the batch whose fate is unknown."""
        index = self.repeated_from(records)
        return 0 if index is None else len(self.doubtful) - index

    def stored(self, count: int) -> None:
        """The broker has the batch of the next number, of so many records."""
        self.next = (self.next + count) & _WRAP
        self.doubtful = ()

    def give_up(self) -> None:
        """The broker does not go on with this numbering. What was in doubt remains so for ever."""
        self.doubtful, self.given_up = (), True
