"""Retention removes what is old, nothing else, and never in silence."""

from pathlib import Path

import pytest

from services.core.broker.errors import OffsetOutOfRange
from services.core.broker.log.keeper import keep_once
from services.core.broker.log.reader import TopicReader
from services.core.broker.log.retention import enforce
from services.core.broker.log.verify import verify
from tests.unit.log.sample import TOPIC, SetClock, make_topic, numbers, records, store


def test_by_age_since_arrival_not_by_event_time(tmp_path: Path) -> None:
    """If it fails, replayed old events vanish at once, or old ones stay for ever."""
    folder, clock = make_topic(tmp_path, retention_ms=1000), SetClock()
    for number in range(5):
        store(folder, 0, records(number * 10, 10), clock)  # event times near zero: decades old
        clock.now += 400
    assert enforce(folder, TOPIC, clock) == {0: 30}
    assert numbers(folder, start=30) == list(range(30, 50))
    clock.now += 10_000
    assert enforce(folder, TOPIC, clock) == {0: 10}
    assert numbers(folder, start=40) == list(range(40, 50)), "the newest row must stay"
    assert verify(tmp_path).is_sound


def test_by_bytes_per_partition(tmp_path: Path) -> None:
    """If it fails, a topic fills the disk although it has a limit."""
    folder, clock = make_topic(tmp_path, partitions=2, retention_bytes=30_000), SetClock()
    for number in range(10):
        store(folder, 0, records(number, 1, size=10_000), clock)
    store(folder, 1, records(0, 1, size=10_000), clock)
    assert enforce(folder, TOPIC, clock) == {0: 7}
    assert numbers(folder, 0, start=7) == [7, 8, 9]
    assert numbers(folder, 1) == [0]


def test_a_reader_behind_is_told(tmp_path: Path) -> None:
    """If it fails, a slow consumer skips what retention removed without an alarm."""
    folder, clock = make_topic(tmp_path, retention_ms=1000), SetClock()
    store(folder, 0, records(0, 10), clock)
    clock.now += 5000
    store(folder, 0, records(10, 10), clock)
    enforce(folder, TOPIC, clock)
    with TopicReader(folder, TOPIC) as reader:
        with pytest.raises(OffsetOutOfRange) as raised:
            reader.read(0, 3, 10)
        assert (raised.value.start, raised.value.end) == (10, 20)
        assert reader.offsets_at("earliest") == {0: 10}


def test_offsets_go_on_and_space_is_reused(tmp_path: Path) -> None:
    """If it fails, offsets restart after retention, or the file grows for ever."""
    folder, clock = make_topic(tmp_path, retention_bytes=200_000), SetClock()
    sizes = []
    for number in range(60):
        store(folder, 0, records(number * 10, 10, size=10_000), clock)
        enforce(folder, TOPIC, clock)
        sizes.append(folder.topic(TOPIC).db.stat().st_size)
    assert numbers(folder, start=580) == list(range(580, 600))
    assert max(sizes) < 2_000_000
    assert verify(tmp_path).is_sound


def test_without_a_limit_nothing_goes(tmp_path: Path) -> None:
    """If it fails, events of a topic that keeps for ever are deleted."""
    folder, clock = make_topic(tmp_path), SetClock()
    store(folder, 0, records(0, 10), clock)
    clock.now += 1 << 40
    assert enforce(folder, TOPIC, clock) == {}
    assert numbers(folder) == list(range(10))


def test_a_clock_set_back_keeps_the_order_of_arrival_times(tmp_path: Path) -> None:
    """If it fails, a clock that jumps back makes the search by halves miss, and retention removes too much."""
    folder, clock = make_topic(tmp_path, retention_ms=1000), SetClock(10_000)
    store(folder, 0, records(0, 10), clock)
    clock.now = 2000
    store(folder, 0, records(10, 10), clock)
    clock.now = 10_500
    store(folder, 0, records(20, 10), clock)
    assert enforce(folder, TOPIC, clock) == {}
    assert numbers(folder) == list(range(30))


def test_a_pass_goes_over_all_topics_and_survives_a_damaged_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If it fails, one damaged topic lets all others grow until the disk is full."""
    folder, clock = make_topic(tmp_path, retention_ms=1000), SetClock()
    (folder.topics / "broken.db").write_bytes(b"x" * 5000)
    store(folder, 0, records(0, 10), clock)
    store(folder, 0, records(10, 10), clock)
    clock.now += 5000
    assert keep_once(folder, clock)
    assert numbers(folder, start=10) == list(range(10, 20))
    assert "broken" in caplog.text
