"""Topics of others, as a transform reads them: the rules of `services.core.pipe_file.existing_topics` as expressions of Spark.

A test holds both against each other. Expressions run in Spark's Java, also in real-time mode; Python would cost a worker for each
record. A tombstone that is to be skipped keeps its null, and the view filters it.
"""

import re
from base64 import urlsafe_b64decode
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from services.core.event import ARRIVAL, CONTENT_TYPE, FAULT, ID, ORIGIN, TOPIC_NUMBERS, topic_incarnation
from services.core.pipe_file.existing_topics import (
    CONTENT_TYPES,
    DAY_MS,
    LATEST_MS,
    MAX_ID_BYTES,
    MAX_KEY_BYTES,
    MOMENT,
    NOT_JSON,
    NOT_TEXT,
    NUMBER,
    OWN_PREFIX,
    SECONDS_BELOW,
    TIME,
    TYPE,
)
from services.core.pipe_file.stream import Stream
from services.core.pipe_file.topic_of_others import FromHeader, Place
from spark.records import HEADERS

_CONTROL = r"[\u0000-\u001f\u007f-\u009f]"
_NUMBER, _MOMENT = rf"\A{NUMBER}\z", rf"\A{MOMENT}\z"
"""With `$` a line break may follow in Java."""


class ReadTopic(NamedTuple):
    """A topic of others. name: in the fleet. topic: on the cluster. run: the beginning of the incarnations of its origins."""

    name: str
    topic: str
    run: str
    stream: Stream


def run_of(topic_id: str) -> str:
    """topic_id: as Java shows it. The beginning of the incarnations, up to their last number."""
    incarnation = topic_incarnation(urlsafe_b64decode(topic_id + "==").hex(), 0)
    return incarnation.rpartition("e")[0]


def translate(frame: DataFrame, read: ReadTopic) -> DataFrame:
    """Records as the connector gives them, with a number as offset: those of this topic as events, the others as they are."""
    rules, is_ours = _Rules(read), f.col("topic") == read.topic
    columns = {name: f.when(is_ours, column).otherwise(f.col(name)) for name, column in rules.columns().items()}
    return frame.withColumns(columns)


class _Value(NamedTuple):
    """A value that a rule found. text: of any kind. is_text, is_integer, is_number: its kind. is_there: it is neither absent nor
    null. is_utf8: false for a header that is not text."""

    text: Column
    is_there: Column
    is_text: Column
    is_integer: Column
    is_number: Column
    is_utf8: Column
    raw: Column


class _Rules:
    """The expressions of one topic."""

    def __init__(self, read: ReadTopic) -> None:
        self._read, self._stream = read, read.stream
        stream = read.stream
        places = {"id": stream.id, "key": stream.key, "time": stream.time, "type": stream.type}
        self._places = {name: place for name, place in places.items() if place is not None}
        self._headers = f.coalesce(f.col("headers"), f.array().cast(HEADERS))
        self._text = f.when(f.is_valid_utf8(f.col("value").cast("string")), f.col("value").cast("string"))
        self._document = f.try_parse_json(self._text)
        self._millis = f.least(f.greatest(f.unix_millis("timestamp"), f.lit(0)), f.lit(LATEST_MS))

    def columns(self) -> dict[str, Column]:
        values = {name: self._find(place) for name, place in self._places.items()}
        fault = f.coalesce(*self._faults(values), f.lit(None).cast("string"))
        is_good = fault.isNull()

        def made(name: str, column: Column) -> Column:
            """The value of a rule, where every rule fits."""
            return f.when(is_good & values[name].is_there, column)

        topic, partition, offset = self._read.topic, f.col("partition"), f.col("offset")
        default_id = f.concat_ws("-", f.lit(topic), partition, offset).cast("binary")
        event_id = f.coalesce(made("id", values["id"].raw), default_id) if "id" in values else default_id
        kind = made("type", values["type"].raw) if "type" in values else f.lit(None).cast("binary")
        time = made("time", _millis_of(values["time"])) if "time" in values else f.lit(None).cast("bigint")
        numbers = f.lit(TOPIC_NUMBERS).cast("bigint")
        run = f.concat(f.lit(f"{self._read.run}e"), f.floor(offset / numbers).cast("string"))
        origin = f.concat_ws(":", run, partition, f.pmod(offset, numbers)).cast("binary")
        headers = f.concat(
            _header(ID, event_id),
            _header(ARRIVAL, self._millis.cast("string").cast("binary")),
            _header(ORIGIN, origin),
            f.when(kind.isNotNull(), _header(TYPE, kind)).otherwise(f.array().cast(HEADERS)),
            self._kept(kind, time),
            *self._media(),
            f.when(fault.isNotNull(), _header(FAULT, fault.cast("binary"))).otherwise(f.array().cast(HEADERS)),
        )
        key = f.coalesce(made("key", values["key"].raw), f.col("key")) if "key" in values else f.col("key")
        empty = b"null" if self._stream.format == "json" else b""
        value = f.coalesce(f.col("value"), f.lit(empty)) if self._stream.tombstones == "deliver" else f.col("value")
        return {
            "key": key,
            "timestamp": f.timestamp_millis(f.coalesce(time, self._millis)),
            "headers": headers,
            "value": value,
        }

    def _media(self) -> list[Column]:
        media = CONTENT_TYPES.get(self._stream.format)
        return [] if media is None else [_header(CONTENT_TYPE, f.lit(media))]

    def _kept(self, kind: Column, time: Column) -> Column:
        """The record's headers without those that are replaced."""

        def keeps(header: Column) -> Column:
            name = header["key"]
            replaced = (kind.isNotNull() & (name == TYPE)) | (time.isNotNull() & (name == TIME))
            return ~(f.startswith(name, f.lit(OWN_PREFIX)) | name.isin(ID, CONTENT_TYPE) | replaced)

        return f.filter(self._headers, keeps)

    def _find(self, place: Place) -> _Value:
        if isinstance(place, FromHeader):
            raw = f.get(self._headers["value"], (f.array_position(self._headers["key"], place.header) - 1).cast("int"))
            text, is_there = raw.cast("string"), raw.isNotNull() & (f.length(raw) > 0)
            is_number = text.rlike(_NUMBER)
            return _Value(text, is_there, is_there, f.lit(False), is_number, f.is_valid_utf8(text), raw)
        path = "$" + "".join(f"['{re.sub(chr(39), chr(92) + chr(39), name)}']" for name in place.split("."))
        found = f.try_variant_get(self._document, path, "variant")
        kind = f.schema_of_variant(found)
        text = f.try_variant_get(self._document, path, "string")
        is_there = f.coalesce(kind != "VOID", f.lit(False))
        is_integer, is_text = kind == "BIGINT", kind == "STRING"
        is_number = is_integer | (kind == "DOUBLE") | (kind == "FLOAT") | f.startswith(kind, f.lit("DECIMAL"))
        return _Value(text, is_there, is_text, is_integer, is_number, f.lit(True), text.cast("binary"))

    def _faults(self, values: dict[str, _Value]) -> list[Column]:
        """Each a text, or null where there is no such fault. The first one counts, as it does in Python."""
        found = []
        if any(isinstance(place, str) for place in self._places.values()):
            found.append(f.when(f.col("value").isNotNull() & self._document.isNull(), f.lit(NOT_JSON)))
        for name in ("id", "key", "time", "type"):
            if name not in values:
                continue
            value = values[name]
            faults = self._time_faults(value) if name == "time" else self._text_faults(name, value)
            found += [f.when(value.is_there & failed, text) for failed, text in faults]
        if self._stream.format == "text":
            found.append(f.when(f.col("value").isNotNull() & self._text.isNull(), f.lit(NOT_TEXT)))
        return found

    def _text_faults(self, name: str, value: _Value) -> list[tuple[Column, Column]]:
        size, most = f.length(value.raw), MAX_KEY_BYTES if name == "key" else MAX_ID_BYTES
        kind = (~(value.is_text | value.is_integer), f.lit(f"the {name} is neither a string nor an integer"))
        if name == "key":
            return [kind, (size > most, f.concat(f.lit("the key has "), size, f.lit(f" bytes. It may have {most}")))]
        wrong = f.concat(f.lit(f"the {name} has "), size, f.lit(f" bytes. It may have 1 to {most}"))
        return [
            (~value.is_utf8, f.lit(f"the {name} is not text in UTF-8")),
            kind,
            ((size > most) | (size == 0), wrong),
            (value.text.rlike(_CONTROL), f.lit(f"the {name} has control characters")),
        ]

    def _time_faults(self, value: _Value) -> list[tuple[Column, Column]]:
        millis = _millis_of(value)
        latest = f.when(self._millis == 0, f.lit(LATEST_MS)).otherwise(
            f.least(f.lit(LATEST_MS), self._millis + f.lit(DAY_MS))
        )
        is_text = value.is_text & ~value.is_number
        return [
            (~value.is_utf8, f.lit("the time is not text in UTF-8")),
            (~(value.is_text | value.is_number), f.lit("the time is neither RFC 3339 text nor a number")),
            (is_text & millis.isNull(), f.lit("the time is a string, but not RFC 3339 with an offset")),
            (
                millis.isNull() | ~millis.between(f.lit(0), latest),
                f.lit("the time is before 1970, or more than a day after the timestamp of the record"),
            ),
        ]


def _millis_of(value: _Value) -> Column:
    """Null when it is no time."""
    number = value.text.try_cast("double")
    scaled = f.rint(f.when(f.abs(number) < SECONDS_BELOW, number * 1000).otherwise(number)).try_cast("bigint")
    moment = f.unix_millis(f.when(value.text.rlike(_MOMENT), f.upper(value.text).try_cast("timestamp")))
    return f.when(value.is_number, scaled).otherwise(moment)


def _header(name: str, value: Column) -> Column:
    return f.array(f.struct(f.lit(name).alias("key"), value.alias("value"))).cast(HEADERS)
