"""How an event travels as a record: the header names, the origin, and who may be told what.

Attributes of CloudEvents use the names of the CloudEvents Kafka binding (`ce_` + attribute), so any other Kafka
consumer reads our streams. Our own headers start with `penstock_`.
"""

import re
from typing import NamedTuple

from services.core.broker.record import Headers, Record

ID = "ce_id"
"""Event id, UTF-8. On every record; stable over retries; what duplicates are recognised by."""
ARRIVAL = "penstock_arrival"
"""When ingest accepted the event: milliseconds since the epoch, ASCII decimal. On every record."""
ORIGIN = "penstock_origin"
"""Where the event entered: `incarnation:partition:sequence`, see `Origin`. On every record."""
TIME = "penstock_time"
"""Event time: milliseconds since the epoch, ASCII decimal. Only where the record's timestamp cannot carry it: on what
Spark wrote to Kafka, whose sink sets no timestamps. The last header; Kafka's consumer makes it the timestamp again."""
MAX_MILLIS_DIGITS = 15
"""Longer ones are no time that anybody meant."""
TRACEPARENT = "traceparent"
"""W3C trace context, when the client sent one."""
CE_PREFIX = "ce_"
"""Prefix of CloudEvents attributes, when the client gave them: ce_type, ce_source, ce_specversion, ce_subject, …"""
CONTENT_TYPE = "content-type"
"""Media type of the value, when it is not application/json (CloudEvents `datacontenttype`)."""


_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,200})?")


class Origin(NamedTuple):
    """The identity that the loss ledger counts by: dense per ingest process run and partition.

    incarnation: one run of one ingest process ([a-z0-9]+). sequence: 0, 1, 2, … in the order of acceptance there.
    """

    incarnation: str
    partition: int
    sequence: int

    def pack(self) -> bytes:
        """As the header carries it."""
        return f"{self.incarnation}:{self.partition}:{self.sequence}".encode()

    @classmethod
    def unpack(cls, data: bytes) -> "Origin":
        """Raises ValueError when this is no origin."""
        incarnation, partition, sequence = data.decode("ascii").split(":")
        if not incarnation:
            raise ValueError("an origin without incarnation")
        return cls(incarnation, int(partition), int(sequence))


def read_id(record: Record) -> str | None:
    """The event id, or None when the record has none (written by others) or it is not UTF-8."""
    raw = record.header(ID)
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def read_arrival(record: Record) -> int | None:
    """Arrival time in ms, or None when missing or not a time."""
    raw = record.header(ARRIVAL)
    return int(raw) if raw is not None and raw.isdigit() and len(raw) <= MAX_MILLIS_DIGITS else None


def read_traceparent(record: Record) -> str | None:
    """The trace context, fit for an HTTP header; None when missing or not well-formed, which W3C says to ignore."""
    raw = record.header(TRACEPARENT)
    return raw.decode() if raw is not None and _TRACEPARENT.fullmatch(raw) else None


def restore_time(timestamp: int, headers: Headers) -> tuple[int, Headers]:
    """The event time in ms and the headers without TIME, when that is the last and valid; else what was given."""
    if headers and headers[-1][0] == TIME and headers[-1][1].isdigit() and len(headers[-1][1]) <= MAX_MILLIS_DIGITS:
        return int(headers[-1][1]), headers[:-1]
    return timestamp, headers


def attributes(headers: Headers) -> dict[str, str]:
    """The CloudEvents attributes among these headers, by attribute name; undecodable ones are left out."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name.startswith(CE_PREFIX):
            try:
                found[name[len(CE_PREFIX) :]] = value.decode()
            except UnicodeDecodeError:
                continue
    return found
