"""Reading everything that can still be read of a topic file, however damaged. Blocking; shares the file with others."""

from collections.abc import Callable, Iterator
from typing import Any

import apsw

from services.core.broker.errors import DataDamaged, UnknownTopic
from services.core.broker.log import schema
from services.core.broker.log.faults import FAULTS, is_damage
from services.core.broker.log.frames import MAX_OFFSET, OFFSET_BITS, Row, read_row
from services.core.broker.log.layout import TopicFiles
from services.core.broker.log.marks import read_loose
from services.core.broker.log.report import PartitionReport, TopicReport
from services.core.broker.log.search import next_intact, row_behind


class Scan:
    """One pass over a topic file: `report` for `verify`, the intact pieces for `repair`."""

    def __init__(self, files: TopicFiles) -> None:
        self.files = files
        self.report = TopicReport(files.topic)
        self.connection: apsw.Connection | None = None
        self.meta: schema.Meta | None = None
        self.incarnation: bytes | None = None
        try:
            self.connection = schema.connect(files.db)
        except (*FAULTS, DataDamaged) as error:
            self.report.problems.append(f"{files.db.name} cannot be opened: {error}")
        try:
            self.meta = self._ask("its description", lambda c: schema.read_meta(c, files.topic), None)
            self._check_structure()
            self.gaps: list[Any] = self._ask(
                "its noted gaps", lambda c: schema.fetch(c, "SELECT * FROM gaps ORDER BY p, first"), []
            )
            self._find_partitions()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        if self.connection is not None:
            self.connection.close(True)

    def intact_rows(self, part: PartitionReport) -> Iterator[Row]:
        """The rows of a partition that are what was stored, in order; at the end the partition's report is complete."""
        expected, part.records, part.lost = part.start, 0, []
        for row in self._rows(part.partition):
            if row.end <= expected or read_row(row) is None:
                continue
            if row.first > expected:
                _note_lost(part, expected, row.first - 1)
            part.records += row.end - max(row.first, expected)
            expected = row.end
            yield row
        part.end = max(part.end, expected)
        if expected < part.end:
            _note_lost(part, expected, part.end - 1)

    def forgive_expired(self) -> None:
        """Take what retention removed during the scan off the lost ranges."""
        described = self._described()
        for part in self.report.partitions:
            start = described.get(part.partition, (0, 0))[0]
            part.lost = [(max(first, start), last) for first, last in part.lost if last >= start]

    def writers(self) -> list[tuple[str, int]]:
        """Exactly-once writers and their last epochs, as far as they are intact."""
        rows = self._ask("the exactly-once writers", lambda c: schema.fetch(c, "SELECT * FROM writers"), [])
        good = [(writer, epoch) for writer, epoch, crc in rows if schema.guard(writer, epoch) == crc]
        if len(good) < len(rows):
            self.report.problems.append(f"the last epochs of {len(rows) - len(good)} exactly-once writers are altered")
        return good

    def groups(self) -> list[str]:
        """The groups that have begun to read it, as far as their names are intact."""
        has_table = "SELECT 1 FROM sqlite_master WHERE type='table' AND name='groups'"
        if not self._ask("its tables", lambda c: schema.fetch(c, has_table), []):
            return []
        rows = self._ask("its groups", lambda c: schema.fetch(c, "SELECT grp, crc FROM groups"), [])
        good = [group for group, crc in rows if schema.guard(group) == crc]
        if len(good) < len(rows):
            self.report.problems.append(f"the names of {len(rows) - len(good)} groups are altered")
        return good

    def _rows(self, partition: int) -> Iterator[Row]:
        """Every row that SQLite can still reach."""
        offset = -1
        while self.connection is not None:
            try:
                row = row_behind(self.connection, partition, offset)
            except FAULTS as error:
                if not is_damage(error):
                    raise
                behind = next_intact(self.connection, partition, offset, MAX_OFFSET)
                if behind == MAX_OFFSET:
                    return
                offset = behind - 1
                continue
            if row is None:
                return
            yield row
            offset = row.first

    def _check_structure(self) -> None:
        lines = self._ask("its structure", lambda c: schema.fetch(c, "PRAGMA integrity_check(5)"), [])
        self.report.problems += [f"SQLite: {line}" for (line,) in lines if line != "ok"]
        self._ask("its head", _try_to_write, None)

    def _find_partitions(self) -> None:
        """Which partitions there are and how far each must reach, from every source that can still be read."""
        marks, self.incarnation, wrong = read_loose(self.files.marks)
        if wrong:
            self.report.problems.append(wrong)
        if self.meta is not None:
            if self.incarnation not in (None, self.meta.incarnation):
                self.report.problems.append(f"{self.files.marks.name} belongs to another topic")
            self.incarnation = self.meta.incarnation
        described = self._described()
        top = self._ask("its rows", lambda c: schema.fetch(c, "SELECT max(pos) FROM batches")[0][0], None)
        counts = [max(described, default=-1) + 1, 0 if top is None else (top >> OFFSET_BITS) + 1, len(marks)]
        for partition in range(max(counts) if self.meta is None else self.meta.partitions):
            start, floor = described.get(partition, (None, 0))
            if start is None:
                self.report.problems.append(f"the description of partition {partition} is missing or altered")
                start = next((row.first for row in self._rows(partition) if read_row(row) is not None), 0)
            mark = marks[partition] if partition < len(marks) else 0
            if partition >= len(marks):
                self.report.problems.append(f"the mark of partition {partition} is missing")
            gaps = [gap[1:3] for gap in self.gaps if gap[0] == partition]
            self.report.partitions.append(PartitionReport(partition, start, max(start, floor, mark), noted=gaps))

    def _described(self) -> dict[int, tuple[int, int]]:
        rows = self._ask("its partitions", lambda c: schema.fetch(c, "SELECT p, start, floor, crc FROM partitions"), [])
        return {p: (start, floor) for p, start, floor, crc in rows if schema.guard(p, start, floor) == crc}

    def _ask(self, what: str, question: Callable[[apsw.Connection], Any], otherwise: Any) -> Any:
        """Ask the file; note what cannot be read. Raises UnknownTopic for a deleted topic."""
        if self.connection is None:
            return otherwise
        try:
            return question(self.connection)
        except UnknownTopic:
            raise
        except (*FAULTS, DataDamaged, TypeError) as error:
            self.report.problems.append(f"{what} cannot be read: {error}")
            return otherwise


def _note_lost(part: PartitionReport, first: int, last: int) -> None:
    """Add a lost range, without what was noted as lost before."""
    for gap_first, gap_last in part.noted:
        if gap_last < first or gap_first > last:
            continue
        if gap_first > first:
            part.lost.append((first, gap_first - 1))
        first = max(first, gap_last + 1)
    if first <= last:
        part.lost.append((first, last))


def _try_to_write(connection: apsw.Connection) -> None:
    """Raises when SQLite takes the file for one that it may only read (its head is altered); changes nothing."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except apsw.BusyError:
        return  # others write: so it can be written
