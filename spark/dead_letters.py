"""From records that are no events, or that a transform cannot take, to the pipe's dead letters."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from services.core.broker.record import Record, TopicPartition
from services.core.dead_letter import MAX_DETAIL, make_dead_letter
from services.core.event import ID
from spark.place import Place
from spark.sources.record_batches import from_arrow
from spark.view import VERDICT, Check

NODE: Final = "transform"
TRANSFORM_ERROR = "transform_error"
_ADDED_BYTES = MAX_DETAIL + 1024


class Rejected(NamedTuple):
    """A record and why."""

    record: Record
    place: Place
    reason: str
    detail: str


def judged(table: Any, checks: Sequence[Check]) -> list[Rejected]:
    """From Arrow rows of raw columns and VERDICT."""
    verdicts = (checks[number] for number in table.column(VERDICT).to_pylist())
    return [
        Rejected(record, place, check.reason, check.detail)
        for (record, place), check in zip(_rows(table), verdicts, strict=True)
    ]


def rejected(table: Any, reason: str, detail: Callable[[Place], str]) -> list[Rejected]:
    """From Arrow rows of raw columns, all for one reason."""
    return [Rejected(record, place, reason, detail(place)) for record, place in _rows(table)]


def _rows(table: Any) -> Iterable[tuple[Record, Place]]:
    places = (table.column(name).to_pylist() for name in ("topic", "partition", "offset"))
    return zip(from_arrow(table), map(Place, *places), strict=True)


def dead_letters(rejected: Iterable[Rejected], *, pipe: str, version: str, max_bytes: int) -> list[Record]:
    """The records for the pipe's dead letters. A payload too large to carry the reason is left where it was read."""
    now = time.time_ns() // 1_000_000
    return [_dead_letter(item, pipe, version, max_bytes, now) for item in rejected]


def _bare(record: Record) -> Record:
    """Only what names the event, where even key and headers leave no room for the reason."""
    event_id = (record.header(ID) or b"")[:MAX_DETAIL]
    return Record(None, b"", record.timestamp, ((ID, event_id),) if event_id else ())


def _dead_letter(item: Rejected, pipe: str, version: str, max_bytes: int, now: int) -> Record:
    record, detail = item.record, item.detail
    size = len(record.key or b"") + len(record.value or b"") + sum(len(n) * 4 + len(v) for n, v in record.headers)
    if size > max_bytes - _ADDED_BYTES:
        detail = f"{detail}; payload of {len(record.value or b'')} bytes left out, it lies at the source"
        small = size - len(record.value or b"") <= max_bytes - _ADDED_BYTES
        record = Record(record.key, b"", record.timestamp, record.headers) if small else _bare(record)
    source = TopicPartition(item.place.topic, item.place.partition)
    return make_dead_letter(
        record,
        reason=item.reason,
        detail=detail,
        node=NODE,
        pipe=pipe,
        version=version,
        first_failure=now,
        source=source,
        offset=int(item.place.offset),
        now_ms=now,
    )
