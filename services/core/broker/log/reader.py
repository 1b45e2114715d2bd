"""Reading one topic: rows in offset order, each checked against its checksum and its neighbour.

Blocking; one thread at a time. What is missing or altered is never passed over: `read` gives what is intact before it,
and the next `read` from there raises DataDamaged naming exactly what cannot be read. Ranges that `repair` has noted as
lost are passed over, and counted.

Nothing above the high-water mark is given away: it may not be on the disk yet, and a consumer that commits it would pass over
what gets its offset after a power cut. What a dead writer left there is synced and marked first (`Store.settle`).
"""

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple, NoReturn

from services.core.broker.contract import PartitionRange, Start
from services.core.broker.errors import DataDamaged, OffsetOutOfRange, UnknownTopic
from services.core.broker.log import schema
from services.core.broker.log.faults import FAULTS, classified, classify, is_damage
from services.core.broker.log.frames import MAX_OFFSET, Row, place, read_row
from services.core.broker.log.layout import DataFolder
from services.core.broker.log.search import first_row_since, next_intact
from services.core.broker.log.store import COLUMNS, Head, OpenTopic, Store
from services.core.broker.record import Record

READ_BYTES = 1 << 20
"""One read returns at most about this much data, and at least one row."""
_ROWS = 16


class Run(NamedTuple):
    """Consecutive records of one partition. `offset`: of the first one. `skipped`: records lost before it (repaired)."""

    offset: int
    records: list[Record]
    skipped: int = 0


class TopicReader(OpenTopic):
    """One topic, open for reading."""

    def __init__(self, folder: DataFolder, topic: str) -> None:
        super().__init__(Store.open(folder, topic))

    @property
    def store(self) -> Store:
        """The open file."""
        return self._store

    def refresh(self) -> int:
        """Notice added partitions and deletion; gives the number of partitions. Raises UnknownTopic."""
        store = self._store
        with classified(store.topic):
            if not store.files.db.exists():
                raise UnknownTopic(f"topic {store.topic!r} was deleted")
            store.meta = schema.read_meta(store.connection, store.topic)
        return store.meta.partitions

    def ranges(self) -> dict[int, PartitionRange]:
        """What each partition holds now."""
        return {p: PartitionRange(head.start, head.next) for p, head in enumerate(self.heads())}

    def heads(self) -> list[Head]:
        """The head of each partition now. `next` reaches to the mark, so that a lost end is read, and found, not passed."""
        self.refresh()
        store = self._store
        with classified(store.topic):
            with store.snapshot():
                heads = store.heads()
            marks = store.marks.read(len(heads))
            if any(head.next > mark for head, mark in zip(heads, marks, strict=True)):
                store.settle()
            return [head._replace(next=max(head.next, mark)) for head, mark in zip(heads, marks, strict=True)]

    def read(self, partition: int, offset: int, max_records: int) -> Run | None:
        """Records from `offset` on, whole rows: there may be more than asked. None at the end.

        Raises OffsetOutOfRange, DataDamaged, Unavailable, UnknownTopic.
        """
        run, mark = self._read(partition, offset, max_records)
        if run is not None and run.records and run.offset >= mark:
            with classified(self._store.topic):
                self._store.settle()
            run, mark = self._read(partition, offset, max_records)
        return None if run is None else run._replace(records=run.records[: max(0, mark - run.offset)])

    def _read(self, partition: int, offset: int, max_records: int) -> tuple[Run | None, int]:
        """What is stored from `offset` on, and up to where it is marked."""
        topic = self._store.topic
        marks = self._store.marks.read(self._store.meta.partitions)  # before the snapshot, which then holds all of it
        if partition >= len(marks):
            raise UnknownTopic(f"{topic} has {len(marks)} partitions, none numbered {partition}")
        try:
            with self._store.snapshot():
                run = self._read_rows(partition, offset, max_records)
                run = run or self._explain(partition, offset, max_records, marks[partition])
                return run, marks[partition]
        except FAULTS as error:
            if is_damage(error):
                self._explain_damage(partition, offset, marks[partition], str(error))
            raise classify(error, topic) from error

    def offsets_at(self, start: Start) -> dict[int, int]:
        """Per partition the offset at which a read from `start` begins; the end when nothing is that new."""
        heads = self.heads()
        with classified(self._store.topic), self._store.snapshot():
            if start == "earliest":
                return {p: head.start for p, head in enumerate(heads)}
            if start == "latest":
                return {p: head.next for p, head in enumerate(heads)}
            assert isinstance(start, datetime)
            if start.tzinfo is None:
                raise ValueError("a start date needs a time zone")
            wanted = int(start.timestamp() * 1000)
            return {p: self._offset_at(p, head, wanted) for p, head in enumerate(heads)}

    def timestamp_at(self, partition: int, offset: int) -> int | None:
        """The timestamp of the first record from `offset` on; None at the end or when it cannot be read."""
        with classified(self._store.topic):
            for row in self._rows(partition, offset, 1):
                records = read_row(row)
                if records:
                    return records[max(0, offset - row.first)].timestamp if offset < row.end else None
        return None

    def last_epoch(self, writer: str) -> int | None:
        """The newest epoch that an exactly-once writer stored, None before the first."""
        with classified(self._store.topic):
            return self._store.writer_epoch(writer)

    def _offset_at(self, partition: int, head: Head, wanted: int) -> int:
        row = first_row_since(self._store.connection, partition, head, wanted)
        if row is None:
            return head.next
        for index, record in enumerate(read_row(row) or ()):
            if record.timestamp >= wanted:
                return max(head.start, row.first + index)
        return max(head.start, row.first)

    def _rows(self, partition: int, offset: int, limit: int) -> Iterator[Row]:
        """Rows from the one that may hold `offset`."""
        cursor = self._store.connection.execute(
            f"SELECT {COLUMNS} FROM batches WHERE pos BETWEEN "  # noqa: S608
            "coalesce((SELECT max(pos) FROM batches WHERE pos BETWEEN ?1 AND ?2), ?2) AND ?3 ORDER BY pos LIMIT ?4",
            (place(partition, 0), place(partition, offset), place(partition, MAX_OFFSET), limit),
        )
        return (Row(*row) for row in cursor)

    def _read_rows(self, partition: int, offset: int, max_records: int) -> Run | None:
        """Intact consecutive rows from the one that holds `offset`; None when that one is missing or altered."""
        if offset < self._store.start_of(partition):
            return None
        found: list[Record] = []
        expected, size = offset, 0
        for row in self._rows(partition, offset, _ROWS):
            if not row.first <= expected < row.end or (found and row.first != expected):
                break
            records = read_row(row)
            if records is None:
                break
            if found:
                found.extend(records)
            else:
                found = records[expected - row.first :] if expected > row.first else records
            expected = row.end
            size += len(row.data)
            if len(found) >= max_records or size >= READ_BYTES:
                break
        return Run(offset, found) if found else None

    def _explain(self, partition: int, offset: int, max_records: int, mark: int) -> Run | None:
        """Why nothing can be read at `offset`: the end, a range noted as lost (passed over), or an error."""
        topic = self._store.topic
        head = self._store.heads()[partition]
        end = max(head.next, mark)
        if not head.start <= offset <= end:
            raise OffsetOutOfRange(topic, partition, offset, head.start, head.next)
        if offset == end:
            return None
        gap = self._store.connection.execute(
            "SELECT last FROM gaps WHERE p=? AND first<=? AND last>=?", (partition, offset, offset)
        ).fetchone()
        if gap is None:
            self._explain_damage(partition, offset, end, "stored records are missing or altered")
        after = gap[0] + 1
        run = self._read_rows(partition, after, max_records) or self._explain(partition, after, max_records, mark)
        if run is None:
            return Run(after, [], after - offset)
        return run._replace(skipped=run.skipped + after - offset)

    def _explain_damage(self, partition: int, offset: int, end: int, detail: str) -> NoReturn:
        """Names what cannot be read at `offset`; nothing when all acknowledged records lie before it."""
        behind = next_intact(self._store.connection, partition, offset, end)
        lost = ((partition, offset, behind - 1),) if behind > offset else ()
        raise DataDamaged(self._store.topic, lost, f"{detail}. Try: penstock log verify, then penstock log repair")
