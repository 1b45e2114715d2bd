"""From rejected records to dead letters that every broker takes."""

import pytest

from services.core.broker.record import Record
from services.core.event import ID, read_id
from services.core.undelivered import dead_letter
from spark.jobs.dead_letters import Rejected, make_dead_letters
from spark.records import RecordOffset, offset_text

MAX_BYTES = 100_000


def size(record: Record) -> int:
    return len(record.key or b"") + len(record.value or b"") + sum(len(n.encode()) + len(v) for n, v in record.headers)


@pytest.mark.parametrize(
    "record",
    [
        Record(b"key", b"x" * MAX_BYTES, 5, ((ID, b"large"),)),
        Record(b"key", b"x", 5, ((ID, b"large"), ("other", b"h" * MAX_BYTES))),
        Record(b"key", b"x", 5, ((ID, b"large"), *((f"h{n}", b"v" * 100) for n in range(MAX_BYTES // 100)))),
        Record(b"k" * MAX_BYTES, b"x", 5, ((ID, b"large"),)),
        Record(None, None, 5, ((ID, b"large" + b"i" * MAX_BYTES),)),
    ],
    ids=["payload", "one header", "many headers", "key", "id"],
)
def test_oversized_record_fits_with_its_reason(record: Record) -> None:
    """If this fails, a record at the broker's limit makes its dead letter too large, and stops the pipe for ever."""
    item = Rejected(record, RecordOffset("s", 3, offset_text(77)), "bad_record", "it is wrong")
    (letter,) = make_dead_letters([item], pipe="p", version="v", max_bytes=MAX_BYTES)
    assert size(letter) <= MAX_BYTES
    assert (read_id(letter) or "").startswith("large")
    assert letter.header(dead_letter.REASON) == b"bad_record"
    assert letter.header(dead_letter.SOURCE) == b"s:3:77"
    detail = letter.header(dead_letter.DETAIL) or b""
    assert detail == b"it is wrong; payload of %d bytes left out, it is stored at the source" % len(record.value or b"")
    assert dead_letter.event_time(letter) == 5


def test_record_that_fits_is_kept_whole() -> None:
    """If this fails, a redrive of a dead letter sends something else than the client did."""
    record = Record(b"key", b"x" * 1000, 5, ((ID, b"small"), ("other", b"h" * 1000)))
    (letter,) = make_dead_letters(
        [Rejected(record, RecordOffset("s", 0, offset_text(1)), "bad_record", "")],
        pipe="p",
        version="v",
        max_bytes=MAX_BYTES,
    )
    assert dead_letter.strip(letter) == record
