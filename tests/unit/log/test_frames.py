"""Frames: what goes in comes out, and nothing else does."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.broker.errors import RecordTooLarge
from services.core.broker.log.row_format import (
    BLOCK_BYTES,
    MAX_RECORD_BYTES,
    Row,
    make_row,
    merge,
    pack,
    pack_all,
    read_row,
    row_position,
)
from services.core.broker.record import Record

RECORDS = st.lists(
    st.builds(
        Record,
        st.none() | st.binary(max_size=20),
        st.none() | st.binary(max_size=200),
        st.integers(-(1 << 62), 1 << 62),
        st.lists(st.tuples(st.text(max_size=8), st.binary(max_size=8)), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=40,
)


def row_of(records: list[Record], partition: int = 3, offset: int = 77) -> Row:
    """A row as the writer makes it."""
    packed, failed = pack(records)
    assert packed is not None
    assert not failed
    return make_row(row_position(partition, offset), packed, packed.max_ts, 12, 34)


def records_of(row: Row) -> list[Record]:
    """What the reader gets of a row."""
    block = read_row(row)
    assert block is not None
    assert list(block.offsets) == list(range(row.first, row.end))
    return block.records


@given(RECORDS)
def test_round_trip(records: list[Record]) -> None:
    """If it fails, events come back altered."""
    row = row_of(records)
    assert records_of(row) == records
    assert (row.first, row.end) == (77, 77 + len(records))


@given(st.lists(RECORDS, min_size=1, max_size=5))
def test_merged_blocks_are_the_concatenation(parts: list[list[Record]]) -> None:
    """If it fails, appends that share a row lose or swap records."""
    blocks = [block for part in parts for block in pack_all(part)]
    merged = merge(blocks)
    row = make_row(0, merged, 0, 0, 0)
    assert records_of(row) == [record for part in parts for record in part]
    assert merged.max_ts == max(record.timestamp for part in parts for record in part)


@pytest.mark.parametrize("count", [15, 16, 17, 65_535, 65_536])
def test_merge_at_the_edges_of_the_length_encoding(count: int) -> None:
    """If it fails, one size of batch cannot be read back."""
    few, many = [Record(None, b"a", 1)] * 3, [Record(None, b"", 2)] * (count - 3)
    packed = merge([block for part in (few, many) for block in (pack(part)[0],) if block is not None])
    assert records_of(make_row(0, packed, 0, 0, 0)) == few + many


@given(RECORDS, st.data())
def test_any_flipped_bit_is_found(records: list[Record], data: st.DataObject) -> None:
    """If it fails, an altered event is delivered as if it were the client's."""
    row = row_of(records)
    name = data.draw(st.sampled_from(row._fields))
    if name == "data":
        altered = bytearray(row.data)
        altered[data.draw(st.integers(0, len(altered) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        damaged = row._replace(data=bytes(altered))
    else:
        damaged = row._replace(**{name: getattr(row, name) ^ (1 << data.draw(st.integers(0, 31)))})
    assert read_row(damaged) is None


@pytest.mark.parametrize("value", [None, "text", 1.5, b"bytes", -1, 1 << 70])
@pytest.mark.parametrize("column", ["pos", "length", "max_ts", "total", "crc", "data"])
def test_columns_of_any_type_are_damage_not_a_crash(column: str, value: Any) -> None:
    """If it fails, damage that changes a column's type kills the reader instead of being named."""
    assert read_row(row_of([Record(None, b"a", 1)])._replace(**{column: value})) is None


def test_oversize_records_are_named_and_the_rest_is_kept() -> None:
    """If it fails, one giant event takes its whole batch with it, or slips through."""
    big = Record(b"k", b"x" * MAX_RECORD_BYTES, 1)
    packed, failed = pack([Record(None, b"a", 1), big, Record(None, b"b", 2)])
    assert packed is not None
    assert packed.length == 2
    assert [(index, type(error)) for index, error in failed] == [(1, RecordTooLarge)]
    assert pack([big])[0] is None


def test_the_largest_record_fits() -> None:
    """If it fails, the stated limit is not the limit."""
    exact = Record(b"k", b"x" * (MAX_RECORD_BYTES - 1), 1)
    assert pack([exact])[1] == ()


def test_pack_all_bounds_its_blocks() -> None:
    """If it fails, a large Spark partition becomes one giant row, and each reader of it needs that memory."""
    blocks = pack_all([Record(None, b"x" * 1000, 1)] * 2000)
    assert sum(block.length for block in blocks) == 2000
    assert all(len(block.data) <= BLOCK_BYTES for block in blocks)
    with pytest.raises(RecordTooLarge):
        pack_all([Record(None, b"x" * (MAX_RECORD_BYTES + 1), 1)])
