"""Where a lane puts events that the destination did not take: retry-in, the pipe's dead letters or parked events.

They are durable there, and then settled.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.ledger.due import Span, since_span
from services.core.ledger.report import Outcome
from services.core.pipes import RETRY_IN, dead_letter_topic, parked_topic
from services.core.retry_state import state_of
from services.expel.delivery import Delivery, Unreadable
from services.expel.handover import Handover
from services.expel.lane_bounds import LaneShape
from services.expel.letters import Letter, LetterWriter, shorten
from services.expel.meter import LaneMeter
from services.expel.outbox import Outbox
from services.expel.outcome import Failure
from services.expel.parked import ParkedWriter


class Elsewhere:
    """One lane's, during one membership. Nothing here waits; `stored` is called with what is durable.

    The tasks run in the group given to `open`.
    """

    def __init__(
        self, shape: LaneShape, producer: Producer, meter: LaneMeter, stored: Callable[[Sequence[Letter]], None]
    ) -> None:
        self._meter, self._stored = meter, stored
        self._writer = LetterWriter(shape.pipe, shape.destination, shape.version)
        self._handover = Handover(shape.pipe, shape.destination, shape.schedule)
        self._parked_writer = ParkedWriter(shape.pipe, shape.destination)
        self._dead = Outbox(producer, dead_letter_topic(shape.pipe), self._buried, shorten)
        self._retry_in = Outbox(producer, RETRY_IN, self._handed_over, self._bury_too_large)
        self._parked = Outbox(producer, parked_topic(shape.pipe), self._are_parked, self._bury_too_large)
        self._all = (self._dead, self._retry_in, self._parked)
        self._group: asyncio.TaskGroup | None = None

    def __len__(self) -> int:
        """How many are not durable yet."""
        return sum(map(len, self._all))

    def open(self, group: asyncio.TaskGroup) -> None:
        """Tasks run in this group from now on."""
        self._group = group

    def hand_over(self, delivery: Delivery, failures: Mapping[int, Failure]) -> None:
        """These events (by index) to the global retrier; those whose window is over to the dead letters."""
        letters, over = self._handover.write(delivery, failures, self._meter.now_ms())
        self._add(self._retry_in, letters)
        self.bury(delivery, over)

    def park(self, delivery: Delivery, reason: str) -> None:
        """All of it to the parked ones. reason: why the destination is paused."""
        self._add(self._parked, self._parked_writer.write(delivery, reason, self._meter.now_ms()))

    def bury(self, delivery: Delivery, failures: Mapping[int, Failure]) -> None:
        """These events (by index) to the dead letters."""
        self._add(self._dead, self._writer.from_failures(delivery, failures, self._meter.now_ms()))

    def bury_unreadable(self, source: TopicPartition, unreadable: Sequence[Unreadable]) -> float:
        """These records to the dead letters; gives what they weigh in the lane."""
        letters = self._writer.from_unreadable(source, unreadable, self._meter.now_ms())
        self._add(self._dead, letters)
        return sum(letter.weight for letter in letters)

    def holds(self, sources: frozenset[TopicPartition]) -> bool:
        """Whether events of these partitions are not durable yet."""
        return any(outbox.holds(sources) for outbox in self._all)

    def disown(self, sources: Collection[TopicPartition]) -> None:
        """Events of these partitions are still written and settle nothing."""
        for outbox in self._all:
            outbox.disown(sources)

    def stop(self) -> None:
        """Write no more; what is not stored is not settled."""
        for outbox in self._all:
            outbox.stop()

    def _add(self, outbox: Outbox, letters: Sequence[Letter]) -> None:
        assert self._group is not None
        outbox.add(letters, self._group)

    def _bury_too_large(self, letter: Letter) -> None:
        """With its retry state the record is larger than the broker takes."""
        detail = "the record with its retry state is larger than the broker takes"
        self._add(self._dead, [self._writer.from_handover(letter, "too_large", detail, self._meter.now_ms())])

    def _buried(self, letters: Sequence[Letter]) -> None:
        self._tell("dead", letters)
        for letter in letters:
            self._meter.buried(letter.reason, letter.events)
        self._stored(letters)

    def _are_parked(self, letters: Sequence[Letter]) -> None:
        for reason in {letter.reason for letter in letters}:
            self._meter.parked(reason, sum(letter.reason == reason for letter in letters))
        self._tell("parked", letters)
        self._stored(letters)

    def _tell(self, outcome: Outcome, letters: Sequence[Letter]) -> None:
        """Since now, and not before they were due: that was by the clock of whoever handed them over or redrove them."""
        now, since = self._meter.now_ms(), dict[Span, list[Record]]()
        for letter in letters:
            state = state_of(letter.original)
            since.setdefault(since_span(now, state.due if state is not None else 0), []).append(letter.original)
        for span, records in since.items():
            self._meter.ledger.add(outcome, records, span)

    def _handed_over(self, letters: Sequence[Letter]) -> None:
        for letter in letters:
            self._meter.handed_over(letter.reason)
        by_due: dict[Span | None, list[Record]] = {}
        for letter in letters:
            by_due.setdefault(letter.due, []).append(letter.original)
        for due, records in by_due.items():
            self._meter.ledger.add("retrying", records, due)
        self._stored(letters)
