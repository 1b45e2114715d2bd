"""Reading the dead-letter topics from their beginning, and then on for ever, without a group: who restarts reads them again.

A page of at most PAGE records at a time, topic after topic: memory does not grow with what is stored, and no topic waits long
for another. A topic that cannot be read is tried again at every turn, and the others go on.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog

from services.core import metrics
from services.core.broker.contract import Admin
from services.core.broker.errors import BrokerError, OffsetOutOfRange, UnknownTopic
from services.core.broker.record import Batch
from services.core.letter import DeadLetter, Position

log = structlog.get_logger()

PAGE = 500
TURN_S = 1.0
"""Between two turns over all topics when there was nothing new in any."""


@dataclass(slots=True)
class Place:
    """Where a topic's only partition is read on; None: from its beginning. caught_up: its end was reached once."""

    next: int | None = None
    caught_up: bool = False
    problem: str | None = None


class LetterReader:
    """`note` gets every letter once and says "", or the reason for which it counts for nobody."""

    def __init__(self, admin: Admin, topics: Sequence[str], note: Callable[[DeadLetter], str]) -> None:
        self._admin, self._note = admin, note
        self._places = {topic: Place() for topic in topics}

    @property
    def catching_up(self) -> bool:
        """Whether some topic's end was not reached yet since the start."""
        return not all(place.caught_up for place in self._places.values())

    @property
    def problems(self) -> dict[str, str]:
        """By topic, why it cannot be read now."""
        return {topic: place.problem for topic, place in self._places.items() if place.problem is not None}

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping`. Raises nothing of the broker."""
        while not stopping.is_set():
            moved = [await self.advance(topic) for topic in self._places if not stopping.is_set()]
            if not any(moved):
                with suppress(TimeoutError):
                    async with asyncio.timeout(TURN_S):
                        await stopping.wait()

    async def advance(self, topic: str) -> bool:
        """One page of this topic; whether there was any."""
        place = self._places[topic]
        try:
            moved = await self._read_page(topic, place)
        except UnknownTopic:  # nothing was ever buried there: a fleet without a schedule has no letters of the retrier
            moved, place.caught_up, place.next = False, True, None
        except BrokerError as error:
            if place.problem is None:
                log.warning("letters_unreadable", topic=topic, error=str(error), hint="it is tried again, others go on")
            place.problem = str(error)
            metrics.OBSERVER_TOPIC_UP.labels(topic).set(0)
            return False
        place.problem = None
        metrics.OBSERVER_TOPIC_UP.labels(topic).set(1)
        return moved

    async def _read_page(self, topic: str, place: Place) -> bool:
        if place.next is None:
            place.next = (await self._admin.describe(topic))[0].start
        try:
            batch = await self._admin.read(topic, 0, place.next, max_records=PAGE)
        except OffsetOutOfRange as error:
            log.warning("letters_gone", topic=topic, wanted=place.next, start=error.start, end=error.end)
            place.next = error.start  # retention was quicker, or the topic was made anew
            return True
        if batch is None:
            place.caught_up = True
            return False
        self._take(batch)
        place.next = batch.offsets[-1] + 1
        return True

    def _take(self, batch: Batch) -> None:
        metrics.OBSERVER_LETTERS.labels(batch.topic).inc(len(batch.records))
        if batch.damage is not None:
            log.error("letters_damaged", topic=batch.topic, first=batch.damage.first, last=batch.damage.last)
            metrics.OBSERVER_PASSED_OVER.labels(batch.topic, "damaged").inc()
            return
        passed: Counter[str] = Counter()
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            passed[self._note(DeadLetter.of(Position(batch.topic, batch.partition, offset), record))] += 1
        for reason, count in passed.items():
            if reason:
                metrics.OBSERVER_PASSED_OVER.labels(batch.topic, reason).inc(count)
