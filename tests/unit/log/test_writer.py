"""Appending: gapless for any number of writers, fenced where asked, and refused before the disk is full."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import apsw
import pytest

from services.core.broker.errors import DataDamaged, StorageFull, Unavailable, UnknownTopic
from services.core.broker.log import sqlite_file
from services.core.broker.log.clock import WallClock
from services.core.broker.log.repair import verify
from services.core.broker.log.row_format import pack_all, row_position
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.log.topic_writer import Fence, TopicWriter
from tests.unit.log.sample import TOPIC, make_topic, numbers, records, store

_APPEND = """
import sys
from services.core.broker.log.clock import WallClock
from services.core.broker.log.row_format import pack_all
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.topic_writer import TopicWriter
from tests.unit.log.sample import TOPIC, records
folder, first = DataFolder.prepare(sys.argv[1]), int(sys.argv[2])
with TopicWriter(folder, TOPIC, WallClock()) as writer:
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(first, first + 100):
        writer.append({0: pack_all(records(number, 1)), 1: pack_all(records(number, 1))})
"""


def test_several_processes_append_without_gaps(tmp_path: Path) -> None:
    """If it fails, two ingest processes overwrite each other's events."""
    folder = make_topic(tmp_path, partitions=2)
    command = [sys.executable, "-c", _APPEND, str(tmp_path)]
    pipe = subprocess.PIPE
    children = [subprocess.Popen([*command, str(n * 1000)], stdin=pipe, stdout=pipe, text=True) for n in range(3)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        child.communicate(timeout=600)
        assert child.returncode == 0
    for partition in range(2):
        found = numbers(folder, partition)
        assert sorted(found) == sorted(n * 1000 + i for n in range(3) for i in range(100))
        assert [n for n in found if n < 1000] == list(range(100)), "one writer's appends changed their order"
    assert verify(tmp_path).is_sound


def test_small_blocks_share_a_row_and_keep_their_offsets(tmp_path: Path) -> None:
    """If it fails, requests of one event each make one row each, and every reader pays for it."""
    folder = make_topic(tmp_path)
    with TopicWriter(folder, TOPIC, WallClock()) as writer:
        blocks = [block for n in range(50) for block in pack_all(records(n, 1))]
        firsts = writer.append({0: blocks})
    assert firsts == {0: list(range(50))}
    assert numbers(folder) == list(range(50))
    with TopicReader(folder, TOPIC) as reader:
        assert sqlite_file.fetch(reader.store.connection, "SELECT count(*) FROM batches") == [(1,)]


def test_large_blocks_get_rows_of_their_own(tmp_path: Path) -> None:
    """If it fails, one transaction of large batches becomes one giant row."""
    folder = make_topic(tmp_path)
    with TopicWriter(folder, TOPIC, WallClock()) as writer:
        firsts = writer.append({0: [block for n in range(3) for block in pack_all(records(n * 10, 10, size=20_000))]})
    assert firsts == {0: [0, 10, 20]}
    assert numbers(folder) == list(range(30))
    with TopicReader(folder, TOPIC) as reader:
        assert sqlite_file.fetch(reader.store.connection, "SELECT pos FROM batches") == [(0,), (10,), (20,)]


def test_more_rows_than_one_statement_takes(tmp_path: Path) -> None:
    """If it fails, a large transaction loses the rows behind the first statement."""
    folder = make_topic(tmp_path)
    store(folder, 0, records(0, 2000, size=10_000))
    assert numbers(folder) == list(range(2000))


def test_a_fenced_epoch_is_stored_once(tmp_path: Path) -> None:
    """If it fails, a Spark batch that is run again is stored twice."""
    folder = make_topic(tmp_path)
    block = pack_all(records(0, 3))
    with TopicWriter(folder, TOPIC, WallClock()) as writer:
        assert writer.append({0: block}, Fence("job", 7)) == {0: [0]}
        assert writer.append({0: block}, Fence("job", 7)) is None
        assert writer.append({0: block}, Fence("job", 6)) is None
        assert writer.append({0: block}, Fence("other", 7)) == {0: [3]}
        assert writer.append({0: block}, Fence("job", 8)) == {0: [6]}
    assert numbers(folder) == [0, 1, 2] * 3


_HOLD = """
import apsw, sys
connection = apsw.Connection(sys.argv[1])
connection.execute("BEGIN IMMEDIATE")
print("ready", flush=True)
sys.stdin.readline()
"""


def test_who_holds_the_write_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a frozen process stops all the others, and none of them says which one it is."""
    folder = make_topic(tmp_path)
    real = sqlite_file.BusyHandler
    monkeypatch.setattr(sqlite_file, "BusyHandler", lambda path: real(path, seconds=0.0))
    command = [sys.executable, "-c", _HOLD, str(folder.topic(TOPIC).db)]
    with (
        TopicWriter(folder, TOPIC, WallClock()) as writer,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder,
    ):
        assert holder.stdout
        holder.stdout.readline()
        with pytest.raises(Unavailable, match=f"Process {holder.pid} holds it. Is its disk slow?"):
            writer.append({0: pack_all(records(0, 3))})
        whole, lists = Path.read_text, iter([""])  # the first list lacks the lock: others came and went
        monkeypatch.setattr(
            Path, "read_text", lambda path: next(lists, whole(path)) if path == Path("/proc/locks") else whole(path)
        )
        assert sqlite_file.find_lock_holder(folder.topic(TOPIC).db) == holder.pid
        holder.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(Unavailable, match=f"is stopped. Try: kill -CONT {holder.pid}"):
            writer.append({0: pack_all(records(0, 3))})
        holder.kill()
        holder.wait()
        writer.append({0: pack_all(records(0, 3))})
    assert numbers(folder) == [0, 1, 2]


def test_an_altered_epoch_is_damage(tmp_path: Path) -> None:
    """If it fails, one flipped bit makes a job's next batches pass as stored already: a silent loss."""
    folder = make_topic(tmp_path)
    with TopicWriter(folder, TOPIC, WallClock()) as writer:
        writer.append({0: pack_all(records(0, 3))}, Fence("job", 7))
    with TopicReader(folder, TOPIC) as reader:
        reader.store.connection.execute("UPDATE writers SET epoch = epoch | 64")
    with TopicWriter(folder, TOPIC, WallClock()) as writer, pytest.raises(DataDamaged):
        writer.append({0: pack_all(records(0, 3))}, Fence("job", 8))


def test_unknown_partitions_store_nothing(tmp_path: Path) -> None:
    """If it fails, records land where no consumer looks."""
    folder = make_topic(tmp_path, partitions=2)
    with TopicWriter(folder, TOPIC, WallClock()) as writer:
        with pytest.raises(UnknownTopic):
            writer.append({0: pack_all(records(0, 3)), 2: pack_all(records(0, 3))})
        assert numbers(folder) == []
        writer.append({0: pack_all(records(0, 3))})
    assert numbers(folder) == [0, 1, 2]


def test_appends_stop_before_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, appends take the last block, and then commits and leases of consumers fail too."""
    folder = make_topic(tmp_path)
    free = 5000
    disk = SimpleNamespace(f_bavail=free, f_frsize=4096, f_blocks=1_000_000)
    with TopicWriter(folder, TOPIC, WallClock()) as writer:
        writer.append({0: pack_all(records(0, 3))})
        monkeypatch.setattr(os, "statvfs", lambda _: disk)
        writer.append({0: pack_all(records(3, 3))})
        disk.f_bavail = 4000
        with pytest.raises(StorageFull, match="Try: freeing space"):
            writer.append({0: pack_all(records(6, 3))})
        disk.f_bavail = 5000
        writer.append({0: pack_all(records(6, 3))})
    assert numbers(folder) == list(range(9))


def test_sqlite_full_stores_nothing_and_heals(tmp_path: Path) -> None:
    """If it fails, a disk that is full all the same breaks the writer for good, or half of an append is stored."""
    folder = make_topic(tmp_path)
    with TopicWriter(folder, TOPIC, WallClock()) as writer:
        writer.append({0: pack_all(records(0, 3))})
        run = writer._store.connection.execute
        (pages,) = run("PRAGMA page_count").fetchone() or (0,)
        run(f"PRAGMA max_page_count={int(str(pages)) + 2}").fetchall()
        with pytest.raises(StorageFull):
            writer.append({0: pack_all(records(3, 50, size=10_000))})
        assert not writer.broken
        run("PRAGMA max_page_count=1000000").fetchall()
        writer.append({0: pack_all(records(3, 3))})
    assert numbers(folder) == list(range(6))
    assert verify(tmp_path).is_sound


def test_a_held_lock_is_unavailable_not_an_error_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, one frozen process makes others hang, or answer that the outcome is unknown."""
    monkeypatch.setattr(sqlite_file, "BUSY_SECONDS", 0.05)
    folder = make_topic(tmp_path)
    holder = apsw.Connection(str(folder.topic(TOPIC).db))
    try:
        with TopicWriter(folder, TOPIC, WallClock()) as writer:
            holder.execute("BEGIN IMMEDIATE")
            with pytest.raises(Unavailable, match="write lock"):
                writer.append({0: pack_all(records(0, 3))})
            holder.execute("ROLLBACK")
            writer.append({0: pack_all(records(0, 3))})
    finally:
        holder.close()
    assert numbers(folder) == [0, 1, 2]


def test_a_file_that_went_back_under_the_writer_is_noticed(tmp_path: Path) -> None:
    """If it fails, offsets that were acknowledged are given out a second time."""
    folder = make_topic(tmp_path)
    with TopicWriter(folder, TOPIC, WallClock()) as writer:
        writer.append({0: pack_all(records(0, 30))})
        with TopicReader(folder, TOPIC) as other:
            other.store.connection.execute("DELETE FROM batches WHERE pos = ?", (row_position(0, 0),))
        with pytest.raises(DataDamaged) as raised:
            writer.append({0: pack_all(records(30, 3))})
        assert raised.value.ranges == ((0, 0, 29),)
        assert writer.broken
    with pytest.raises(DataDamaged):
        TopicWriter(folder, TOPIC, WallClock())


def test_the_write_ahead_log_stays_short(tmp_path: Path) -> None:
    """If it fails, the write-ahead log grows without bound, and so does the time to open it after a crash."""
    folder = make_topic(tmp_path)
    with TopicWriter(folder, TOPIC, WallClock()) as writer:
        for number in range(60):
            writer.append({0: pack_all(records(number, 1, size=500_000))})
            if writer.is_checkpoint_due:
                writer.checkpoint()
        assert folder.topic(TOPIC).wal.stat().st_size < 10 << 20
    assert numbers(folder) == list(range(60))
