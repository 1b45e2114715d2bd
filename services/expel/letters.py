"""Dead letters on their way: written durably before the event they stand for is settled.

While their topic cannot be written nothing is dropped and nothing settled; writing is tried for ever and goes on by itself.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import backoff
import structlog

from services.core import dead_letter
from services.core.broker.errors import RecordTooLarge
from services.core.broker.key_send import send_by_key
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition, estimate_size
from services.expel.delivery import Delivery, Unreadable
from services.expel.meter import NODE
from services.expel.outcome import Failure

log = structlog.get_logger()

_BASE_WAIT, _MAX_WAIT = 0.25, 10.0
_BATCH = 500


class Letter(NamedTuple):
    """A dead letter, and what it settles once it is stored. weight: bytes that the event counts in its lane.

    events: how many are lost to the destination with it; more than one for a damaged batch.
    tried: it was under way to the destination, and its key waits for it.
    disowned: its partition is another member's meanwhile, and nothing is settled by it.
    """

    letter: Record
    original: Record
    source: TopicPartition
    offset: int
    weight: float
    reason: str
    tried: bool
    events: int = 1
    disowned: bool = False


@dataclass(frozen=True, slots=True)
class LetterWriter:
    """Makes the letters of one destination."""

    pipe: str
    destination: str

    def from_failures(self, delivery: Delivery, failures: Mapping[int, Failure]) -> list[Letter]:
        """Events (by index) that were given up after the delivery's attempts."""
        places = delivery.places()
        letters = []
        for index, failure in failures.items():
            source, offset, _ = places[index]
            bad = Unreadable(offset, delivery.records[index], failure.reason, failure.detail)
            letter = self._make(source, bad, delivery.attempts, delivery.first_failure, delivery.weight / len(delivery))
            letters.append(letter._replace(disowned=source in delivery.disowned))
        return letters

    def from_unreadable(self, source: TopicPartition, unreadable: Sequence[Unreadable], now_ms: int) -> list[Letter]:
        """Records that were never tried."""
        return [self._make(source, bad, 0, now_ms, estimate_size((bad.record,))) for bad in unreadable]

    def _make(
        self, source: TopicPartition, bad: Unreadable, attempts: int, first_failure: int, weight: float
    ) -> Letter:
        letter = dead_letter.make_dead_letter(
            bad.record,
            reason=bad.reason,
            detail=bad.detail,
            node=NODE,
            pipe=self.pipe,
            destination=self.destination,
            attempts=attempts,
            first_failure=first_failure,
            source=source,
            offset=bad.offset,
        )
        return Letter(letter, bad.record, source, bad.offset, weight, bad.reason, attempts > 0, bad.events)


class DeadLetters:
    """One lane's writer. Bounded by the lane, which takes nothing new while too much is unsettled.

    `stored` is called with letters that are durable. The task belongs to `group`; it runs only while there is something to write.
    """

    def __init__(self, producer: Producer, topic: str, stored: Callable[[Sequence[Letter]], None]) -> None:
        self._producer, self._topic, self._stored = producer, topic, stored
        self._waiting: list[Letter] = []
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, letters: Sequence[Letter], group: asyncio.TaskGroup) -> None:
        """Queue letters for writing."""
        self._waiting += letters
        if self._task is None and self._waiting:
            self._task = group.create_task(self._run(), name=f"dead letters {self._topic}")

    def holds(self, sources: frozenset[TopicPartition]) -> bool:
        """Whether letters for events of these partitions are not stored yet."""
        return any(letter.source in sources for letter in self._waiting)

    def disown(self, sources: Collection[TopicPartition]) -> None:
        """Letters for events of these partitions are still written and settle nothing."""
        self._waiting = [
            letter._replace(disowned=True) if letter.source in sources else letter for letter in self._waiting
        ]

    def stop(self) -> None:
        """Write no more; what is not stored is not settled."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        failures = 0
        try:
            while self._waiting:
                batch = self._waiting[:_BATCH]
                failed = await send_by_key(self._producer, self._topic, [letter.letter for letter in batch])
                self._keep(len(batch), failed)
                if not failed:
                    if failures:
                        log.info("dead_letters_written_again", topic=self._topic)
                    failures = 0
                    continue
                error = next(iter(failed.values()))
                if not failures and not isinstance(error, RecordTooLarge):
                    log.error(
                        "dead_letters_unavailable",
                        topic=self._topic,
                        waiting=len(self._waiting),
                        error=str(error),
                        hint="nothing is lost; what waits for them stays uncommitted. Try: check the broker and the topic",
                    )
                failures += 1
                await asyncio.sleep(backoff.full_jitter(min(_MAX_WAIT, _BASE_WAIT * 2 ** min(failures, 10))))
        finally:
            self._task = None

    def _keep(self, count: int, failed: dict[int, Exception]) -> None:
        """Of the first `count`, settle what was stored; the rest stays in front, without its value when that never fits."""
        batch = self._waiting[:count]
        again = [
            _shorten(letter) if isinstance(failed[index], RecordTooLarge) else letter
            for index, letter in enumerate(batch)
            if index in failed
        ]
        self._waiting[:count] = again
        stored = [letter for index, letter in enumerate(batch) if index not in failed]
        if stored:
            self._stored(stored)


def _shorten(letter: Letter) -> Letter:
    """The headers still say where the whole record lies. Of headers that alone are too large only ours are kept."""
    value_free = letter.letter.value is None
    headers = tuple(
        header for header in letter.letter.headers if not value_free or header[0].startswith(dead_letter.PREFIX)
    )
    log.error(
        "dead_letter_without_value", source=letter.source, offset=letter.offset, reason="larger than the broker takes"
    )
    key = None if value_free else letter.letter.key
    return letter._replace(letter=Record(key, None, letter.letter.timestamp, headers))
