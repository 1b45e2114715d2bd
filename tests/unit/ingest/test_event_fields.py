"""Columns have a fast way and a way row by row; whatever stands in a column, both must say the same."""

import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.pipe_file.field_path import field_reader
from services.core.pipe_file.stream import Stream
from services.ingest.event_fields import FUTURE_MS, read_ids, read_keys, read_times
from services.ingest.intake import Intake
from services.ingest.json_events import Items

ARRIVAL = 1_790_000_000_000
TEXTS = st.text(max_size=5) | st.text("a\x00\x1f\x7f\x85é€", max_size=3) | st.just("x" * 300) | st.just("y" * 1025)
MOMENTS = st.datetimes(timezones=st.just(datetime.UTC)).map(datetime.datetime.isoformat)
NUMBERS = st.integers(-(10**15), 10**15) | st.floats(allow_nan=False, allow_infinity=False)
ODD: st.SearchStrategy[Any] = st.none() | st.booleans() | st.just({}) | st.just([])
ALIKE: st.SearchStrategy[Any] = st.lists(TEXTS, min_size=1, max_size=5) | st.lists(MOMENTS, min_size=1, max_size=5)
COLUMNS: st.SearchStrategy[list[Any]] = ALIKE | st.lists(st.integers(0, 2 * ARRIVAL), min_size=1, max_size=5)
COLUMNS |= st.lists(TEXTS | MOMENTS | NUMBERS | ODD, min_size=1, max_size=5)


@given(COLUMNS)
def test_a_column_is_read_as_its_rows_are(column: list[object]) -> None:
    """A shortcut that lets something through would store ids, keys or times that a row alone would have refused."""
    for read in (read_ids, read_keys, lambda rows: read_times(rows, ARRIVAL)):
        values, faults = read(column)
        assert len(values) == len(column)
        for row, value in enumerate(column):
            # A second row of another kind forces the way row by row.
            alone, wrong = read([value, None, 1.5])
            assert faults.get(row) == wrong.get(0)
            if row not in faults:
                assert values[row] == alone[0]


@given(COLUMNS)
def test_accepted_times_are_in_range(column: list[object]) -> None:
    """Whatever was written, the result lies between 1970 and a day from now."""
    times, faults = read_times(column, ARRIVAL)
    assert all(0 <= time <= ARRIVAL + FUTURE_MS for row, time in enumerate(times) if row not in faults)


@given(
    st.recursive(st.none() | st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner), max_leaves=8)
)
def test_nested_fields_are_found_or_absent(value: object) -> None:
    """A payload of another shape than the stream's path means absent, never an error."""
    document = value if isinstance(value, dict) else {}
    expected: object = document
    for name in ("a", "b", "c"):
        expected = expected.get(name) if isinstance(expected, dict) else None
    assert field_reader("a.b.c")([document]) == [expected]
    assert field_reader("a")([document]) == [document.get("a")]


@pytest.mark.parametrize(
    "column",
    [
        [ARRIVAL - 101, ARRIVAL - 99],
        ["2026-01-01T00:00:00Z", None],
        [(ARRIVAL - 101) / 1000, ARRIVAL],
        [ARRIVAL - 101, None],
    ],
)
def test_too_old_for_the_stream(column: list[object]) -> None:
    """Broken: Kafka, which counts retention from the event time, deletes an acknowledged event before it is delivered."""
    times, faults = read_times(column, ARRIVAL, ARRIVAL - 100)
    assert [(row, kind.name) for row, (kind, _) in faults.items()] == [(0, "too-old")]
    assert times[1] >= ARRIVAL - 100


def test_half_the_retention_stays_for_the_delivery() -> None:
    """Broken: an event accepted at the edge of its retention is gone a moment later."""
    intake, day = Intake("s", Stream.model_validate({"retention": "2d", "time": "at"}), lambda *_: 0), 86_400_000
    intake.partitions = 1

    def refused(age: int) -> list[str]:
        items = Items([b'{"at": %d}' % (ARRIVAL - age)], [{"at": ARRIVAL - age}], [0])
        return [one.kind.name for one in intake.prepare(items, ARRIVAL, None).refused]

    assert refused(day + 1) == [], "retention counts from storing"
    intake.limit_age(by_event_time=True)
    assert (refused(day), refused(day + 1)) == ([], ["too-old"])
