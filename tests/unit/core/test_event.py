"""The envelope's own headers, also as others may have written them."""

import pytest

from services.core.broker.record import Headers, Record
from services.core.event import ARRIVAL, TIME, Origin, read_arrival, restore_time

OTHER = ("ce_id", b"x")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ((OTHER, (TIME, b"123")), (123, (OTHER,))),
        ((OTHER,), (7, (OTHER,))),
        ((), (7, ())),
        (((TIME, b"123"), OTHER), (7, ((TIME, b"123"), OTHER))),
        ((OTHER, (TIME, b"soon")), (7, (OTHER, (TIME, b"soon")))),
        ((OTHER, (TIME, b"9" * 5000)), (7, (OTHER, (TIME, b"9" * 5000)))),
    ],
)
def test_event_time_behind_a_writer_without_timestamps(headers: Headers, expected: tuple[int, Headers]) -> None:
    """Broken: receivers behind Spark on Kafka are told the time of Spark's write, and lag looks smaller than it is."""
    assert restore_time(7, headers) == expected


@pytest.mark.parametrize(("raw", "expected"), [(b"12", 12), (b"", None), (b"-1", None), (b"9" * 5000, None)])
def test_arrival_of_a_foreign_record(raw: bytes, expected: int | None) -> None:
    """Broken: 5000 digits raise, and one foreign record ends every lane of the process, again and again."""
    assert read_arrival(Record(None, b"{}", 0, ((ARRIVAL, raw),))) == expected


def test_origin_travels_in_a_header() -> None:
    """Broken: the loss ledger counts by something else than what ingest wrote."""
    origin = Origin("0a1b", 3, 12)
    assert Origin.unpack(origin.pack()) == origin
    for wrong in (b"", b":1:2", b"a:1", b"a:x:2"):
        with pytest.raises(ValueError):
            Origin.unpack(wrong)
