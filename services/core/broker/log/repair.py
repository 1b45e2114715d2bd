"""Checking a data folder, and accepting a loss. Blocking.

`verify` reads every record and compares it with its checksum; it may run beside a working fleet.
"""

import os
import time
import uuid
from contextlib import AbstractContextManager, closing
from pathlib import Path

from services.core.broker.errors import UnknownTopic
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder, TopicFiles, locked
from services.core.broker.log.groups import write_groups
from services.core.broker.log.high_water_marks import HighWaterMarks
from services.core.broker.log.scan import FolderReport, GroupScan, TopicReport, TopicScan, scan_groups
from services.core.broker.log.sqlite_file import (
    COMPACTED_FORMAT,
    GROUPS_TABLE,
    TOPIC_TABLES,
    Meta,
    checksum,
    connect,
    shared_lock,
    write_meta,
)
from services.core.broker.log.topic_store import COLUMNS
from services.core.broker.log.topics import topic_names
from services.core.folders import make_folder, sync_folder


def verify(path: str | Path, topic: str | None = None) -> FolderReport:
    """Scan one topic, or all, and the consumer groups; names every lost offset. Raises UnknownTopic, BadDataFolder.

    Damage is in the report, never raised. Marks are read before rows, so what is appended meanwhile does not count as lost.
    """
    folder = DataFolder.prepare(path)
    names = topic_names(folder) if topic is None else [topic]
    reports = []
    for name in names:
        try:
            reports.append(verify_topic(folder, name))
        except UnknownTopic:
            if topic is not None:
                raise
    return FolderReport(reports, _verify_groups(folder).report)


def verify_topic(folder: DataFolder, topic: str) -> TopicReport:
    """Scan one topic. Raises UnknownTopic."""
    files = folder.topic(topic)
    if not files.db.exists() and not files.marks.exists():
        raise UnknownTopic(f"no topic {topic!r}")
    with shared_lock(files), closing(TopicScan(files)) as scan:
        for part in scan.report.partitions:
            for _ in scan.intact_rows(part):
                pass
        scan.forgive_expired()
        scan.writers()
        scan.groups()
        return scan.report


def _verify_groups(folder: DataFolder) -> GroupScan:
    with shared_lock(folder.groups):
        return scan_groups(folder)


# Accepting a loss: readable records are copied to a new file, lost ranges are recorded in its table `gaps`, and reading goes on
# behind them. Nothing is deleted: the damaged files stay in `damaged/<topic>-<time>/`. A topic is repaired while nobody has it
# open; others go on.

_LOCK_SECONDS = 5.0


def repair(path: str | Path, topic: str | None = None) -> FolderReport:
    """Repair one topic, or everything that is damaged. Sound files are not touched. Reports the damage that was found.

    Raises Unavailable when a process has a damaged topic open (stop the fleet first), UnknownTopic, StorageFull.
    """
    folder = DataFolder.prepare(path)
    reports = []
    for name in topic_names(folder) if topic is None else [topic]:
        report = verify_topic(folder, name)
        if not report.is_sound:
            report = _repair_topic(folder, folder.topic(name))
        reports.append(report)
    groups = _verify_groups(folder)
    if not groups.report.is_sound and topic is None:
        _repair_groups(folder)
    return FolderReport(reports, groups.report)


def _repair_topic(folder: DataFolder, files: TopicFiles) -> TopicReport:
    with folder.locked_catalog(), _alone(files):
        scan = TopicScan(files)
        try:
            meta = scan.meta or Meta(  # retention is lost with the description: keep for ever; rows may be sparse
                COMPACTED_FORMAT,
                files.topic,
                scan.incarnation or uuid.uuid4().bytes,
                max(1, len(scan.report.partitions)),
                None,
                None,
                0,
            )
            draft = files.db.with_name(f".{uuid.uuid4().hex}.draft")
            _copy_topic(scan, meta, draft)
        finally:
            scan.close()
        _replace(folder, files, draft, meta.incarnation, [part.end for part in scan.report.partitions])
        return scan.report


def _copy_topic(scan: TopicScan, meta: Meta, draft: Path) -> None:
    now = WallClock().now_ms()
    with closing(connect(draft, create=True)) as connection:
        with connection:
            connection.execute(TOPIC_TABLES)
            write_meta(connection, meta)
            connection.executemany(
                "INSERT INTO writers VALUES(?,?,?)", [(w, epoch, checksum(w, epoch)) for w, epoch in scan.writers()]
            )
            connection.executemany("INSERT INTO gaps VALUES(?,?,?,?,?)", scan.gaps)
            connection.execute(GROUPS_TABLE)
            connection.executemany("INSERT INTO groups VALUES(?,?)", [(g, checksum(g)) for g in scan.groups()])
        for part in scan.report.partitions:
            with connection:
                connection.executemany(
                    f"INSERT INTO batches({COLUMNS}) VALUES(?,?,?,?,?,?,?,?)", scan.intact_rows(part)
                )
                crc = checksum(part.partition, part.start, part.end)
                connection.execute(
                    "INSERT INTO partitions VALUES(?,?,?,?)", (part.partition, part.start, part.end, crc)
                )
                lost = [(part.partition, first, last, now, "lost, accepted by repair") for first, last in part.lost]
                connection.executemany("INSERT INTO gaps VALUES(?,?,?,?,?)", lost)


def _repair_groups(folder: DataFolder) -> None:
    """Keep intact offsets. A group whose offset is lost reads that partition again from the beginning: never a gap."""
    files = folder.groups
    with folder.locked_catalog(), _alone(files):
        scan = scan_groups(folder)
        draft = files.db.with_name(f".{uuid.uuid4().hex}.draft")
        incarnation = uuid.uuid4().bytes
        write_groups(draft, incarnation, scan.commits, scan.progress | scan.lost)
        _replace(folder, files, draft, incarnation, [scan.commits])


def _replace(folder: DataFolder, files: TopicFiles, draft: Path, incarnation: bytes, marks: list[int]) -> None:
    """Put the draft in the place of the damaged file, which is kept aside. When it is interrupted, opening raises DataDamaged.

    The old marks are replaced last: until then only they hold the end of the file.
    """
    aside = folder.root / "damaged" / f"{files.topic}-{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:12]}"
    make_folder(aside, mode=0o700)
    for path in (files.db, files.wal, files.marks):
        if path.exists():
            os.link(path, aside / path.name)
    sync_folder(aside)
    files.wal.unlink(missing_ok=True)  # first: SQLite would play it into the new file
    files.shm.unlink(missing_ok=True)
    draft.rename(files.db)
    HighWaterMarks.create(files.marks, incarnation, marks)
    sync_folder(files.db.parent)


def _alone(files: TopicFiles) -> AbstractContextManager[None]:
    """Lock the file while no other process has it open. Raises Unavailable."""
    refusal = f"{files.topic!r} is in use. Try: stopping the fleet, then repair again"
    return locked(files.lock, _LOCK_SECONDS, refusal)
