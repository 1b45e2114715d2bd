"""One dead letter read back: what its headers say, and where it lies."""

import re
from dataclasses import dataclass
from typing import NamedTuple, Self

from services.core import dead_letter
from services.core.broker.record import Record
from services.core.event import read_id
from services.core.times import format_time

_POSITION = re.compile(r"([A-Za-z0-9._-]{1,249}):(\d{1,9}):(\d{1,64})")


class Position(NamedTuple):
    """Where a record lies; as text `topic:partition:offset`."""

    topic: str
    partition: int
    offset: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError."""
        match = _POSITION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text[:80]!r} is no position. Try: one from penstock dead list, e.g. late.dead:0:17")
        return cls(match[1], int(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """What the headers say (`dead_letter`), "" and 0 where one is missing. first_failure: ms. fate: "" while it is open.

    digest: of the letter as it is stored (`audit.digest_of`); empty where nobody asks what became of it.
    """

    position: Position
    record: Record
    pipe: str
    destination: str
    node: str
    reason: str
    detail: str
    attempts: int
    first_failure: int
    source: str
    fate: str = ""
    version: str = ""
    digest: bytes = b""

    @classmethod
    def of(cls, position: Position, record: Record, fate: str = "", digest: bytes = b"") -> Self:
        """From the record; never fails, others may have written to the topic."""
        return cls(
            position,
            record,
            _text(record, dead_letter.PIPE),
            _text(record, dead_letter.DESTINATION),
            _text(record, dead_letter.NODE),
            _text(record, dead_letter.REASON),
            _text(record, dead_letter.DETAIL),
            _number(record, dead_letter.ATTEMPTS),
            _number(record, dead_letter.FIRST_FAILURE),
            _text(record, dead_letter.SOURCE),
            fate,
            _text(record, dead_letter.VERSION),
            digest,
        )

    @property
    def event_id(self) -> str | None:
        """None when it has none, or none that is text."""
        return read_id(self.record)

    def as_json(self) -> dict[str, object]:
        """Without the payload; times in RFC 3339."""
        return {
            "position": str(self.position),
            "id": self.event_id,
            "pipe": self.pipe,
            "pipe_version": self.version,
            "destination": self.destination,
            "node": self.node,
            "reason": self.reason,
            "detail": self.detail,
            "attempts": self.attempts,
            "first_failure": format_time(self.first_failure),
            "event_time": format_time(dead_letter.event_time(self.record)),
            "source": self.source,
            "fate": self.fate,
        }


def _text(record: Record, name: str) -> str:
    return (record.header(name) or b"").decode(errors="replace")


def _number(record: Record, name: str) -> int:
    raw = record.header(name) or b""
    return int(raw) if raw.isdigit() and len(raw) <= 15 else 0
