"""Dead letters: from rejected records (no events, or events that a transform cannot process) to the pipe's dead-letter topic."""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import pyarrow as pa
import structlog
from pyspark.sql import DataFrame

from services.core.broker.record import Record, TopicPartition
from services.core.event import ID
from services.core.pipe_file.topic_names import dead_letter_topic
from services.core.times import format_time
from services.core.undelivered.causes import normalise
from services.core.undelivered.dead_letter import MAX_DETAIL, make_dead_letter
from spark.batch_report import NODE, BatchReport, Origins, add_outcome, origins_of, union
from spark.brokers.contract import BatchName, TooMuch, is_too_much
from spark.jobs.query import Query
from spark.records import OffsetRange, RecordOffset, from_arrow
from spark.transforms.preparation import Prepared, of_stream
from spark.transforms.view import FAILED_CHECK, SCHEMA_MISMATCH, TIME

TRANSFORM_ERROR: Final = "transform_error"
DEAD: Final = "dead"
"""Names the dead letters of records that fail a check."""
LATE: Final = "late"
"""The reason of late events, and the name of their dead letters."""
PIECE = 20_000
"""The most rejected records that the driver holds at once."""
PIECE_BYTES = 64 << 20
"""Of all of them. Python needs some five times as much."""
_CUT_INTO = 16
_ADDED_BYTES = MAX_DETAIL + 1024
log = structlog.get_logger()


class Rejected(NamedTuple):
    record: Record
    source: RecordOffset
    reason: str
    detail: str


def bad_records_name(prepared: Prepared, of: str = "") -> str:
    """Names the dead letters of a batch's bad records, also by the columns that they fail: a batch that is computed again with
    other columns has others."""
    digest = hashlib.sha256(repr(sorted(prepared.columns.items())).encode()).hexdigest()[:8]
    return ":".join(filter(None, (DEAD, of, digest)))


def reject_as(raw: DataFrame, reason: str, detail: Callable[[RecordOffset], str]) -> list[Rejected]:
    """All these raw records, for one reason. Executes the frame."""
    return [Rejected(record, source, reason, detail(source)) for record, source in _rows(raw.toArrow())]


def reject_late(raw: DataFrame, watermark: int, batch: int) -> list[Rejected]:
    """These raw records of a batch with TIME, because of its watermark (ms). Executes the frame. Raises TooMuch."""
    table = _collect(raw)
    detail = (
        "a result that was open may hold it: "
        f"event time {{}} is before the watermark {format_time(watermark)} of batch {batch}"
    )
    times = table.column(TIME).cast(pa.timestamp("ms", tz="UTC"), safe=False).cast(pa.int64()).to_pylist()
    return [
        Rejected(record, source, LATE, detail.format(format_time(time)))
        for (record, source), time in zip(_rows(table), times, strict=True)
    ]


def reject_bad_records(prepared: Prepared, raw: DataFrame) -> list[Rejected]:
    """The records of a batch that fail a check. Executes the frame. Raises TooMuch."""
    found = []
    for stream, view in prepared.views.items():
        table = _collect(view.bad(view.check(of_stream(prepared, raw, stream))))
        checks = [view.checks[number] for number in table.column(FAILED_CHECK).to_pylist()]
        for (record, source), check in zip(_rows(table), checks, strict=True):
            found.append(Rejected(record, source, check.reason, view.explain(check, record.value or b"")))
    return found


def _collect(frame: DataFrame) -> Any:
    """An Arrow table. Raises TooMuch; the errors of executing the frame."""
    table: Any = frame.toArrow()
    if table.nbytes > PIECE_BYTES:
        raise TooMuch(f"{table.nbytes} bytes of rejected records")
    return table


def _rows(table: Any) -> Iterable[tuple[Record, RecordOffset]]:
    sources = (table.column(name).to_pylist() for name in ("topic", "partition", "offset"))
    return zip(from_arrow(table), map(RecordOffset, *sources), strict=True)


def write_in_pieces(
    query: Query,
    name: str,
    epoch: int,
    whole: Callable[[], Sequence[OffsetRange]],
    reject: Callable[[Sequence[OffsetRange] | None], list[Rejected]],
    report: BatchReport,
    *,
    events: int,
    counted: bool = False,
) -> Origins:
    """Store the rejected records of a batch as dead letters, unless they were stored before. Returns and adds as
    `write_dead_letters`.

    events: at most about so many are rejected. reject: those of these ranges, or of the whole batch; executes a frame. whole:
    the ranges of the batch, asked for only to cut it. The driver holds PIECE records at a time, or fewer where these are too
    large. A batch is cut by its offsets, and a piece is named by its own: a repeat after a crash cuts the same pieces.
    Raises the errors of reading and writing.
    """

    def write(name: str, ranges: Sequence[OffsetRange] | None, events: int) -> Origins:
        if events <= PIECE:
            try:
                found = reject(ranges)
            except Exception as error:
                if not is_too_much(error) or (events == 1 and len(ranges or ()) <= 1):
                    raise
            else:
                return write_dead_letters(query, found, name, epoch, report, counted=counted)
        size = PIECE if events > PIECE else -(-events // _CUT_INTO)
        if ranges is None or events > 1:
            parts = query.broker.split_ranges(whole() if ranges is None else ranges, size)
        else:  # one of each partition
            parts = iter([[part] for part in ranges])
        return union(write(f"{name}:{name_ranges(part)}", part, size) for part in parts)

    return write(name, None, events)


def name_ranges(ranges: Iterable[OffsetRange]) -> str:
    return hashlib.sha256(repr(sorted(map(tuple, ranges))).encode()).hexdigest()[:16]


def write_dead_letters(
    query: Query, found: Sequence[Rejected], name: str, epoch: int, report: BatchReport, *, counted: bool = False
) -> Origins:
    """Store these records as dead letters of the pipe, unless (name, epoch) was stored before, and add them to the report.

    Returns their origins, when there is a ledger. counted: what others wrote is counted elsewhere.
    """
    if not found:
        return {}
    dead: Origins = {}
    reasons = Counter(item.reason for item in found)
    report.dead += reasons
    if query.ledger:
        gathered = origins_of([item.record for item in found])
        dead = gathered.all if counted else gathered.counted(query.pipe, len(found))
        add_outcome(report.sets, "dead", dead)
    max_bytes = query.broker.max_record_bytes
    records = make_dead_letters(found, pipe=query.pipe, version=query.prepared.version, max_bytes=max_bytes)
    batch = BatchName(f"{query.writer}:{name}", epoch)
    query.broker.write_records(query.session, records, dead_letter_topic(query.pipe), batch)
    examples = [  # a payload's value is in the dead letter, not in the log
        normalise(item.detail) if item.reason == SCHEMA_MISMATCH else item.detail for item in found[:3]
    ]
    hint = f"Try: penstock dead list --pipe {query.pipe}, which has the values; penstock dead show POSITION has the payload"
    log.warning(
        "dead_letters_written", pipe=query.pipe, events=len(found), reasons=dict(reasons), examples=examples, hint=hint
    )
    return dead


def make_dead_letters(rejected: Iterable[Rejected], *, pipe: str, version: str, max_bytes: int) -> list[Record]:
    """The records for the dead-letter topic. A payload that is too large for a dead letter stays at its source."""
    now = time.time_ns() // 1_000_000
    return [_make_dead_letter(item, pipe, version, max_bytes, now) for item in rejected]


def _make_dead_letter(item: Rejected, pipe: str, version: str, max_bytes: int, now: int) -> Record:
    record, detail = item.record, item.detail
    size = len(record.key or b"") + len(record.value or b"") + sum(len(n) * 4 + len(v) for n, v in record.headers)
    if size > max_bytes - _ADDED_BYTES:
        detail = f"{detail}; payload of {len(record.value or b'')} bytes left out, it is stored at the source"
        small = size - len(record.value or b"") <= max_bytes - _ADDED_BYTES
        record = Record(record.key, b"", record.timestamp, record.headers) if small else _identity_of(record)
    return make_dead_letter(
        record,
        reason=item.reason,
        detail=detail,
        node=NODE,
        pipe=pipe,
        version=version,
        first_failure=now,
        source=TopicPartition(item.source.topic, item.source.partition),
        offset=int(item.source.offset),
        now_ms=now,
    )


def _identity_of(record: Record) -> Record:
    """Only the event's id, where even key and headers are too large."""
    event_id = (record.header(ID) or b"")[:MAX_DETAIL]
    return Record(None, b"", record.timestamp, ((ID, event_id),) if event_id else ())
