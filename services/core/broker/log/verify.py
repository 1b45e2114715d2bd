"""Checking a data folder: every record read and compared with its checksum. Blocking; may run beside a working fleet."""

from pathlib import Path

from services.core.broker.errors import UnknownTopic
from services.core.broker.log.group_scan import scan_groups
from services.core.broker.log.layout import DataFolder
from services.core.broker.log.report import FolderReport, TopicReport
from services.core.broker.log.scan import Scan
from services.core.broker.log.topics import topic_names


def verify(path: str | Path, topic: str | None = None) -> FolderReport:
    """Scan one topic, or all, and the consumer groups; names every lost offset. Raises UnknownTopic, BadDataFolder.

    Damage is in the report, never raised. Marks are read before rows: what is appended meanwhile is not called lost.
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
    return FolderReport(reports, scan_groups(folder).report)


def verify_topic(folder: DataFolder, topic: str) -> TopicReport:
    """Scan one topic. Raises UnknownTopic."""
    files = folder.topic(topic)
    if not files.db.exists() and not files.marks.exists():
        raise UnknownTopic(f"no topic {topic!r}")
    scan = Scan(files)
    try:
        for part in scan.report.partitions:
            for _ in scan.intact_rows(part):
                pass
        scan.forgive_expired()
        scan.writers()
        scan.groups()
        return scan.report
    finally:
        scan.close()
