"""An event as a record: the names of its headers, and its origin.

Attributes of CloudEvents have the names of the CloudEvents Kafka binding (`ce_` + attribute), so any Kafka consumer can read
our streams. Our own headers start with `penstock_`.
"""

import re
from typing import NamedTuple

from services.core.broker.record import Headers, Record

ID = "ce_id"
"""Event id, UTF-8. On every record; the same over retries; receivers recognise duplicates by it."""
ARRIVAL = "penstock_arrival"
"""The time at which ingest accepted the event: milliseconds since the epoch, ASCII decimal. On every record."""
ORIGIN = "penstock_origin"
"""The packed `Origin`: `incarnation:partition:sequence`. On every record."""
TIME = "penstock_time"
"""Event time: milliseconds since the epoch, ASCII decimal. On Kafka the last header of our records, because the timestamp
there is the time of storing. Our readers of Kafka make it the timestamp again, and remove the header."""
MAX_MILLIS_DIGITS = 15
"""A longer number is not a time."""
OUTPUTS = "penstock_outputs"
"""The names of the outputs that a transform gave the event to, joined by commas; may be empty. Only on records of a transform
with several outputs, behind the event's own headers. Without it an event is in every output of its pipe."""
REDRIVEN = "penstock_redriven"
"""The position of the dead letter whose event an operator sent to its stream again. No transform drops it as a repeated one."""
FAULT = "penstock_fault"
"""Why a record of a topic of others is no event, for a person: a rule of the pipe file does not fit it. It is the last header,
and the record goes to the dead letters."""
TRACEPARENT = "traceparent"
"""W3C trace context, if the client sent one."""
SENDER = "penstock-send"
"""The CloudEvents source of the events of `penstock send`, which made their ids."""
CE_PREFIX = "ce_"
"""Prefix of the client's CloudEvents attributes: ce_type, ce_source, ce_specversion, ce_subject, …"""
CONTENT_TYPE = "content-type"
"""Media type of the value, if it is not application/json (CloudEvents `datacontenttype`)."""


_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,200})?")


class Origin(NamedTuple):
    """The identity of an event in the ledger.

    incarnation: one run of one ingest process ([a-z0-9]+). sequence: 0, 1, 2, … without a gap, in the order of acceptance in
    this run and partition.
    """

    incarnation: str
    partition: int
    sequence: int

    def pack(self) -> bytes:
        """The header's value."""
        return f"{self.incarnation}:{self.partition}:{self.sequence}".encode()

    @classmethod
    def unpack(cls, data: bytes) -> "Origin":
        """From the header's value. Raises ValueError."""
        incarnation, partition, sequence = data.decode("ascii").split(":")
        if not incarnation:
            raise ValueError("an origin without incarnation")
        return cls(incarnation, int(partition), int(sequence))

    @classmethod
    def read(cls, data: bytes | None) -> "Origin | None":
        """As `unpack`; None without a header, and when another program wrote something else."""
        try:
            return cls.unpack(data or b"")
        except ValueError:
            return None


TOPIC_NUMBERS = 1 << 31
"""The offsets of one incarnation of a topic of others: the ledger's sets have room for so many."""
OF_TOPIC = "topic"
"""The beginning of the incarnations of topics of others; those of ingest are hexadecimal."""


def topic_incarnation(topic_id: str, offset: int) -> str:
    """The incarnation in the origin of a record of a topic of others: the topic's id, and which TOPIC_NUMBERS offsets these are.

    The number is `offset % TOPIC_NUMBERS`. A topic that was deleted and created again has another id.
    """
    return f"{OF_TOPIC}{topic_id.replace('-', '')}e{offset // TOPIC_NUMBERS}"


def offset_of(origin: Origin) -> int:
    """Where the record with this origin is, in its partition of a topic of others. Raises ValueError for an event of ours."""
    run, _, epoch = origin.incarnation.rpartition("e")
    if not is_of_topic(run) or not epoch.isdigit():
        raise ValueError(f"{origin.incarnation} is not of a topic of others")
    return int(epoch) * TOPIC_NUMBERS + origin.sequence


def is_of_topic(incarnation: str) -> bool:
    """Whether it is a `topic_incarnation`."""
    return incarnation.startswith(OF_TOPIC)


def read_id(record: Record) -> str | None:
    """The event id; None when the record has none (another program wrote it) or it is not UTF-8."""
    raw = record.header(ID)
    if raw is None:
        return None
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def read_arrival(record: Record) -> int | None:
    """Arrival time in ms; None when it is missing or not a time."""
    raw = record.header(ARRIVAL)
    return int(raw) if raw is not None and raw.isdigit() and len(raw) <= MAX_MILLIS_DIGITS else None


def read_traceparent(record: Record) -> str | None:
    """The trace context, safe as an HTTP header; None when it is missing or malformed. W3C requires to ignore a malformed one."""
    raw = record.header(TRACEPARENT)
    return raw.decode() if raw is not None and _TRACEPARENT.fullmatch(raw) else None


def restore_time(timestamp: int, headers: Headers) -> tuple[int, Headers]:
    """The event time in ms and the headers without TIME. Without a valid TIME as the last header: both unchanged."""
    if headers and headers[-1][0] == TIME:
        text = headers[-1][1]
        if text and text.isdigit() and len(text) <= MAX_MILLIS_DIGITS:
            return int(text), headers[:-1]
    return timestamp, headers


def attributes(headers: Headers) -> dict[str, str]:
    """The CloudEvents attributes among these headers, by attribute name, without those that are not UTF-8."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name.startswith(CE_PREFIX):
            try:
                found[name[len(CE_PREFIX) :]] = value.decode()
            except UnicodeDecodeError:
                continue
    return found
