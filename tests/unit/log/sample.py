"""Small logs for unit tests."""

from pathlib import Path

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.log import retention, topics
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.row_format import pack_all
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.log.topic_writer import TopicWriter
from services.core.broker.record import Record

TOPIC = "orders"


class SetClock(WallClock):
    """A clock that a test moves."""

    def __init__(self, now: int = 1_000_000) -> None:
        super().__init__()
        self.now = now

    def now_ms(self) -> int:
        return self.now


class SetBoot:
    """The machine's own time, which a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.boot = 5_000, 1
        monkeypatch.setattr(retention, "boot_ms", lambda: self.now)
        monkeypatch.setattr(retention, "boot_id", lambda: f"boot {self.boot}")

    def restart(self) -> None:
        self.now, self.boot = 5_000, self.boot + 1


def record(number: int, size: int = 0) -> Record:
    """Record `number`; n milliseconds of event time."""
    return Record(b"k%d" % (number % 7), (b"%d" % number).ljust(size, b" "), number, (("id", b"%d" % number),))


def records(first: int, count: int, size: int = 0) -> list[Record]:
    """Consecutive numbers."""
    return [record(number, size) for number in range(first, first + count)]


def make_topic(
    path: Path,
    partitions: int = 1,
    *,
    retention_ms: int | None = None,
    retention_bytes: int | None = None,
    compact: bool = False,
) -> DataFolder:
    """A data folder with one topic."""
    folder = DataFolder.prepare(path)
    topics.create_topic(folder, TopicSpec(TOPIC, partitions, retention_ms, retention_bytes, compact))
    return folder


def store(folder: DataFolder, partition: int, items: list[Record], clock: WallClock | None = None) -> None:
    """Append, durably."""
    with TopicWriter(folder, TOPIC, clock or WallClock()) as writer:
        writer.append({partition: pack_all(items)})


def numbers(folder: DataFolder, partition: int = 0, start: int = 0) -> list[int]:
    """The numbers of all records from `start` on."""
    found: list[int] = []
    with TopicReader(folder, TOPIC) as reader:
        while (run := reader.read(partition, start, 10)) is not None:
            found += [int(item.value or b"") for item in run.records]
            start = run.next
    return found
