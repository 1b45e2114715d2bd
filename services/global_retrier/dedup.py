"""Finds the records that the previous owner of a partition moved and did not commit, so that they are not moved twice."""

from collections.abc import Sequence

from services.core.broker.contract import Broker
from services.core.broker.record import Batch, Headers, Record, TopicPartition
from services.core.pipe_file.topic_names import retry_topic
from services.core.takeover_dedup import TakeoverDedup
from services.global_retrier.delay_queue import DELAY_BY_TOPIC, MOVE_EVENTS, Clock, DelayedRecord, choose_delays

_SKEW_MS = 500
"""How far the previous owner's clock may have been ahead of this one."""

_Copied = tuple[Headers, bytes | None, bytes | None]


class MoveTakeover:
    """For one delay queue; made before the first move.

    A queue commits right after each move. So a process that dies leaves at most one move of each partition uncommitted, among the
    first MOVE_EVENTS records behind the commit. Their due times decide to which topics they can have been moved.
    """

    def __init__(self, source: TopicPartition, broker: Broker, clock: Clock) -> None:
        self._source, self._began = source, clock.now_ms()
        self._dedup = TakeoverDedup(broker, MOVE_EVENTS)
        self._dedup.start([source])

    async def find_moved(self, items: Sequence[DelayedRecord]) -> frozenset[int]:
        """Offsets of the next items that are certainly in their next topic already. Only the first calls read from the broker."""
        count = self._dedup.spend(self._source, len(items))
        suspects = [item for item in items[:count] if item.wake <= self._began + _SKEW_MS and not item.problem]
        if not suspects:
            return frozenset()
        by_topic = self._group_by_topic(suspects)
        since = {topic: min(item.wake for item in found) - _SKEW_MS for topic, found in by_topic.items()}
        wanted: dict[str, dict[_Copied, list[int]]] = {topic: {} for topic in by_topic}
        for topic, candidates in by_topic.items():
            for item in candidates:
                wanted[topic].setdefault(_copied(item.record), []).append(item.offset)
        moved: set[int] = set()

        def compare(topic: str, batch: Batch) -> None:
            for at, record in zip(batch.offsets, batch.records, strict=True):
                own = wanted[topic].get(_copied(record), ())
                # In its own topic a record equals itself.
                moved.update(offset for offset in own if batch.source != self._source or offset < at)

        await self._dedup.read(since, compare)
        return frozenset(moved)

    def _group_by_topic(self, suspects: Sequence[DelayedRecord]) -> dict[str, list[DelayedRecord]]:
        """By each topic that the previous owner may have chosen, between the record's wake and the start of this queue.

        Only later topics: a record there is never skipped because of the record in this one.
        """
        by_topic: dict[str, list[DelayedRecord]] = {}
        delay = DELAY_BY_TOPIC[self._source.topic]
        for item in suspects:
            for topic in choose_delays(item.due - max(self._began, item.wake), item.due - item.wake):
                if topic is None or not delay or DELAY_BY_TOPIC[topic] <= delay:
                    by_topic.setdefault(retry_topic(item.pipe) if topic is None else topic, []).append(item)
        return by_topic


def _copied(record: Record) -> _Copied:
    """What a move copies: everything but the time of writing. Key and value too, because a topic that was created anew has
    other events at the positions that the headers name."""
    return record.headers, record.key, record.value
