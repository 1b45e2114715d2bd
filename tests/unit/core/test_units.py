"""Durations and sizes always carry a unit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.units import format_count, format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("10s", 10), ("5m", 300), ("75h", 270_000), ("7d", 604_800), ("1.5 h", 5400), (" 2s ", 2)],
)
def test_durations(text: str, seconds: float) -> None:
    """Broken: a time-out is not the one that the operator wrote."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["10", 10, 10.5, "-5s", "0s", "0.0h", "s", "", "5 min", "1e3s", "inf s", "nan", None, True, "9" * 13 + "s"]
)
def test_bad_durations(text: object) -> None:
    """Broken: `timeout: 10` means seconds to one person and milliseconds to another; a negative one never waits."""
    with pytest.raises(ValueError, match="Try: 10s"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"), [("512B", 512), ("64KB", 64_000), ("64KiB", 65_536), ("1.5MB", 1_500_000), ("2GiB", 2 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    """Broken: a limit is not the one that the operator wrote."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["1024", 1024, "-1MB", "0B", "1mb", "1 megabyte"])
def test_bad_sizes(text: object) -> None:
    """Broken: a limit without a unit is guessed at."""
    with pytest.raises(ValueError, match="Try: 1MB"):
        parse_size(text)


@given(st.integers(1, 10**9))
def test_formats_read_back(amount: int) -> None:
    """Broken: the generated settings file shows a default that is not the default."""
    assert parse_duration(format_duration(amount / 1000)) == pytest.approx(amount / 1000)
    assert parse_size(format_size(amount)) == amount


def test_formats_as_people_write() -> None:
    """Broken: help and settings file say 604800000ms."""
    assert [format_duration(s) for s in (0.05, 25, 90, 300, 604800)] == ["50ms", "25s", "90s", "5m", "7d"]
    assert [format_size(s) for s in (1, 1024, 1_000_000, 64 << 20)] == ["1B", "1KiB", "1MB", "64MiB"]


def test_numbers_with_their_noun() -> None:
    """Broken: a person reads of 1 events, or counts the digits of 1234567."""
    assert [format_count(count, "event") for count in (0, 1, 2, 1_234_567)] == [
        "0 events",
        "1 event",
        "2 events",
        "1,234,567 events",
    ]
