"""Reading everything that is still readable in a data folder, however damaged, and reporting every lost offset. Blocking."""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import apsw

from services.core.broker.errors import BrokerError, DataDamaged, UnknownTopic
from services.core.broker.log.data_folder import DataFolder, TopicFiles
from services.core.broker.log.groups import ALL, GroupPosition
from services.core.broker.log.high_water_marks import read_loose
from services.core.broker.log.row_format import MAX_OFFSET, OFFSET_BITS, Row, read_row
from services.core.broker.log.sqlite_file import FAULTS, Meta, checksum, connect, fetch, is_damage, read_meta
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.log.topic_store import next_intact, row_behind, row_that_holds
from services.core.broker.log.topics import topic_names
from services.core.broker.record import TopicPartition

Range = tuple[int, int]
"""First and last offset."""


@dataclass(slots=True)
class PartitionReport:
    """One partition: offsets `start <= offset < end`. records: the number of readable ones.

    accepted: lost earlier, recorded by `repair`.
    """

    partition: int
    start: int
    end: int
    records: int = 0
    lost: list[Range] = field(default_factory=list)
    accepted: list[Range] = field(default_factory=list)


@dataclass(slots=True)
class TopicReport:
    """One topic (or the groups, by the name "groups"). problems: other damage than lost records."""

    topic: str
    partitions: list[PartitionReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def lost_records(self) -> int:
        """The number of unreadable records that no repair has accepted."""
        return sum(last - first + 1 for part in self.partitions for first, last in part.lost)

    @property
    def is_sound(self) -> bool:
        """No record is lost, and there is no problem."""
        return not self.problems and not self.lost_records


@dataclass(slots=True)
class FolderReport:
    """All topics and the groups of a data folder."""

    topics: list[TopicReport]
    groups: TopicReport

    @property
    def is_sound(self) -> bool:
        """All topics and the groups are sound."""
        return self.groups.is_sound and all(topic.is_sound for topic in self.topics)


class TopicScan:
    """One pass over a topic file: `report` for `verify`, the intact pieces for `repair`."""

    def __init__(self, files: TopicFiles) -> None:
        self.files = files
        self.report = TopicReport(files.topic)
        self.connection: apsw.Connection | None = None
        self.meta: Meta | None = None
        self.incarnation: bytes | None = None
        try:
            self.connection = connect(files.db)
        except (*FAULTS, DataDamaged) as error:
            self.report.problems.append(f"{files.db.name} cannot be opened: {error}")
        try:
            self.meta = self._query("its description", lambda c: read_meta(c, files.topic), None)
            self._check_structure()
            self.gaps: list[Any] = self._query(
                "its accepted gaps", lambda c: fetch(c, "SELECT * FROM gaps ORDER BY p, first"), []
            )
            self._find_partitions()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close(True)

    def intact_rows(self, part: PartitionReport) -> Iterator[Row]:
        """The intact rows of a partition, in order. At the end the partition's report is complete.

        Compaction may replace rows meanwhile by one that begins before them: then that one is counted from there on.
        """
        expected, part.records, part.lost = part.start, 0, []
        for row in self._rows(part.partition):
            if row.end <= expected or read_row(row) is None:
                continue
            while row.first > expected and (merged := self._intact_at(part.partition, expected)) is not None:
                part.records += _count(merged, expected)
                expected = merged.end
            if row.end <= expected:
                continue
            if row.first > expected:
                _add_lost(part, expected, row.first - 1)
            part.records += _count(row, expected)
            expected = row.end
            yield row
        part.end = max(part.end, expected)
        if expected < part.end:
            _add_lost(part, expected, part.end - 1)

    def forgive_expired(self) -> None:
        """Remove records that retention deleted during the scan from the lost ranges."""
        described = self._described()
        for part in self.report.partitions:
            start = described.get(part.partition, (0, 0))[0]
            part.lost = [(max(first, start), last) for first, last in part.lost if last >= start]

    def writers(self) -> list[tuple[str, int]]:
        """Exactly-once writers and their last epochs, as far as they are intact."""
        rows = self._query("the exactly-once writers", lambda c: fetch(c, "SELECT * FROM writers"), [])
        good = [(writer, epoch) for writer, epoch, crc in rows if checksum(writer, epoch) == crc]
        if len(good) < len(rows):
            self.report.problems.append(f"the last epochs of {len(rows) - len(good)} exactly-once writers are altered")
        return good

    def groups(self) -> list[str]:
        """The groups that have begun to read the topic, as far as their names are intact."""
        has_table = "SELECT 1 FROM sqlite_master WHERE type='table' AND name='groups'"
        if not self._query("its tables", lambda c: fetch(c, has_table), []):
            return []
        rows = self._query("its groups", lambda c: fetch(c, "SELECT grp, crc FROM groups"), [])
        good = [group for group, crc in rows if checksum(group) == crc]
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

    def _intact_at(self, partition: int, offset: int) -> Row | None:
        """The row that holds this offset now, when it is intact."""
        assert self.connection is not None
        try:
            row = row_that_holds(self.connection, partition, offset)
        except FAULTS:
            return None
        return row if row is not None and read_row(row) is not None else None

    def _check_structure(self) -> None:
        lines = self._query("its structure", lambda c: fetch(c, "PRAGMA integrity_check(5)"), [])
        self.report.problems += [f"SQLite: {line}" for (line,) in lines if line != "ok"]
        self._query("its head", _try_to_write, None)

    def _find_partitions(self) -> None:
        """Find the partitions and their ends from every readable source."""
        marks, self.incarnation, wrong = read_loose(self.files.marks)
        if wrong:
            self.report.problems.append(wrong)
        if self.meta is not None:
            if self.incarnation not in (None, self.meta.incarnation):
                self.report.problems.append(f"{self.files.marks.name} belongs to another topic")
            self.incarnation = self.meta.incarnation
        described = self._described()
        top = self._query("its rows", lambda c: fetch(c, "SELECT max(pos) FROM batches")[0][0], None)
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
            self.report.partitions.append(PartitionReport(partition, start, max(start, floor, mark), accepted=gaps))

    def _described(self) -> dict[int, tuple[int, int]]:
        rows = self._query("its partitions", lambda c: fetch(c, "SELECT p, start, floor, crc FROM partitions"), [])
        return {p: (start, floor) for p, start, floor, crc in rows if checksum(p, start, floor) == crc}

    def _query(self, what: str, query: Callable[[apsw.Connection], Any], otherwise: Any) -> Any:
        """Query the file; record a problem when it cannot be read. Raises UnknownTopic for a deleted topic."""
        if self.connection is None:
            return otherwise
        try:
            return query(self.connection)
        except UnknownTopic:
            raise
        except (*FAULTS, DataDamaged, TypeError) as error:
            self.report.problems.append(f"{what} cannot be read: {error}")
            return otherwise


def _count(row: Row, start: int) -> int:
    """The records of an intact row from this offset on."""
    block = read_row(row)
    return 0 if block is None else len(block.offsets) - bisect_left(block.offsets, start)


def _add_lost(part: PartitionReport, first: int, last: int) -> None:
    """Add a lost range, without the parts that a repair has accepted."""
    for gap_first, gap_last in part.accepted:
        if gap_last < first or gap_first > last:
            continue
        if gap_first > first:
            part.lost.append((first, gap_first - 1))
        first = max(first, gap_last + 1)
    if first <= last:
        part.lost.append((first, last))


def _try_to_write(connection: apsw.Connection) -> None:
    """Raises when the file is read-only for SQLite, because its head is altered. Changes nothing."""
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except apsw.BusyError:
        return  # others write: so it can be written


@dataclass(slots=True)
class GroupScan:
    """progress: intact rows by group and partition. commits: the count.

    lost: the positions of groups whose rows are altered or missing: the earliest record, whatever their `start` is, because
    their offset is not known.
    """

    report: TopicReport = field(default_factory=lambda: TopicReport("groups"))
    progress: dict[tuple[str, TopicPartition], GroupPosition] = field(default_factory=dict)
    lost: dict[tuple[str, TopicPartition], GroupPosition] = field(default_factory=dict)
    commits: int = 0


class _Begun(NamedTuple):
    """The groups that are registered in a topic. starts: the first stored offset of each partition."""

    topic: str
    incarnation: bytes
    starts: list[int]
    groups: set[str]


def scan_groups(folder: DataFolder) -> GroupScan:
    """Check committed offsets against their checksums, the number of commits against its mark, and the groups that are registered
    in each topic against their offsets there. Damaged topics, which have their own reports, are skipped."""
    found = GroupScan()
    files = folder.groups
    begun = _begun_groups(folder)  # first: a group that begins meanwhile is not called lost
    if not files.db.exists() and not files.marks.exists() and not any(topic.groups for topic in begun):
        return found
    problems = found.report.problems
    marks, _, wrong = read_loose(files.marks)
    if wrong:
        problems.append(wrong)
    connection = None
    try:
        connection = connect(files.db)
        read_meta(connection, "groups")
        problems += [f"SQLite: {line}" for (line,) in fetch(connection, "PRAGMA integrity_check(5)") if line != "ok"]
        ((found.commits,),) = fetch(connection, "SELECT commits FROM state WHERE id=1")
        _read_offsets(connection, found)
    except (*FAULTS, DataDamaged, ValueError) as error:
        problems.append(f"{files.db.name} cannot be read: {error}")
    finally:
        if connection is not None:
            connection.close(True)
    if not marks:
        problems.append("the mark of commits is missing")
    mark = marks[0] if marks else 0
    if found.commits < mark:
        problems.append(f"the last {mark - found.commits} commits of offsets are missing; groups would read again")
    found.commits = max(found.commits, mark)
    for topic in begun:
        _find_lost(topic, found)
    for group, source in sorted(found.lost):
        if source.partition > ALL:
            where = f"{source.topic}[{source.partition}]"
            problems.append(
                f"the committed offset of group {group!r} in {where} is lost; it begins at the earliest record"
            )
    return found


def _read_offsets(connection: apsw.Connection, found: GroupScan) -> None:
    sql = "SELECT grp, topic, partition, incarnation, begin, processed, crc FROM offsets"
    for group, topic, partition, *value, crc in fetch(connection, sql):
        source = TopicPartition(topic, partition)
        if checksum(group, *source, *value) == crc:
            found.progress[group, source] = GroupPosition(*value)
        elif isinstance(group, str) and isinstance(topic, str) and isinstance(partition, int) and partition > ALL:
            found.lost[group, source] = GroupPosition(b"", 0, None)
        else:
            found.report.problems.append("a row of committed offsets is altered and names no group")


def _begun_groups(folder: DataFolder) -> list[_Begun]:
    found = []
    for topic in topic_names(folder):
        try:
            with TopicReader(folder, topic) as reader:
                starts = [start for start, _ in reader.store.partition_starts()]
                found.append(_Begun(topic, reader.store.meta.incarnation, starts, reader.store.groups()))
        except (*FAULTS, BrokerError):
            continue
    return found


def _find_lost(topic: _Begun, found: GroupScan) -> None:
    """Record every partition of the topic in which a group had begun and has no intact offset, and where it begins."""
    for group, source in [key for key in found.lost if key[1].topic == topic.topic]:
        if source.partition < len(topic.starts):
            found.lost[group, source] = GroupPosition(topic.incarnation, topic.starts[source.partition], None)
    for group in sorted(topic.groups):
        whole = TopicPartition(topic.topic, ALL)
        last = found.progress.get((group, whole))
        is_known = last is not None and last.incarnation == topic.incarnation
        if last is None or not is_known:
            found.lost[group, whole] = GroupPosition(topic.incarnation, len(topic.starts), None)
        for partition, start in enumerate(topic.starts):
            source = TopicPartition(topic.topic, partition)
            is_later = last is not None and is_known and partition >= last.begin  # added since the group last joined
            if (group, source) not in found.progress and not is_later:
                found.lost[group, source] = GroupPosition(topic.incarnation, start, None)
