"""The cut: the state of a whole log at one moment, for a backup. Blocking.

The moment is that of a crash: the write locks of the groups and of all topics are held together, so nothing is committed anywhere
meanwhile. Every order in which the services write survives a crash at any moment, and so it survives in a backup: what a group
has committed is settled in the cut of the other topics; a position never lies beyond the records; a record that another one
names is there. Two copies that were made one after the other would need an order of copying for each of these.

Within the locks only descriptions and positions are read. Writers wait for a few milliseconds per hundred topics. The records
are copied afterwards: rows never change, and retention is held off until the copy ends. A topic that is deleted meanwhile can
still be read, because its file is open.
"""

import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import apsw

from services.core.broker.errors import DataDamaged, Unavailable, UnknownTopic
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.groups import GroupPosition
from services.core.broker.log.high_water_marks import HighWaterMarks, require_no_loss
from services.core.broker.log.retention import retention_suspended
from services.core.broker.log.sqlite_file import (
    BusyHandler,
    Meta,
    checksum,
    classified,
    fetch,
    opened,
    read_meta,
)
from services.core.broker.log.topic_store import TopicStore
from services.core.broker.log.topics import topic_names
from services.core.broker.record import TopicPartition

T = TypeVar("T")

_TRIES, _PATIENCE, _PAUSE = 20, 0.25, 0.05
"""The locks are given back and taken again when one of them is not free in time (seconds): no writer waits for long."""


@dataclass(slots=True)
class TopicCut:
    """One topic at the moment of the cut. Partition p holds the offsets `starts[p] <= offset < ends[p]`.

    gaps: rows of the table, accepted by repairs. store: open, to copy the records.
    """

    store: TopicStore
    meta: Meta
    starts: list[int]
    ends: list[int]
    gaps: list[Any]
    writers: list[Any]
    groups: list[str]


@dataclass(slots=True)
class Cut(Generic[T]):
    """A log at one moment. commits: the count in groups.db. beside: the result of `at_cut`. held_s: how long writers waited."""

    at_ms: int
    topics: list[TopicCut]
    groups: dict[tuple[str, TopicPartition], GroupPosition] = field(default_factory=dict)
    commits: int = 0
    beside: T | None = None
    held_s: float = 0.0


@contextmanager
def take_cut(folder: DataFolder, at_cut: Callable[[], T]) -> Iterator[Cut[T]]:
    """Cut the log; `at_cut` runs within the locks and must be short. Retention is held off until the context is left.

    Raises DataDamaged when the log does not have what it acknowledged, Unavailable when the locks are not free.
    """
    with ExitStack() as stack:
        stack.enter_context(retention_suspended(folder))
        with ExitStack() as locks:
            locks.enter_context(folder.locked_catalog())
            stores = _open_topics(folder, stack)
            groups = _open_groups(folder, locks)
            files = [("groups", groups[0])] if groups is not None else []
            files += [(store.topic, store.connection) for store in stores]
            begun = _lock_all(files, locks)
            cut = Cut[T](time.time_ns() // 1_000_000, [_cut_topic(store) for store in stores])
            if groups is not None:
                cut.groups, cut.commits = _read_groups(*groups)
            cut.beside = at_cut()
        cut.held_s = time.monotonic() - begun
        yield cut


def _open_topics(folder: DataFolder, stack: ExitStack) -> list[TopicStore]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):  # each topic has four open files
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    stores = []
    for topic in topic_names(folder):
        try:
            store = TopicStore.open(folder, topic)
        except UnknownTopic:
            continue
        stack.callback(store.close)
        stores.append(store)
    return stores


def _open_groups(folder: DataFolder, locks: ExitStack) -> tuple[apsw.Connection, HighWaterMarks] | None:
    """None before the first group."""
    files = folder.groups
    if not files.db.exists():
        require_no_loss(files)
        return None
    with opened(files) as (lock, connection):
        marks = HighWaterMarks.open(files.marks, "groups", read_meta(connection, "groups").incarnation)
    locks.callback(os.close, lock)
    locks.callback(connection.close)
    locks.callback(marks.close)
    return connection, marks


def _lock_all(files: Sequence[tuple[str, apsw.Connection]], locks: ExitStack) -> float:
    """Take the write lock of every file; `locks` gives them back. Returns when the first was taken, by `time.monotonic`.

    Nobody else holds two of them, so none waits for ever.
    """
    busy = Unavailable("no file")
    for _, connection in files:
        connection.set_busy_handler(BusyHandler(Path(connection.filename), _PATIENCE))
    for _ in range(_TRIES):
        begun = time.monotonic()
        with ExitStack() as held:
            try:
                for topic, connection in files:
                    with classified(topic):
                        connection.execute("BEGIN IMMEDIATE")
                    held.callback(connection.execute, "ROLLBACK")
            except Unavailable as error:
                busy = error
                held.close()
                time.sleep(_PAUSE)
                continue
            locks.push(held.pop_all())
            return begun
    raise busy


def _cut_topic(store: TopicStore) -> TopicCut:
    topic, connection = store.topic, store.connection
    with classified(topic):
        meta = read_meta(connection, topic)
        marks = store.marks.read(meta.partitions)
        store.meta = meta
        heads = store.heads()
        gaps = fetch(connection, "SELECT * FROM gaps ORDER BY p, first")
        writers = fetch(connection, "SELECT writer, epoch, crc FROM writers ORDER BY writer")
        groups = sorted(store.groups())
    lost = tuple((p, h.next, mark - 1) for p, (h, mark) in enumerate(zip(heads, marks, strict=True)) if h.next < mark)
    if lost:
        raise DataDamaged(topic, lost, "acknowledged records are missing")
    if any(checksum(writer, epoch) != crc for writer, epoch, crc in writers):
        raise DataDamaged(topic, (), "the last epoch of a writer is altered")
    return TopicCut(store, meta, [h.start for h in heads], [h.next for h in heads], gaps, writers, groups)


def _read_groups(
    connection: apsw.Connection, marks: HighWaterMarks
) -> tuple[dict[tuple[str, TopicPartition], GroupPosition], int]:
    found = {}
    with classified("groups"):
        ((commits,),) = fetch(connection, "SELECT commits FROM state WHERE id=1")
        rows = fetch(connection, "SELECT grp, topic, partition, incarnation, begin, processed, crc FROM offsets")
    if commits < marks.read(1)[0]:
        raise DataDamaged("groups", (), "commits of offsets are missing")
    for group, topic, partition, *value, crc in rows:
        source = TopicPartition(topic, partition)
        if checksum(group, *source, *value) != crc:
            raise DataDamaged(
                "groups", (), f"the committed offset of group {group!r} is altered. Try: penstock log verify"
            )
        found[group, source] = GroupPosition(*value)
    return found, commits
