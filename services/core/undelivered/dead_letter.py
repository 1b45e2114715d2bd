"""Dead letters: events that could not be processed, with the reason. One topic per pipe, written by expel and Spark.

The record keeps its key, value and headers. The headers of this module are added in front; a redrive removes them. The record's
timestamp is the time at which the dead letter was written, because Kafka's retention counts from it: an event that waited long
would be deleted at once. The event's time is a header.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple, Self

from services.core.broker.record import Record, TopicPartition
from services.core.event import MAX_MILLIS_DIGITS, read_id
from services.core.times import format_time
from services.core.undelivered import retry_state

PREFIX = "penstock_dead_"
REASON = PREFIX + "reason"
"""A stable word, e.g. `http_404`, `window_over`, `bad_record`, `schema_mismatch`, `transform_error`.

`damaged_batch`: the value is the stored bytes of several damaged records; it cannot be redriven."""
DETAIL = PREFIX + "detail"
"""For a person; at most `MAX_DETAIL` bytes; without secrets."""
NODE = PREFIX + "node"
"""The node that wrote it: `transform` or `expel`."""
PIPE = PREFIX + "pipe"
DESTINATION = PREFIX + "destination"
"""Empty in dead letters of a transform."""
VERSION = PREFIX + "version"
"""The definition of the pipe (`pipes.pipe_version`); missing where the node does not know it."""
ATTEMPTS = PREFIX + "attempts"
FIRST_FAILURE = PREFIX + "first_failure"
"""Milliseconds since the epoch of the first failed attempt."""
FAILURES = PREFIX + "failures"
"""The failed attempts (`failed_attempts.pack_attempts`); missing without any, and in dead letters of earlier versions."""
SOURCE = PREFIX + "source"
"""The original record: `topic:partition:offset`."""
TIME = PREFIX + "time"
"""The event's time, ms. Dead letters of earlier versions lack it: their timestamp is that time."""

_MILLIS = re.compile(rb"-?[0-9]{1,%d}" % MAX_MILLIS_DIGITS)

MAX_DETAIL = 1024


def make_dead_letter(
    record: Record,
    *,
    reason: str,
    detail: str,
    node: str,
    pipe: str,
    version: str = "",
    destination: str = "",
    attempts: int = 0,
    first_failure: int,
    source: TopicPartition,
    offset: int,
    now_ms: int,
    failures: bytes | None = None,
) -> Record:
    """The record for the pipe's dead letters. first_failure, now_ms: ms. failures: the value of FAILURES.

    Replaces headers of an earlier dead letter or retry.
    """
    kept = tuple(header for header in record.headers if not header[0].startswith((PREFIX, retry_state.PREFIX)))
    added = (
        (REASON, reason.encode()),
        (DETAIL, detail.encode(errors="replace")[:MAX_DETAIL]),
        (NODE, node.encode()),
        (PIPE, pipe.encode()),
        *(((VERSION, version.encode()),) if version else ()),
        (DESTINATION, destination.encode()),
        (ATTEMPTS, str(attempts).encode()),
        (FIRST_FAILURE, str(first_failure).encode()),
        (SOURCE, f"{source.topic}:{source.partition}:{offset}".encode()),
        (TIME, b"%d" % record.timestamp),
        *(((FAILURES, failures),) if failures else ()),
    )
    return Record(record.key, record.value, now_ms, added + kept)


def event_time(record: Record) -> int:
    """The time of the event in this dead letter, ms."""
    time = record.header(TIME)
    return int(time) if time is not None and _MILLIS.fullmatch(time) else record.timestamp


def strip(record: Record) -> Record:
    """The original record, for a redrive."""
    kept = tuple(header for header in record.headers if not header[0].startswith(PREFIX))
    return Record(record.key, record.value, event_time(record), kept)


_POSITION = re.compile(r"([A-Za-z0-9._-]{1,249}):(\d{1,9}):(\d{1,64})")


class Position(NamedTuple):
    """The place of a record; as text `topic:partition:offset`."""

    topic: str
    partition: int
    offset: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """From text. Raises ValueError."""
        match = _POSITION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text[:80]!r} is not a position. Try: one from penstock dead list, e.g. late.dead:0:17")
        return cls(match[1], int(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.topic}:{self.partition}:{self.offset}"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A dead letter with the values of its headers; "" and 0 for missing ones. first_failure: ms.

    fate: `redriven`, `discarded`, or "" while it is open. digest: of the stored record (`audit.digest_of`), or empty.
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
        """From the record. Never raises: other programs may have written to the topic."""
        return cls(
            position,
            record,
            _text(record, PIPE),
            _text(record, DESTINATION),
            _text(record, NODE),
            _text(record, REASON),
            _text(record, DETAIL),
            _number(record, ATTEMPTS),
            _number(record, FIRST_FAILURE),
            _text(record, SOURCE),
            fate,
            _text(record, VERSION),
            digest,
        )

    @property
    def dead_since(self) -> int:
        """When it became a dead letter, ms. In the time before, its event was tried again, perhaps for days."""
        if not self.first_failure or self.record.header(TIME) is not None:
            return self.record.timestamp
        return self.first_failure  # of an earlier version: the timestamp is the event's time

    @property
    def event_id(self) -> str | None:
        """None when it is missing or not UTF-8."""
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
            "dead_since": format_time(self.dead_since),
            "event_time": format_time(event_time(self.record)),
            "source": self.source,
            "fate": self.fate,
        }


def _text(record: Record, name: str) -> str:
    return (record.header(name) or b"").decode(errors="replace")


def _number(record: Record, name: str) -> int:
    raw = record.header(name) or b""
    return int(raw) if raw.isdigit() and len(raw) <= 15 else 0
