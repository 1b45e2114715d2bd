"""From rows as aiokafka decodes them to the contract's `Batch`."""

from collections.abc import Iterable, Sequence
from typing import Any

from services.core.broker.record import Batch, Headers, Record, TopicPartition
from services.core.event import TIME, restore_time


def make_batch(source: TopicPartition, rows: Sequence[Any]) -> Batch:
    """Rows of one partition, at least one, in offset order; each has offset, key, value, timestamp and headers (a tuple)."""
    first, last = rows[0].offset, rows[-1].offset
    dense = last - first + 1 == len(rows)
    offsets = range(first, last + 1) if dense else [row.offset for row in rows]
    if [1 for row in rows for _, value in row.headers if value is None]:
        records = [Record(row.key, row.value, row.timestamp, _without_null(row.headers)) for row in rows]
    else:
        records = [Record(row.key, row.value, row.timestamp, row.headers) for row in rows]
    if [1 for record in records if record.headers and record.headers[-1][0] == TIME]:
        records = [_with_event_time(record) for record in records]
    return Batch(*source, offsets, records)


def _with_event_time(record: Record) -> Record:
    """What a writer that sets no timestamps (Spark) wrote, as ingest would have."""
    timestamp, headers = restore_time(record.timestamp, record.headers)
    return Record(record.key, record.value, timestamp, headers)


def _without_null(headers: Iterable[tuple[str, bytes | None]]) -> Headers:
    """Kafka allows a header without a value; other people's records have some. For us it is empty."""
    return tuple((name, value or b"") for name, value in headers)
