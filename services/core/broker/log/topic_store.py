"""One open topic file: its description, its ends, the one way to change it, and the search for rows.

Blocking; used from worker threads and from Spark workers. One thread at a time.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

import apsw

from services.core.broker.errors import DataDamaged, UnknownTopic
from services.core.broker.log.data_folder import DataFolder, TopicFiles
from services.core.broker.log.high_water_marks import HighWaterMarks, require_no_loss
from services.core.broker.log.row_format import MAX_OFFSET, Row, read_row, row_position
from services.core.broker.log.sqlite_file import (
    FAULTS,
    GROUPS_TABLE,
    DurableFile,
    checksum,
    classified,
    fetch,
    is_damage,
    opened,
    read_meta,
)

COLUMNS = "pos, count, max_ts, top_ts, stored_ms, total, crc, data"


class Head(NamedTuple):
    """A partition holds `start <= offset < next`. The other fields are those of its last row (0 without one)."""

    start: int
    next: int
    top_ts: int
    stored_ms: int
    total: int


class TopicStore(DurableFile):
    """An open topic file."""

    def __init__(self, files: TopicFiles, lock: int, connection: apsw.Connection) -> None:
        self.topic = files.topic
        self.meta = read_meta(connection, files.topic)
        super().__init__(files, lock, connection, HighWaterMarks.open(files.marks, files.topic, self.meta.incarnation))

    @classmethod
    def open(cls, folder: DataFolder, topic: str) -> "TopicStore":
        """Raises UnknownTopic, DataDamaged (the topic's description is damaged), Unavailable (it is being repaired)."""
        files = folder.topic(topic)
        if not files.db.exists():
            require_no_loss(files)
            raise UnknownTopic(f"no topic {topic!r}. Try: declare it under `streams:` in the pipe file")
        with opened(files) as (lock, connection):
            return cls(files, lock, connection)

    def partition_starts(self) -> list[tuple[int, int]]:
        """(start, floor) of each partition: its first offset, and the least offset that a new record may get."""
        rows = fetch(self.connection, "SELECT p, start, floor, crc FROM partitions ORDER BY p")
        for index, (p, start, floor, crc) in enumerate(rows):
            if p != index or checksum(p, start, floor) != crc:
                raise DataDamaged(self.topic, (), f"the description of partition {index} is altered")
        if len(rows) < self.meta.partitions:
            raise DataDamaged(
                self.topic, (), f"{self.meta.partitions - len(rows)} partitions are not described any more"
            )
        return [(start, floor) for _, start, floor, _ in rows]

    def start_of(self, partition: int) -> int:
        """The first offset that a partition keeps. Raises DataDamaged."""
        rows = fetch(self.connection, "SELECT p, start, floor, crc FROM partitions WHERE p=?", (partition,))
        if not rows or checksum(*rows[0][:3]) != rows[0][3]:
            raise DataDamaged(self.topic, (), f"the description of partition {partition} is altered")
        start: int = rows[0][1]
        return start

    def set_partition(self, partition: int, start: int, floor: int) -> None:
        """Write one partition's description; inside of `transact`."""
        crc = checksum(partition, start, floor)
        self.connection.execute("INSERT OR REPLACE INTO partitions VALUES(?,?,?,?)", (partition, start, floor, crc))

    def writer_epoch(self, writer: str) -> int | None:
        """The newest epoch that an exactly-once writer stored, None before the first. Raises DataDamaged."""
        rows = fetch(self.connection, "SELECT epoch, crc FROM writers WHERE writer=?", (writer,))
        if not rows:
            return None
        epoch: int = rows[0][0]
        if checksum(writer, epoch) != rows[0][1]:
            raise DataDamaged(self.topic, (), f"the last epoch of writer {writer!r} is altered")
        return epoch

    def groups(self) -> set[str]:
        """The groups that have begun to read this topic. Raises DataDamaged when one of the names is altered."""
        with classified(self.topic):
            names = dict(self._group_rows())
        if any(checksum(name) != crc for name, crc in names.items()):
            raise DataDamaged(self.topic, (), "the names of its groups are altered. Try: penstock log repair")
        return set(names)

    def register_group(self, group: str) -> None:
        """Store, durably, that the group has begun to read this topic: it must not begin again when groups.db is lost."""
        if (group, checksum(group)) in self._group_rows():
            return

        def insert() -> None:
            self.connection.execute(GROUPS_TABLE)
            self.connection.execute("INSERT OR REPLACE INTO groups VALUES(?,?)", (group, checksum(group)))

        self.transact(insert, lambda _: {}, 0)

    def _group_rows(self) -> list[tuple[str, int]]:
        if not fetch(self.connection, "SELECT 1 FROM sqlite_master WHERE type='table' AND name='groups'"):
            return []
        return fetch(self.connection, "SELECT grp, crc FROM groups")

    def heads(self) -> list[Head]:
        return [self._head(p, start, floor) for p, (start, floor) in enumerate(self.partition_starts())]

    def _head(self, partition: int, start: int, floor: int) -> Head:
        last = self.connection.execute(
            "SELECT pos, count, top_ts, stored_ms, total FROM batches WHERE pos BETWEEN ? AND ? ORDER BY pos DESC LIMIT 1",
            (row_position(partition, 0), row_position(partition, MAX_OFFSET)),
        ).fetchone()
        if last is None:
            return Head(start, max(start, floor), 0, 0, 0)
        pos, *rest = last
        count, top_ts, stored_ms, total = (value if type(value) is int else 0 for value in rest)  # damage changes types
        return Head(start, max((pos & MAX_OFFSET) + count, floor), top_ts, stored_ms, total)

    def check_tail(self) -> None:
        """Make sure that nothing acknowledged is missing at the end of any partition.

        Raises DataDamaged naming exactly the missing offsets: those between the end of the file and the mark, and the
        last row of a partition if it is altered.
        """
        marks = self.marks.read(self.meta.partitions)
        heads = self.heads()
        missing = []
        for partition, (head, mark) in enumerate(zip(heads, marks, strict=False)):
            row = self.connection.execute(
                f"SELECT {COLUMNS} FROM batches WHERE pos BETWEEN ? AND ? ORDER BY pos DESC LIMIT 1",  # noqa: S608
                (row_position(partition, 0), row_position(partition, MAX_OFFSET)),
            ).fetchone()
            if row is not None and read_row(Row(*row)) is None:
                missing.append((partition, row[0] & MAX_OFFSET, max(mark, head.next) - 1))
            elif head.next < mark:
                missing.append((partition, head.next, mark - 1))
        if missing:
            raise DataDamaged(
                self.topic,
                tuple(missing),
                "acknowledged records are missing. Try: penstock log verify, then penstock log repair",
            )
        self.marks.raise_to({p: head.next for p, head in enumerate(heads)}, len(heads))

    def sync_and_mark(self) -> None:
        """Sync and mark the records of a writer that ended between commit and mark. Raises Unavailable, DataDamaged."""
        self.rewrite_wal()
        self.marks.raise_to({p: head.next for p, head in enumerate(self.heads())}, self.meta.partitions)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Several reads of the same state."""
        self.connection.execute("BEGIN")
        try:
            yield
        finally:
            self.connection.execute("COMMIT")


class OpenTopic:
    """A reader or writer of one topic file; a context manager that closes it."""

    def __init__(self, store: TopicStore) -> None:
        self._store = store

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


# Finding rows: by halves over the columns that never decrease, and behind damage.


def first_row_from(connection: apsw.Connection, partition: int, head: Head, column: str, least: int) -> int:
    """Offset of the first row whose `column` (top_ts, stored_ms or total) is at least this; head.next when none is."""
    low, high = head.start, head.next
    while low < high:
        middle = (low + high) // 2
        row = connection.execute(
            f"SELECT pos, count, {column} FROM batches WHERE pos BETWEEN ? AND ? ORDER BY pos DESC LIMIT 1",  # noqa: S608
            (row_position(partition, 0), row_position(partition, middle)),
        ).fetchone()
        pos, count, value = row or (0, 0, None)
        if type(value) is int and value >= least:
            high = min(middle, pos & MAX_OFFSET)
        else:
            low = max(middle + 1, (pos & MAX_OFFSET) + count if type(count) is int else 0)
    return low


def first_row_since(connection: apsw.Connection, partition: int, head: Head, timestamp: int) -> Row | None:
    """The first row that holds a record of this timestamp or newer."""
    offset = first_row_from(connection, partition, head, "top_ts", timestamp)
    row = connection.execute(
        f"SELECT {COLUMNS} FROM batches WHERE pos BETWEEN ? AND ? AND max_ts >= ? ORDER BY pos LIMIT 1",  # noqa: S608
        (row_position(partition, offset), row_position(partition, MAX_OFFSET), timestamp),
    ).fetchone()
    return None if row is None else Row(*row)


def next_intact(connection: apsw.Connection, partition: int, offset: int, end: int) -> int:
    """The offset of the first intact row behind damage at `offset`, else `end`."""
    while offset < end:
        try:
            row = row_behind(connection, partition, offset)
        except FAULTS as error:
            if not is_damage(error):
                raise
            offset = _step_over(connection, partition, offset, end)
            continue
        if row is None:
            return end
        if read_row(row) is not None:
            return row.first
        offset = row.first
    return end


def row_behind(connection: apsw.Connection, partition: int, offset: int) -> Row | None:
    """The next row of the partition that begins behind `offset`. Raises SQLite's errors, also for rows out of order."""
    row = connection.execute(
        f"SELECT {COLUMNS} FROM batches WHERE pos > ? AND pos <= ? ORDER BY pos LIMIT 1",  # noqa: S608
        (row_position(partition, offset), row_position(partition, MAX_OFFSET)),
    ).fetchone()
    if row is not None and not row_position(partition, offset) < row[0] <= row_position(partition, MAX_OFFSET):
        raise apsw.CorruptError("a row is out of order")
    return None if row is None else Row(*row)


def row_that_holds(connection: apsw.Connection, partition: int, offset: int) -> Row | None:
    """The row whose span has this offset. Raises SQLite's errors."""
    row = connection.execute(
        f"SELECT {COLUMNS} FROM batches WHERE pos BETWEEN ? AND ? ORDER BY pos DESC LIMIT 1",  # noqa: S608
        (row_position(partition, 0), row_position(partition, offset)),
    ).fetchone()
    found = None if row is None else Row(*row)
    return found if found is not None and found.first <= offset < found.end else None


def behind_accepted(accepted: Sequence[tuple[int, int]], offset: int) -> int:
    """The first offset from this one on that no repair has given up. accepted: (first, last) in order."""
    for first, last in accepted:
        if first <= offset <= last:
            offset = last + 1
    return offset


def _step_over(connection: apsw.Connection, partition: int, offset: int, end: int) -> int:
    """The least offset behind which SQLite can read a row again: doubling steps, then halves between the last two."""
    fails, step = offset, 1
    while not _is_readable(connection, partition, offset + step):
        fails = offset + step
        step *= 2
        if offset + step >= end:
            return end
    works = offset + step
    while works - fails > 1:
        middle = (fails + works) // 2
        if _is_readable(connection, partition, middle):
            works = middle
        else:
            fails = middle
    return works


def _is_readable(connection: apsw.Connection, partition: int, offset: int) -> bool:
    try:
        row_behind(connection, partition, offset)
    except FAULTS as error:
        if not is_damage(error):
            raise
        return False
    return True
