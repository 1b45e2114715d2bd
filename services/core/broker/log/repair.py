"""Accepting a loss: what can be read is copied to a fresh file, what is lost is noted there, reading goes on behind it.

Nothing is thrown away: the damaged files stay in `damaged/<topic>-<time>/`. A topic is repaired while nobody has it
open; others go on. Readers pass over noted ranges and count them (`LogConsumer.skipped`); `gaps` lists them for ever.
"""

import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from services.core.broker.errors import Unavailable
from services.core.broker.log import schema
from services.core.broker.log.clock import WallClock
from services.core.broker.log.group_scan import GroupScan, scan_groups
from services.core.broker.log.groups import TABLES
from services.core.broker.log.layout import DataFolder, TopicFiles
from services.core.broker.log.marks import Marks
from services.core.broker.log.reader import TopicReader
from services.core.broker.log.report import FolderReport, TopicReport
from services.core.broker.log.scan import Scan
from services.core.broker.log.store import COLUMNS
from services.core.broker.log.topics import topic_names
from services.core.broker.log.verify import verify_topic
from services.core.folders import make_folder, sync_folder

_LOCK_SECONDS = 5.0


class Gap(NamedTuple):
    """A range that was lost and accepted: offsets first to last. noted_ms: when `repair` noted it."""

    partition: int
    first: int
    last: int
    noted_ms: int
    reason: str


def gaps(path: str | Path, topic: str) -> list[Gap]:
    """All ranges of a topic that `repair` noted as lost. Raises UnknownTopic, DataDamaged."""
    with TopicReader(DataFolder.prepare(path), topic) as reader:
        return [Gap(*row) for row in schema.fetch(reader.store.connection, "SELECT * FROM gaps ORDER BY p, first")]


def repair(path: str | Path, topic: str | None = None) -> FolderReport:
    """Repair one topic, or everything that is damaged; sound files are not touched. Reports what was found before.

    Raises Unavailable when somebody has a damaged topic open (stop the fleet first), UnknownTopic, StorageFull.
    """
    folder = DataFolder.prepare(path)
    reports = []
    for name in topic_names(folder) if topic is None else [topic]:
        report = verify_topic(folder, name)
        if not report.is_sound:
            report = _repair_topic(folder, folder.topic(name))
        reports.append(report)
    groups = scan_groups(folder)
    if not groups.report.is_sound and topic is None:
        _repair_groups(folder, groups)
    return FolderReport(reports, groups.report)


def _repair_topic(folder: DataFolder, files: TopicFiles) -> TopicReport:
    with folder.locked_catalog(), _alone(files):
        scan = Scan(files)
        try:
            meta = scan.meta or schema.Meta(  # retention is lost with the description: keep for ever
                schema.FORMAT,
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


def _copy_topic(scan: Scan, meta: schema.Meta, draft: Path) -> None:
    connection = schema.connect(draft, create=True)
    now = WallClock().now_ms()
    try:
        with connection:
            connection.execute(schema.TOPIC_TABLES)
            schema.write_meta(connection, meta)
            connection.executemany(
                "INSERT INTO writers VALUES(?,?,?)", [(w, epoch, schema.guard(w, epoch)) for w, epoch in scan.writers()]
            )
            connection.executemany("INSERT INTO gaps VALUES(?,?,?,?,?)", scan.gaps)
            connection.execute(schema.GROUPS_TABLE)
            connection.executemany("INSERT INTO groups VALUES(?,?)", [(g, schema.guard(g)) for g in scan.groups()])
        for part in scan.report.partitions:
            with connection:
                connection.executemany(
                    f"INSERT INTO batches({COLUMNS}) VALUES(?,?,?,?,?,?,?,?)", scan.intact_rows(part)
                )
                crc = schema.guard(part.partition, part.start, part.end)
                connection.execute(
                    "INSERT INTO partitions VALUES(?,?,?,?)", (part.partition, part.start, part.end, crc)
                )
                lost = [(part.partition, first, last, now, "lost, accepted by repair") for first, last in part.lost]
                connection.executemany("INSERT INTO gaps VALUES(?,?,?,?,?)", lost)
    finally:
        connection.close()


def _repair_groups(folder: DataFolder, scan: GroupScan) -> None:
    """Keep intact offsets. A group whose offset is lost reads that partition again from the beginning: never a gap."""
    files = folder.groups
    with folder.locked_catalog(), _alone(files):
        scan = scan_groups(folder)
        draft = files.db.with_name(f".{uuid.uuid4().hex}.draft")
        incarnation = uuid.uuid4().bytes
        kept = scan.progress | scan.lost
        connection = schema.connect(draft, create=True)
        try:
            with connection:
                connection.execute(TABLES)
                connection.execute("INSERT INTO state VALUES(1, ?)", (scan.commits,))
                schema.write_meta(connection, schema.Meta(schema.FORMAT, "groups", incarnation, 1, None, None, 0))
                connection.executemany(
                    "INSERT INTO offsets VALUES(?,?,?,?,?,?,?)",
                    [(g, *s, *value, schema.guard(g, *s, *value)) for (g, s), value in kept.items()],
                )
        finally:
            connection.close()
        _replace(folder, files, draft, incarnation, [scan.commits])


def _replace(folder: DataFolder, files: TopicFiles, draft: Path, incarnation: bytes, marks: list[int]) -> None:
    """Put the draft in the damaged file's place. Cut off half-way it leaves a loud state and the damaged files aside.

    The old marks go last: until the draft is there, only they say how far the file must reach.
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
    Marks.create(files.marks, incarnation, marks)
    sync_folder(files.db.parent)


@contextmanager
def _alone(files: TopicFiles) -> Iterator[None]:
    """Hold the file with nobody else having it open. Raises Unavailable."""
    fd = os.open(files.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_SECONDS
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"{files.topic!r} is in use. Try: stopping the fleet, then repair again"
                    ) from None
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)
