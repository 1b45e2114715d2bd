"""Some seconds of tests/fuzz/schemas.py. The seed is the day: its runs begin alike, and every day does something else."""

from datetime import UTC, datetime

from tests.fuzz import schemas

SECONDS = 20.0


def test_what_is_damaged_is_read_answered_or_refused() -> None:
    """Broken: a text from outside ends in an exception that nobody expects; or a client of the registry reads 500 for its own
    mistake, and repeats the request for ever."""
    assert schemas.run(SECONDS, datetime.now(UTC).date().toordinal()) == 0
