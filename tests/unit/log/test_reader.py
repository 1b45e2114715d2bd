"""Reading: from any offset, from any date, and to the end."""

from datetime import UTC, datetime, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.broker.contract import Lag
from services.core.broker.errors import OffsetOutOfRange, UnknownTopic
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.row_format import pack
from services.core.broker.log.topic_reader import TopicReader, lag_behind
from services.core.broker.log.topic_writer import TopicWriter
from services.core.broker.record import Record
from tests.unit.log.sample import TOPIC, SetClock, make_topic, numbers, records, store


def at(millis: int) -> datetime:
    """A date by its milliseconds."""
    return datetime.fromtimestamp(millis / 1000, UTC)


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    """Three rows of ten records: numbers and times 0 to 29."""
    folder = make_topic(tmp_path)
    for first in (0, 10, 20):
        store(folder, 0, records(first, 10))
    return folder


@pytest.mark.parametrize("start", [0, 1, 9, 10, 15, 20, 29, 30])
def test_from_the_middle_of_a_row(folder: DataFolder, start: int) -> None:
    """If it fails, a consumer that committed within a batch gets records twice or misses some."""
    assert numbers(folder, start=start) == list(range(start, 30))


def test_beyond_the_end_is_refused(folder: DataFolder) -> None:
    """If it fails, a group whose topic lost its end waits for ever and nobody knows."""
    with TopicReader(folder, TOPIC) as reader:
        with pytest.raises(OffsetOutOfRange):
            reader.read(0, 31, 10)
        with pytest.raises(UnknownTopic):
            reader.read(1, 0, 10)


def test_a_small_wish_does_not_read_everything(folder: DataFolder) -> None:
    """If it fails, a poll for one record decodes megabytes."""
    with TopicReader(folder, TOPIC) as reader:
        run = reader.read(0, 0, 1)
        assert run is not None
        assert len(run.records) == 10
        run = reader.read(0, 0, 11)
        assert run is not None
        assert len(run.records) == 20


def test_a_naive_date_is_refused(folder: DataFolder) -> None:
    """If it fails, a start date means something else on each machine."""
    with TopicReader(folder, TOPIC) as reader, pytest.raises(ValueError, match="time zone"):
        reader.offsets_at(datetime(2026, 1, 1))  # noqa: DTZ001 - that is the point


def test_dates_know_time_zones(folder: DataFolder) -> None:
    """If it fails, time travel is off by the zone."""
    with TopicReader(folder, TOPIC) as reader:
        berlin = timezone(at(0).astimezone().utcoffset() or UTC.utcoffset(None))
        assert reader.offsets_at(at(15).astimezone(berlin)) == {0: 15}


@settings(max_examples=60)
@given(
    batches=st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=6), min_size=1, max_size=10),
    wanted=st.integers(-5, 65),
)
def test_start_at_a_date_is_the_first_record_not_older(
    tmp_path_factory: pytest.TempPathFactory, batches: list[list[int]], wanted: int
) -> None:
    """If it fails, a replay from a date misses events whose clocks were late, or begins elsewhere."""
    folder = make_topic(tmp_path_factory.mktemp("dates"))
    with TopicWriter(folder, TOPIC, WallClock()) as writer:
        for times in batches:
            packed, _ = pack([Record(None, b"", when) for when in times])
            assert packed is not None
            writer.append({0: [packed]})
    flat = [when for times in batches for when in times]
    expected = next((index for index, when in enumerate(flat) if when >= wanted), len(flat))
    with TopicReader(folder, TOPIC) as reader:
        assert reader.offsets_at(at(wanted)) == {0: expected}


def test_lag_counts_records_and_the_time_since_they_were_stored(tmp_path: Path) -> None:
    """If it fails, alarms and scaling work on wrong figures: an event from last year looks as if it had waited for a year."""
    folder, clock = make_topic(tmp_path), SetClock(1000)
    for first in (0, 10, 20):
        store(folder, 0, records(first, 10), clock)
        clock.now += 100
    with TopicReader(folder, TOPIC) as reader:
        lags = {offset: lag_behind(reader, {0: offset}, 5000)[0] for offset in (0, 15, 29, 30)}
    assert lags == {0: Lag(30, 4000, 1000), 15: Lag(15, 3900, 1100), 29: Lag(1, 3800, 1200), 30: Lag(0, 0)}
