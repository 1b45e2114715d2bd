"""Topics come and go whole, whoever else has them open."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import NewerFormat, TopicExists, UnknownTopic
from services.core.broker.log import sqlite_file, topics
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.row_format import pack_all
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.log.topic_writer import TopicWriter
from tests.unit.log.sample import TOPIC, make_topic, numbers, records, store

_CREATE = """
import sys
from services.core.broker.contract import TopicSpec
from services.core.broker.errors import TopicExists
from services.core.broker.log import topics
from services.core.broker.log.data_folder import DataFolder
folder = DataFolder.prepare(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
won = 0
for number in range(20):
    try:
        topics.create_topic(folder, TopicSpec(f"t{number}", partitions=2))
        won += 1
    except TopicExists:
        pass
print(won)
"""


def test_two_processes_create_the_same_topics(tmp_path: Path) -> None:
    """If it fails, two services that start together make one topic twice, and one of them writes into a lost file."""
    command = [sys.executable, "-c", _CREATE, str(tmp_path)]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    won = []
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        out, _ = child.communicate(timeout=600)
        won.append(int(out))
    assert sum(won) == 20
    assert topics.list_topics(DataFolder(tmp_path)) == {f"t{number}": 2 for number in range(20)}


def test_creation_leaves_no_drafts(tmp_path: Path) -> None:
    """If it fails, the folder fills with half-made files."""
    folder = make_topic(tmp_path)
    with pytest.raises(TopicExists):
        topics.create_topic(folder, TopicSpec(TOPIC))
    assert not [path.name for path in folder.topics.iterdir() if path.name.startswith(".")]


def test_left_over_files_of_a_cut_off_deletion_do_not_leak_into_a_new_topic(tmp_path: Path) -> None:
    """If it fails, SQLite plays an old topic's write-ahead log into the new one."""
    folder = make_topic(tmp_path)
    files = folder.topic(TOPIC)
    with TopicWriter(folder, TOPIC, WallClock()) as writer:
        writer.append({0: pack_all(records(0, 50))})
        old = files.wal.read_bytes()
    topics.delete_topic(folder, TOPIC)
    files.wal.write_bytes(old)
    topics.create_topic(folder, TopicSpec(TOPIC, partitions=1))
    assert numbers(folder) == []


def test_an_old_handle_does_not_touch_the_topic_made_again(tmp_path: Path) -> None:
    """If it fails, closing a stale handle unlinks the new topic's write-ahead log: acknowledged events are gone."""
    folder = make_topic(tmp_path)
    with TopicWriter(folder, TOPIC, WallClock()) as stale:
        stale.append({0: pack_all(records(0, 5))})
        topics.delete_topic(folder, TOPIC)
        topics.create_topic(folder, TopicSpec(TOPIC, partitions=1))
        with TopicWriter(folder, TOPIC, WallClock()) as fresh:
            fresh.append({0: pack_all(records(100, 5))})
            with pytest.raises(UnknownTopic):
                stale.append({0: pack_all(records(5, 5))})
            stale_reader_sees = numbers(folder)
    assert stale_reader_sees == numbers(folder) == list(range(100, 105))


def test_a_deletion_cut_off_half_way_is_finished(tmp_path: Path) -> None:
    """If it fails, a topic that died while being deleted can neither be used nor made again."""
    folder = make_topic(tmp_path)
    store(folder, 0, records(0, 5))
    with TopicReader(folder, TOPIC) as reader:
        meta = msgspec.structs.replace(reader.store.meta, deleted=True)
        connection = reader.store.connection
        reader.store.transact(lambda: sqlite_file.write_meta(connection, meta), lambda _: {}, 0)
    assert topics.list_topics(folder) == {}
    topics.create_topic(folder, TopicSpec(TOPIC, partitions=1))
    assert numbers(folder) == []


def test_a_newer_format_is_refused_loudly(tmp_path: Path) -> None:
    """If it fails, an old version reads a newer file wrongly."""
    folder = make_topic(tmp_path)
    with TopicReader(folder, TOPIC) as reader:
        meta = msgspec.structs.replace(reader.store.meta, format=sqlite_file.COMPACTED_FORMAT + 1)
        connection = reader.store.connection
        reader.store.transact(lambda: sqlite_file.write_meta(connection, meta), lambda _: {}, 0)
    with pytest.raises(NewerFormat, match=r"has format 3, written by a newer Penstock.*docs/upgrading\.md"):
        TopicReader(folder, TOPIC)


def test_growing(tmp_path: Path) -> None:
    """If it fails, a topic loses records or marks when it grows."""
    folder = make_topic(tmp_path, partitions=2)
    store(folder, 1, records(0, 5))
    with TopicWriter(folder, TOPIC, WallClock()) as writer:
        writer.append({0: pack_all(records(0, 3))})
        topics.add_partitions(folder, TOPIC, 4)
        writer.append({3: pack_all(records(50, 5))})
    assert [numbers(folder, p) for p in range(4)] == [[0, 1, 2], [0, 1, 2, 3, 4], [], [50, 51, 52, 53, 54]]
    with pytest.raises(ValueError, match="partitions"):
        topics.add_partitions(folder, TOPIC, 4)
