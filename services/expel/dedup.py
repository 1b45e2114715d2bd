"""Events that reach a lane twice: after a takeover of partitions, and from the retry or parked topic."""

import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from services.core.broker.contract import Broker
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.ledger.report import Span, due_span
from services.core.pipe_file.topic_names import RETRY_IN, parked_topic, retry_topic
from services.core.takeover_dedup import WITHIN_S, TakeoverDedup
from services.core.undelivered.retry_state import PREFIX, BadRetryRecord, RetryState, event_hash, read_state, state_for
from services.expel.delivery import Unreadable

BAD_RETRY_RECORD = "bad_retry_record"
_DESTINATION = PREFIX + "destination"
_MAX_OTHERS = 1000
"""As many destinations as a pipe may have."""
_REMEMBERED = 5000
"""Records polled last. The duplicate of a crash between write and commit follows close behind."""

_Round = tuple[str, int]
"""Where the original record is stored (`topic:partition:offset`), and the event's number of rounds."""
_Written = tuple[int, int, Span]
"""(when it was written to retry-in, ms; a hash of the event, because a topic that was created anew has other events at the same
offsets; when it is due)."""


class RetryTakeover:
    """Finds events that the previous owner wrote to the retry topic and did not commit.

    Tried and written once more, such an event would start its attempts anew and go through the schedule twice. So before the
    first batch of a partition is accepted, the newest records of retry-in are read. One destination's, during one membership.

    reach: how many records of a partition can be in the retry topic and not committed; 0: the lane does not use that topic.
    """

    def __init__(self, broker: Broker, pipe: str, destination: str, reach: int) -> None:
        self._dedup = TakeoverDedup(broker, reach)
        self._pipe, self._destination = pipe, destination
        self._written: dict[_Round, _Written] = {}

    async def prepare(self, polled: Collection[TopicPartition], assigned: Collection[TopicPartition]) -> None:
        """Before batches of these partitions are accepted. Reads only if one of `polled` is new."""
        if self._dedup.is_started(polled):
            return
        since = int((time.time() - WITHIN_S) * 1000)
        self._written = {key: written for key, written in self._written.items() if written[0] >= since}
        await self._dedup.read({RETRY_IN: since}, lambda _, batch: self._add(batch.records))
        self._dedup.start({*polled, *assigned})

    def remove(self, sources: Collection[TopicPartition]) -> None:
        """These partitions were revoked."""
        self._dedup.remove(sources)

    def find(self, batch: Batch) -> dict[int, Span]:
        """The events that are in the retry topic already, by offset, and when they are due. Each batch once, in order."""
        if batch.damage is not None or not self._dedup.spend(batch.source, len(batch.offsets)) or not self._written:
            return {}
        is_back = batch.topic in (retry_topic(self._pipe), parked_topic(self._pipe))
        place = f"{batch.topic}:{batch.partition}"
        return {
            offset: due
            for offset, record in zip(batch.offsets, batch.records, strict=True)
            if (due := self._find_next(record) if is_back else self._find_round((f"{place}:{offset}", 1), record))
        }

    def _add(self, records: Sequence[Record]) -> None:
        for record in records:
            state = state_for(record, self._pipe, self._destination)
            if state is not None:
                due = due_span(state.due, state.due - record.timestamp)
                self._written[state.source, state.rounds] = record.timestamp, event_hash(record), due

    def _find_round(self, key: _Round, record: Record, since: int = 0) -> Span | None:
        """When this event is due, if it was written for that round, at `since` (ms) or later."""
        written = self._written.get(key)
        is_same = written is not None and written[0] >= since and written[1] == event_hash(record)
        return written[2] if written is not None and is_same else None

    def _find_next(self, record: Record) -> Span | None:
        """As above, for an event that came back and went to its next round since: a redriven dead letter had rounds before."""
        state = state_for(record, self._pipe, self._destination)
        if state is None:
            return None
        return self._find_round((state.source, state.rounds + 1), record, record.timestamp)


@dataclass(frozen=True, slots=True)
class Sorted:
    """mine: batches by the stream of origin, with the offsets of the polled topic. others, duplicates: offsets.

    unclaimed: how many of the others are for destinations that the pipe does not have, by name.
    """

    mine: Sequence[Batch]
    others: Sequence[int]
    duplicates: Sequence[int]
    unreadable: Sequence[Unreadable]
    unclaimed: Mapping[str, int]


class RetryTopicFilter:
    """Sorts batches of the retry or parked topic, which all destinations of a pipe share, each with a position of its own.

    One destination's view of one topic during one membership. siblings: the pipe's destinations, this one too; None: another
    lane counts events for unknown ones.
    """

    def __init__(self, pipe: str, destination: str, siblings: frozenset[str] | None = None) -> None:
        self._siblings = None if siblings is None else frozenset(name.encode() for name in siblings)
        self._pipe, self._destination = pipe, destination
        self._others: set[bytes] = set()
        """Names of other destinations: their events need no more than one header."""
        self._polled: OrderedDict[tuple[str, int, int, int], tuple[TopicPartition, int]] = OrderedDict()

    def sort(self, batch: Batch) -> Sorted:
        """Each record is in exactly one of mine, others, duplicates and unreadable."""
        mine: dict[TopicPartition, tuple[list[int], list[Record]]] = {}
        others: list[int] = []
        duplicates: list[int] = []
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
                if state.destination != self._destination and len(self._others) < _MAX_OTHERS:
                    self._others.add(state.destination.encode())
            elif self._is_duplicate(state, record, (batch.source, offset)):
                duplicates.append(offset)
            else:
                offsets, records = mine.setdefault(state.position()[0], ([], []))
                offsets.append(offset)
                records.append(Record(record.key, record.value, state.time, record.headers))
        batches = [Batch(topic, partition, *lists) for (topic, partition), lists in mine.items()]
        return Sorted(batches, others, duplicates, unreadable, unclaimed)

    def _is_duplicate(self, state: RetryState, record: Record, place: tuple[TopicPartition, int]) -> bool:
        """Whether the same round of the same event was polled from another place. The same place again is a redelivery."""
        key = (state.source, state.rounds, state.due, event_hash(record))
        known = self._polled.get(key)
        if known is None:
            self._polled[key] = place
            if len(self._polled) > _REMEMBERED:
                self._polled.popitem(last=False)
        return known is not None and known != place
