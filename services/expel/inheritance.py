"""What whoever delivered a partition before had handed over without committing it: known, so that no event has two lives.

An expel that dies between writing to retry-in and committing leaves events that wait with the retrier and are read again.
Tried and handed over once more, they would count their attempts from anew and go through the schedule twice. So before the
first batch of a partition is taken, the newest records of retry-in are looked through.
"""

import asyncio
import time
from collections.abc import Collection, Sequence

import structlog

from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.broker.tail import read_tail
from services.core.ledger.due import Span, due_span
from services.core.pipes import RETRY_IN, parked_topic, retry_topic
from services.core.retry_state import event_hash, state_for

log = structlog.get_logger()

WITHIN_S = 120.0
"""From a death to the next owner's look at most: a session's time-out and a restart. Also how long a rewind of the group passes
over what was just handed over."""
TAIL_EVENTS = 5000
_PATIENCE_S = 3.0

_Life = tuple[str, int]
"""Where the original record lies (`topic:partition:offset`), and how often the event was handed over."""
_Seen = tuple[int, int, Span]
"""When it was handed over (ms); a hash of the event: a topic that was made anew has other events at the same offsets; when it
is due."""


class Inheritance:
    """One destination's, during one membership of its group.

    reach: how many records of a partition can have been handed over and not committed; 0: none ever is.
    """

    def __init__(self, broker: Broker, pipe: str, destination: str, reach: int) -> None:
        self._broker, self._pipe, self._destination, self._reach = broker, pipe, destination, reach
        self._unsure: dict[TopicPartition, int] = {}
        self._handed_over: dict[_Life, _Seen] = {}

    def is_known(self, sources: Collection[TopicPartition]) -> bool:
        """Whether `look` was called for all of these since they came."""
        return not self._reach or self._unsure.keys() >= set(sources)

    async def look(self, sources: Collection[TopicPartition]) -> None:
        """Find what concerns these partitions. While the broker cannot be asked nothing is found: some may live twice."""
        since = int((time.time() - WITHIN_S) * 1000)
        self._handed_over = {life: seen for life, seen in self._handed_over.items() if seen[0] >= since}
        try:
            async with asyncio.timeout(_PATIENCE_S):
                async for batch in read_tail(self._broker, RETRY_IN, since, TAIL_EVENTS):
                    self._note(batch.records)
        except (BrokerError, TimeoutError) as error:
            log.warning("tail_unknown", topic=RETRY_IN, error=str(error), hint="some events may be handed over twice")
        self._unsure = dict.fromkeys(sources, self._reach) | self._unsure

    def forget(self, sources: Collection[TopicPartition]) -> None:
        """These partitions left: when they come back somebody else may have had them."""
        for source in sources:
            self._unsure.pop(source, None)

    def find(self, batch: Batch) -> dict[int, Span]:
        """Those events that the retrier has, by offset, and when they are due. Each batch once, in order."""
        left = self._unsure.get(batch.source, 0)
        if left <= 0 or not self._handed_over or batch.damage is not None:
            return {}
        self._unsure[batch.source] = left - len(batch.offsets)
        is_back = batch.topic in (retry_topic(self._pipe), parked_topic(self._pipe))
        place = f"{batch.topic}:{batch.partition}"
        pairs = zip(batch.offsets, batch.records, strict=True)
        return {
            offset: due
            for offset, record in pairs
            if (due := self._went_on(record) if is_back else self._find_next((f"{place}:{offset}", 1), record))
        }

    def _note(self, records: Sequence[Record]) -> None:
        for record in records:
            state = state_for(record, self._pipe, self._destination)
            if state is not None:
                due = due_span(state.due, state.due - record.timestamp)
                self._handed_over[state.source, state.rounds] = record.timestamp, event_hash(record), due

    def _find_next(self, life: _Life, record: Record, since: int = 0) -> Span | None:
        """When this event is due, if it was handed over in that life, at `since` (ms) or later."""
        seen = self._handed_over.get(life)
        return seen[2] if seen is not None and seen[0] >= since and seen[1] == event_hash(record) else None

    def _went_on(self, record: Record) -> Span | None:
        """As above, if it went to its next round after it had come back: a letter that is redriven has been through rounds."""
        state = state_for(record, self._pipe, self._destination)
        return (
            self._find_next((state.source, state.rounds + 1), record, record.timestamp) if state is not None else None
        )
