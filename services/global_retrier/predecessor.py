"""What whoever served a partition before may have written on without committing it: found again, so that it is not written twice.

A line commits right after each move, so a process that dies leaves at most one move of each partition uncommitted: some of
the first `MOVE_EVENTS` records behind the committed offset. Where these went follows from their due time; there the newest
records are looked through, once.
"""

import asyncio
from collections.abc import Sequence

import structlog

from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.core.broker.record import Headers, Record, TopicPartition
from services.core.broker.tail import read_tail
from services.core.pipes import retry_topic
from services.global_retrier.clock import Clock
from services.global_retrier.line import MOVE_EVENTS, Waiting
from services.global_retrier.route import DELAY_BY_TOPIC, choose_delays

log = structlog.get_logger()

TAIL_EVENTS = 5000
"""Looked through at the end of a topic at most: what others have written there since."""
_PATIENCE_S = 3.0
_SKEW_MS = 500
"""By how much the predecessor's clock may have been ahead of ours."""

_Copied = tuple[Headers, bytes | None, bytes | None]


class Predecessor:
    """Of one line. Made when the line begins, before anything is moved."""

    def __init__(self, source: TopicPartition, broker: Broker, clock: Clock) -> None:
        self._source, self._broker = source, broker
        self._began = clock.now_ms()
        self._unsure = MOVE_EVENTS

    async def find_moved(self, items: Sequence[Waiting]) -> frozenset[int]:
        """Offsets of those of the next items that certainly stand where they are to go. Asks the broker only at first.

        While it cannot be asked none is found, and they may be written twice.
        """
        suspects = [item for item in items[: self._unsure] if item.wake <= self._began + _SKEW_MS and not item.problem]
        self._unsure -= min(self._unsure, len(items))
        found: set[int] = set()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                for topic, candidates in self._sort(suspects).items():
                    found |= await self._look(topic, candidates)
        except (BrokerError, TimeoutError) as error:
            log.warning("tail_unknown", source=self._source.topic, error=str(error), hint="some may be written twice")
        return frozenset(found)

    def _sort(self, suspects: Sequence[Waiting]) -> dict[str, list[Waiting]]:
        """By each topic that a predecessor may have chosen, from when the record could leave until this line began.

        Only topics further on the way: what is found there cannot itself be dropped because of the record here.
        """
        by_topic: dict[str, list[Waiting]] = {}
        delay = DELAY_BY_TOPIC[self._source.topic]
        for item in suspects:
            for topic in choose_delays(item.due - max(self._began, item.wake), item.due - item.wake):
                if topic is None or not delay or DELAY_BY_TOPIC[topic] <= delay:
                    by_topic.setdefault(retry_topic(item.pipe) if topic is None else topic, []).append(item)
        return by_topic

    async def _look(self, topic: str, candidates: Sequence[Waiting]) -> set[int]:
        """A move copies all but the time of writing: event, round and due time."""
        wanted: dict[_Copied, list[int]] = {}
        for item in candidates:
            wanted.setdefault(_copied(item.record), []).append(item.offset)
        since = min(item.wake for item in candidates) - _SKEW_MS
        found: set[int] = set()
        async for batch in read_tail(self._broker, topic, since, TAIL_EVENTS):
            for at, record in zip(batch.offsets, batch.records, strict=True):
                own = wanted.get(_copied(record), ())
                # In its own topic a record finds itself, too.
                found.update(offset for offset in own if batch.source != self._source or offset < at)
        return found


def _copied(record: Record) -> _Copied:
    """Key and value, too: a stream that was made anew has other events at the same place, which the headers name."""
    return record.headers, record.key, record.value
