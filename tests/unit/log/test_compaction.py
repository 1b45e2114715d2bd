"""Compaction removes what a newer record of the key has replaced, nothing else, and survives a kill between any two steps."""

import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from services.core.broker.errors import DataDamaged, NewerFormat
from services.core.broker.log import compaction, sqlite_file
from services.core.broker.log.blocking import read_range
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.groups import GroupPosition, GroupsFile
from services.core.broker.log.repair import repair, verify
from services.core.broker.log.retention import apply_retention_once, enforce
from services.core.broker.log.scan import TopicScan
from services.core.broker.log.sqlite_file import DurableFile
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.log.topics import register_group
from services.core.broker.record import Record, TopicPartition
from tests.unit.log.sample import TOPIC, SetBoot, SetClock, make_topic, store

AGE = 1000
DAY = 86_400_000


def event(key: bytes | None, value: bytes | None, at: int = 0) -> Record:
    return Record(key, value, at, (("id", b"x"),))


def stored(folder: DataFolder, partition: int = 0, start: int = 0) -> dict[int, Record]:
    """The records by offset, as a reader that begins at `start` gets them."""
    found: dict[int, Record] = {}
    with TopicReader(folder, TOPIC) as reader:
        while (run := reader.read(partition, start, 3)) is not None:
            found.update(zip(run.offsets, run.records, strict=True))
            start = run.next
    return found


def fill(folder: DataFolder, clock: SetClock, keys: str, *, partition: int = 0) -> None:
    """One append for each letter: a small letter is an event of that key, a capital its tombstone."""
    for number, key in enumerate(keys):
        value = b"%d" % number if key.islower() else None
        store(folder, partition, [event(key.lower().encode(), value)], clock)


def rows(folder: DataFolder) -> list[tuple[int, int]]:
    """(first offset, span) of each row."""
    with closing(apsw.Connection(str(folder.topic(TOPIC).db))) as connection:
        return [(pos, count) for pos, count in connection.execute("SELECT pos, count FROM batches ORDER BY pos")]


def test_the_newest_of_each_key_stays_at_its_offset(tmp_path: Path) -> None:
    """If it fails, a table loses a key, or the same record has another offset for a later reader."""
    folder, clock = make_topic(tmp_path, compact=True, retention_ms=AGE), SetClock()
    fill(folder, clock, "abacabz")
    store(folder, 0, [event(b"last", b"")], clock)
    clock.now += AGE + 1
    assert enforce(folder, TOPIC, clock.now_ms()) == {0: 3}
    assert list(stored(folder)) == [3, 4, 5, 6, 7]
    assert [record.key for record in stored(folder).values()] == [b"c", b"a", b"b", b"z", b"last"]
    assert rows(folder) == [(0, 7), (7, 1)], "neighbours must become one row, without a gap; the last row stays"
    report = verify(tmp_path)
    assert report.is_sound
    assert report.topics[0].partitions[0].records == 5
    assert list(stored(folder, start=4)) == [4, 5, 6, 7], "a reader in the middle goes on"
    with TopicReader(folder, TOPIC) as reader:
        assert reader.stored_at(0, 1)


def test_young_and_unread_records_stay(tmp_path: Path) -> None:
    """If it fails, a destination misses events that the stream's retention promises it."""
    folder, clock = make_topic(tmp_path, compact=True, retention_ms=AGE), SetClock()
    fill(folder, clock, "aaa")
    clock.now += AGE // 2
    fill(folder, clock, "aaaz")
    clock.now += AGE // 2 + 1
    register_group(folder, TOPIC, "slow")
    with closing(GroupsFile(folder)) as groups, TopicReader(folder, TOPIC) as reader:
        position = GroupPosition(reader.store.meta.incarnation, 0, 0)
        groups.set_progress("slow", {TopicPartition(TOPIC, 0): position})
    assert enforce(folder, TOPIC, clock.now_ms()) == {}, "offset 0 is read, and the newest read one; 1 and 2 are unread"
    clock.now += AGE
    assert enforce(folder, TOPIC, clock.now_ms()) == {0: 2}, "older than twice the retention"
    assert list(stored(folder)) == [2, 3, 4, 5, 6]


def test_a_tombstone_stays_for_the_retention_after_what_it_removed(tmp_path: Path) -> None:
    """If it fails, a reader that saw the value never learns that it was deleted."""
    folder, clock = make_topic(tmp_path, compact=True, retention_ms=AGE), SetClock()
    fill(folder, clock, "aAz")
    clock.now += AGE + 1
    assert enforce(folder, TOPIC, clock.now_ms()) == {0: 1}
    assert list(stored(folder)) == [1, 2]
    clock.now += AGE - 1
    assert enforce(folder, TOPIC, clock.now_ms()) == {}
    clock.now += 1
    assert enforce(folder, TOPIC, clock.now_ms()) == {0: 1}
    assert list(stored(folder)) == [2]
    assert list(stored(folder, start=0)) == [2], "a row without any record is passed over"
    assert [list(batch.offsets) for batch in read_range(tmp_path, TOPIC, 0, 0, 3)] == [[2]]
    assert verify(tmp_path).is_sound


def test_a_tombstone_stays_for_the_retention_while_the_retentions_clock_catches_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a table that is away for half the retention misses a delete, because the machine was off for days before."""
    age = 10 * DAY
    boot = SetBoot(monkeypatch)
    folder, clock = make_topic(tmp_path, compact=True, retention_ms=age), SetClock(100 * DAY)
    fill(folder, clock, "aAz")
    assert apply_retention_once(folder, clock)
    clock.now += 20 * DAY
    boot.restart()
    alone_at = None
    for _ in range(200):
        boot.now += DAY // 2
        clock.now += DAY // 2
        assert apply_retention_once(folder, clock)
        offsets = list(stored(folder))
        if alone_at is None and 0 not in offsets:
            alone_at = clock.now
        if 1 not in offsets:
            break
    assert alone_at is not None
    assert offsets == [2]
    assert age <= clock.now - alone_at <= 2 * age


def test_records_without_a_key_stay(tmp_path: Path) -> None:
    """If it fails, an event that another program wrote without a key is lost."""
    folder, clock = make_topic(tmp_path, compact=True, retention_ms=AGE), SetClock()
    store(folder, 0, [event(None, b"1"), event(None, b"2"), event(b"a", b"1"), event(b"a", b"2")], clock)
    store(folder, 0, [event(b"z", b"")], clock)
    clock.now += AGE + 1
    assert enforce(folder, TOPIC, clock.now_ms()) == {0: 1}
    assert list(stored(folder)) == [0, 1, 3, 4]


def test_more_keys_than_a_pass_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a stream with more keys than fit into memory is never compacted, or loses some."""
    monkeypatch.setattr(compaction, "_MAX_KEYS", 3)
    folder, clock = make_topic(tmp_path, compact=True, retention_ms=AGE), SetClock()
    fill(folder, clock, "abcdefabcdefz")
    clock.now += 2 * AGE + 1
    removed = 0
    for _ in range(5):
        removed += sum(enforce(folder, TOPIC, clock.now_ms()).values())
    assert removed == 6
    assert [record.key for record in stored(folder).values()] == [b"a", b"b", b"c", b"d", b"e", b"f", b"z"]


def test_little_dirt_waits(tmp_path: Path) -> None:
    """If it fails, each minute rewrites a large topic for a single new record."""
    folder, clock = make_topic(tmp_path, compact=True, retention_ms=AGE), SetClock()
    store(folder, 0, [event(b"%d" % number, b"v" * 100) for number in range(100)], clock)
    fill(folder, clock, "z")
    clock.now += AGE + 1
    assert enforce(folder, TOPIC, clock.now_ms()) == {}
    fill(folder, clock, "zzy")
    clock.now += AGE - 2
    assert enforce(folder, TOPIC, clock.now_ms()) == {}, "too little"
    clock.now += AGE
    assert enforce(folder, TOPIC, clock.now_ms()) == {0: 2}, "at the latest after twice the retention"


def test_damage_stops_the_pass_and_is_no_hole(tmp_path: Path) -> None:
    """If it fails, compaction turns damaged records into removed ones, in silence."""
    folder, clock = make_topic(tmp_path, compact=True, retention_ms=AGE), SetClock()
    fill(folder, clock, "aabbz")
    with closing(apsw.Connection(str(folder.topic(TOPIC).db))) as connection:
        connection.execute("UPDATE batches SET data = x'91' || substr(data, 2) || x'00' WHERE pos = 2")
    clock.now += AGE + 1
    with pytest.raises(DataDamaged) as raised:
        enforce(folder, TOPIC, clock.now_ms())
    assert raised.value.ranges == ((0, 2, 2),)
    assert verify(tmp_path).topics[0].lost_records == 1
    repair(tmp_path)
    assert enforce(folder, TOPIC, clock.now_ms()) == {0: 1}
    assert list(stored(folder)) == [1, 3, 4]
    assert verify(tmp_path).is_sound


def test_a_damaged_partition_keeps_no_other_from_compaction(tmp_path: Path) -> None:
    """If it fails, one damaged record lets all partitions of its topic grow until the disk is full."""
    folder, clock = make_topic(tmp_path, compact=True, retention_ms=AGE, partitions=3), SetClock()
    for partition in range(3):
        fill(folder, clock, "aaz", partition=partition)
    with closing(apsw.Connection(str(folder.topic(TOPIC).db))) as connection:
        connection.execute("UPDATE batches SET data = x'91' || substr(data, 2) || x'00' WHERE pos = 1")
    clock.now += AGE + 1
    labels = {"topic": TOPIC, "reason": "damaged"}
    before = REGISTRY.get_sample_value("penstock_log_not_compacted_total", labels) or 0.0
    with pytest.raises(DataDamaged) as raised:
        enforce(folder, TOPIC, clock.now_ms())
    assert {first for first, *_ in raised.value.ranges} == {0}
    assert [list(stored(folder, partition)) for partition in (1, 2)] == [[1, 2], [1, 2]]
    assert REGISTRY.get_sample_value("penstock_log_not_compacted_total", labels) == before + 1


def test_a_missing_row_is_damage_and_no_removed_records(tmp_path: Path) -> None:
    """If it fails, a row that the disk lost becomes a part of a compacted one, and nobody hears of the loss."""
    folder, clock = make_topic(tmp_path, compact=True, retention_ms=AGE), SetClock()
    fill(folder, clock, "abcaz")
    with closing(apsw.Connection(str(folder.topic(TOPIC).db))) as connection:
        connection.execute("DELETE FROM batches WHERE pos = 2")
    clock.now += AGE + 1
    with pytest.raises(DataDamaged) as raised:
        enforce(folder, TOPIC, clock.now_ms())
    assert raised.value.ranges == ((0, 2, 2),)
    assert verify(tmp_path).topics[0].lost_records == 1
    repair(tmp_path)
    assert enforce(folder, TOPIC, clock.now_ms()) == {0: 1}
    assert rows(folder) == [(0, 2), (3, 1), (4, 1)], "no row spans what a repair has recorded as lost"
    assert verify(tmp_path).topics[0].partitions[0].accepted == [(2, 2)]


def test_a_check_beside_compaction_finds_no_loss(tmp_path: Path) -> None:
    """If it fails, an operator who verifies a working fleet is told of lost records that are there."""
    folder, clock = make_topic(tmp_path, compact=True, retention_ms=AGE), SetClock()
    fill(folder, clock, "abcdabefz")
    clock.now += AGE + 1
    with closing(TopicScan(folder.topic(TOPIC))) as scan:
        (part,) = scan.report.partitions
        reading = scan.intact_rows(part)
        for _ in range(3):
            next(reading)
        assert enforce(folder, TOPIC, clock.now_ms()) == {0: 2}
        assert [row.first for row in reading] == [8]
        assert (part.records, part.lost) == (9, [])


def test_a_sparse_row_survives_a_repair_without_the_description(tmp_path: Path) -> None:
    """If it fails, repairing a compacted topic loses what compaction kept."""
    folder, clock = make_topic(tmp_path, compact=True, retention_ms=AGE), SetClock()
    fill(folder, clock, "aAbbz")
    clock.now += AGE + 1
    enforce(folder, TOPIC, clock.now_ms())
    before = stored(folder)
    with closing(apsw.Connection(str(folder.topic(TOPIC).db))) as connection:
        connection.execute("UPDATE meta SET crc = crc + 1")
    repair(tmp_path)
    assert stored(folder) == before
    assert verify(tmp_path).is_sound


def test_an_older_version_refuses_a_compacted_topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, an older version takes sparse rows for damage, and a repair with it deletes them."""
    folder = make_topic(tmp_path, compact=True)
    monkeypatch.setattr(sqlite_file, "COMPACTED_FORMAT", sqlite_file.FORMAT)
    with pytest.raises(NewerFormat):
        TopicReader(folder, TOPIC)


class Killed(Exception):
    """The process ended here."""


@dataclass
class Follower:
    """A reader that keeps a table, as the table service does. fresh_ms: when it last was at the end, or began."""

    fresh_ms: int
    position: int = 0
    rows: dict[bytes, bytes] = field(default_factory=dict)


@dataclass
class World:
    """A compacted partition, and what it must hold. past: every record that was appended, with its time."""

    folder: DataFolder
    clock: SetClock
    past: list[tuple[Record, int]] = field(default_factory=list)
    followers: list[Follower] = field(default_factory=list)

    def append(self, keys: list[tuple[int, bool]]) -> None:
        items = [event(b"k%d" % key, None if gone else b"%d" % len(self.past)) for key, gone in keys]
        store(self.folder, 0, items, self.clock)
        self.past += [(item, self.clock.now) for item in items]

    def wait(self, share: int) -> None:
        self.clock.now += AGE * share // 10

    def compact(self, kill_at: int) -> None:
        """kill_at: the transaction before which the process ends; 0: none."""
        whole, count = DurableFile.transact, 0

        def transact(self: DurableFile, *given: Any) -> Any:
            nonlocal count
            count += 1
            if count == kill_at:
                raise Killed
            return whole(self, *given)

        with pytest.MonkeyPatch.context() as patch, suppress(Killed):
            patch.setattr(DurableFile, "transact", transact)
            patch.setattr(compaction, "_MERGED_ROWS", 3)
            enforce(self.folder, TOPIC, self.clock.now_ms())

    def begin(self) -> None:
        self.followers.append(Follower(self.clock.now))

    def follow(self, count: int) -> None:
        with TopicReader(self.folder, TOPIC) as reader:
            for follower in self.followers:
                left = count
                while left > 0 and (run := reader.read(0, follower.position, 1)) is not None:
                    for record in run.records:
                        assert record.key is not None
                        if record.value is None:
                            follower.rows.pop(record.key, None)
                        else:
                            follower.rows[record.key] = record.value
                    follower.position, left = run.next, left - 1
                if follower.position == len(self.past):
                    self.check_follower(follower)

    def check_follower(self, follower: Follower) -> None:
        if self.clock.now - follower.fresh_ms < AGE:
            assert follower.rows == self.table()
        follower.rows = self.table()  # one that was away for longer has to begin again
        follower.fresh_ms = self.clock.now

    def table(self) -> dict[bytes, bytes]:
        rows: dict[bytes, bytes | None] = {}
        for record, _ in self.past:
            rows[record.key or b""] = record.value
        return {key: value for key, value in rows.items() if value is not None}

    def check(self) -> None:
        kept = stored(self.folder)
        assert list(kept) == sorted(kept)
        newest = {record.key: offset for offset, (record, _) in enumerate(self.past)}
        for offset, (record, at) in enumerate(self.past):
            if offset in kept:
                assert kept[offset] == record
                continue
            assert self.clock.now - at > AGE, "a young record is gone"
            assert newest[record.key] > offset or record.value is None, "the newest record of a key is gone"
        if self.past:
            assert len(self.past) - 1 in kept
        assert verify(self.folder.root).is_sound


_KEYS = st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=6)
_STEPS = st.one_of(
    st.builds(lambda keys: lambda world: world.append(keys), _KEYS),
    st.builds(lambda share: lambda world: world.wait(share), st.integers(1, 25)),
    st.builds(lambda at: lambda world: world.compact(at), st.integers(0, 4)),
    st.builds(lambda count: lambda world: world.follow(count), st.integers(1, 4)),
    st.just(World.begin),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(_STEPS, min_size=5, max_size=40))
def test_any_history_keeps_what_a_table_needs(steps: list[Callable[[World], None]]) -> None:
    """Appends, tombstones, waits, passes that are killed before any transaction, and readers in the middle, against a dict. If it
    fails, compaction loses the newest record of a key, an early one, or a tombstone that a reader still needs."""
    with tempfile.TemporaryDirectory() as path:
        world = World(make_topic(Path(path), compact=True, retention_ms=AGE), SetClock())
        for step in steps:
            step(world)
            world.check()
        for _ in range(3):
            world.wait(21)
            world.compact(0)
            world.check()
        world.follow(1000)
