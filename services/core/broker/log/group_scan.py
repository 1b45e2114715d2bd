"""Reading what can still be read of groups.db. Blocking."""

from dataclasses import dataclass, field

import apsw

from services.core.broker.errors import DataDamaged
from services.core.broker.log import schema
from services.core.broker.log.faults import FAULTS
from services.core.broker.log.groups import ALL, Progress
from services.core.broker.log.layout import DataFolder
from services.core.broker.log.marks import read_loose
from services.core.broker.log.report import TopicReport
from services.core.broker.record import TopicPartition


@dataclass(slots=True)
class GroupScan:
    """progress: intact rows by group and partition. altered: keys whose rows are not what was stored. commits: the count."""

    report: TopicReport = field(default_factory=lambda: TopicReport("groups"))
    progress: dict[tuple[str, TopicPartition], Progress] = field(default_factory=dict)
    altered: list[tuple[str, TopicPartition]] = field(default_factory=list)
    commits: int = 0


def scan_groups(folder: DataFolder) -> GroupScan:
    """Check committed offsets against their checksums and the number of commits against its mark."""
    found = GroupScan()
    files = folder.groups
    if not files.db.exists() and not files.marks.exists():
        return found
    problems = found.report.problems
    marks, _, wrong = read_loose(files.marks)
    if wrong:
        problems.append(wrong)
    connection = None
    try:
        connection = schema.connect(files.db)
        schema.read_meta(connection, "groups")
        problems += [
            f"SQLite: {line}" for (line,) in schema.fetch(connection, "PRAGMA integrity_check(5)") if line != "ok"
        ]
        ((found.commits,),) = schema.fetch(connection, "SELECT commits FROM state WHERE id=1")
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
    for group, source in found.altered:
        problems.append(f"the committed offset of group {group!r} in {source.topic}[{source.partition}] is altered")
    return found


def _read_offsets(connection: apsw.Connection, found: GroupScan) -> None:
    sql = "SELECT grp, topic, partition, incarnation, begin, processed, crc FROM offsets"
    for group, topic, partition, *value, crc in schema.fetch(connection, sql):
        source = TopicPartition(topic, partition)
        if schema.guard(group, *source, *value) == crc:
            found.progress[group, source] = Progress(*value)
        elif isinstance(group, str) and isinstance(topic, str) and isinstance(partition, int) and partition > ALL:
            found.altered.append((group, source))
        else:
            found.report.problems.append("a row of committed offsets is altered and names no group")
