"""Retention removes what is old, nothing else, and never in silence."""

import errno
import fcntl
import os
from pathlib import Path

import apsw
import pytest
from structlog.testing import capture_logs

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import OffsetOutOfRange, Unavailable
from services.core.broker.log import retention, sqlite_file
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.groups import GroupPosition, GroupsFile
from services.core.broker.log.high_water_marks import HighWaterMarks
from services.core.broker.log.repair import verify
from services.core.broker.log.retention import apply_retention_once, enforce, read_clock
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.log.topics import create_topic, register_group
from services.core.broker.record import TopicPartition
from tests.unit.log.sample import TOPIC, SetBoot, SetClock, make_topic, numbers, records, store

SOURCE = TopicPartition(TOPIC, 0)
DAY = 86_400_000


def test_by_age_since_arrival_not_by_event_time(tmp_path: Path) -> None:
    """If it fails, replayed old events vanish at once, or old ones stay for ever."""
    folder, clock = make_topic(tmp_path, retention_ms=1000), SetClock()
    for number in range(5):
        store(folder, 0, records(number * 10, 10), clock)  # event times near zero: decades old
        clock.now += 400
    assert enforce(folder, TOPIC, clock.now_ms()) == {0: 30}
    assert numbers(folder, start=30) == list(range(30, 50))
    clock.now += 10_000
    assert enforce(folder, TOPIC, clock.now_ms()) == {0: 10}
    assert numbers(folder, start=40) == list(range(40, 50)), "the newest row must stay"
    assert verify(tmp_path).is_sound


def test_by_bytes_per_partition(tmp_path: Path) -> None:
    """If it fails, a topic fills the disk although it has a limit."""
    folder, clock = make_topic(tmp_path, partitions=2, retention_bytes=30_000), SetClock()
    for number in range(10):
        store(folder, 0, records(number, 1, size=10_000), clock)
    store(folder, 1, records(0, 1, size=10_000), clock)
    assert enforce(folder, TOPIC, clock.now_ms()) == {0: 7}
    assert numbers(folder, 0, start=7) == [7, 8, 9]
    assert numbers(folder, 1) == [0]


def test_a_reader_behind_is_told(tmp_path: Path) -> None:
    """If it fails, a slow consumer skips what retention removed without an alarm."""
    folder, clock = make_topic(tmp_path, retention_ms=1000), SetClock()
    store(folder, 0, records(0, 10), clock)
    clock.now += 5000
    store(folder, 0, records(10, 10), clock)
    enforce(folder, TOPIC, clock.now_ms())
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
        enforce(folder, TOPIC, clock.now_ms())
        sizes.append(folder.topic(TOPIC).db.stat().st_size)
    assert numbers(folder, start=580) == list(range(580, 600))
    assert max(sizes) < 2_000_000
    assert verify(tmp_path).is_sound


def test_without_a_limit_nothing_goes(tmp_path: Path) -> None:
    """If it fails, events of a topic that keeps for ever are deleted."""
    folder, clock = make_topic(tmp_path), SetClock()
    store(folder, 0, records(0, 10), clock)
    clock.now += 1 << 40
    assert enforce(folder, TOPIC, clock.now_ms()) == {}
    assert numbers(folder) == list(range(10))


def test_a_clock_set_back_keeps_the_order_of_arrival_times(tmp_path: Path) -> None:
    """If it fails, a clock that jumps back makes the search by halves miss, and retention removes too much."""
    folder, clock = make_topic(tmp_path, retention_ms=1000), SetClock(10_000)
    store(folder, 0, records(0, 10), clock)
    clock.now = 2000
    store(folder, 0, records(10, 10), clock)
    clock.now = 10_500
    store(folder, 0, records(20, 10), clock)
    assert enforce(folder, TOPIC, clock.now_ms()) == {}
    assert numbers(folder) == list(range(30))


def test_a_pass_goes_over_all_topics_and_survives_a_damaged_one(tmp_path: Path) -> None:
    """If it fails, one damaged topic lets all others grow until the disk is full; or one that is being created looks damaged."""
    folder, clock = make_topic(tmp_path, retention_ms=1000), SetClock()
    (folder.topics / "broken.db").write_bytes(b"x" * 5000)
    HighWaterMarks.create(folder.topic("new").marks, b"n" * 16, [0])
    store(folder, 0, records(0, 10), clock)
    store(folder, 0, records(10, 10), clock)
    clock.now += 5000
    with capture_logs() as logs:
        assert apply_retention_once(folder, clock)
    assert numbers(folder, start=10) == list(range(10, 20))
    assert [line["topic"] for line in logs if line["event"] == "retention_failed"] == ["broken"]


def test_a_pass_that_fails_as_a_whole_is_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a process that has no file descriptor left for a moment never applies retention again, and says nothing."""
    folder, clock = make_topic(tmp_path), SetClock()

    def fail(_: DataFolder) -> list[str]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(retention, "topic_names", fail)
        assert not apply_retention_once(folder, clock)
    assert [line["event"] for line in logs] == ["retention_failed"]
    assert apply_retention_once(folder, clock)


def test_a_first_pass_survives_a_topic_whose_rows_cannot_be_read(tmp_path: Path) -> None:
    """Broken: without a retention clock one damaged page ends retention in every process, for all topics, until the disk is
    full."""
    folder, clock = make_topic(tmp_path, retention_ms=1000), SetClock()
    create_topic(folder, TopicSpec("broken", 1))
    connection = sqlite_file.connect(folder.topic("broken").db)
    ((page,),) = sqlite_file.fetch(connection, "SELECT rootpage FROM sqlite_master WHERE name='batches'")
    connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    connection.close()
    with folder.topic("broken").db.open("r+b") as file:
        file.seek((page - 1) * sqlite_file.PAGE_BYTES)
        file.write(b"x" * 100)
    store(folder, 0, records(0, 10), clock)
    store(folder, 0, records(10, 10), clock)
    clock.now += 5000
    assert apply_retention_once(folder, clock)
    assert numbers(folder, start=10) == list(range(10, 20))


def test_what_a_group_has_still_to_read_is_kept_for_twice_as_long(tmp_path: Path) -> None:
    """Broken: a destination that was down for as long as the retention loses events; or holds the disk for ever."""
    folder, clock = make_topic(tmp_path, retention_ms=1000), SetClock()
    for number in range(3):
        store(folder, 0, records(number * 10, 10), clock)
    groups = GroupsFile(folder)
    try:
        groups.set_progress("ahead", {SOURCE: GroupPosition(incarnation_of(folder), 0, 29)})
        groups.set_progress("behind", {SOURCE: GroupPosition(incarnation_of(folder), 0, 9)})
        clock.now += 1500
        assert enforce(folder, TOPIC, clock.now_ms()) == {0: 10}
        clock.now += 600
        assert enforce(folder, TOPIC, clock.now_ms()) == {0: 10}, "only the newest row stays"
    finally:
        groups.close()


def test_a_group_without_an_offset_has_everything_to_read(tmp_path: Path) -> None:
    """Broken: the groups' file is lost, and retention takes what their repair would have begun with."""
    folder, clock = make_topic(tmp_path, retention_ms=1000), SetClock()
    for number in range(3):
        store(folder, 0, records(number * 10, 10), clock)
    register_group(folder, TOPIC, "behind")
    clock.now += 1500
    assert enforce(folder, TOPIC, clock.now_ms()) == {}


def test_while_the_groups_are_repaired_everything_counts_as_unread(tmp_path: Path) -> None:
    """Broken: retention reads groups.db between the removal of its log and the new file, and deletes what a group has to read."""
    folder, clock = make_topic(tmp_path, retention_ms=1000), SetClock()
    for number in range(3):
        store(folder, 0, records(number * 10, 10), clock)
    groups = GroupsFile(folder)
    groups.set_progress("ahead", {SOURCE: GroupPosition(incarnation_of(folder), 0, 29)})
    groups.close()
    clock.now += 1500
    with folder.groups.lock.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert enforce(folder, TOPIC, clock.now_ms()) == {}
        with pytest.raises(Unavailable, match="is being repaired"):
            verify(tmp_path)
    assert enforce(folder, TOPIC, clock.now_ms()) == {0: 20}


def test_a_clock_that_is_days_ahead_deletes_nothing_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a process starts with a wrong clock, and a week of events goes before anybody has read it."""
    boot = SetBoot(monkeypatch)
    folder, clock = make_topic(tmp_path, retention_ms=7 * DAY), SetClock(100 * DAY)
    for number in range(6):
        store(folder, 0, records(number * 10, 10), clock)
        clock.now += DAY
        boot.now += DAY
        assert apply_retention_once(folder, clock)
    clock.now += 30 * DAY
    for _ in range(3):
        boot.now += 60_000
        clock.now += 60_000
        assert apply_retention_once(folder, clock)
    assert numbers(folder) == list(range(60))


def test_the_newest_record_says_how_far_a_first_clock_may_be_ahead(tmp_path: Path) -> None:
    """Broken: the first start of this version on a machine with a wrong clock deletes everything."""
    folder, clock = make_topic(tmp_path, retention_ms=7 * DAY), SetClock(100 * DAY)
    store(folder, 0, records(0, 10), clock)
    store(folder, 0, records(10, 10), clock)
    clock.now += 30 * DAY
    assert apply_retention_once(folder, clock)
    assert numbers(folder) == list(range(20))


def test_retention_catches_up_after_the_machine_was_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: once the machine was off for days, the disk fills; or nobody is told why old records are still there."""
    boot = SetBoot(monkeypatch)
    folder, clock = make_topic(tmp_path, retention_ms=3 * DAY), SetClock(100 * DAY)
    store(folder, 0, records(0, 10), clock)
    store(folder, 0, records(10, 10), clock)
    assert apply_retention_once(folder, clock)
    clock.now += 10 * DAY
    boot.restart()
    kept = []
    with capture_logs() as logs:
        for _ in range(14):
            boot.now += DAY
            clock.now += DAY
            assert apply_retention_once(folder, clock)
            with TopicReader(folder, TOPIC) as reader:
                kept.append(reader.ranges()[0].start == 0)
    assert kept[0], "for a day it has gone two, and what it went before does not count"
    assert not kept[-1]
    assert 1 <= [line["event"] for line in logs].count("retention_clock_behind") <= 14
    assert read_clock(folder, clock) == clock.now


def test_a_folder_on_another_machine_is_not_judged_by_how_long_that_one_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a data disk is moved to a machine that has been up for months and whose clock is weeks ahead: a week of events
    goes at once."""
    boot = SetBoot(monkeypatch)
    folder, clock = make_topic(tmp_path, retention_ms=7 * DAY), SetClock(100 * DAY)
    store(folder, 0, records(0, 10), clock)
    store(folder, 0, records(10, 10), clock)
    assert apply_retention_once(folder, clock)
    boot.restart()
    boot.now += 90 * DAY
    clock.now += 30 * DAY
    assert apply_retention_once(folder, clock)
    assert numbers(folder) == list(range(20))


def test_a_retention_clock_that_cannot_be_read_begins_anew(tmp_path: Path) -> None:
    """Broken: a torn file stops retention for good."""
    folder, clock = make_topic(tmp_path, retention_ms=1000), SetClock()
    store(folder, 0, records(0, 10), clock)
    (tmp_path / "retention.clock").write_bytes(b"1 {")
    assert read_clock(folder, clock) == clock.now
    assert read_clock(folder, clock) == clock.now


def incarnation_of(folder: DataFolder) -> bytes:
    with TopicReader(folder, TOPIC) as reader:
        return reader.store.meta.incarnation
