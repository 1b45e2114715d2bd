"""Reading what can still be read of groups.db, and naming what is lost of it. Blocking."""

from dataclasses import dataclass, field
from typing import NamedTuple

import apsw

from services.core.broker.errors import BrokerError, DataDamaged
from services.core.broker.log import schema
from services.core.broker.log.faults import FAULTS
from services.core.broker.log.groups import ALL, Progress
from services.core.broker.log.layout import DataFolder
from services.core.broker.log.marks import read_loose
from services.core.broker.log.reader import TopicReader
from services.core.broker.log.report import TopicReport
from services.core.broker.log.topics import topic_names
from services.core.broker.record import TopicPartition


@dataclass(slots=True)
class GroupScan:
    """progress: intact rows by group and partition. commits: the count.

    lost: where groups begin whose rows are altered or missing: at the earliest record, whatever their `start` is. Nobody
    knows what they had read.
    """

    report: TopicReport = field(default_factory=lambda: TopicReport("groups"))
    progress: dict[tuple[str, TopicPartition], Progress] = field(default_factory=dict)
    lost: dict[tuple[str, TopicPartition], Progress] = field(default_factory=dict)
    commits: int = 0


class _Begun(NamedTuple):
    """What a topic knows of its groups. starts: the first stored offset by partition."""

    topic: str
    incarnation: bytes
    starts: list[int]
    groups: set[str]


def scan_groups(folder: DataFolder) -> GroupScan:
    """Check committed offsets against their checksums and the number of commits against its mark, and every group that a
    topic knows against its offsets there. A damaged topic, which has a report of its own, is asked nothing."""
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
    for group, topic, partition, *value, crc in schema.fetch(connection, sql):
        source = TopicPartition(topic, partition)
        if schema.guard(group, *source, *value) == crc:
            found.progress[group, source] = Progress(*value)
        elif isinstance(group, str) and isinstance(topic, str) and isinstance(partition, int) and partition > ALL:
            found.lost[group, source] = Progress(b"", 0, None)
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
    """Note every partition of the topic in which a group had begun and has no intact offset, and where it begins."""
    for group, source in [key for key in found.lost if key[1].topic == topic.topic]:
        if source.partition < len(topic.starts):
            found.lost[group, source] = Progress(topic.incarnation, topic.starts[source.partition], None)
    for group in sorted(topic.groups):
        whole = TopicPartition(topic.topic, ALL)
        last = found.progress.get((group, whole))
        is_known = last is not None and last.incarnation == topic.incarnation
        if last is None or not is_known:
            found.lost[group, whole] = Progress(topic.incarnation, len(topic.starts), None)
        for partition, start in enumerate(topic.starts):
            source = TopicPartition(topic.topic, partition)
            is_later = last is not None and is_known and partition >= last.begin  # added since the group last looked
            if (group, source) not in found.progress and not is_later:
                found.lost[group, source] = Progress(topic.incarnation, start, None)
