"""Records as Arrow columns and back, a batch at a time. Imported by Spark's Python workers: keep it light."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa

from services.core.broker.record import Batch, Record
from services.core.event import ORIGIN
from spark.place import offset_text
from spark.shapes import ORIGINS_READ

Schema = Any
"""pyarrow ships no types."""


HEADERS_TYPE = pa.list_(pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())])))
_TYPES = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.string(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "headers": HEADERS_TYPE,
}
RAW_SCHEMA: Schema = pa.schema(list(_TYPES.items()))
"""`spark.shapes.RAW` in Arrow's types, as Spark asks for them."""
RAW_WITH_ORIGINS: Schema = RAW_SCHEMA.append(pa.field(ORIGINS_READ, pa.string()))
OUT_SCHEMA: Schema = pa.schema([(name, _TYPES[name]) for name in ("key", "value", "timestamp", "headers")])
"""`spark.shapes.OUT` in Arrow's types."""


def raw_schema(options: Mapping[str, str]) -> Schema:
    """What a stream is read as, by its option `origins`."""
    return RAW_WITH_ORIGINS if "origins" in options else RAW_SCHEMA


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
    if ORIGINS_READ in schema.names:
        origins = [b"#%d" % size, *(value for name, value in headers if name == ORIGIN)]
        columns[ORIGINS_READ] = pa.array(
            [b" ".join(origins).decode(errors="replace"), *[None] * (size - 1)][:size], pa.string()
        )
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def from_arrow(columns: Any) -> list[Record]:
    """Records from a table or record batch with the columns of `spark.shapes.OUT`."""
    keys, values = columns.column("key").to_pylist(), columns.column("value").to_pylist()
    times = columns.column("timestamp").cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64()).to_pylist()
    headers = _headers(columns.column("headers"))
    return [Record(*fields) for fields in zip(keys, values, times, headers, strict=True)]


def _headers(column: Any) -> Iterator[tuple[tuple[str, bytes], ...]]:
    for chunk in _chunks(column):
        lists = chunk.fill_null([]) if chunk.null_count else chunk
        pairs = lists.values
        names, values = pairs.field(0).to_pylist(), pairs.field(1).to_pylist()
        # A header without a value is a null to Spark; records have bytes only.
        flat = [(name, value if value is not None else b"") for name, value in zip(names, values, strict=True)]
        for first, last in pairwise(lists.offsets.to_pylist()):
            yield tuple(flat[first:last])


def _chunks(column: Any) -> Sequence[Any]:
    return column.chunks if isinstance(column, pa.ChunkedArray) else [column]
