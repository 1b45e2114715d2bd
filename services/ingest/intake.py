"""From the events of a request to the records of one stream, by partition, column by column.

All of it is plain computation, done at once for a whole request or a slice of it.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import msgspec

from services.core import event
from services.core.broker.partitioner import choose_partition
from services.core.broker.record import Headers, Record
from services.core.http.problem_type import ProblemType
from services.core.pipe_file.field_path import Column, Reader, field_reader
from services.core.pipe_file.stream import Stream
from services.core.pipe_file.topic_of_others import Place
from services.ingest import problems
from services.ingest.cloudevents import JSON, NO_DATA
from services.ingest.event_fields import (
    Faults,
    IdMaker,
    Numbers,
    Origins,
    read_ids,
    read_keys,
    read_times,
)
from services.ingest.json_events import Attributes, Items
from services.ingest.metrics import StreamLedger, Tally
from services.ingest.problems import Refusal, Refused

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-.{0,200})?")
_ATTRIBUTES = {"id": "id", "key": "partitionkey", "time": "time"}
"""The CloudEvents attributes that have the value if the payload lacks it."""
_OWN_HEADER = frozenset(("id", "datacontenttype"))
_NO_HEADERS: Headers = ()
KEYLESS_MS = 25
"""How long events without a key go to the same partition. It is longer than an append, so that few appends are open at
once, and too short for anybody to notice."""


class Columns(msgspec.Struct, frozen=True):
    """The rows of a request. values: None for a tombstone. keys and more: None when no row has any. times in ms."""

    values: list[bytes | None]
    ids: list[bytes]
    keys: list[bytes | None] | None
    times: list[int]
    more: list[Headers] | None

    def join(self, other: "Columns") -> "Columns":
        """The rows of both. A column that is None in one is None in the other, because both are of one request."""
        return Columns(
            self.values + other.values,
            self.ids + other.ids,
            None if self.keys is None else self.keys + (other.keys or []),
            self.times + other.times,
            None if self.more is None else self.more + (other.more or []),
        )


class Prepared(msgspec.Struct, frozen=True):
    """The records of a request by partition, and the data for its answer.

    numbers: of each partition's records. rows: by partition, the row of each record in the request's columns. all_rows: those of
    all partitions. indexes: the position of each row in the request. values, ids, times (ms): by row. refused: events that are
    not sent. has_keys: any event of the request has a key.
    """

    parts: dict[int, list[Record]]
    numbers: dict[int, Numbers]
    rows: dict[int, Sequence[int]]
    all_rows: Sequence[int]
    indexes: Sequence[int]
    values: list[bytes | None]
    ids: list[bytes]
    times: list[int]
    refused: list[Refusal]
    has_keys: bool


class Intake:
    """One stream in this process. `partitions` is 0 until the broker has answered (`probe.py`)."""

    def __init__(self, name: str, stream: Stream, rotate: Callable[[str, int], int]) -> None:
        self.name = name
        self.partitions = 0
        self.topic = ""
        """The mark of its topic in offset tokens, where it is compacted."""
        self.tally = Tally(name)
        self.origins = Origins()
        self.ledger: StreamLedger | None = None
        """The reports of the numbers of `origins`; None when the ledger is off."""
        self.broker_failure: tuple[float, str] | None = None
        """When (monotonic seconds) and why the broker last stored nothing of a request; None since it stored something."""
        self._ids = IdMaker()
        self.compact = stream.compact
        self._rotate = rotate
        self._retention = stream.retention
        self._max_age_ms: int | None = None
        self._id_field, self._key_field, self._time_field = map(_reader, (stream.id, stream.key, stream.time))
        self._names = {with_attributes: _name_values(stream, with_attributes) for with_attributes in (False, True)}
        self._keyless, self._keyless_since = 0, -KEYLESS_MS

    def limit_age(self, *, by_event_time: bool) -> None:
        """Refuse old events where retention counts from the event time: the broker would drop them soon after it acknowledged
        them. Half the retention is for the delivery. A compacted stream keeps the newest of each key."""
        self._max_age_ms = round(self._retention * 500) if by_event_time and not self.compact else None

    def prepare(self, items: Items, arrival: int, traceparent: str | None) -> Prepared:
        """The events as records. `arrival` in ms. Raises Refused: an id with control characters refuses the whole request."""
        columns, faults = self._columns(items, arrival, traceparent)
        return self._finish(items, columns, faults, arrival)

    async def prepare_slices(self, slices: Iterable[Items], arrival: int, traceparent: str | None) -> Prepared:
        """As `prepare`, for a request that is read in slices; other requests get their turn between two of them."""
        whole, faults = Items([], [], []), dict[int, tuple[ProblemType, str]]()
        columns: Columns | None = None
        indexes: list[int] = []
        for items in slices:
            if items.values:
                more, found = self._columns(items, arrival, traceparent)
                faults.update({len(indexes) + row: fault for row, fault in found.items()})
                indexes += items.indexes
                columns = more if columns is None else columns.join(more)
            whole = Items([], [], indexes, None, whole.refused + items.refused, items.by_line)
            del items
            await asyncio.sleep(0)
        return self._finish(whole, columns or Columns([], [], None, [], None), faults, arrival)

    def _finish(self, items: Items, columns: Columns, faults: Faults, arrival: int) -> Prepared:
        count, refused = len(columns.ids), items.refused
        rows: Sequence[int] = range(count)
        if faults:
            bad = [row for row, (kind, _) in faults.items() if kind is problems.BAD_ID_CHARACTERS]
            if bad and not items.by_line:
                row = min(bad)
                detail = (
                    f"In event {items.indexes[row]}, counted from 0: {faults[row][1]} The whole request was refused."
                )
                raise Refused(problems.BAD_ID_CHARACTERS, detail)
            refused = refused + [Refusal(items.indexes[row], *fault) for row, fault in sorted(faults.items())]
            rows = [row for row in rows if row not in faults]
        split = self._split(rows, columns.keys, arrival) if rows else {}
        numbers = {partition: self.origins.reserve(partition, len(chosen)) for partition, chosen in split.items()}
        parts = {
            partition: make_records(chosen, columns, arrival, numbers[partition]) for partition, chosen in split.items()
        }
        has_keys = columns.keys is not None and columns.keys.count(None) < count
        values, ids, times = columns.values, columns.ids, columns.times
        return Prepared(parts, numbers, split, rows, items.indexes, values, ids, times, refused, has_keys)

    def _columns(self, items: Items, arrival: int, traceparent: str | None) -> tuple[Columns, Faults]:
        """The id, key, time and further headers of each row, and the faults by row."""
        count = len(items.values)
        faults: Faults = {}
        names = self._names[items.attributes is not None]
        found: list[bytes | None] = []
        keys: list[bytes | None] | None = None
        times = [arrival] * count
        if (column := self._column(items, "id", self._id_field)) is not None:
            found, wrong = read_ids(column, names["id"])
            faults.update(wrong)
        if (column := self._column(items, "key", self._key_field)) is not None:
            keys, wrong = read_keys(column, names["key"])
            faults.update(wrong)
        if (column := self._column(items, "time", self._time_field)) is not None:
            oldest = 0 if self._max_age_ms is None else arrival - self._max_age_ms
            times, wrong = read_times(column, arrival, oldest, names["time"])
            faults.update(wrong)
        more = more_headers(items.attributes, count, traceparent)
        values: list[bytes | None] = cast("list[bytes | None]", items.values)
        if self.compact:
            faults = {**_find_keyless(keys, count, names["key"]), **faults}
            if items.attributes is not None:
                values = [None if value is NO_DATA else value for value in values]
        return Columns(values, self._fill(found, count, arrival), keys, times, more), faults

    def _column(self, items: Items, use: str, field: Reader | None) -> Column | None:
        """The stream's own field of the payload, its gaps filled from the CloudEvents attribute. Counts the gaps that no client
        filled: `penstock send` makes ids because a repetition needs them, whatever the event has."""
        own = field(items.documents) if field is not None else None
        if items.attributes is not None:
            given: Column = [attributes.get(_ATTRIBUTES[use]) for attributes in items.attributes]
            if own is None:
                return given
            if use == "id" and None in own:
                pairs = zip(own, items.attributes, strict=True)
                self.tally.absent(use, sum(one is None and each.get("source") == event.SENDER for one, each in pairs))
            own = [other if one is None else one for one, other in zip(own, given, strict=True)]
        if own is not None and (absent := own.count(None)):
            self.tally.absent(use, absent)
        return own

    def _fill(self, found: list[bytes | None], count: int, arrival: int) -> list[bytes]:
        """The ids from the events, and new ones for the other rows."""
        if found and None not in found:
            return cast("list[bytes]", found)
        made = self._ids.make(count, arrival)
        return [one or other for one, other in zip(found, made, strict=True)] if found else made

    def _split(self, rows: Sequence[int], keys: list[bytes | None] | None, arrival: int) -> dict[int, Sequence[int]]:
        if keys is None:
            return {self._keyless_partition(arrival): rows}
        partitions = self.partitions
        keyless = self._keyless_partition(arrival) if None in keys else -1
        parts: dict[int, list[int]] = {}
        for row in rows:
            key = keys[row]
            partition = keyless if key is None else choose_partition(key, partitions)
            part = parts.get(partition)
            if part is None:
                parts[partition] = [row]
            else:
                part.append(row)
        return dict(parts)

    def _keyless_partition(self, arrival: int) -> int:
        """One partition for KEYLESS_MS, then the next: events that arrive during an append become one batch."""
        if not 0 <= arrival - self._keyless_since < KEYLESS_MS:
            self._keyless, self._keyless_since = self._rotate(self.name, self.partitions), arrival
        return self._keyless


def _reader(place: Place | None) -> Reader | None:
    return field_reader(place) if isinstance(place, str) else None


def _name_values(stream: Stream, with_attributes: bool) -> dict[str, str]:
    """The beginning of a sentence about an id, key or time: with its places in the event."""
    fields, names = {"id": stream.id, "key": stream.key, "time": stream.time}, {}
    for what, path in fields.items():
        places = [] if path is None else [f"field '{path}'"]
        places += [f"attribute {_ATTRIBUTES[what]}"] if with_attributes else []
        names[what] = f"The {what} ({' or '.join(places)})"
    return names


def _find_keyless(keys: list[bytes | None] | None, count: int, name: str) -> Faults:
    """Rows without a key, or with an empty one, which could never be replaced. name: begins the sentence."""
    if keys is not None and all(keys):
        return {}
    detail = f"{name} is missing or empty. This stream keeps the newest event of each key, so each event needs one."
    return {row: (problems.NO_KEY, detail) for row in range(count) if keys is None or not keys[row]}


def make_records(rows: Sequence[int], columns: Columns, arrival: int, numbers: Numbers) -> list[Record]:
    """The records of these rows, numbered in order. arrival in ms. The one loop of ingest that runs for every event."""
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
    """The header for a well-formed trace context. Any other is ignored, as W3C requires."""
    if traceparent is None or not _TRACEPARENT.fullmatch(traceparent):
        return _NO_HEADERS
    return ((event.TRACEPARENT, traceparent.encode(errors="replace")),)
