"""What is written elsewhere in place of a delivery: how a dead letter is made, and what storing it settles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import structlog

from services.core import dead_letter
from services.core.broker.record import Record, TopicPartition, estimate_size
from services.core.ledger.due import Span
from services.core.retry_state import state_of
from services.expel.delivery import Delivery, Unreadable
from services.expel.lane_ledger import NODE
from services.expel.outcome import Failure

log = structlog.get_logger()


class Letter(NamedTuple):
    """A record for another topic of ours, and what it settles once it is stored. weight: bytes that the event counts in its lane.

    events: how many are lost to the destination with it; more than one for a damaged batch.
    tried: it was under way to the destination, and its key waits for it.
    disowned: its partition is another member's meanwhile, and nothing is settled by it. due: when it comes back, if it does.
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
    due: Span | None = None


@dataclass(frozen=True, slots=True)
class LetterWriter:
    """Makes the letters of one destination. version: of its pipe's definition."""

    pipe: str
    destination: str
    version: str = ""

    def from_failures(self, delivery: Delivery, failures: Mapping[int, Failure], now_ms: int) -> list[Letter]:
        """Events (by index) that were given up after the delivery's attempts."""
        places = delivery.places()
        letters = []
        for index, failure in failures.items():
            source, offset, _ = places[index]
            bad = Unreadable(offset, delivery.records[index], failure.reason, failure.detail)
            weight = delivery.weight / len(delivery)
            letter = self._make(source, bad, delivery.attempts, delivery.first_failure, weight, now_ms)
            letters.append(letter._replace(disowned=source in delivery.disowned))
        return letters

    def from_handover(self, letter: Letter, reason: str, detail: str, now_ms: int) -> Letter:
        """A dead letter in place of one for retry-in."""
        original = letter.original
        wrapped = Record(original.key, original.value, original.timestamp, letter.letter.headers)
        dead = self._make(
            letter.source, Unreadable(letter.offset, wrapped, reason, detail), 0, 0, letter.weight, now_ms
        )
        return dead._replace(original=original, tried=letter.tried, disowned=letter.disowned)

    def from_unreadable(self, source: TopicPartition, unreadable: Sequence[Unreadable], now_ms: int) -> list[Letter]:
        """Records that were never tried."""
        return [self._make(source, bad, 0, now_ms, estimate_size((bad.record,)), now_ms) for bad in unreadable]

    def _make(
        self, source: TopicPartition, bad: Unreadable, attempts: int, first_failure: int, weight: float, now_ms: int
    ) -> Letter:
        earlier = state_of(bad.record)
        original, offset = (source, bad.offset) if earlier is None else earlier.position()
        letter = dead_letter.make_dead_letter(
            bad.record,
            reason=bad.reason,
            detail=bad.detail,
            node=NODE,
            pipe=self.pipe,
            version=self.version,
            destination=self.destination,
            attempts=attempts if earlier is None else attempts + earlier.attempts,
            first_failure=(0 if earlier is None else earlier.first_failure) or first_failure,
            source=original,
            offset=offset,
            now_ms=now_ms,
        )
        return Letter(letter, bad.record, source, bad.offset, weight, bad.reason, attempts > 0, bad.events)


def shorten(letter: Letter) -> Letter:
    """The dead letter without its value, then with our headers only: these say where the whole record lies."""
    value_free = letter.letter.value is None
    headers = tuple(
        header for header in letter.letter.headers if not value_free or header[0].startswith(dead_letter.PREFIX)
    )
    log.error(
        "dead_letter_without_value", source=letter.source, offset=letter.offset, reason="larger than the broker takes"
    )
    key = None if value_free else letter.letter.key
    return letter._replace(letter=Record(key, None, letter.letter.timestamp, headers))
