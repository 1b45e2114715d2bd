"""One topic file, open in this process: its description, its ends, and the one way to change it.

Blocking; used from worker threads and from Spark workers. One thread at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import NamedTuple, Self

import apsw

from services.core.broker.errors import DataDamaged, UnknownTopic
from services.core.broker.log import schema
from services.core.broker.log.durable import DurableFile, opened
from services.core.broker.log.faults import classified
from services.core.broker.log.frames import MAX_OFFSET, Row, place, read_row
from services.core.broker.log.layout import DataFolder, TopicFiles
from services.core.broker.log.marks import Marks, require_no_loss

COLUMNS = "pos, count, max_ts, top_ts, stored_ms, total, crc, data"


class Head(NamedTuple):
    """Where a partition stands: it holds `start <= offset < next`. The rest comes from its last row (0 without one)."""

    start: int
    next: int
    top_ts: int
    stored_ms: int
    total: int


class Store(DurableFile):
    """An open topic file."""

    def __init__(self, files: TopicFiles, lock: int, connection: apsw.Connection) -> None:
        self.topic = files.topic
        self.meta = schema.read_meta(connection, files.topic)
        super().__init__(files, lock, connection, Marks.open(files.marks, files.topic, self.meta.incarnation))

    @classmethod
    def open(cls, folder: DataFolder, topic: str) -> "Store":
        """Raises UnknownTopic, DataDamaged (its own description cannot be trusted), Unavailable (under repair)."""
        files = folder.topic(topic)
        if not files.db.exists():
            require_no_loss(files)
            raise UnknownTopic(f"no topic {topic!r}. Try: declare it under `streams:` in the pipe file")
        with opened(files) as (lock, connection):
            return cls(files, lock, connection)

    def partition_starts(self) -> list[tuple[int, int]]:
        """(start, floor) of each partition: the first offset kept, the least offset a new record may get."""
        rows = schema.fetch(self.connection, "SELECT p, start, floor, crc FROM partitions ORDER BY p")
        for index, (p, start, floor, crc) in enumerate(rows):
            if p != index or schema.guard(p, start, floor) != crc:
                raise DataDamaged(self.topic, (), f"the description of partition {index} is altered")
        if len(rows) < self.meta.partitions:
            raise DataDamaged(
                self.topic, (), f"{self.meta.partitions - len(rows)} partitions are not described any more"
            )
        return [(start, floor) for _, start, floor, _ in rows]

    def start_of(self, partition: int) -> int:
        """The first offset that a partition keeps. Raises DataDamaged."""
        rows = schema.fetch(self.connection, "SELECT p, start, floor, crc FROM partitions WHERE p=?", (partition,))
        if not rows or schema.guard(*rows[0][:3]) != rows[0][3]:
            raise DataDamaged(self.topic, (), f"the description of partition {partition} is altered")
        start: int = rows[0][1]
        return start

    def set_partition(self, partition: int, start: int, floor: int) -> None:
        """Write one partition's description; inside of `transaction`."""
        crc = schema.guard(partition, start, floor)
        self.connection.execute("INSERT OR REPLACE INTO partitions VALUES(?,?,?,?)", (partition, start, floor, crc))

    def writer_epoch(self, writer: str) -> int | None:
        """The newest epoch that an exactly-once writer stored, None before the first. Raises DataDamaged."""
        rows = schema.fetch(self.connection, "SELECT epoch, crc FROM writers WHERE writer=?", (writer,))
        if not rows:
            return None
        epoch: int = rows[0][0]
        if schema.guard(writer, epoch) != rows[0][1]:
            raise DataDamaged(self.topic, (), f"the last epoch of writer {writer!r} is altered")
        return epoch

    def groups(self) -> set[str]:
        """The groups that have begun to read this topic. Raises DataDamaged when one of the names is altered."""
        with classified(self.topic):
            names = dict(self._group_rows())
        if any(schema.guard(name) != crc for name, crc in names.items()):
            raise DataDamaged(self.topic, (), "the names of its groups are altered. Try: penstock log repair")
        return set(names)

    def register_group(self, group: str) -> None:
        """Remember, durably, that the group has begun to read this topic: it must not begin anew when groups.db is lost."""
        if (group, schema.guard(group)) in self._group_rows():
            return

        def insert() -> None:
            self.connection.execute(schema.GROUPS_TABLE)
            self.connection.execute("INSERT OR REPLACE INTO groups VALUES(?,?)", (group, schema.guard(group)))

        self.transact(insert, lambda _: {}, 0)

    def _group_rows(self) -> list[tuple[str, int]]:
        if not schema.fetch(self.connection, "SELECT 1 FROM sqlite_master WHERE type='table' AND name='groups'"):
            return []
        return schema.fetch(self.connection, "SELECT grp, crc FROM groups")

    def heads(self) -> list[Head]:
        """The head of each partition, as of now."""
        return [self._head(p, start, floor) for p, (start, floor) in enumerate(self.partition_starts())]

    def _head(self, partition: int, start: int, floor: int) -> Head:
        last = self.connection.execute(
            "SELECT pos, count, top_ts, stored_ms, total FROM batches WHERE pos BETWEEN ? AND ? ORDER BY pos DESC LIMIT 1",
            (place(partition, 0), place(partition, MAX_OFFSET)),
        ).fetchone()
        if last is None:
            return Head(start, max(start, floor), 0, 0, 0)
        pos, *rest = last
        count, top_ts, stored_ms, total = (value if type(value) is int else 0 for value in rest)  # damage changes types
        return Head(start, max((pos & MAX_OFFSET) + count, floor), top_ts, stored_ms, total)

    def check_tail(self) -> list[Head]:
        """The heads, after making sure that nothing acknowledged is missing at the end of any partition.

        Raises DataDamaged naming exactly the missing offsets: those between the end of the file and the mark, and the
        last row of a partition if it is not what was stored.
        """
        marks = self.marks.read(self.meta.partitions)
        heads = self.heads()
        missing = []
        for partition, (head, mark) in enumerate(zip(heads, marks, strict=False)):
            row = self.connection.execute(
                f"SELECT {COLUMNS} FROM batches WHERE pos BETWEEN ? AND ? ORDER BY pos DESC LIMIT 1",  # noqa: S608
                (place(partition, 0), place(partition, MAX_OFFSET)),
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
        return heads

    def settle(self) -> None:
        """Sync and mark what a writer stored and did not live to mark. Raises Unavailable, DataDamaged."""
        self.rewrite_wal()
        self.marks.raise_to({p: head.next for p, head in enumerate(self.heads())}, self.meta.partitions)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Several reads that see the same moment."""
        self.connection.execute("BEGIN")
        try:
            yield
        finally:
            self.connection.execute("COMMIT")


class OpenTopic:
    """What reads or appends to one topic file, and closes it when its context is left."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def close(self) -> None:
        """Close the files."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
