"""From rows to records: headers and origins. The one loop of ingest that runs for every event."""

import re
import secrets
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from services.core import event
from services.core.broker.record import Headers, Record
from services.core.ledger.report import MAX_NUMBER
from services.ingest.cloudevents import JSON
from services.ingest.json_events import Attributes

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,200})?")
_OWN_HEADER = frozenset(("id", "datacontenttype"))
_NO_HEADERS: Headers = ()


class Numbers(NamedTuple):
    """Consecutive numbers in one partition, from `first` on. prefix: what the packed `event.Origin` of each starts with."""

    incarnation: str
    first: int
    prefix: bytes


class Origins:
    """Numbers the events that one process run sends into one stream: 0, 1, 2, … in each partition, without a gap.

    Each stream has an incarnation of its own, so that two streams never share an origin; and begins another one before a
    number is larger than the ledger's sets can hold.
    """

    def __init__(self, limit: int = MAX_NUMBER) -> None:
        self._limit = limit
        self._begin()

    def _begin(self) -> None:
        self.incarnation = secrets.token_hex(8)
        self._next: dict[int, int] = {}
        self._prefixes: dict[int, bytes] = {}

    def reserve(self, partition: int, count: int) -> Numbers:
        """Reserve `count` numbers, at most `limit`."""
        first = self._next.get(partition, 0)
        if first + count > self._limit:
            self._begin()
            first = 0
        if not first:
            self._prefixes[partition] = f"{self.incarnation}:{partition}:".encode()
        self._next[partition] = first + count
        return Numbers(self.incarnation, first, self._prefixes[partition])


class Columns(msgspec.Struct, frozen=True):
    """The rows of a request. keys and more: None when no row has any. times in ms."""

    values: list[bytes]
    ids: list[bytes]
    keys: list[bytes | None] | None
    times: list[int]
    more: list[Headers] | None

    def join(self, other: "Columns") -> "Columns":
        """The rows of both. A column that is None in one is None in the other, for they are of one request."""
        return Columns(
            self.values + other.values,
            self.ids + other.ids,
            None if self.keys is None else self.keys + (other.keys or []),
            self.times + other.times,
            None if self.more is None else self.more + (other.more or []),
        )


def make_records(rows: Sequence[int], columns: Columns, arrival: int, numbers: Numbers) -> list[Record]:
    """The records of these rows, numbered in order. arrival in ms."""
    values, ids, times, more = columns.values, columns.ids, columns.times, columns.more
    prefix, first = numbers.prefix, numbers.first
    id_name, origin_name = event.ID, event.ORIGIN
    arrived = (event.ARRIVAL, b"%d" % arrival)
    keys = columns.keys or [None] * len(values)
    if more is None:
        return [
            Record(
                keys[row],
                values[row],
                times[row],
                ((id_name, ids[row]), arrived, (origin_name, b"%b%d" % (prefix, number))),
            )
            for number, row in enumerate(rows, first)
        ]
    return [
        Record(
            keys[row],
            values[row],
            times[row],
            ((id_name, ids[row]), arrived, (origin_name, b"%b%d" % (prefix, number)), *more[row]),
        )
        for number, row in enumerate(rows, first)
    ]


def more_headers(attributes: Sequence[Attributes] | None, count: int, traceparent: str | None) -> list[Headers] | None:
    """CloudEvents attributes and the request's trace context, per row; None when there are neither."""
    trace = _trace(traceparent)
    if attributes is None:
        return [trace] * count if trace else None
    return [_from_attributes(one, trace) for one in attributes]


def _from_attributes(attributes: Attributes, trace: Headers) -> Headers:
    headers = tuple(
        (event.CE_PREFIX + name, value.encode()) for name, value in attributes.items() if name not in _OWN_HEADER
    )
    media = attributes.get("datacontenttype", JSON)
    if media != JSON:
        headers += ((event.CONTENT_TYPE, media.encode(errors="replace")),)
    return headers + (_trace(attributes.get("traceparent")) or trace)


def _trace(traceparent: str | None) -> Headers:
    """The header for a well-formed trace context; W3C says to ignore any other."""
    if traceparent is None or not _TRACEPARENT.fullmatch(traceparent):
        return _NO_HEADERS
    return ((event.TRACEPARENT, traceparent.encode(errors="replace")),)
