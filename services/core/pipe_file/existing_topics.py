"""From a record of a topic of others to an event: the rules of its stream in the pipe file.

The record gets the headers that ingest gives an event. Its origin is its place in the topic, so the ledger, dead letters and
retries work as for our own events. The arrival is the record's timestamp, because it is the same whoever reads it.

A record that a rule does not fit gets the header FAULT, and default values; whoever processes it makes a dead letter of it. A
tombstone stays a record without a value if it is to be skipped.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import orjson

from services.core.broker.existing import NO_EXISTING, ExistingTopics, target_name
from services.core.broker.record import Batch, Headers, Record
from services.core.broker.several.brokers import DEFAULT
from services.core.event import (
    ARRIVAL,
    CE_PREFIX,
    CONTENT_TYPE,
    FAULT,
    ID,
    ORIGIN,
    TOPIC_NUMBERS,
    read_arrival,
    topic_incarnation,
)
from services.core.pipe_file.pipes import PipeFile, own_streams
from services.core.pipe_file.stream import Stream
from services.core.pipe_file.topic_names import dead_letter_topic, output_topic, parked_topic, retry_topic
from services.core.pipe_file.topic_of_others import FromHeader, Place, TopicTarget

OWN_PREFIX = "penstock_"
"""Headers of another fleet, whose output this topic may be. They mean nothing here."""
CONTENT_TYPES = {"text": b"text/plain; charset=utf-8", "bytes": b"application/octet-stream"}
"""By format; JSON has none."""
TYPE, TIME = f"{CE_PREFIX}type", f"{CE_PREFIX}time"
MAX_ID_BYTES, MAX_KEY_BYTES = 256, 1024
"""As of the events that clients send."""
DAY_MS = 86_400_000
LATEST_MS = 253_402_300_799_999
"""The end of the year 9999."""
SECONDS_BELOW = 10**11
"""Smaller numbers are seconds, others milliseconds, as in ingest."""
NOT_JSON = "the value is not JSON, and a rule of its stream needs a field of it"
NOT_TEXT = "the value is not text in UTF-8"

NUMBER = r"[0-9]{1,15}([.][0-9]{1,9})?"
"""A header with a time as a number."""
MOMENT = (
    r"[1-9][0-9]{3}-[0-9]{2}-[0-9]{2}[Tt ]([01][0-9]|2[0-3]):[0-9]{2}:[0-9]{2}([.][0-9]{1,9})?"
    r"([Zz]|[+-](0[0-9]|1[0-7]):?[0-5][0-9]|[+-]18:?00)"
)
"""RFC 3339. Python and Java read more, and differ in it. Java has offsets to 18 hours."""
LARGEST_INTEGER = (1 << 63) - 1
"""Of ids, keys and types."""

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
_NUMBER, _MOMENT = re.compile(NUMBER), re.compile(MOMENT)
_EPOCH, _MILLISECOND = datetime(1970, 1, 1, tzinfo=UTC), timedelta(milliseconds=1)


def existing_topics(pipes: PipeFile, on: str | None = None) -> ExistingTopics:
    """The topics of others that the pipe file reads and writes. on: those on this broker; None: on all."""
    read = {
        name: (stream.topic, stream)
        for name, stream in pipes.streams.items()
        if stream.topic is not None and on in (None, stream.home)
    }
    written = {target_name(one.name, one.home): one.name for one in _targets(pipes) if on in (None, one.home)}
    if not read and not written:
        return NO_EXISTING
    names = {name: topic for name, (topic, _) in read.items()} | written
    return ExistingTopics(
        names, {topic: Translation(stream) for topic, stream in read.values()}, _own_topics(pipes, on)
    )


def target_homes(pipes: PipeFile) -> dict[str, str]:
    """The broker of each topic of others that the pipe file writes, by the topic's name in the fleet."""
    return {target_name(one.name, one.home): one.home for one in _targets(pipes)}


def _targets(pipes: PipeFile) -> list[TopicTarget]:
    return [one.topic for pipe in pipes.pipes.values() for one in pipe.destinations if one.topic is not None]


def _own_topics(pipes: PipeFile, on: str | None) -> frozenset[str]:
    """The topics of streams and pipes that are ours. Those that begin with `penstock.` are, too."""
    streams = {name for name, stream in own_streams(pipes).items() if on in (None, stream.home)}
    if on not in (None, DEFAULT):
        return frozenset(streams)
    of_pipes = (output_topic, dead_letter_topic, retry_topic, parked_topic)
    return frozenset(streams).union(name(pipe) for pipe in pipes.pipes for name in of_pipes)


class _Misfit(ValueError):
    """A rule does not fit a record. The message is for a person; it does not quote the value."""


class _Made(NamedTuple):
    """What the rules made of one record; None: the default."""

    id: bytes | None
    key: bytes | None
    time: int | None
    type: bytes | None


_DEFAULTS = _Made(None, None, None, None)
_REPLACED = frozenset((ID, CONTENT_TYPE))
_CHECKED = _REPLACED | {TYPE, TIME}
"""Headers of others that a rule may replace."""


class _Found(NamedTuple):
    """Of a batch. ids: None without a rule."""

    ids: list[bytes] | None
    keys: list[bytes | None]
    times: list[int]


class _Columns:
    """Reads the fields that rules name, and no others: a payload is not parsed into objects. rules: by name, top-level or nested
    fields."""

    def __init__(self, rules: Mapping[str, str]) -> None:
        self._rules = {name: place.split(".") for name, place in rules.items()}
        self._decode = msgspec.json.Decoder(_payload_type(list(self._rules.values()))).decode

    def read(self, records: Sequence[Record]) -> _Found | None:
        """None when any value is not of the usual kind."""
        ids, keys = None, [record.key for record in records]
        times = [record.timestamp for record in records]
        if not self._rules:
            return _Found(ids, keys, times)
        values = [record.value or b"" for record in records]
        try:
            text = b"".join(values)
            if not text.isascii():
                text.decode()  # fields that no rule names are not decoded
            documents = list(map(self._decode, values))
            columns = {name: _column(documents, path) for name, path in self._rules.items()}
            if (column := columns.get("time")) is not None:
                times = _read_times(column, times)
        except (msgspec.DecodeError, UnicodeDecodeError, _Misfit, RecursionError):
            return None
        if (column := columns.get("id")) is not None and (ids := _encode(column, MAX_ID_BYTES)) is None:
            return None
        if (column := columns.get("key")) is not None:
            encoded = _encode(column, MAX_KEY_BYTES)
            if encoded is None:
                return None
            keys = list(encoded)
        return _Found(ids, keys, times)


def _payload_type(paths: Sequence[Sequence[str]]) -> Any:
    """A type that decodes these fields only; absent ones are None."""
    below: dict[str, list[Sequence[str]]] = {}
    for path in paths:
        below.setdefault(path[0], []).append(path[1:])
    names = {f"f_{name.encode().hex()}": name for name in below}
    fields = [
        (field, Any if any(not rest for rest in below[name]) else _payload_type(below[name]) | None, None)
        for field, name in names.items()
    ]
    return msgspec.defstruct("Payload", fields, rename=names, gc=False)


def _column(documents: Sequence[Any], path: Sequence[str]) -> list[Any]:
    """documents: of `_payload_type`. Raises _Misfit where one field is below another one that a rule names."""
    first, *below = (f"f_{name.encode().hex()}" for name in path)
    column = list(map(attrgetter(first), documents))
    for field in below:
        if dict in set(map(type, column)):
            raise _Misfit
        column = [getattr(value, field, None) for value in column]
    return column


def _read_times(column: list[Any], timestamps: list[int]) -> list[int]:
    """As `_read_time` of each; the timestamp where there is none. Raises _Misfit."""
    latest = min(LATEST_MS, min(timestamps) + DAY_MS)
    if set(map(type, column)) == {int} and min(column) >= SECONDS_BELOW and max(column) <= latest:
        return column
    found = map(_read_time, column, timestamps)
    return [time if own is None else own for own, time in zip(found, timestamps, strict=True)]


def _encode(column: list[Any], most: int) -> list[bytes] | None:
    """None unless all are strings without control characters and of a fitting length."""
    if set(map(type, column)) != {str} or not "".join(column).isprintable():
        return None
    found = [value.encode() for value in column]
    return found if all(found) and max(map(len, found)) <= most else None


class Translation:
    """The rules of one stream. Called with a batch and the id of its topic; see `Translate`."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._rules: dict[str, Place] = {
            name: place
            for name, place in (("id", stream.id), ("key", stream.key), ("time", stream.time), ("type", stream.type))
            if place is not None
        }
        media = CONTENT_TYPES.get(stream.format)
        self._media: Headers = () if media is None else ((CONTENT_TYPE, media),)
        rules = {name: place for name, place in self._rules.items() if isinstance(place, str)}
        fields = _payload_type([place.split(".") for place in rules.values()]) if rules else None
        self._decode = None if fields is None else msgspec.json.Decoder(fields).decode
        is_usual = stream.format == "json" and len(rules) == len(self._rules) and "type" not in rules
        self._columns = _Columns(rules) if is_usual else None

    def __call__(self, batch: Batch, topic_id: str) -> Batch:
        if batch.damage is not None:
            return batch
        ids = f"{batch.topic}-{batch.partition}-".encode()
        made = self._translate_usual(batch, topic_id, ids)
        if made is None:
            origins = _origins(topic_id, batch.partition, batch.offsets)
            made = [
                self._translate(record, b"%b%d" % (ids, offset), origin)
                for offset, record, origin in zip(batch.offsets, batch.records, origins, strict=True)
            ]
        return Batch(batch.topic, batch.partition, batch.offsets, made)

    def repeat(self, record: Record) -> Record:
        """Apply the rules to an event with a FAULT again, because they may have changed. It has the FAULT again where they do not
        fit, or where the event does not have all that they read."""
        event_id, origin = record.header(ID), record.header(ORIGIN)
        places = self._rules.values()
        if (
            event_id is None
            or origin is None
            or any(isinstance(one, FromHeader) and one.header in _REPLACED for one in places)
        ):
            return record
        stored = Record(record.key, record.value, read_arrival(record) or 0, record.headers)
        return self._translate(stored, event_id, origin)

    def _translate_usual(self, batch: Batch, topic_id: str, prefix: bytes) -> list[Record] | None:
        """All at once, where every header is kept and every rule fits; None when one record needs `_translate`."""
        records, offsets = batch.records, batch.offsets
        epoch = offsets[0] // TOPIC_NUMBERS
        if (
            self._columns is None
            or offsets[-1] // TOPIC_NUMBERS != epoch
            or [1 for one in records if one.value is None or not 0 <= one.timestamp <= LATEST_MS]
        ):
            return None
        names = {name for record in records if record.headers for name, _ in record.headers}
        if names & _CHECKED or [1 for name in names if name.startswith(OWN_PREFIX)]:
            return None
        found = self._columns.read(records)
        if found is None:
            return None
        ids = found.ids or _numbered(prefix, offsets)
        arrivals = {time: (ARRIVAL, b"%d" % time) for time in {record.timestamp for record in records}}
        return [
            Record(
                key, record.value, time, ((ID, event_id), arrivals[record.timestamp], (ORIGIN, origin), *record.headers)
            )
            for record, event_id, origin, key, time in zip(
                records, ids, _origins(topic_id, batch.partition, offsets), found.keys, found.times, strict=True
            )
        ]

    def _translate(self, record: Record, default_id: bytes, origin: bytes) -> Record:
        timestamp = min(max(0, record.timestamp), LATEST_MS)
        made, fault, value = _DEFAULTS, "", record.value
        try:
            made = self._apply(record, timestamp)
            if self._stream.format == "text" and value is not None:
                _text(value, NOT_TEXT)
        except _Misfit as misfit:
            fault = str(misfit)
        if value is None and self._stream.tombstones == "deliver":
            value = b"null" if self._stream.format == "json" else b""
        kept = self._keep(record.headers, made) if record.headers else ()
        headers: Headers = (
            (ID, made.id or default_id),
            (ARRIVAL, b"%d" % timestamp),
            (ORIGIN, origin),
            *(((TYPE, made.type),) if made.type is not None else ()),
            *kept,
            *self._media,
            *(((FAULT, fault.encode()),) if fault else ()),
        )
        key = record.key if made.key is None else made.key
        return Record(key, value, timestamp if made.time is None else made.time, headers)

    def _keep(self, headers: Headers, made: _Made) -> Headers:
        """The record's headers without those of other fleets and those that are replaced."""
        dropped = _REPLACED
        if made.type is not None:
            dropped = dropped | {TYPE}
        if made.time is not None:
            dropped = dropped | {TIME}
        return tuple(one for one in headers if one[0] not in dropped and not one[0].startswith(OWN_PREFIX))

    def _apply(self, record: Record, timestamp: int) -> _Made:
        """Raises _Misfit."""
        if not self._rules:
            return _DEFAULTS
        document = None if self._decode is None or record.value is None else _parse(record.value, self._decode)
        values = {name: _find(record, document, place) for name, place in self._rules.items()}
        return _Made(
            _read_text("id", values.get("id"), MAX_ID_BYTES),
            _read_key(values.get("key")),
            _read_time(values.get("time"), timestamp),
            _read_text("type", values.get("type"), MAX_ID_BYTES),
        )


def _origins(topic_id: str, partition: int, offsets: Sequence[int]) -> list[bytes]:
    """The packed origins of the records at these offsets."""
    runs = {
        epoch: f"{topic_incarnation(topic_id, epoch * TOPIC_NUMBERS)}:{partition}:".encode()
        for epoch in {offset // TOPIC_NUMBERS for offset in (offsets[0], offsets[-1])}
    }
    if len(runs) == 1:
        ((epoch, run),) = runs.items()
        first = epoch * TOPIC_NUMBERS
        return _numbered(run, [offset - first for offset in offsets] if first else offsets)
    return [
        f"{topic_incarnation(topic_id, offset)}:{partition}:{offset % TOPIC_NUMBERS}".encode() for offset in offsets
    ]


def _numbered(prefix: bytes, numbers: Sequence[int]) -> list[bytes]:
    """The prefix, which has no comma, with each of these numbers."""
    return (prefix + orjson.dumps(list(numbers))[1:-1].replace(b",", b"," + prefix)).split(b",")


def _parse(value: bytes, decode: Callable[[bytes], object]) -> object:
    """decode: reads the fields of the rules only. It counts where another field has a number that is too large for a float."""
    with suppress(orjson.JSONDecodeError, RecursionError):
        return orjson.loads(value)
    with suppress(UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        value.decode()
        return msgspec.to_builtins(decode(value))
    raise _Misfit(NOT_JSON)


def _find(record: Record, document: object, place: Place) -> Any:
    """The value there; None when it is absent or null. Of a header its bytes."""
    if isinstance(place, FromHeader):
        return record.header(place.header) or None
    found: Any = document
    for name in place.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def _text(value: bytes, otherwise: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise _Misfit(otherwise) from None


def _is_integer(value: Any) -> bool:
    return type(value) is int and -LARGEST_INTEGER <= value <= LARGEST_INTEGER


def _read_text(what: str, value: Any, most: int) -> bytes | None:
    """A string without control characters, or an integer."""
    if value is None:
        return None
    if _is_integer(value):
        return b"%d" % value
    if type(value) is bytes:
        value = _text(value, f"the {what} is not text in UTF-8")
    if type(value) is not str:
        raise _Misfit(f"the {what} is neither a string nor an integer")
    found = value.encode()
    if not found or len(found) > most:
        raise _Misfit(f"the {what} has {len(found)} bytes. It may have 1 to {most}")
    if _CONTROL.search(value):
        raise _Misfit(f"the {what} has control characters")
    return found


def _read_key(value: Any) -> bytes | None:
    """A string or an integer, or the bytes of a header."""
    if value is None:
        return None
    if _is_integer(value):
        return b"%d" % value
    if type(value) is not str and type(value) is not bytes:
        raise _Misfit("the key is neither a string nor an integer")
    found = value.encode() if isinstance(value, str) else value
    if len(found) > MAX_KEY_BYTES:
        raise _Misfit(f"the key has {len(found)} bytes. It may have {MAX_KEY_BYTES}")
    return found


def _read_time(value: Any, timestamp: int) -> int | None:
    """RFC 3339 with an offset, or a number of seconds or milliseconds since 1970; in ms."""
    if value is None:
        return None
    if type(value) is bytes:
        value = _text(value, "the time is not text in UTF-8")
        if _NUMBER.fullmatch(value):
            value = float(value)
    if type(value) is str:
        time = _read_moment(value)
    elif type(value) is int or (type(value) is float and math.isfinite(value)):
        time = round(value * 1000 if abs(value) < SECONDS_BELOW else value)
    else:
        raise _Misfit("the time is neither RFC 3339 text nor a number")
    latest = LATEST_MS if not timestamp else min(LATEST_MS, timestamp + DAY_MS)
    if not 0 <= time <= latest:
        raise _Misfit("the time is before 1970, or more than a day after the timestamp of the record")
    return time


def _read_moment(value: str) -> int:
    try:
        if not _MOMENT.fullmatch(value):
            raise ValueError
        return (datetime.fromisoformat(value.upper()) - _EPOCH) // _MILLISECOND
    except (ValueError, OverflowError):
        raise _Misfit("the time is a string, but not RFC 3339 with an offset") from None


def read_streams(pipes: PipeFile) -> Mapping[str, str]:
    """The streams whose topics are others', and those topics."""
    return {name: stream.topic for name, stream in pipes.streams.items() if stream.topic is not None}
