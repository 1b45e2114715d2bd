"""A record in Spark: its columns in Spark's DDL and in Arrow, its offset, and ranges of offsets.

**Raw** is a record as it was read. **Out** is a record to be written. Both have the columns of Spark's Kafka connector, but the
offset is a text. Between them is the **view**, the columns that a transform sees. Spark's Python workers import this file: keep
it light.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa

from services.core.broker.record import Batch, Record

HEADERS = "ARRAY<STRUCT<key: STRING, value: BINARY>>"
RAW = f"key BINARY, value BINARY, topic STRING, partition INT, offset STRING, timestamp TIMESTAMP, headers {HEADERS}"
RAW_NAMES = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
OUT = f"key BINARY, value BINARY, timestamp TIMESTAMP, headers {HEADERS}"
EVENT_TYPE = (
    "STRUCT<id: STRING, key: BINARY, time: TIMESTAMP, arrival: TIMESTAMP, type: STRING, source: STRING, "
    f"headers: {HEADERS}, topic: STRING, partition: INT, offset: STRING>"
)
"""The identity of an event, which a transform returns unchanged. topic, partition, offset: of its record in the source."""
READ = "read"
STAMPED_EVENT_TYPE = f"{EVENT_TYPE[:-1]}, {READ}: BIGINT>"
"""In real-time mode: with the time when the event was read, in ms since the epoch."""
EVENT = "event"
"""The view's column of that type."""
VALUE = "value"
"""The view's column with the payload's text."""
EVENT_TIME = "event_time"
"""The view's column with the event's time, when the pipe has a watermark over it."""

LATEST_MS = 253_402_300_799_999
"""The end of the year 9999, the last time of Spark's timestamps."""

DIGITS, _MOST_DIGITS = 19, 63
"""Of an offset below 2^63, and of an offset of Kinesis, which has up to 206 bits."""


def offset_text(offset: int) -> str:
    """The text of the column `offset`: zeros in front, so that the texts of one partition sort as their numbers do."""
    return f"{offset:0{DIGITS}d}" if offset < 1 << 63 else f"{offset:0{_MOST_DIGITS}d}"


class RecordOffset(NamedTuple):
    """One record of a source. Sorts in the order of reading. offset: `offset_text`."""

    topic: str
    partition: int
    offset: str


class OffsetRange(NamedTuple):
    """Records `start <= offset < end` of one partition. On Kinesis: of one shard, and `end - start` counts nothing."""

    topic: str
    partition: int
    start: int
    end: int


Offsets = dict[tuple[str, int], int]
"""The next offset to read, by topic and partition."""
Begins = Mapping[str, tuple[str, Mapping[int, int]]]
"""Where a new checkpoint begins, by topic: the topic's identity, and the offsets by partition."""
NO_BEGINS: Begins = {}


def cut_evenly(ranges: Sequence[OffsetRange], events: int) -> Iterator[list[OffsetRange]]:
    """These ranges in parts of at most this number of events, or one of each range. Only where offsets count events."""
    waiting = [part for part in ranges if part.start < part.end]
    fits = sum(part.end - part.start for part in waiting) <= events
    size = events if fits else max(1, events // max(1, len(waiting)))
    while waiting:
        yield [part._replace(end=min(part.end, part.start + size)) for part in waiting]
        waiting = [part._replace(start=part.start + size) for part in waiting if part.start + size < part.end]


Schema = Any
"""pyarrow ships no types."""
_TYPES = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.string(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "headers": pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())]))),
}
RAW_SCHEMA: Schema = pa.schema(list(_TYPES.items()))
OUT_SCHEMA: Schema = pa.schema([(name, _TYPES[name]) for name in ("key", "value", "timestamp", "headers")])


def to_arrow(batch: Batch, schema: Schema) -> Any:
    """One record batch with the columns of `schema`, one of those above."""
    records = batch.records
    size = len(records)
    headers = [pair for record in records for pair in record.headers]
    bounds = [0]
    for record in records:
        bounds.append(bounds[-1] + len(record.headers))
    pair_type = schema.field("headers").type.value_type
    pairs = pa.StructArray.from_arrays(
        [pa.array([name for name, _ in headers], pa.string()), pa.array([value for _, value in headers], pa.binary())],
        fields=list(pair_type),
    )
    columns = {
        "key": pa.array([record.key for record in records], pa.binary()),
        "value": pa.array([record.value for record in records], pa.binary()),
        "topic": pa.array([batch.topic], pa.string()).take(pa.array([0] * size, pa.int32())),
        "partition": pa.array([batch.partition] * size, pa.int32()),
        "offset": pa.array([offset_text(offset) for offset in batch.offsets], pa.string()),
        "timestamp": pa.array([record.timestamp * 1000 for record in records], schema.field("timestamp").type),
        "headers": pa.ListArray.from_arrays(pa.array(bounds, pa.int32()), pairs, type=schema.field("headers").type),
    }
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def from_arrow(columns: Any) -> list[Record]:
    """Records from a table or record batch with the columns of OUT."""
    keys, values = columns.column("key").to_pylist(), columns.column("value").to_pylist()
    times = columns.column("timestamp").cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64()).to_pylist()
    headers = _headers(columns.column("headers"))
    return [Record(*fields) for fields in zip(keys, values, times, headers, strict=True)]


def _headers(column: Any) -> Iterator[tuple[tuple[str, bytes], ...]]:
    for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
        lists = chunk.fill_null([]) if chunk.null_count else chunk
        pairs = lists.values
        names, values = pairs.field(0).to_pylist(), pairs.field(1).to_pylist()
        # A header without a value is null in Spark; records have bytes only.
        flat = [(name, value if value is not None else b"") for name, value in zip(names, values, strict=True)]
        for first, last in pairwise(lists.offsets.to_pylist()):
            yield tuple(flat[first:last])
