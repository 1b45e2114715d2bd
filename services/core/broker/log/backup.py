"""A copy of the log: one SQLite file per topic, and its counts and groups' positions for a manifest. Blocking.

Every row is compared with its checksum while it is copied, so a copy that was made can be read. Memory: a few rows.

A restored topic gets a new incarnation. Offsets behind the copy are given again, to other records; whatever remembers the
lost topic from elsewhere (a checkpoint in an object store, a group of another copy) then finds another topic, instead of passing
over the new records.
"""

import errno
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import msgspec

from services.core.broker.errors import DataDamaged
from services.core.broker.log.cut import Cut, TopicCut
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.groups import GroupPosition, write_groups
from services.core.broker.log.high_water_marks import HighWaterMarks
from services.core.broker.log.row_format import MAX_OFFSET, Row, read_row, row_position
from services.core.broker.log.sqlite_file import (
    FAULTS,
    GROUPS_TABLE,
    PAGE_BYTES,
    TOPIC_TABLES,
    checksum,
    classified,
    classify,
    connect,
    fetch,
    read_meta,
    write_meta,
)
from services.core.broker.log.topic_store import COLUMNS, behind_accepted
from services.core.broker.record import TopicPartition

_INSERT = f"INSERT INTO batches({COLUMNS}) VALUES (?,?,?,?,?,?,?,?)"  # noqa: S608 - constants only
_ROWS = 16
"""Per page: some megabytes."""

Progress = Callable[[int], None]
"""Called with a number of further records."""


class PartitionCopy(msgspec.Struct, frozen=True):
    """Offsets `start <= offset < end`. records: those that can be read; less than end - start where a repair accepted a loss."""

    partition: int
    start: int
    end: int
    records: int


class TopicCopy(msgspec.Struct, frozen=True):
    """One topic. incarnation: of the topic that was copied, in hexadecimal."""

    topic: str
    incarnation: str
    partitions: list[PartitionCopy]

    @property
    def records(self) -> int:
        return sum(part.records for part in self.partitions)


class GroupCopy(msgspec.Struct, frozen=True):
    """`GroupPosition` of a group in a partition. partition: also `groups.ALL`."""

    group: str
    topic: str
    partition: int
    incarnation: str
    begin: int
    processed: int | None

    @property
    def next(self) -> int:
        """The offset to read next."""
        return self.begin if self.processed is None else self.processed + 1


class LogCopy(msgspec.Struct, frozen=True):
    """A log at the moment `at_ms`. commits: of the groups' offsets."""

    at_ms: int
    topics: list[TopicCopy]
    groups: list[GroupCopy]
    commits: int

    @property
    def records(self) -> int:
        return sum(topic.records for topic in self.topics)

    def unread(self) -> dict[str, int]:
        """By group, the records that it had still to process in the topics where it has begun."""
        ends = {(topic.incarnation, part.partition): part.end for topic in self.topics for part in topic.partitions}
        found: dict[str, int] = {}
        for one in self.groups:
            end = ends.get((one.incarnation, one.partition))
            if end is not None:
                found[one.group] = found.get(one.group, 0) + max(0, end - one.next)
        return found


def copy_log(cut: Cut[Any], target: Path, progress: Progress) -> LogCopy:
    """Copy every topic of the cut into a file `<topic>.db` in the folder `target`, synced.

    Raises DataDamaged, Unavailable, StorageFull for the log, OSError for the target.
    """
    topics = [_copy_topic(topic, target / f"{topic.meta.topic}.db", progress) for topic in cut.topics]
    groups = [
        GroupCopy(group, *source, value.incarnation.hex(), value.begin, value.processed)
        for (group, source), value in sorted(cut.groups.items())
    ]
    return LogCopy(cut.at_ms, topics, groups, cut.commits)


def check_topic(path: Path, copy: TopicCopy, progress: Progress) -> list[str]:
    """Read every record of a copied topic; gives the differences from its counts. Changes nothing, also not beside the file."""
    try:
        with closing(_open_readonly(path)) as connection:
            meta = read_meta(connection, copy.topic)
            if meta.incarnation.hex() != copy.incarnation or meta.partitions != len(copy.partitions):
                return [f"{path.name} is another topic than the manifest says"]
            gaps = fetch(connection, "SELECT * FROM gaps ORDER BY p, first")
            found = []
            for part in copy.partitions:
                records = 0
                for row in _rows(connection, copy.topic, part.partition, part.start, part.end, gaps):
                    records += _count(row, part.start)
                    progress(_count(row, part.start))
                if records != part.records:
                    found.append(f"{path.name} has {records} records in partition {part.partition}, not {part.records}")
            return found
    except DataDamaged as error:
        return [f"{path.name}: {error}"]
    except (*FAULTS, ValueError) as error:
        return [f"{path.name} cannot be read: {error}"]


def adopt_log(folder: DataFolder, copy: LogCopy) -> dict[str, str]:
    """Make a log of copied topic files that are in `folder.topics`: marks, groups without members, new incarnations; durable.

    Returns the new incarnation by the old one, both in hexadecimal. Raises BrokerError kinds, OSError.
    """
    renewed: dict[str, str] = {}
    for topic in copy.topics:
        files, incarnation = folder.topic(topic.topic), uuid.uuid4().bytes
        renewed[topic.incarnation] = incarnation.hex()
        with classified(topic.topic), closing(connect(files.db)) as connection, connection:
            write_meta(connection, msgspec.structs.replace(read_meta(connection, topic.topic), incarnation=incarnation))
        HighWaterMarks.create(files.marks, incarnation, [part.end for part in topic.partitions])
    progress = {
        (one.group, TopicPartition(one.topic, one.partition)): GroupPosition(
            bytes.fromhex(renewed.get(one.incarnation, one.incarnation)), one.begin, one.processed
        )
        for one in copy.groups
    }
    incarnation, files = uuid.uuid4().bytes, folder.groups
    with classified("groups"):
        write_groups(files.db, incarnation, copy.commits, progress)
    HighWaterMarks.create(files.marks, incarnation, [copy.commits])
    folder.sync_names()
    return renewed


def _copy_topic(cut: TopicCut, path: Path, progress: Progress) -> TopicCopy:
    try:
        return _write_copy(cut, path, progress)
    except apsw.Error as error:  # of the target: those of the log are classified where it is read
        number = errno.ENOSPC if isinstance(error, apsw.FullError) else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


def _write_copy(cut: TopicCut, path: Path, progress: Progress) -> TopicCopy:
    topic, source, partitions = cut.meta.topic, cut.store.connection, []
    with closing(_create(path)) as target:
        with target:
            target.execute(f"{TOPIC_TABLES}{GROUPS_TABLE}")
            write_meta(target, cut.meta)
            target.executemany("INSERT INTO writers VALUES(?,?,?)", cut.writers)
            target.executemany("INSERT INTO gaps VALUES(?,?,?,?,?)", cut.gaps)
            target.executemany("INSERT INTO groups VALUES(?,?)", [(group, checksum(group)) for group in cut.groups])
            target.executemany(
                "INSERT INTO partitions VALUES(?,?,?,?)",
                [(p, s, e, checksum(p, s, e)) for p, (s, e) in enumerate(zip(cut.starts, cut.ends, strict=True))],
            )
        for partition, (start, end) in enumerate(zip(cut.starts, cut.ends, strict=True)):
            records = 0
            with target:
                for row in _rows(source, topic, partition, start, end, cut.gaps):
                    target.execute(_INSERT, row)
                    records += _count(row, start)
                    progress(_count(row, start))
            partitions.append(PartitionCopy(partition, start, end, records))
        target.pragma("journal_mode", "wal")  # as the log opens it
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    return TopicCopy(topic, cut.meta.incarnation.hex(), partitions)


def _count(row: Row, start: int) -> int:
    return row.end - max(row.first, start)


def _rows(
    connection: apsw.Connection, topic: str, partition: int, start: int, end: int, gaps: Sequence[Any]
) -> Iterator[Row]:
    """The rows with the offsets from start to end, in order. Raises DataDamaged unless they are intact and without a gap that no
    repair has accepted."""
    accepted = [(first, last) for p, first, last, *_ in gaps if p == partition]
    expected, at = behind_accepted(accepted, start), row_position(partition, 0) - 1
    sql = f"SELECT {COLUMNS} FROM batches WHERE pos > ? AND pos <= ? ORDER BY pos LIMIT {_ROWS}"  # noqa: S608
    while True:
        try:
            page = fetch(connection, sql, (at, row_position(partition, min(end, MAX_OFFSET))))
        except FAULTS as error:
            raise classify(error, topic) from error
        for row in map(Row._make, page):
            at = row.pos
            if row.end <= start or row.first >= end:
                continue
            if row.first > expected:
                raise _damaged(topic, partition, expected, row.first - 1)
            if read_row(row) is None:
                raise _damaged(topic, partition, row.first, row.end - 1)
            expected = behind_accepted(accepted, row.end)
            yield row
        if len(page) < _ROWS:
            break
    if expected < end:
        raise _damaged(topic, partition, expected, end - 1)


def _damaged(topic: str, partition: int, first: int, last: int) -> DataDamaged:
    return DataDamaged(topic, ((partition, first, last),), "records are missing or altered")


def _create(path: Path) -> apsw.Connection:
    """An empty file, without a journal: a copy that is not finished is thrown away."""
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
    connection.execute(f"PRAGMA page_size={PAGE_BYTES}; PRAGMA cache_size=-2048")
    connection.pragma("journal_mode", "off")
    connection.pragma("synchronous", "off")
    return connection


def _open_readonly(path: Path) -> apsw.Connection:
    flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    return apsw.Connection(f"{path.absolute().as_uri()}?immutable=1", flags=flags)
