"""Events that come back, retried or parked: which of a polled batch are this destination's, and as what they go on.

A pipe's destinations share such a topic, each with a position of its own, and pass over what is for the others.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.core.broker.record import Batch, Record, TopicPartition
from services.core.retry_state import PREFIX, BadRetryRecord, RetryState, event_hash, read_state
from services.expel.delivery import Unreadable

_DESTINATION = PREFIX + "destination"
BAD_RETRY_RECORD = "bad_retry_record"
_OTHERS = 1000
"""As many destinations as a pipe may have."""
_REMEMBERED = 5000
"""Records taken lately. A twin was written by who died between writing and committing: it comes close behind."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """mine: batches by the stream they came from first, whose offsets are those of the topic read. others, twins: offsets.

    unclaimed: of the others, how many are for destinations that the pipe has not, by name.
    """

    mine: Sequence[Batch]
    others: Sequence[int]
    twins: Sequence[int]
    unreadable: Sequence[Unreadable]
    unclaimed: Mapping[str, int]


class Returned:
    """One destination's view of `topic` during one membership."""

    def __init__(self, topic: str, pipe: str, destination: str, siblings: frozenset[str] | None = None) -> None:
        """siblings: as in LaneShape."""
        self.topic = topic
        self._siblings = None if siblings is None else frozenset(name.encode() for name in siblings)
        self._pipe, self._destination = pipe, destination
        self._others: set[bytes] = set()
        """Other destinations' names seen so far: what is for them costs a look at one header."""
        self._seen: OrderedDict[tuple[str, int, int, int], tuple[TopicPartition, int]] = OrderedDict()

    def sort(self, batch: Batch) -> Sorted:
        """Each record stands in exactly one of mine, others, twins and unreadable."""
        mine: dict[TopicPartition, tuple[list[int], list[Record]]] = {}
        others: list[int] = []
        twins: list[int] = []
        unreadable: list[Unreadable] = []
        unclaimed: Counter[str] = Counter()
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            name = record.header(_DESTINATION)
            if self._siblings is not None and name is not None and name not in self._siblings:
                unclaimed[name.decode(errors="replace")] += 1
            if name in self._others:
                others.append(offset)
                continue
            try:
                state = read_state(record)
            except BadRetryRecord as error:
                unreadable.append(Unreadable(offset, record, BAD_RETRY_RECORD, str(error)))
                continue
            if (state.pipe, state.destination) != (self._pipe, self._destination):
                others.append(offset)
                if state.destination != self._destination and len(self._others) < _OTHERS:
                    self._others.add(state.destination.encode())
            elif self._is_twin(state, record, (batch.source, offset)):
                twins.append(offset)
            else:
                offsets, records = mine.setdefault(state.position()[0], ([], []))
                offsets.append(offset)
                records.append(Record(record.key, record.value, state.time, record.headers))
        batches = [Batch(topic, partition, *lists) for (topic, partition), lists in mine.items()]
        return Sorted(batches, others, twins, unreadable, unclaimed)

    def _is_twin(self, state: RetryState, record: Record, place: tuple[TopicPartition, int]) -> bool:
        """Whether the same event of the same round was taken from another place. The same place again is a redelivery."""
        key = (state.source, state.rounds, state.due, event_hash(record))
        known = self._seen.get(key)
        if known is None:
            self._seen[key] = place
            if len(self._seen) > _REMEMBERED:
                self._seen.popitem(last=False)
        return known is not None and known != place
