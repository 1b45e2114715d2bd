"""Records to Kinesis entries and back."""

from hashlib import md5

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.broker.errors import RecordTooLarge
from services.core.broker.kinesis.record_format import (
    AGGREGATE_MAGIC,
    FRAME_MAGIC,
    MAX_ENTRY_BYTES,
    MAX_RECORD_BYTES,
    NAME_BYTES,
    BadAggregate,
    BadEntry,
    _read_frame,
    _read_own,
    make_entries,
    read_entry,
    unpack,
)
from services.core.broker.record import Record

HEADERS = st.lists(st.tuples(st.text(max_size=5), st.binary(max_size=5)), max_size=3).map(tuple)
RECORDS = st.builds(
    Record,
    st.none() | st.binary(max_size=9),
    st.none() | st.binary(max_size=300),
    st.integers(0, 1 << 45),
    HEADERS,
)
KEY, HASH_KEY, NOW = "0", 1 << 127, 1_700_000_000_000


@given(st.lists(RECORDS, min_size=1, max_size=20))
def test_records_come_back(records: list[Record]) -> None:
    """If it fails, a payload, key, header or event time is altered on its way through Kinesis."""
    (entry,), refused = make_entries(records, KEY, HASH_KEY)
    assert not refused
    assert list(entry.indexes) == list(range(len(records)))
    assert read_entry(entry.data, KEY, NOW) == records


@given(st.lists(RECORDS, min_size=1, max_size=9), st.sampled_from([b"", b"n" * 32]), st.data())
def test_the_short_way_reads_as_the_general_one(records: list[Record], name: bytes, data: st.DataObject) -> None:
    """If it fails, an entry that was damaged, or that another producer made, is read as other records than it holds."""
    ((entry,), _) = make_entries(records, KEY, HASH_KEY, lambda _bodies: name)
    assert _read_own(entry.data) == (records, name + entry.data[-16:] if name else b"")
    changed = bytearray(entry.data[4:-16])
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    other = AGGREGATE_MAGIC + bytes(changed) + md5(changed, usedforsecurity=False).digest()
    if (found := _read_own(other)) is not None:
        assert found[0] == read_generally(other)


def read_generally(data: bytes) -> list[Record] | None:
    """As `read_entry`, without the short way; None where it refuses the entry."""
    try:
        return [_read_frame(part.data, part.partition_key, NOW) for part in unpack(data) or ()]
    except (BadAggregate, BadEntry):
        return None


def test_what_is_too_large_for_one_entry_becomes_several_in_order() -> None:
    """If it fails, an append above a megabyte is refused for ever, or its order is lost."""
    huge = Record(b"k", b"x" * (MAX_RECORD_BYTES + 1), 1)
    records = [Record(b"k", bytes([n]) * 400_000, n) for n in range(5)]
    entries, refused = make_entries([*records[:2], huge, *records[2:]], KEY, HASH_KEY)
    assert {index: type(error) for index, error in refused.items()} == {2: RecordTooLarge}
    assert [list(entry.indexes) for entry in entries] == [[0, 1], [3, 4], [5]]
    assert [one for entry in entries for one in read_entry(entry.data, KEY, NOW)] == records
    assert all(len(entry.data) + len(KEY) <= MAX_ENTRY_BYTES for entry in entries)


def test_the_largest_record_fits() -> None:
    """If it fails, an event of the size that we promise to take is refused."""
    largest = Record(b"k" * 100, b"x" * (MAX_RECORD_BYTES - 100), 1)
    (entry,), refused = make_entries([largest], KEY, HASH_KEY, lambda _bodies: b"n" * NAME_BYTES)
    assert not refused
    assert len(entry.data) + len(KEY) <= MAX_ENTRY_BYTES


def test_many_small_headers_do_not_burst_an_entry() -> None:
    """If it fails, a record within the limit by its content is sent and refused for ever for its framing."""
    record = Record(b"k", b"", 1, tuple((f"h{n}", b"") for n in range(150_000)))
    entries, refused = make_entries([record], KEY, HASH_KEY)
    assert not entries
    assert isinstance(refused[0], RecordTooLarge)


def test_what_others_wrote_is_a_record_too() -> None:
    """If it fails, a stream that others write to cannot be read."""
    assert read_entry(b"plain", "their key", NOW) == [Record(b"their key", b"plain", NOW)]


def test_a_frame_of_a_newer_version_is_no_payload() -> None:
    """Broken: receivers get the bytes of a frame that only a newer version can read."""
    data = FRAME_MAGIC[:-1] + bytes([FRAME_MAGIC[-1] + 1]) + b"rest"
    with pytest.raises(BadEntry, match="has format 2, written by a newer Penstock"):
        read_entry(data, "k", 5)
