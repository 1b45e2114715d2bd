"""One dead letter as an operator sees it, and which of them are meant."""

import datetime
import re
from dataclasses import asdict, dataclass
from typing import NamedTuple, Self

from services.core import dead_letter
from services.core.broker.record import Record
from services.core.event import read_id
from services.core.units import parse_duration

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
    """What the headers say (`core.dead_letter`), "" and 0 where one is missing. first_failure: ms. fate: "" while it is open."""

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

    @classmethod
    def of(cls, position: Position, record: Record, fate: str = "") -> Self:
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
        )

    def as_json(self) -> dict[str, object]:
        """Without the payload; times in RFC 3339."""
        return {
            "position": str(self.position),
            "id": read_id(self.record),
            "pipe": self.pipe,
            "destination": self.destination,
            "node": self.node,
            "reason": self.reason,
            "detail": self.detail,
            "attempts": self.attempts,
            "first_failure": format_time(self.first_failure),
            "event_time": format_time(self.record.timestamp),
            "source": self.source,
            "fate": self.fate,
        }


@dataclass(frozen=True, slots=True)
class Filter:
    """Which letters; None: any. since, until: ms, of the first failure, since <= time < until."""

    pipe: str | None = None
    destination: str | None = None
    reason: str | None = None
    since: int | None = None
    until: int | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in asdict(self).values())

    def matches(self, letter: DeadLetter) -> bool:
        """Whether the letter is meant."""
        return (
            self.pipe in (None, letter.pipe)
            and self.destination in (None, letter.destination)
            and self.reason in (None, letter.reason)
            and (self.since is None or self.since <= letter.first_failure)
            and (self.until is None or letter.first_failure < self.until)
        )

    def as_json(self) -> dict[str, str]:
        """What was asked for, for the audit."""
        times = {"since", "until"}
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return {name: format_time(value) if name in times else value for name, value in given.items()}


def parse_time(text: str, now: float) -> int:
    """Milliseconds from `2h` (ago) or an RFC 3339 time with a time zone. now: seconds. Raises ValueError."""
    try:
        return int((now - parse_duration(text)) * 1000)
    except ValueError:
        pass
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        raise ValueError(f"{text[:40]!r} is no time. Try: 2h (ago) or 2026-11-21T08:00:00Z")
    return int(when.timestamp() * 1000)


def format_time(millis: int) -> str:
    """RFC 3339 in UTC; the number itself when it is no time that anybody meant."""
    try:
        when = datetime.datetime.fromtimestamp(millis / 1000, datetime.UTC)
    except (ValueError, OverflowError, OSError):
        return str(millis)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(record: Record, name: str) -> str:
    return (record.header(name) or b"").decode(errors="replace")


def _number(record: Record, name: str) -> int:
    raw = record.header(name) or b""
    return int(raw) if raw.isdigit() and len(raw) <= 15 else 0
